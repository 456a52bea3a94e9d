"""The outline of a model in a GGUF file: the name, dtype and row order of each tensor, and the header.

Only architectures whose tensors are those of their Hugging Face checkpoint, up to the order of rows, are listed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.gguf import gguf_package
from mxcli.files.gguf_metadata import (
    EXPERTS,
    HeadSizes,
    expert_settings,
    head_sizes,
    model_settings,
    require_int,
    rope_factors,
    rope_kind,
)
from mxcli.files.outline import Destination, OutputOutline
from mxcli.files.tensors import Array, TensorInfo

ROPE_FACTORS = "rope_freqs.weight"
HELD_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_LAYERS = 10_000
_LEFT_OUT = re.compile(r"\.(rotary_emb\.inv_freq|attention\.(masked_)?bias)$")
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
_QUERIES_AND_KEYS = re.compile(r"(^|\.)([qk])_proj\.(weight|bias)$")

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Family:
    """Models with one `model_type`: the architecture in the file, and whether its query and key rows are interleaved
    (the rotary embedding pairs neighbours instead of halves); `scaled` are the kinds of rope scaling that it supports,
    with `biased` transformers' loader of GGUF files expects biases, and with `experts` every layer has some."""

    model_type: str
    architecture: str
    interleaved_rope: bool
    scaled: frozenset[str] = frozenset({"default", "linear", "yarn"})
    biased: bool = False
    experts: bool = False


FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("llama", "llama", interleaved_rope=True, scaled=frozenset({"default", "linear", "yarn", "llama3"})),
        Family("mistral", "llama", interleaved_rope=True),
        Family("qwen2", "qwen2", interleaved_rope=False, biased=True),
        Family("qwen3", "qwen3", interleaved_rope=False),
        Family("qwen3_moe", "qwen3moe", interleaved_rope=False, experts=True),
    )
}


def outline_of(config: Config | None, tensors: Iterable[TensorInfo]) -> OutputOutline:
    """Return the outline of a model with this config.json and these tensors.

    Raises RefusedError with every reason why a file could not describe the model: another architecture, tensors without
    a name in it, dtypes that it does not hold, heads that do not divide; InputError if config.json lacks what the
    header needs.
    """
    family = _family(config)
    assert config is not None
    infos = list(tensors)
    sizes = head_sizes(config)
    names = _name_map(family, require_int(config, "num_hidden_layers"))
    problems: list[str] = [*_unlike(family, config)]
    targets: dict[str, Destination | None] = {}
    for info in infos:
        try:
            targets[info.name] = _target(info, family, sizes, names)
        except ValueError as fault:
            problems.append(f"{printable(info.name)}: {fault}.")
    if problems:
        raise together(RefusedError, "What a GGUF file cannot hold", problems)
    factors = rope_factors(config, sizes)
    left_out = [name for name, target in targets.items() if target is None]
    remarks = []
    if left_out:
        remarks.append(f"{len(left_out):,} tables that GGUF computes are left out ('{printable(left_out[0])}', …).")
    if not family.biased and any(target and target.name.endswith(".bias") for target in targets.values()):
        remarks.append("Biases are written; transformers' loader of GGUF files leaves them out of such models.")
    if config.get("sliding_window") and config.get("model_type") == "mistral":
        remarks.append("GGUF's llama has full attention: the model's sliding window is dropped.")
    return OutputOutline(
        targets,
        {} if factors is None else {ROPE_FACTORS: factors},
        family.architecture,
        (
            partial(model_settings, config, sizes, rope_dimensions=family.interleaved_rope),
            *((partial(expert_settings, config),) if family.experts else ()),
        ),
        tuple(remarks),
    )


def _family(config: Config | None) -> Family:
    known = ", ".join(FAMILIES)
    if config is None or "model_type" not in config:
        raise RefusedError(
            f"The layout gguf needs a config.json with a model_type next to the weights; it writes {known}."
        )
    family = FAMILIES.get(str(config["model_type"]))
    if family is None:
        raise RefusedError(
            f"config.json: the layout gguf cannot write '{printable(config['model_type'])}' models; it writes {known}. "
            "Use another --layout."
        )
    return family


