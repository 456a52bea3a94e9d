"""The header of a GGUF file, from a model's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import pi
from typing import Any

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.gguf import ALIGNMENT, gguf_package
from mxcli.files.layouts.layout import Entry
from mxcli.files.tensors import Array

Config = Mapping[str, object]
Write = Callable[[Any], None]
"""Adds settings to a GGUFWriter."""

DEFAULT_ROPE_BASE = 10_000.0
QUANTIZATION_VERSION = 2


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The number of query heads, the number of key and value heads, and the size of a head."""

    heads: int
    key_heads: int
    size: int


def head_sizes(config: Config) -> HeadSizes:
    """Return the heads that a config.json describes. Raises InputError if it does not."""
    heads = require_int(config, "num_attention_heads")
    if heads <= 0:
        raise InputError(f"config.json: num_attention_heads is {heads:,}.")
    stated = config.get("head_dim")
    size = stated if isinstance(stated, int) else require_int(config, "hidden_size") // heads
    shared = config.get("num_key_value_heads")
    return HeadSizes(heads, shared if isinstance(shared, int) else heads, size)


def model_settings(config: Config, sizes: HeadSizes, writer: Any, *, rope_dimensions: bool) -> None:
    """Add the settings that loaders need to rebuild the model's layers, with `rope_dimensions` the rotary dimension
    too."""
    writer.add_block_count(require_int(config, "num_hidden_layers"))
    writer.add_context_length(require_int(config, "max_position_embeddings"))
    writer.add_embedding_length(require_int(config, "hidden_size"))
    writer.add_feed_forward_length(require_int(config, "intermediate_size"))
    writer.add_vocab_size(require_int(config, "vocab_size"))
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.key_heads)
    writer.add_layer_norm_rms_eps(_require_float(config, "rms_norm_eps"))
    if rope_dimensions:
        writer.add_rope_dimension_count(sizes.size)
    if isinstance(config.get("head_dim"), int):
        writer.add_key_length(sizes.size)
        writer.add_value_length(sizes.size)
    writer.add_rope_freq_base(rope_base(config))
    kind = rope_kind(config)
    if kind in _SCALINGS:
        writer.add_rope_scaling_type(getattr(gguf_package().RopeScalingType, _SCALINGS[kind]))
        writer.add_rope_scaling_factor(_require_float(rope(config), "factor"))
        original = rope(config).get("original_max_position_embeddings")
        if isinstance(original, int):
            writer.add_rope_scaling_orig_ctx_len(original)


EXPERTS = ("num_local_experts", "num_experts")
"""Keys of a config.json that state the number of experts."""


def expert_settings(config: Config, writer: Any) -> None:
    """Add the settings of experts."""
    writer.add_expert_count(require_int(config, next((key for key in EXPERTS if key in config), EXPERTS[-1])))
    writer.add_expert_used_count(require_int(config, "num_experts_per_tok"))
    writer.add_expert_feed_forward_length(require_int(config, "moe_intermediate_size"))


_SCALINGS = {"linear": "LINEAR", "yarn": "YARN"}


def rope(config: Config) -> Config:
    """Return the rotary embedding settings of a config.json, from the newer key or the older."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    return {
        **(older if isinstance(older, Mapping) else {}),
        **(newer if isinstance(newer, Mapping) else {}),
    }


def rope_kind(config: Config) -> str:
    """Return the kind of scaling of the rotary embedding."""
    settings = rope(config)
    return str(settings.get("rope_type", settings.get("type", "default")))


def rope_base(config: Config) -> float:
    """Return the base of the rotary embedding's frequencies."""
    settings = {"rope_theta": DEFAULT_ROPE_BASE, **config, **rope(config)}
    return _require_float(settings, "rope_theta")


def rope_factors(config: Config, sizes: HeadSizes) -> Array | None:
    """Return the divisor of each frequency, binary32 [size / 2], for models that scale low frequencies only (rope_type
    `llama3`); None for others.

    Wavelengths up to original / high_freq_factor are kept, those from original / low_freq_factor on are scaled by
    `factor`, and the frequency is interpolated between them (Llama 3.1).
    """
    if rope_kind(config) != "llama3":
        return None
    settings = rope(config)
    factor, low, high = (_require_float(settings, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original, base = _require_float(settings, "original_max_position_embeddings"), rope_base(config)
    if not 0 < low < high or factor <= 0:
        raise InputError("config.json: factor, low_freq_factor and high_freq_factor of its rope must be ascending.")
    factors = []
    for dimension in range(0, sizes.size, 2):
        turns = original / (2 * pi * base ** (dimension / sizes.size))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (share + (1 - share) / factor))
    return np.array(factors, np.float32)


def require_int(config: Config, key: str) -> int:
    """Return an integer of a config.json. Raises InputError without one."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise InputError(f"config.json: {key} is {printable(value)}; a GGUF file needs an integer.")
    return value


def _require_float(config: Config, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"config.json: {key} is {printable(value)}; a GGUF file needs a number.")
    return float(value)


def gguf_header(architecture: str, file_type: int, settings: Sequence[Write], entries: Sequence[Entry]) -> bytes:
    """Return the header of a file with these tensors in this order, padded to where the first one begins."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(None, architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(file_type)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    for write in settings:
        write(writer)
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.block_type or entry.dtype]
        # The package takes the shape of bytes for a block type, and the shape of elements for any other.
        element = np.dtype(np.uint8 if entry.block_type else np.void)
        writer.add_tensor_info(entry.name, entry.shape or (1,), element, entry.nbytes, raw_dtype=kind)
    stream = BytesIO()
    writer.fout, writer.state = [stream], type(writer.state).EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = stream.getvalue()
    return written + bytes(-len(written) % ALIGNMENT)
