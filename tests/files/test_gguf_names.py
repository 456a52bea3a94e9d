"""Plain checkpoints under the names that GGUF files have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import LLAMA, bf16, llama, write_model

from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.gguf_names import named_as_gguf

pytest.importorskip("gguf")
CONFIG = {**LLAMA, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_names_dtypes_and_rows_are_those_of_gguf(tmp_path: Path) -> None:
    tensors = llama()
    rows = np.repeat(np.arange(64, dtype=np.float32)[:, None], 64, axis=1)
    tensors["model.layers.0.self_attn.q_proj.weight"] = bf16(rows)
    tensors["model.layers.0.self_attn.o_proj.weight"] = bf16(rows)
    named = named_as_gguf(open_checkpoint(write_model(tmp_path / "m", tensors, CONFIG)))
    assert sorted(named.tensors) == [
        "blk.0.attn_k.weight",
        "blk.0.attn_norm.weight",
        "blk.0.attn_output.weight",
        "blk.0.attn_q.weight",
        "blk.0.attn_v.weight",
        "blk.0.ffn_down.weight",
        "blk.0.ffn_gate.weight",
        "blk.0.ffn_norm.weight",
        "blk.0.ffn_up.weight",
        "output.weight",
        "output_norm.weight",
        "token_embd.weight",
    ]
    assert {named.tensors[name].dtype for name in ("output_norm.weight", "blk.0.attn_norm.weight")} == {"F32"}
    query = read(named, named.tensors["blk.0.attn_q.weight"])
    first = (query[:, 0].astype(np.uint32) << 16).view(np.float32).tolist()
    # Two heads of 32 rows: of each the rows 0, 16, 1, 17, …
    assert first[:6] == [0, 16, 1, 17, 2, 18]
    assert first[32:36] == [32, 48, 33, 49]
    output = read(named, named.tensors["blk.0.attn_output.weight"])
    assert (output[:, 0].astype(np.uint32) << 16).view(np.float32).tolist() == list(range(64))


def test_a_head_that_is_the_embedding_has_a_name_too(tmp_path: Path) -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    named = named_as_gguf(
        open_checkpoint(write_model(tmp_path / "m", tensors, {**CONFIG, "tie_word_embeddings": True}))
    )
    assert named.tied == {"output.weight": "token_embd.weight"}
    assert "output.weight" not in named.tensors


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (None, r"it has no config\.json with a model_type, and the names of its tensors in GGUF files are known for"),
        ({**CONFIG, "model_type": "gemma2"}, "its model_type is 'gemma2', and the names of its tensors in GGUF files"),
        (
            {**CONFIG, "model_type": "gpt_neox"},
            "its model_type is 'gpt_neox', .* known for llama, mistral, qwen2, qwen3",
        ),
        ({**CONFIG, "num_local_experts": 4}, "num_local_experts is 4; GGUF has one tensor for all experts"),
    ],
)
def test_models_without_known_names_are_refused(tmp_path: Path, config: dict[str, object] | None, why: str) -> None:
    with pytest.raises(RefusedError, match=f"cannot be compared with a GGUF file: .*{why}"):
        named_as_gguf(open_checkpoint(write_model(tmp_path / "m", llama(), config)))
