from __future__ import annotations

import pytest

from mxcli.files.layouts.renamed import names_of


@pytest.mark.parametrize(
    ("stored", "called"),
    [
        ("embed_out", "lm_head"),
        ("transformer.h.3.mlp.c_proj", "model.layers.3.mlp.down_proj"),
        ("transformer.h.3.attn.attention.out_proj", "model.layers.3.self_attn.o_proj"),
        ("layers.12.attn.wq_a", "layers.12.self_attn.q_a_proj"),
        ("layers.12.ffn.shared_experts.w3", "layers.12.mlp.shared_experts.up_proj"),
        ("model.layers.1.mlp.shared_mlp.down_proj", "model.layers.1.mlp.shared_experts.down_proj"),
        ("mlp_AR.linear_1", "projector.linear_1"),
        ("vit.encoder.layer.0.attention.attention.query", "vit.encoder.layers.0.attention.q_proj"),
    ],
)
def test_transformers_has_other_names(stored: str, called: str) -> None:
    assert names_of(stored) == (stored, called)


@pytest.mark.parametrize(
    "name",
    ["lm_head", "model.layers.0.self_attn.q_proj", "gpt_neox.layers.0.mlp.dense_h_to_4h", "model.embed_out", "h.0.x"],
)
def test_most_layers_have_one_name(name: str) -> None:
    assert names_of(name) == (name,)
