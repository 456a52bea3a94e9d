"""The structure of a model: tied output heads."""

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
    heads = [info for info in tensors.values() if info.role == "lm_head"]
    stated = _stated_tie(config)
    if heads:
        tables = {info.shape for info in tensors.values() if info.role == "embedding"}
        head = next((printable(info.name) for info in heads if info.shape in tables), None)
        says = stated and head is not None
        return {}, [f"The configuration ties the output head, yet {head} is stored."] if says else []
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
