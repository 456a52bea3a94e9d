"""Layers of diffusion models that recipes keep plain."""

from __future__ import annotations

import re

import pytest

from mxcli.files.models.diffusion import FP32, LIKE_OTHERS, MODELOPT, ROWS, STORAGE, kept_by_recipe, kept_modules

FLUX = {
    "x_embedder": (MODELOPT, "projection of the input"),
    "context_embedder": (MODELOPT, "projection of the input"),
    "time_text_embed.timestep_embedder.linear_1": (MODELOPT, "embedding of time and text"),
    "time_text_embed.guidance_embedder.linear_1": (MODELOPT, "embedding of time and text"),
    "norm_out.linear": (MODELOPT, "projection of the output"),
    "proj_out": (STORAGE, "projection of the output"),
    "transformer_blocks.0.attn.to_q": None,
    "transformer_blocks.0.attn.add_k_proj": None,
    "transformer_blocks.0.norm1.linear": None,
    "transformer_blocks.0.ff.net.0.proj": None,
    "single_transformer_blocks.0.proj_out": None,
    "single_transformer_blocks.0.proj_mlp": None,
}
WAN = {
    "patch_embedding": (MODELOPT, "projection of the input"),
    "condition_embedder.text_embedder.linear_1": (MODELOPT, "embedding of time and text"),
    "condition_embedder.time_embedder.linear_1": (FP32, "embedding of time and text"),
    "condition_embedder.time_proj": (MODELOPT, "embedding of time and text"),
    "proj_out": (STORAGE, "projection of the output"),
    "blocks.0.attn1.to_q": None,
    "blocks.0.attn2.add_k_proj": None,
    "blocks.0.ffn.net.2": None,
}
LTX = {
    "proj_in": (STORAGE, "projection of the input"),
    "time_embed.linear": (MODELOPT, "embedding of time and text"),
    "caption_projection.linear_1": (MODELOPT, "embedding of time and text"),
    "proj_out": (STORAGE, "projection of the output"),
    "transformer_blocks.0.attn2.to_k": None,
}
QWEN = {
    "img_in": (MODELOPT, "projection of the input"),
    "txt_in": (MODELOPT, "projection of the input"),
    "time_text_embed.timestep_embedder.linear_2": (MODELOPT, "embedding of time and text"),
    "norm_out.linear": (MODELOPT, "projection of the output"),
    "transformer_blocks.3.img_mod.1": None,
    "transformer_blocks.3.attn.to_out.0": None,
}
SD3 = {
    "pos_embed.proj": (MODELOPT, "embedding of positions"),
    "context_embedder": (MODELOPT, "projection of the input"),
    "time_text_embed.text_embedder.linear_2": (MODELOPT, "embedding of time and text"),
    "norm_out.linear": (MODELOPT, "projection of the output"),
    "proj_out": (STORAGE, "projection of the output"),
    "transformer_blocks.5.norm1_context.linear": None,
    "transformer_blocks.5.ff_context.net.2": None,
}
UNET = {
    "time_embedding.linear_1": (MODELOPT, "embedding of time and text"),
    "add_embedding.linear_1": (MODELOPT, "embedding of time and text"),
    "down_blocks.0.resnets.0.time_emb_proj": (MODELOPT, "embedding of time and text"),
    "conv_in": (MODELOPT, "convolution"),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": None,
    "down_blocks.0.attentions.0.proj_in": None,
    "mid_block.attentions.0.proj_out": None,
}


@pytest.mark.parametrize(
    ("class_name", "modules"),
    [
        ("FluxTransformer2DModel", FLUX),
        ("WanTransformer3DModel", WAN),
        ("WanVACETransformer3DModel", WAN | {"vace_patch_embedding": (STORAGE, "projection of the input")}),
        ("LTXVideoTransformer3DModel", LTX),
        ("QwenImageTransformer2DModel", QWEN),
        ("SD3Transformer2DModel", SD3),
        ("UNet2DConditionModel", UNET),
        ("Flux2Transformer2DModel", {"single_stream_modulation.linear": (MODELOPT, "modulation by time and text")}),
        (
            "ZImageTransformer2DModel",
            {"t_embedder.mlp.0": (STORAGE, "embedding of time and text"), "layers.0.w1": None},
        ),
        ("LTX2VideoTransformer3DModel", {"audio_proj_in": (MODELOPT, "projection of the input")}),
        ("LTX2VideoTransformer3DModel", {"audio_time_embed.linear": (MODELOPT, "embedding of time and text")}),
        ("MochiTransformer3DModel", {"time_embed.caption_proj": (LIKE_OTHERS, "embedding of time and text")}),
        ("DiTTransformer2DModel", {"proj_out_1": (LIKE_OTHERS, "projection of the output"), "blocks.0.ff.net.2": None}),
        ("NewTransformer2DModel", {"x_embedder": (MODELOPT, "projection of the input"), "blocks.0.attn.to_q": None}),
    ],
)
def test_modules_kept_by_default(class_name: str, modules: dict[str, tuple[str, str] | None]) -> None:
    found = kept_modules(class_name, modules)
    assert {name: (row.source, row.why) for name, row in found.items()} == {
        name: expected for name, expected in modules.items() if expected is not None
    }


def test_some_recipes_keep_the_first_and_last_blocks() -> None:
    blocks = [f"transformer_blocks.{at}.attn.to_q" for at in range(60)]
    assert kept_modules("QwenImageTransformer2DModel", blocks) == {}
    found = kept_modules("QwenImageTransformer2DModel", blocks, by_default=False)
    assert list(found) == [blocks[0], blocks[1], blocks[58], blocks[59]]
    blocks = [f"blocks.{at}.ffn.net.2" for at in range(40)]
    found = kept_modules("WanTransformer3DModel", blocks, by_default=False)
    assert list(found) == [blocks[at] for at in (0, 1, 2, 37, 38, 39)]
    assert {row.why for row in found.values()} == {"first or last block"}


def test_some_recipes_keep_the_layers_of_adaptive_norms() -> None:
    name = "transformer_blocks.0.norm1.linear"
    assert kept_modules("FluxTransformer2DModel", [name], by_default=False)[name].source == STORAGE


def test_rows_are_patterns_that_say_why() -> None:
    for row in ROWS:
        re.compile(row.classes)
        re.compile(row.modules)
        assert row.why
        assert row.source in (FP32, STORAGE, MODELOPT, LIKE_OTHERS)
    assert len(kept_by_recipe("FluxTransformer2DModel")) < len(ROWS)
