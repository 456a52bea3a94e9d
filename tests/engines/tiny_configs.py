"""Small configurations of transformers' models: the default of a class with every size made small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN, WIDE, HEADS, LAYERS, WORDS = 64, 128, 2, 2, 128

SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "decoder_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("projection_dim", "word_embed_proj_dim", "lm_head_hidden", "rnn_hidden", "lru_width"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
        WIDE,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "hidden_dim", "intermediate_size_mlp"), WIDE
    ),
    **dict.fromkeys(("block_ff_dim", "mlp_dim", "feed_forward_hidden_size", "shared_intermediate_size"), WIDE),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks"),
        LAYERS,
    ),
    **dict.fromkeys(("depth", "num_global_layers", "num_decoder_layers", "decoder_num_hidden_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "attention_heads", "linear_num_key_heads", "linear_num_value_heads"), HEADS
    ),
    **dict.fromkeys(
        ("head_dim", "d_kv", "attention_head_dim", "kv_channels", "linear_key_head_dim", "linear_value_head_dim"), 32
    ),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), WORDS),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "seq_length"), 64
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"), 4
    ),
    **dict.fromkeys(("moe_k", "moe_topk", "top_k_experts"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("image_size", "patch_size", "num_channels"), 0),
}
"""Sizes by the names that configurations give them; 0 leaves the default."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def tiny(kind: type[Any], changes: Mapping[str, Any]) -> Any:
    """A configuration of a class, small, with `changes`; those of a part are a mapping under the part's name."""
    return kind(**_small(kind(), changes))


def _small(default: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: getattr(default, name, None) for name in default.sub_configs}
    stored = {name for name in default.to_dict() if name not in parts}
    found: dict[str, Any] = {name: size for name, size in SIZES.items() if size and name in stored}
    found |= {name: token for name, token in TOKENS.items() if name in stored}
    for name, part in parts.items():
        if part is not None:
            found[name] = {"model_type": part.model_type, **_small(part, changes.get(name) or {})}
    return found | {name: value for name, value in changes.items() if not (name in found and name in parts)}