def _unlike(family: Family, config: Config) -> list[str]:
    """Return the settings that distinguish a model from others of its type."""
    problems: list[str] = []
    experts = next((key for key in (*EXPERTS, "n_routed_experts") if config.get(key)), None)
    if family.experts:
        problems += _unlike_experts(family, config)
    elif experts:
        problems.append(f"config.json: {experts} is {printable(config[experts])}; GGUF has one tensor for all experts.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        problems.append(f"config.json: hidden_act is '{printable(activation)}'; {family.architecture} has silu.")
    if config.get("use_sliding_window"):
        problems.append(f"config.json: use_sliding_window is true; {family.architecture} has full attention.")
    kind = rope_kind(config)
    if kind not in family.scaled:
        known = ", ".join(sorted(family.scaled))
        problems.append(f"config.json: the rope_type '{printable(kind)}' is not one of {known}.")
    return problems


def _unlike_experts(family: Family, config: Config) -> Iterator[str]:
    """Yield the settings of experts that an architecture does not have."""
    if config.get("norm_topk_prob") is not True:
        yield (
            f"config.json: norm_topk_prob is {printable(config.get('norm_topk_prob'))}; {family.architecture} divides "
            "the weights of the chosen experts by their sum."
        )
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        yield f"config.json: some layers have no experts; all layers of {family.architecture} have some."


def _name_map(family: Family, layers: int) -> Any:
    if not 0 < layers <= MAX_LAYERS:
        raise InputError(f"config.json: num_hidden_layers is {layers:,}.")
    gguf = gguf_package()
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    return gguf.get_tensor_name_map(architecture, layers)


def _target(info: TensorInfo, family: Family, sizes: HeadSizes, names: Any) -> Destination | None:
    """Return the destination of a tensor. Raises ValueError if it has none."""
    if _LEFT_OUT.search(info.name):
        return None
    if _SINGLE_EXPERT.search(info.name):
        raise ValueError("GGUF has one tensor for all experts: quantize to another layout, and use mxcli convert")
    name = names.get_name(info.name, (".weight", ".bias"))
    if name is None:
        raise ValueError(f"{family.architecture} has no tensor for it")
    if info.dtype not in HELD_DTYPES:
        raise ValueError(f"it is {info.dtype}; GGUF files hold {', '.join(HELD_DTYPES)}")
    match = _QUERIES_AND_KEYS.search(info.name) if family.interleaved_rope else None
    dtype = "F32" if len(info.shape) < 2 and info.dtype in ("F16", "BF16") else info.dtype
    if match is None:
        return Destination(name, dtype)
    heads = sizes.heads if match[2] == "q" else sizes.key_heads
    if info.shape[0] != heads * sizes.size or sizes.size % 2:
        raise ValueError(f"its {info.shape[0]:,} rows are not {heads:,} heads of {sizes.size:,}, an even number")
    return Destination(name, dtype, partial(interleaved, heads=heads))


def interleaved(x: Array, heads: int) -> Array:
    """Reorder rows [heads * 2n, …] so that those of a head are in the order 0, n, 1, n + 1, …: pairs of the rotary
    embedding, which Hugging Face's llama stores n apart, become neighbours."""
    paired = x.reshape(heads, 2, -1, *x.shape[1:])
    return np.ascontiguousarray(np.swapaxes(paired, 1, 2)).reshape(x.shape)


def halved(x: Array, heads: int) -> Array:
    """Reorder rows [heads * 2n, …] so that those of a head are in the order 0, 2, 4, … 1, 3, 5, …: the inverse of
    `interleaved`."""
    paired = x.reshape(heads, -1, 2, *x.shape[1:])
    return np.ascontiguousarray(np.swapaxes(paired, 1, 2)).reshape(x.shape)
