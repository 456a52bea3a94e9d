"""Linear layers that transformers (5.24) has under other names than files do, beyond a prefix: its names as rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache


@dataclass(frozen=True, slots=True)
class Renamed:
    """The names of layers in files (an expression, searched), what transformers replaces them by, and the model types
    that have them."""

    stored: str
    called: str
    model_types: tuple[str, ...]


_NOMIC = r"^(?:nomic_bert\.)?encoder\.layers\.(\d+)\."
_LING = ("bailing_hybrid",)
_VIT = (
    "audio-spectrogram-transformer", "beit", "deit", "ijepa", "pixio", "vision-encoder-decoder",
    "vision-text-dual-encoder", "vit", "vit_mae", "vit_msn", "vivit", "zoedepth",
)  # fmt: skip
_SWIN = ("swin", "grounding-dino", "mm-grounding-dino", "mask2former", "oneformer")
_OUTPUT = ((r"attention\.output\.dense", "attention.o_proj"),)
_QUERIES = tuple((rf"attention\.attention\.{name}", f"attention.{name[0]}_proj") for name in ("query", "key", "value"))
_OF_SELF = tuple((rf"attention\.self\.{name}", f"attention.{name[0]}_proj") for name in ("query", "key", "value"))
_MLP = ((r"intermediate\.dense", "mlp.fc1"), (r"output\.dense", "mlp.fc2"))
_DENSE_MLP = ((r"mlp\.dense1", "mlp.fc1"), (r"mlp\.dense2", "mlp.fc2"))
_IN_TOWERS = (
    (r"\.layer\.(\d+)\.", r".layers.\1.", (*_QUERIES, *_OUTPUT, *_MLP), _VIT),
    (r"\.decoder_encoder\.layer\.(\d+)\.", r".decoder_layers.\1.", (*_QUERIES, *_OUTPUT, *_MLP), ("vit_mae",)),
    (r"\.decoder_layers\.(\d+)\.", r".decoder_layers.\1.", (*_QUERIES, *_OUTPUT, *_MLP), ("vit_mae",)),
    (r"\.blocks\.(\d+)\.", r".blocks.\1.", (*_OF_SELF, *_OUTPUT, *_MLP), _SWIN),
    (r"\.block\.(\d+)\.(\d+)\.", r".stages.\1.blocks.\2.", (*_OF_SELF, *_OUTPUT, *_DENSE_MLP), ("segformer",)),
)
"""Where layers of towers are in files and in transformers, and their names there."""
RENAMED = (
    Renamed(r"^embed_out$", "lm_head", ("gpt_neox",)),
    Renamed(r"^transformer\.h\.(\d+)\.attn\.attention\.([qkv]_proj)$", r"model.layers.\1.self_attn.\2", ("exaone",)),
    Renamed(r"^transformer\.h\.(\d+)\.attn\.attention\.out_proj$", r"model.layers.\1.self_attn.o_proj", ("exaone",)),
    Renamed(r"^transformer\.h\.(\d+)\.mlp\.c_fc_0$", r"model.layers.\1.mlp.gate_proj", ("exaone",)),
    Renamed(r"^transformer\.h\.(\d+)\.mlp\.c_fc_1$", r"model.layers.\1.mlp.up_proj", ("exaone",)),
    Renamed(r"^transformer\.h\.(\d+)\.mlp\.c_proj$", r"model.layers.\1.mlp.down_proj", ("exaone",)),
    Renamed(r"\.attn\.w([qo])_([ab])$", r".self_attn.\1_\2_proj", ("deepseek_v4",)),
    Renamed(r"\.attn\.wkv$", r".self_attn.kv_proj", ("deepseek_v4",)),
    Renamed(r"\.attn\.compressor\.wkv$", r".self_attn.compressor.kv_proj", ("deepseek_v4",)),
    Renamed(r"\.attn\.compressor\.wgate$", r".self_attn.compressor.gate_proj", ("deepseek_v4",)),
    Renamed(r"\.ffn\.shared_experts\.w1$", r".mlp.shared_experts.gate_proj", ("deepseek_v4",)),
    Renamed(r"\.ffn\.shared_experts\.w3$", r".mlp.shared_experts.up_proj", ("deepseek_v4",)),
    Renamed(r"\.ffn\.shared_experts\.w2$", r".mlp.shared_experts.down_proj", ("deepseek_v4",)),
    Renamed(r"\.mlp\.shared_mlp\.", ".mlp.shared_experts.", ("hy_v3",)),
    Renamed(r"\.mlp\.shared_expert\.", ".mlp.shared_experts.", ("laguna",)),
    Renamed(r"\.block_sparse_moe\.shared_experts\.", ".mlp.shared_experts.", ("minimax_m3_vl",)),
    Renamed(r"\.self_attn\.g_proj$", ".self_attn.gate_proj", ("dory",)),
    Renamed(r"\.linear_gate$", ".gate_proj", ("hy_v4", "hy_v4_vl")),
    Renamed(r"\.self_attn\.q_b_proj$", ".self_attn.q_gate_proj", ("axk2",)),
    Renamed(r"\.W_down$", ".mlp.fc1", ("axk2",)),
    Renamed(r"\.W_up$", ".mlp.fc2", ("axk2",)),
    Renamed(r"\.self_attn\.f_([ab])_proj$", r".self_attn.forget_gate.f_\1_proj", ("glm5_next",)),
    Renamed(r"\.self_attn\.to_([qkv])$", r".self_attn.\1_proj", ("cosmos3_edge", "cosmos3_omni")),
    Renamed(r"\.self_attn\.to_out$", ".self_attn.o_proj", ("cosmos3_edge", "cosmos3_omni")),
    Renamed(r"^language_model\.model\.blocks\.", "model.language_model.layers.", ("kimi_k25",)),
    Renamed(r"\.attention\.w([qkvo])$", r".self_attn.\1_proj", ("mistral_large4", "molmo2")),
    Renamed(r"\.attention\.wkv_a_with_mqa$", ".self_attn.kv_a_proj_with_mqa", ("mistral_large4",)),
    Renamed(r"\.attention\.wkv_b$", ".self_attn.kv_b_proj", ("mistral_large4",)),
    Renamed(r"\.attention\.indexer\.", ".self_attn.indexer.", ("mistral_large4",)),
    Renamed(r"(^|\.)mlp_AR\.", r"\1projector.", ("paddleocr_vl",)),
    Renamed(r"(^|\.)patch_merge_mlp\.", r"\1multi_modal_projector.merge_", ("minimax_m3_vl",)),
    Renamed(r"(^|\.)vision_projector$", r"\1projector", ("hyperclovax_vision_v2",)),
    Renamed(r"^model\.layers\.(\d+)\.attention\.(b|g|k|q|v|kv_b)_proj$", r"model.layers.\1.self_attn.\2_proj", _LING),
    Renamed(
        r"^model\.layers\.(\d+)\.attention\.kv_a_proj_with_mqa$", r"model.layers.\1.self_attn.kv_a_proj_with_mqa", _LING
    ),
    Renamed(r"^model\.layers\.(\d+)\.attention\.f_proj$", r"model.layers.\1.self_attn.forget_gate.f_proj", _LING),
    Renamed(r"^model\.layers\.(\d+)\.attention\.dense$", r"model.layers.\1.self_attn.o_proj", _LING),
    Renamed(r"\.block_sparse_moe\.shared_experts\.", ".mlp.shared_experts.", ("kimi_linear",)),
    Renamed(r"\.block_sparse_moe\.((gate|up|down)_proj)$", r".mlp.\1", ("kimi_linear",)),
    Renamed(r"\.shared_experts\.linear_gate$", ".shared_experts.gate_proj", ("hy_v4", "hy_v4_vl")),
    Renamed(_NOMIC + r"attn\.out_proj$", r"layers.\1.self_attn.o_proj", ("nomic_bert",)),
    *(Renamed(_NOMIC + r"attn\.Wqkv$", rf"layers.\1.self_attn.{part}_proj", ("nomic_bert",)) for part in "qkv"),
    Renamed(_NOMIC + r"mlp\.fc11$", r"layers.\1.mlp.up_proj", ("nomic_bert",)),
    Renamed(_NOMIC + r"mlp\.fc12$", r"layers.\1.mlp.gate_proj", ("nomic_bert",)),
    Renamed(_NOMIC + r"mlp\.fc2$", r"layers.\1.mlp.down_proj", ("nomic_bert",)),
    Renamed(r"(^|\.)linear_c\.(\d+)\.proj$", r"\1linear_projections.\2.proj", ("segformer",)),
    *(
        Renamed(place + layer + "$", called_place + called, types)
        for place, called_place, layers, types in _IN_TOWERS
        for layer, called in layers
    ),
)
"""The rows apply to every model: a name that the model does not have matches nothing."""


@lru_cache(maxsize=1 << 16)
def names_of(module: str) -> Sequence[str]:
    """Return the names of a module: in files, and in transformers if it has another one there."""
    if not _any_row().search(module):
        return (module,)
    others = (pattern.sub(called, module) for pattern, called in _rows())
    return tuple(dict.fromkeys((module, *others)))


@cache
def _any_row() -> re.Pattern[str]:
    """Return one expression for all rows: few names need the rows themselves."""
    return re.compile("|".join(f"(?:{re.sub(r'[(](?![?])', '(?:', row.stored)})" for row in RENAMED))


@cache
def _rows() -> Sequence[tuple[re.Pattern[str], str]]:
    return [(re.compile(row.stored), row.called) for row in RENAMED]
