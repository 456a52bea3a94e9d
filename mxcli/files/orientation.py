"""Which dimension of a stored weight its matrix product reduces over: where blocks must run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mxcli.files.tensors import TensorInfo

LAST, BEFORE_LAST = -1, -2


@dataclass(frozen=True, slots=True)
class Transposed:
    """Weights stored [in, out]: their names (searched), the model types it holds for (none: all), and why."""

    name: str
    model_types: frozenset[str]
    reason: str


CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
STACKED = frozenset({"gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})
TRANSPOSED = (
    Transposed(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$", CONV1D, "GPT-2 Conv1D layers are stored [in, out]"),
    Transposed(r"\.experts\.(gate_up_proj|down_proj)$", STACKED, "these experts are stored [expert, in, out]"),
    Transposed(r"(^|\.)kernel$", frozenset(), "Flax kernels are stored [in, out]"),
)
# A fused c_attn is three times as wide as it is long when stored [in, out], and only then.
_FUSED = re.compile(r"(^|\.)h\.\d+\.attn\.c_attn\.weight$")


def reduction_axis(info: TensorInfo, config: Mapping[str, object] | None = None, *, conv1d: bool = False) -> int:
    """-1 or -2: the dimension the layer sums over.

    A stack of experts is decided by which of its dimensions is the config's hidden_size, where only one is;
    else the TRANSPOSED rows for the config's model type decide. `conv1d` is stores_conv1d() of the source,
    for sources without a config.
    """
    if len(info.shape) < 2:
        return LAST
    by_size = _expert_axis(info, _sizes(config))
    if by_size is not None:
        return by_size
    types = _model_types(config)
    if conv1d:
        types |= {"gpt2"}
    for row in TRANSPOSED:
        if (not row.model_types or row.model_types & types) and re.search(row.name, info.name):
            return BEFORE_LAST
    return LAST


def stores_conv1d(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the shapes of fused attention weights show GPT-2's [in, out] order."""
    return any(
        len(info.shape) == 2 and info.shape[1] == 3 * info.shape[0]
        for name, info in tensors.items()
        if name.endswith(".c_attn.weight") and _FUSED.search(name)
    )


def _expert_axis(info: TensorInfo, hidden_sizes: frozenset[int]) -> int | None:
    part = re.search(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$", info.name)
    if part is None or len(info.shape) != 3:
        return None
    last, before = (size in hidden_sizes for size in (info.shape[-1], info.shape[-2]))
    if last == before:
        return None
    reduces_hidden = part[1] == "gate_up_proj"
    return LAST if last == reduces_hidden else BEFORE_LAST


def _parts(config: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    if config is None:
        return []
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def _sizes(config: Mapping[str, object] | None) -> frozenset[int]:
    sizes = (part.get("hidden_size") for part in _parts(config))
    return frozenset(size for size in sizes if isinstance(size, int))


def _model_types(config: Mapping[str, object] | None) -> frozenset[str]:
    types = (part.get("model_type") for part in _parts(config))
    return frozenset(name for name in types if isinstance(name, str))
