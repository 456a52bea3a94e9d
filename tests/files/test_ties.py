"""Output heads that are tied to the embedding are named, and nothing is invented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_checkpoint import zeros

from mxcli.files.checkpoint import open_checkpoint

TABLE = zeros("BF16", 16, 8)


def _causal(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": ["XForCausalLM"], "tie_word_embeddings": True} | keys


@pytest.mark.parametrize(
    ("stored", "config", "tied"),
    [
        (
            "model.embed_tokens.weight",
            {"tie_word_embeddings": True},
            {"lm_head.weight": "model.embed_tokens.weight"},
        ),
        ("model.embed_tokens.weight", _causal("llama"), {"lm_head.weight": "model.embed_tokens.weight"}),
        ("transformer.wte.weight", _causal("gpt2"), {"lm_head.weight": "transformer.wte.weight"}),
        ("wte.weight", _causal("gpt2"), {"lm_head.weight": "wte.weight"}),
        (
            "model.language_model.embed_tokens.weight",
            {"text_config": {"tie_word_embeddings": True}},
            {"lm_head.weight": "model.language_model.embed_tokens.weight"},
        ),
        (
            "language_model.model.embed_tokens.weight",
            _causal("gemma3"),
            {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
        ),
        (
            "model.decoder.embed_tokens.weight",
            _causal("opt"),
            {"lm_head.weight": "model.decoder.embed_tokens.weight"},
        ),
        (
            "model.decoder.embed_tokens.weight",
            _causal("whisper"),
            {"proj_out.weight": "model.decoder.embed_tokens.weight"},
        ),
        ("backbone.embeddings.weight", _causal("mamba"), {"lm_head.weight": "backbone.embeddings.weight"}),
        (
            "shared.weight",
            _causal("t5"),
            {
                "decoder.embed_tokens.weight": "shared.weight",
                "encoder.embed_tokens.weight": "shared.weight",
                "lm_head.weight": "shared.weight",
            },
        ),
        ("model.embed_tokens.weight", {"architectures": ["LlamaModel"], "tie_word_embeddings": True}, {}),
        ("embeddings.word_embeddings.weight", {"architectures": ["BertModel"]}, {}),
        ("model.embed_tokens.weight", {}, {}),
        ("some.table.weight", _causal("x"), {}),
    ],
)
def test_ties(model: Callable[..., Path], stored: str, config: dict[str, Any], tied: dict[str, str]) -> None:
    checkpoint = open_checkpoint(model({"model.safetensors": {stored: TABLE}, "config.json": config}))
    assert checkpoint.tied == tied
    assert list(checkpoint.tensors) == [stored]
    assert checkpoint.notes == tuple(f"{alias} is tied to {stored}." for alias in tied)


@pytest.mark.parametrize(
    ("tensors", "config", "notes"),
    [
        (
            ["model.embed_tokens.weight"],
            {"architectures": ["GemmaForCausalLM"]},
            "lm_head.weight is tied to model.embed_tokens.weight "
            "(the configuration does not say so, but no head is stored).",
        ),
        (
            ["model.embed_tokens.weight"],
            _causal("llama", tie_word_embeddings=False),
            "The configuration says the output head is not tied, yet no head is stored.",
        ),
        (
            ["model.embed_tokens.weight", "lm_head.weight"],
            _causal("llama"),
            "The configuration ties the output head, yet lm_head.weight is stored.",
        ),
    ],
)
def test_what_contradicts_itself_is_noted(
    model: Callable[..., Path], tensors: list[str], config: dict[str, Any], notes: str
) -> None:
    root = model({"model.safetensors": dict.fromkeys(tensors, TABLE), "config.json": config})
    assert open_checkpoint(root).notes == (notes,)


@pytest.mark.parametrize("name", ["head.dense.weight", "score.weight"])
def test_a_head_of_another_size_than_the_table_contradicts_no_tie(model: Callable[..., Path], name: str) -> None:
    tensors = {"model.embeddings.tok_embeddings.weight": TABLE, name: zeros("BF16", 8, 8)}
    root = model({"model.safetensors": tensors, "config.json": _causal("modernbert")})
    assert open_checkpoint(root).notes == ()
