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
        ("vit.encoder.layer.3.attention.output.dense", "vit.encoder.layers.3.attention.o_proj"),
        ("deit.encoder.layer.1.intermediate.dense", "deit.encoder.layers.1.mlp.fc1"),
        ("beit.encoder.layer.1.output.dense", "beit.encoder.layers.1.mlp.fc2"),
        ("decoder.decoder_layers.2.output.dense", "decoder.decoder_layers.2.mlp.fc2"),
        ("swin.encoder.layers.0.blocks.1.attention.self.key", "swin.encoder.layers.0.blocks.1.attention.k_proj"),
        ("segformer.encoder.block.0.1.mlp.dense2", "segformer.encoder.stages.0.blocks.1.mlp.fc2"),
        ("decode_head.linear_c.2.proj", "decode_head.linear_projections.2.proj"),
        ("model.layers.4.attention.dense", "model.layers.4.self_attn.o_proj"),
        ("encoder.layers.5.mlp.fc12", "layers.5.mlp.gate_proj"),
        ("nomic_bert.encoder.layers.5.mlp.fc2", "layers.5.mlp.down_proj"),
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


def test_a_layer_that_is_divided_on_load_has_several_names() -> None:
    stored = "encoder.layers.1.attn.Wqkv"
    assert names_of(stored) == (stored, *(f"layers.1.self_attn.{part}_proj" for part in "qkv"))
