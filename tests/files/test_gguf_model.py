"""What a GGUF file says of a model, and which models it cannot say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxcli.errors import InputError, RefusedError
from mxcli.files.gguf_metadata import gguf_header, head_sizes, rope_factors
from mxcli.files.gguf_model import interleaved, outline_of
from mxcli.files.layouts.layout import Entry
from mxcli.files.tensors import TensorInfo

gguf = pytest.importorskip("gguf")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def info(name: str, *shape: int, dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(name, dtype, shape, "weight", Path("m"), 0, 0)


def settings(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    outline = outline_of(config, [])
    header = gguf_header(outline.architecture, 38, outline.settings, [Entry("a", "F32", (8,))])
    (tmp_path / "m.gguf").write_bytes(header + bytes(32))
    return {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}


def test_the_settings_of_a_llama(tmp_path: Path) -> None:
    said = settings(LLAMA, tmp_path)
    assert {key: value for key, value in said.items() if not key.startswith("GGUF.")} == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.file_type": 38,
        "general.quantization_version": 2,
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.vocab_size": 32,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
    }


def test_settings_that_only_some_models_have(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
    said = settings({**LLAMA, "model_type": "qwen3", "head_dim": 32, "rope_parameters": rope}, tmp_path)
    assert {key: value for key, value in said.items() if key.startswith(("qwen3.rope", "qwen3.attention.key_"))} == {
        "qwen3.attention.key_length": 32,
        "qwen3.rope.freq_base": 5e5,
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 128,
    }
    older = {**LLAMA, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}
    assert settings(older, tmp_path)["llama.rope.scaling.factor"] == 2.0
    assert settings(older, tmp_path)["llama.rope.freq_base"] == 1e6


def test_names_dtypes_and_order_of_rows() -> None:
    infos = [
        info("model.embed_tokens.weight", 32, 64),
        info("model.layers.1.self_attn.q_proj.weight", 64, 64),
        info("model.layers.1.self_attn.k_proj.bias", 32),
        info("model.layers.1.self_attn.v_proj.weight", 32, 64),
        info("model.layers.0.mlp.down_proj.weight", 64, 128, dtype="F16"),
        info("model.layers.0.input_layernorm.weight", 64, dtype="F16"),
        info("model.layers.0.self_attn.rotary_emb.inv_freq", 8, dtype="F32"),
        info("lm_head.weight", 32, 64, dtype="F32"),
    ]
    outline = outline_of(LLAMA, infos)
    targets = [
        target and (target.name, target.dtype, target.reorder is not None) for target in outline.targets.values()
    ]
    assert targets == [
        ("token_embd.weight", "BF16", False),
        ("blk.1.attn_q.weight", "BF16", True),
        ("blk.1.attn_k.bias", "F32", True),
        ("blk.1.attn_v.weight", "BF16", False),
        ("blk.0.ffn_down.weight", "F16", False),
        ("blk.0.attn_norm.weight", "F32", False),
        None,
        ("output.weight", "F32", False),
    ]
    assert outline.constants == {}
    assert len(outline.remarks) == 2
    assert "Biases are written; transformers' loader of GGUF files leaves them out" in outline.remarks[1]
    assert (
        "1 tables that GGUF computes are left out ('model.layers.0.self_attn.rotary_emb.inv_freq'" in outline.remarks[0]
    )
    bias = outline.targets["model.layers.1.self_attn.k_proj.bias"]
    assert bias is not None
    halves = np.arange(32, dtype=np.float32).view(np.uint32) >> 16
    assert bias.of(halves.astype(np.uint16), "BF16").tolist()[:6] == [0, 8, 1, 9, 2, 10]
    assert all(
        not target.reorder for target in outline_of({**LLAMA, "model_type": "qwen2"}, infos).targets.values() if target
    )


def test_rows_of_a_head_alternate_between_its_halves() -> None:
    rows = np.arange(8).reshape(8, 1)
    assert interleaved(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleaved(rows, 1).ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_low_frequencies_of_llama_3_are_divided() -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**LLAMA, "head_dim": 16, "rope_theta": 500000.0, "rope_scaling": rope}
    factors = rope_factors(config, head_sizes(config))
    # Turns in 8192 positions: 1303.8, 252.8, 49.03, 9.507, 1.844, 0.3575, …; up to 1 is scaled, from 4 on is not.
    assert factors is not None
    assert factors.tolist() == [1, 1, 1, 1, pytest.approx(2.69, abs=0.01), 8, 8, 8]
    assert list(outline_of(config, []).constants) == ["rope_freqs.weight"]
    assert rope_factors(LLAMA, head_sizes(LLAMA)) is None


@pytest.mark.parametrize(
    ("config", "tensor", "why"),
    [
        (None, None, "needs a config.json with a model_type"),
        ({"model_type": "gemma2"}, None, "cannot write 'gemma2' models; it writes llama, mistral, qwen2, qwen3"),
        ({"num_local_experts": 8}, None, "num_local_experts is 8; GGUF has one tensor for all experts"),
        ({"hidden_act": "gelu"}, None, "hidden_act is 'gelu'; llama has silu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, None, "the rope_type 'longrope' is not one of default, linear"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "llama3"}}, None, "the rope_type 'llama3' is not one of"),
        ({}, info("vision.patch.weight", 4, 4), "vision.patch.weight: llama has no tensor for it"),
        ({}, info("model.layers.2.mlp.up_proj.weight", 4, 4), "llama has no tensor for it"),
        ({}, info("lm_head.weight", 4, 4, dtype="F8_E4M3"), "it is F8_E4M3; GGUF files hold F64, F32, F16, BF16"),
        ({}, info("model.layers.0.self_attn.q_proj.weight", 60, 64), "its 60 rows are not 4 heads of 16"),
    ],
)
def test_what_cannot_be_written_is_refused(config: dict[str, Any] | None, tensor: TensorInfo | None, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        outline_of(None if config is None else {**LLAMA, **config}, [tensor] if tensor else [])


def test_everything_is_refused_at_once() -> None:
    with pytest.raises(RefusedError) as refused:
        outline_of({**LLAMA, "hidden_act": "relu"}, [info("a.weight", 4, 4), info("b.weight", 4, 4)])
    assert len(refused.value.reasons) == 3


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_required_header_keys(key: str) -> None:
    with pytest.raises(InputError, match=rf"config\.json: {key} is None; a GGUF file needs an integer"):
        outline_of({name: value for name, value in LLAMA.items() if name != key}, [])
