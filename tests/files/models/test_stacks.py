"""The dimension that a stored weight sums over."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxcli.files.models.stacks import (
    BEFORE_LAST,
    LAST,
    Orientation,
    alternates,
    orientations,
    stack_row,
    stores_conv1d,
)
from mxcli.files.tensors import TensorInfo


def _info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "BF16", shape, "weight", Path("m.safetensors"), 0, 0)


def _orientation(info: TensorInfo, config: dict[str, object] | None) -> Orientation:
    return orientations({info.name: info}, config).of(info)


UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
ARIA = {"model_type": "aria", "text_config": {"model_type": "aria_text", "hidden_size": 128}}
NUCLEUS = {"_class_name": "NucleusMoEImageTransformer2DModel"}
FFN = "transformer.blocks.0.ffn.experts.mlp"
OMNI = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {"hidden_size": 2048}}}


@pytest.mark.parametrize(
    ("name", "shape", "config", "axis"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 32), {"model_type": "llama"}, -1),
        ("h.0.attn.c_attn.weight", (768, 2304), {"model_type": "gpt2"}, -2),
        ("transformer.h.0.mlp.c_proj.weight", (3072, 768), {"model_type": "gpt2"}, -2),
        ("transformer.h.0.attn.c_attn.weight", (6144, 2048), {"model_type": "qwen"}, -1),
        ("transformer.h.0.mlp.c_fc.weight", (8192, 2048), {"model_type": "gpt_bigcode"}, -1),
        ("transformer.h.0.crossattention.q_attn.weight", (64, 64), {"model_type": "imagegpt"}, -2),
        ("speech_encoder_model.h.0.mlp.c_fc.weight", (64, 256), {"model_type": "clvp"}, -2),
        (UP, (32, 2880, 5760), {"model_type": "gpt_oss", "hidden_size": 2880}, -2),
        (DOWN, (32, 2880, 2880), {"model_type": "gpt_oss", "hidden_size": 2880}, -2),
        (UP, (16, 5120, 16384), {"text_config": {"model_type": "llama4_text", "hidden_size": 5120}}, -2),
        (DOWN, (16, 8192, 5120), {"text_config": {"model_type": "llama4_text", "hidden_size": 5120}}, -2),
        (UP, (2, 256, 768), {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 256}}, -2),
        (UP, (2, 768, 256), {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 256}}, -1),
        (UP, (2, 256, 256), {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 256}}, -2),
        (UP, (2, 768, 256), {"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 256}}, -1),
        (UP, (2, 256, 256), {"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 256}}, -1),
        (UP, (128, 1536, 2048), {"model_type": "qwen3_moe", "hidden_size": 2048}, -1),
        (DOWN, (128, 2048, 768), {"model_type": "qwen3_moe", "hidden_size": 2048}, -1),
        (DOWN, (8, 64, 64), {"model_type": "mixtral", "hidden_size": 64}, -1),
        ("thinker.model.layers.0.mlp.experts.down_proj", (8, 2048, 768), OMNI, -1),
        (UP, (128, 2048, 1536), {"model_type": "new", "hidden_size": 2048}, -2),
        (DOWN, (8, 64, 64), {"model_type": "qwen3_moe", "hidden_size": 64}, -1),
        ("language_model.model.layers.0.mlp.experts.fc1.weight", (4, 128, 128), ARIA, -2),
        ("language_model.model.layers.0.mlp.experts.fc2.weight", (4, 64, 128), ARIA, -2),
        ("model.layers.0.mlp.input_linear.weight", (4, 128, 128), {"model_type": "jetmoe", "hidden_size": 128}, -1),
        ("model.layers.0.mlp.output_linear.weight", (4, 128, 64), {"model_type": "jetmoe", "hidden_size": 128}, -1),
        ("model.layers.0.self_attention.experts.input_linear.weight", (4, 64, 64), {"model_type": "jetmoe"}, -1),
        ("model.layers.0.block_sparse_moe.output_linear.weight", (4, 64, 64), {"model_type": "granitemoe"}, -1),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (4, 64, 64), {"model_type": "granitemoehybrid"}, -1),
        ("depth_decoder.model.layers.0.mlp.fc1.weight", (8, 256, 128), {"model_type": "moshi"}, -1),
        ("depth_decoder.model.layers.0.self_attn.q_proj.linear.weight", (8, 64, 64), {"model_type": "moshi"}, -1),
        ("depth_decoder.codebooks_head.weight", (31, 64, 96), {"model_type": "csm"}, -2),
        (f"{FFN}.w1", (256, 32), {"model_type": "dbrx"}, -1),
        (f"{FFN}.v1", (256, 32), {"model_type": "dbrx"}, -1),
        (f"{FFN}.w2", (256, 32), {"model_type": "dbrx"}, -2),
        ("encoder.layers.1.mlp.experts.mlp.w2", (256, 32), {"model_type": "nomic_bert"}, -2),
        ("encoder.layer.0.intermediate.dense.weight", (2, 16, 64), {"model_type": "convbert"}, -2),
        ("encoder.layer.0.intermediate.dense.weight", (64, 32), {"model_type": "convbert"}, -1),
        ("model.layers.0.temporal_block.rg_lru.input_gate_weight", (4, 16, 16), {"model_type": "recurrent_gemma"}, -2),
        ("model.layers.3.moe.gate_proj.weight", (8, 64, 64), {"model_type": "step3p5"}, -1),
        ("model.layers.3.mixer.experts.up_proj", (8, 64, 64), {"model_type": "nemotron_h"}, -1),
        ("transformer_blocks.0.img_mlp.experts.gate_up_proj", (8, 64, 128), NUCLEUS, -2),
        ("blk.0.ffn_down_exps.weight", (8, 64, 64), None, -1),
        (UP, (8, 64, 128), None, -1),
        ("params.Dense_0.kernel", (64, 128), None, -2),
        ("x", (64,), None, -1),
        ("x", (), None, -1),
    ],
)
def test_orientation(name: str, shape: tuple[int, ...], config: dict[str, object] | None, axis: int) -> None:
    assert _orientation(_info(name, *shape), config).axis == axis


@pytest.mark.parametrize(
    ("names", "shapes", "config", "axes"),
    [
        # llama4 with 2 * intermediate == hidden, and with intermediate == hidden: no dimension of one part decides
        ((UP, DOWN), ((4, 256, 256), (4, 128, 256)), None, (-2, -2)),
        ((UP, DOWN), ((4, 256, 256), (4, 256, 128)), None, (-1, -1)),
        ((UP, DOWN), ((4, 256, 512), (4, 256, 256)), {"model_type": "new", "hidden_size": 256}, (-2, -2)),
        ((UP, DOWN), ((4, 512, 256), (4, 256, 256)), {"model_type": "new", "hidden_size": 256}, (-1, -1)),
        ((UP, DOWN), ((4, 256, 512), (4, 256, 256)), None, (-2, -2)),
        ((f"{UP}.weight", f"{DOWN}.weight"), ((4, 512, 256), (4, 256, 256)), None, (-1, -1)),
        (("m.experts.fc1.weight", "m.experts.fc2.weight"), ((4, 128, 128), (4, 64, 128)), None, (-2, -2)),
        (("m.input_linear.weight", "m.output_linear.weight"), ((4, 128, 128), (4, 128, 64)), None, (-1, -1)),
        # the shapes show another order than the model type has elsewhere
        ((UP, DOWN), ((4, 256, 256), (4, 256, 128)), {"model_type": "qwen3_vl_moe"}, (-1, -1)),
    ],
)
def test_both_parts_of_a_stack_have_one_order(
    names: tuple[str, str], shapes: tuple[tuple[int, ...], ...], config: dict[str, object] | None, axes: tuple[int, int]
) -> None:
    tensors = {name: _info(name, *shape) for name, shape in zip(names, shapes, strict=True)}
    found = [orientations(tensors, config).of(info) for info in tensors.values()]
    assert (found[0].axis, found[1].axis) == axes
    assert all(each.known for each in found)


@pytest.mark.parametrize(
    ("name", "shape", "config", "known"),
    [
        (UP, (8, 64, 64), {"model_type": "new"}, False),
        (UP, (8, 64, 64), None, False),
        ("model.layers.0.moe.linear_v.weight", (8, 64, 32), {"model_type": "new"}, False),
        (UP, (8, 64, 64), {"model_type": "qwen3_moe"}, True),
        ("model.layers.0.mlp.up_proj.weight", (64, 64), {"model_type": "new"}, True),
        ("stacked", (8, 64, 64), None, True),
    ],
)
def test_an_unknown_order_is_said(
    name: str, shape: tuple[int, ...], config: dict[str, object] | None, known: bool
) -> None:
    found = _orientation(_info(name, *shape), config)
    assert found.known == known
    if not known:
        assert found == Orientation(LAST, "orientation not known: [expert, out, in] is assumed", known=False)


@pytest.mark.parametrize(
    ("name", "shape", "models", "axis"),
    [
        ("depth_decoder.model.layers.3.mlp.fc2.weight", (8, 64, 64), {"moshi"}, LAST),
        ("language_model.model.layers.7.mlp.experts.fc1.weight", (4, 64, 64), {"aria", "aria_text"}, BEFORE_LAST),
        ("model.layers.0.mlp.input_linear.weight", (4, 64, 64), {"jetmoe"}, LAST),
        ("model.layers.0.mlp.input_linear.weight", (4, 64, 64), {"new"}, None),
        ("encoder.layers.0.conv_module.pointwise_conv1.weight", (256, 128, 1), {"conformer"}, None),
        ("decoder.model.layers.0.self_attn.q_proj.linear.weight", (64, 64), {"moshi"}, None),
        ("model.conv1.weight", (64, 32, 3), {"gpt2"}, None),
        ("depth_decoder.input_projections.weight", (8, 64, 64), {"moshi"}, LAST),
        ("audio_encoder.encoder.layers.0.conv.weight", (64, 32, 7), {"moshi", "mimi"}, None),
        ("audio_encoder.quantizer.acoustic_residual_vector_quantizer.input_proj.weight", (64, 32, 1), {"moshi"}, None),
        ("encoder.layer.0.intermediate.dense.weight", (2, 16, 64), {"convbert"}, BEFORE_LAST),
        ("encoder.layer.0.attention.self.key_conv_attn_layer.depthwise.weight", (64, 1, 9), {"convbert"}, None),
    ],
)
def test_stacks_are_distinguished_from_convolutions(
    name: str, shape: tuple[int, ...], models: set[str], axis: int | None
) -> None:
    row = stack_row(name, shape, frozenset(models))
    assert (None if row is None else row.axis) == axis


def test_gate_and_up_alternate_in_gpt_oss_only() -> None:
    stack = _info(UP, 8, 64, 128)
    assert alternates(stack, {"model_type": "gpt_oss"})
    assert not alternates(stack, {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})
    assert not alternates(stack, None)


def test_gpt2_is_recognised_by_its_fused_attention() -> None:
    stored = {info.name: info for info in (_info("h.0.attn.c_attn.weight", 8, 24), _info("h.0.mlp.c_fc.weight", 8, 32))}
    linear = {info.name: info for info in (_info("h.0.attn.c_attn.weight", 24, 8), _info("h.0.mlp.c_fc.weight", 32, 8))}
    assert stores_conv1d(stored)
    assert not stores_conv1d(linear)
    assert not stores_conv1d({})
    axes = [orientations(stored, None).of(info).axis for info in stored.values()]
    assert axes == [-2, -2]


@pytest.mark.parametrize(
    ("name", "model", "role"),
    [
        ("model.layers.0.mlp.input_linear.weight", "jetmoe", "weight"),
        ("depth_decoder.model.layers.0.mlp.fc1.weight", "moshi", "weight"),
        ("depth_decoder.codebooks_head.weight", "csm", "lm_head"),
        ("encoder.layer.0.output.dense.weight", "convbert", "other"),
        ("model.layers.0.temporal_block.rg_lru.recurrent_gate_weight", "recurrent_gemma", "other"),
    ],
)
def test_what_stacks_are_for(name: str, model: str, role: str) -> None:
    row = stack_row(name, (4, 64, 64), frozenset({model}))
    assert row is not None
    assert row.role == role
