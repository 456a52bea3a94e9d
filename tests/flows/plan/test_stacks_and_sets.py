"""Plans for stacks of experts, and for sets of layers that engines join, by what the model is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import noise, write_model

from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, Plan, make_plan

BY_HIDDEN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
ARIA = {"model_type": "aria", "text_config": {"model_type": "aria_text", "hidden_size": 128}}
LLAMA4 = {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_size": 64}}


def _plan(folder: Path, tensors: dict, config: dict, name: str = "mxfp8", axis: str | None = None) -> Plan:
    return make_plan(open_checkpoint(write_model(folder, tensors, config)), Options(name, axis=axis, layout="mxcli"))


@pytest.mark.parametrize(
    ("names", "shapes", "config", "axis"),
    [
        (BY_HIDDEN, ((4, 64, 64), (4, 32, 64)), LLAMA4, "column"),
        (BY_HIDDEN, ((4, 64, 128), (4, 64, 64)), LLAMA4, "column"),
        (BY_HIDDEN, ((4, 128, 64), (4, 64, 64)), {"model_type": "qwen3_5_moe"}, "row"),
        (BY_HIDDEN, ((4, 64, 64), (4, 64, 32)), {"model_type": "my_model"}, "row"),
        (BY_HIDDEN, ((4, 64, 64), (4, 32, 64)), {"model_type": "my_model"}, "column"),
        (("m.experts.fc1.weight", "m.experts.fc2.weight"), ((4, 128, 128), (4, 64, 128)), ARIA, "column"),
    ],
)
def test_stacks_are_quantized_along_the_dimension_their_experts_sum_over(
    tmp_path: Path, names: tuple[str, str], shapes: tuple[tuple[int, ...], ...], config: dict, axis: str
) -> None:
    plan = _plan(tmp_path / "m", {name: noise(*shape) for name, shape in zip(names, shapes, strict=True)}, config)
    assert [(step.axis, step.summed, step.reason) for step in plan.quantized] == [
        (axis, axis, "quantized: weight, linear layers of experts")
    ] * 2


def test_the_reason_says_that_the_order_of_a_stack_is_not_known(tmp_path: Path) -> None:
    stack = {"model.layers.0.mlp.experts.gate_up_proj": noise(4, 64, 64)}
    plan = _plan(tmp_path / "m", stack, {"model_type": "my_model"})
    (step,) = plan.quantized
    assert plan.notes == (
        "1 stack of layers ('model.layers.0.mlp.experts.gate_up_proj'): orientation not known: [expert, out, in] is "
        "assumed, so blocks run along the last dimension. Name another with --axis column.",
    )
    assert _plan(tmp_path / "c", stack, {"model_type": "my_model"}, axis="column").notes == ()
    assert (step.axis, step.summed) == ("row", None)
    assert step.reason == (
        "quantized: weight, linear layers of experts; orientation not known: [expert, out, in] is assumed"
    )
    (step,) = _plan(tmp_path / "k", stack, {"model_type": "qwen3_5_moe"}).quantized
    assert step.reason == "quantized: weight, linear layers of experts"


def test_a_requested_axis_leaves_the_one_that_layers_sum_over(tmp_path: Path) -> None:
    tensors = {name: noise(4, 64, 64) for name in BY_HIDDEN}
    plan = _plan(tmp_path / "m", tensors, {"model_type": "llama4"}, axis="row")
    assert [(step.axis, step.summed) for step in plan.quantized] == [("row", "column")] * 2


WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}


def test_the_scale_of_cross_attention_is_shared_by_k_and_v_only(tmp_path: Path) -> None:
    layer = "model.decoder.layers.0"
    tensors = {
        f"{layer}.{attention}.{name}_proj.weight": noise(32, 64)
        for attention in ("self_attn", "encoder_attn")
        for name in "qkv"
    }
    plan = _plan(tmp_path / "m", tensors, WHISPER, "nvfp4")
    assert {key: len(members) for key, members in plan.groups.items()} == {
        f"{layer}.self_attn.q_proj+k_proj+v_proj": 3,
        f"{layer}.encoder_attn.k_proj+v_proj": 2,
    }
    assert plan.notes == ("2 fused sets (such as q, k, v or gate, up): one tensor scale each.",)


@pytest.mark.parametrize(
    ("model", "names", "group"),
    [
        ("exaone", ("h.0.mlp.c_fc_0", "h.0.mlp.c_fc_1"), "h.0.mlp.c_fc_0+c_fc_1"),
        ("qwen", ("h.0.mlp.w1", "h.0.mlp.w2"), "h.0.mlp.w2+w1"),
        ("minicpm3", ("h.0.attn.q_a_proj", "h.0.attn.kv_a_proj_with_mqa"), None),
        ("deepseek_v3", ("h.0.attn.q_a_proj", "h.0.attn.kv_a_proj_with_mqa"), "h.0.attn.q_a_proj+kv_a_proj_with_mqa"),
    ],
)
def test_families_share_tensor_scales_in_their_own_sets(
    tmp_path: Path, model: str, names: tuple[str, ...], group: str | None
) -> None:
    tensors = {f"{name}.weight": noise(32, 64) for name in names}
    plan = _plan(tmp_path / "m", tensors, {"model_type": model}, "nvfp4")
    assert list(plan.groups) == ([] if group is None else [group])


def test_layers_of_different_inputs_share_no_tensor_scale(tmp_path: Path) -> None:
    tensors = {"a.to_q.weight": noise(32, 64), "a.to_k.weight": noise(32, 96), "a.to_v.weight": noise(32, 96)}
    plan = _plan(tmp_path / "m", tensors, {"model_type": "my_model"}, "nvfp4")
    assert (dict(plan.groups), plan.notes) == ({}, ())


def test_a_note_says_that_the_sets_of_a_model_are_not_known(tmp_path: Path) -> None:
    tensors = {"m.gate_proj.weight": noise(32, 64), "m.up_proj.weight": noise(32, 64)}
    known = _plan(tmp_path / "k", tensors, {"model_type": "llama"}, "nvfp4")
    assert len(known.notes) == 1
    plan = _plan(tmp_path / "m", tensors, {"model_type": "my_model"}, "nvfp4")
    assert plan.notes[1:] == (
        "The layers that engines join in 'my_model' are not known (it is not in the tables of vLLM 0.32 and SGLang "
        "0.5.23); q, k, v and gate, up are taken as joined, by their names.",
    )
    assert list(plan.groups) == ["m.gate_proj+up_proj"]
    assert _plan(tmp_path / "a", tensors, {"model_type": "my_model"}).notes == ()


def test_empty_stacks_are_survived(tmp_path: Path) -> None:
    tensors = {name: ("BF16", np.zeros((0, 64, 64), np.uint16)) for name in BY_HIDDEN}
    with pytest.raises(RefusedError, match="nothing to quantize"):
        _plan(tmp_path / "m", tensors, {"model_type": "my_model"})


def test_sets_go_by_inputs_along_any_axis(tmp_path: Path) -> None:
    tensors = {"a.to_q.weight": noise(64, 64), "a.to_k.weight": noise(32, 64), "a.to_v.weight": noise(32, 64)}
    for axis in ("row", "column"):
        plan = _plan(tmp_path / axis, tensors, {"model_type": "llama"}, "nvfp4", axis=axis)
        assert [(step.tensor.name, step.inputs, step.group) for step in plan.tensors] == [
            (name, 64, "a.to_q+to_k+to_v") for name in tensors
        ]


def test_inputs_of_transposed_layers_are_their_rows(tmp_path: Path) -> None:
    plan = _plan(tmp_path / "m", {"h.0.mlp.c_fc.weight": noise(64, 128)}, {"model_type": "gpt2"})
    assert [(step.axis, step.inputs) for step in plan.tensors] == [("column", 64)]
