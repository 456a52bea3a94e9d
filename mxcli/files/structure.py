"""The structure of a model: tied output heads, and the dimension that each weight's matrix product reduces over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Tie:
    """An embedding's name (full match), the names that share it, and the model types it holds for (none: all)."""

    stored: str
    aliases: tuple[str, ...]
    model_types: frozenset[str] = frozenset()


# The first matching row decides; \1 is the stored name's prefix.
TIES = (
    Tie(r"(.*\.)?decoder\.embed_tokens\.weight", ("proj_out.weight",), frozenset({"whisper"})),
    Tie(
        r"shared\.weight",
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
        frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"}),
    ),
    Tie(r"(bert\.)embeddings\.word_embeddings\.weight", ("cls.predictions.decoder.weight",)),
    Tie(r"(roberta\.)embeddings\.word_embeddings\.weight", ("lm_head.decoder.weight",)),
    Tie(r"gpt_neox\.embed_in\.weight", ("embed_out.weight",)),
    Tie(r"(language_model\.)model\.embed_tokens\.weight", (r"\1lm_head.weight",)),
    Tie(r"model\.shared\.weight", ("lm_head.weight",)),
    Tie(r"(model\.(language_model\.|decoder\.)?)?embed_tokens\.weight", ("lm_head.weight",)),
    Tie(r"(transformer\.)?wte\.weight|(transformer\.)?word_embeddings\.weight", ("lm_head.weight",)),
    Tie(r"(backbone\.)?embeddings?\.weight", ("lm_head.weight",)),
    Tie(r"tok_embeddings\.weight", ("output.weight",)),
)
GENERATES = re.compile(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel|ForConditionalGeneration|ForMaskedLM)$")


def tied_by_config(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, object] | None
) -> tuple[dict[str, str], list[str]]:
    """Return the stored name of every absent tied tensor, and notes.

    A head that is absent is tied if the configuration states tie_word_embeddings, or does not state it and its
    architecture generates text. Nothing is tied if a head is stored, or the architecture has none.
    """
    if config is None:
        return {}, []
    heads = [name for name, info in tensors.items() if info.role == "lm_head"]
    stated = _stated_tie(config)
    if heads:
        head = printable(heads[0])
        return {}, [f"The configuration ties the output head, yet {head} is stored."] if stated else []
    has_head = _has_head(config)
    if has_head is False or (has_head is None and not stated):
        return {}, []
    row, match = _embedding(tensors, config)
    if row is None or match is None:
        return {}, []
    if stated is False:
        return {}, ["The configuration says the output head is not tied, yet no head is stored."]
    stored = match[0]
    aliases = sorted(match.expand(alias) for alias in row.aliases)
    tied = {alias: stored for alias in aliases if alias not in tensors}
    why = "" if stated else " (the configuration does not say so, but no head is stored)"
    return tied, [f"{alias} is tied to {printable(stored)}{why}." for alias in tied]


def _embedding(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, object]
) -> tuple[Tie | None, re.Match[str] | None]:
    names = [name for name, info in tensors.items() if info.role == "embedding"]
    for row in TIES:
        if row.model_types and config.get("model_type") not in row.model_types:
            continue
        for name in names:
            match = re.fullmatch(row.stored, name)
            if match:
                return row, match
    return None, None


def _stated_tie(config: Mapping[str, object]) -> bool | None:
    for part in (config, config.get("text_config")):
        stated = part.get("tie_word_embeddings") if isinstance(part, Mapping) else None
        if isinstance(stated, bool):
            return stated
    return None


def _has_head(config: Mapping[str, object]) -> bool | None:
    """Return whether the architecture has an output head; None if the configuration names no architecture."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    return any(GENERATES.search(str(name)) is not None for name in architectures)


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
    """Return the dimension that the layer sums over: -1 or -2.

    For a stack of experts, the dimension equal to the config's hidden_size decides if there is exactly one; else the
    TRANSPOSED rows for the config's model type decide. `conv1d` is stores_conv1d() of the source, for sources without a
    config.
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
    """Return whether the shapes of fused attention weights show GPT-2's [in, out] order."""
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
