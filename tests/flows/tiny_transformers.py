"""Tiny models of transformers, made from configurations, with weights that every format rounds."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()
_SIZES = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_SIZES, "hidden_size": 64, "intermediate_size": 128}
_TEXT = {**_WIDE, "num_key_value_heads": 2, "tie_word_embeddings": False}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _TEXT),
    "tied": ("LlamaConfig", "LlamaForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "bert": ("BertConfig", "BertForMaskedLM", _WIDE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_TEXT, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_TEXT, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_TEXT, "num_local_experts": 4, "head_dim": 16, "intermediate_size": 64, "intermediate_size_mlp": 64},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64},
    ),
}


@cache
def _made(name: str) -> Any:
    config, model, options = CLASSES[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    made.set_experts_implementation("eager") if "experts" in str(made) else None
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05 if parameter.ndim > 1 else parameter)
    return made


def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of its own."""
    return copy.deepcopy(_made(name)).to(dtype)


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    """Some tokens of the vocabulary, always the same."""
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(1))
