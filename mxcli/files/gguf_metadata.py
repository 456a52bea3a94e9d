"""What the header of a GGUF file says of a model, from its config.json."""

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
    """Heads of queries, heads of keys and values, and the size of one."""

    heads: int
    key_heads: int
    size: int


def head_sizes(config: Config) -> HeadSizes:
    """The heads that a config.json describes; raises InputError where it does not."""
    heads = as_number(config, "num_attention_heads")
    if heads <= 0:
        raise InputError(f"config.json: num_attention_heads is {heads:,}.")
    stated = config.get("head_dim")
    size = stated if isinstance(stated, int) else as_number(config, "hidden_size") // heads
    shared = config.get("num_key_value_heads")
    return HeadSizes(heads, shared if isinstance(shared, int) else heads, size)


def model_settings(config: Config, sizes: HeadSizes, writer: Any, *, turned: bool) -> None:
    """Add what every loader needs to rebuild the model's layers."""
    writer.add_block_count(as_number(config, "num_hidden_layers"))
    writer.add_context_length(as_number(config, "max_position_embeddings"))
    writer.add_embedding_length(as_number(config, "hidden_size"))
    writer.add_feed_forward_length(as_number(config, "intermediate_size"))
    writer.add_vocab_size(as_number(config, "vocab_size"))
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.key_heads)
    writer.add_layer_norm_rms_eps(_real(config, "rms_norm_eps"))
    if turned:
        writer.add_rope_dimension_count(sizes.size)
    if isinstance(config.get("head_dim"), int):
        writer.add_key_length(sizes.size)
        writer.add_value_length(sizes.size)
    said = rope(config)
    writer.add_rope_freq_base(rope_base(config))
    kind = rope_kind(config)
    if kind in _SCALINGS:
        writer.add_rope_scaling_type(getattr(gguf_package().RopeScalingType, _SCALINGS[kind]))
        writer.add_rope_scaling_factor(_real(said, "factor"))
        original = said.get("original_max_position_embeddings")
        if isinstance(original, int):
            writer.add_rope_scaling_orig_ctx_len(original)


_SCALINGS = {"linear": "LINEAR", "yarn": "YARN"}


def rope(config: Config) -> Config:
    """What a config.json says of its rotary embedding, in the newer way or the older."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    return {
        **(older if isinstance(older, Mapping) else {}),
        **(newer if isinstance(newer, Mapping) else {}),
    }


def rope_kind(config: Config) -> str:
    """How the rotary embedding is scaled."""
    said = rope(config)
    return str(said.get("rope_type", said.get("type", "default")))


def rope_base(config: Config) -> float:
    """The base of the rotary embedding's frequencies."""
    said = {"rope_theta": DEFAULT_ROPE_BASE, **config, **rope(config)}
    return _real(said, "rope_theta")


def rope_factors(config: Config, sizes: HeadSizes) -> Array | None:
    """By how much each frequency is divided, binary32 [size / 2], for models that scale low frequencies only (the
    rope_type `llama3`); None for others.

    Wavelengths up to original / high_freq_factor stay, those from original / low_freq_factor on are scaled by `factor`,
    and between them the frequency is interpolated (Llama 3.1).
    """
    if rope_kind(config) != "llama3":
        return None
    said = rope(config)
    factor, low, high = (_real(said, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original, base = _real(said, "original_max_position_embeddings"), rope_base(config)
    if not 0 < low < high or factor <= 0:
        raise InputError("config.json: factor, low_freq_factor and high_freq_factor of its rope must be ascending.")
    factors = []
    for place in range(0, sizes.size, 2):
        turns = original / (2 * pi * base ** (place / sizes.size))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (share + (1 - share) / factor))
    return np.array(factors, np.float32)


def as_number(config: Config, key: str) -> int:
    """A whole number of a config.json; raises InputError where it has none."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise InputError(f"config.json: {key} is {printable(value)}; a GGUF file must say it, as a whole number.")
    return value


def _real(config: Config, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"config.json: {key} is {printable(value)}; a GGUF file must say it, as a number.")
    return float(value)


def header_of(architecture: str, file_type: int, settings: Sequence[Write], entries: Sequence[Entry]) -> bytes:
    """The header of a file with these tensors in this order, padded to where the first one begins."""
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
