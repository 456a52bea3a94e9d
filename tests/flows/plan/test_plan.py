from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import LLAMA, bf16, layer, llama, noise, write_model

from mxcli.errors import RefusedError, UsageError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.flows.write.arrange import arrange
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Rules


def plan_of(folder: Path, tensors: dict, options: Options, config: dict | None = LLAMA) -> Plan:
    return make_plan(open_checkpoint(write_model(folder, tensors, config)), options)


def decisions(plan: Plan) -> dict[str, str | None]:
    return {step.tensor.name: step.scheme.format.name if step.scheme else None for step in plan.tensors}


def reasons(plan: Plan) -> dict[str, str]:
    return {step.tensor.name: step.reason for step in plan.tensors}


def test_linear_layers_are_quantized_and_all_else_is_kept_with_a_reason(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "m", llama(), Options("mxfp4"))
    quantized = {name for name, row in decisions(plan).items() if row}
    assert quantized == {
        f"model.layers.0.{name}_proj.weight"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert reasons(plan)["lm_head.weight"] == "kept: lm_head, output head"
    assert reasons(plan)["model.norm.weight"] == "kept: norm, normalization"
    assert reasons(plan)["model.layers.0.mlp.up_proj.weight"] == "quantized: weight, linear layer"


# A preset was forgotten, and a bias came out half as long.
def test_only_float_matrices_are_quantized_by_default(tmp_path: Path) -> None:
    tensors = {
        "blocks.0.fc.weight": noise(32, 64),
        "blocks.0.fc.bias": noise(2560),
        "blocks.0.norm.weight": noise(64),
        "blocks.0.conv1d.weight": noise(8, 32, 4),
        "embeddings.word_embeddings.weight": noise(32, 64),
        "blocks.0.counter": ("I64", np.zeros((2, 32), np.int64)),
        "blocks.0.mlp.gate.weight": noise(8, 64),
        "blocks.0.scalar": bf16(1.0),
        "blocks.0.empty.weight": bf16(np.zeros((0, 32))),
    }
    plan = plan_of(tmp_path / "m", tensors, Options("mxfp8"))
    assert [name for name, row in decisions(plan).items() if row] == ["blocks.0.fc.weight"]
    assert reasons(plan)["blocks.0.empty.weight"] == "kept: weight, without elements"
    assert reasons(plan)["blocks.0.mlp.gate.weight"] == "kept: router, chooses experts"


def test_a_selector_without_a_match_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="matches no tensor"):
        plan_of(tmp_path / "m", llama(), Options("mxfp4", selection=(Rule(False, "*.qproj.weight"),)))


def test_a_rule_excludes_and_another_forces_a_protected_role_in(tmp_path: Path) -> None:
    rules = (Rule(False, "*.q_proj.weight"), Rule(True, "@lm_head"))
    plan = plan_of(tmp_path / "m", llama(), Options("mxfp4", selection=rules))
    assert reasons(plan)["model.layers.0.self_attn.q_proj.weight"].startswith("kept: excluded by --exclude")
    assert decisions(plan)["lm_head.weight"] == "mxfp4_e2m1"
    assert "--include @lm_head" in reasons(plan)["lm_head.weight"]


def test_a_convolution_whose_last_dimension_fits_can_be_forced_in(tmp_path: Path) -> None:
    tensors = {"net.0.conv.weight": noise(4, 4, 32), "net.1.fc.weight": noise(4, 32)}
    plan = plan_of(tmp_path / "m", tensors, Options("mxfp4", selection=(Rule(True, "@conv"),)), None)
    assert decisions(plan) == {"net.0.conv.weight": "mxfp4_e2m1", "net.1.fc.weight": None}


# Fails at save after a quarter of an hour, and does not say which layer.
def test_all_indivisible_lengths_are_refused_at_once(tmp_path: Path) -> None:
    tensors = llama() | {"model.a.weight": noise(4, 100), "model.b.weight": noise(4, 7)}
    with pytest.raises(RefusedError) as refused:
        plan_of(tmp_path / "m", tensors, Options("mxfp4"))
    assert refused.value.exit_code == 4
    assert refused.value.details == (
        "model.a.weight [4, 100]: last dimension 100 is not a multiple of 32 (mxfp4_e2m1). "
        "Use --exclude 'model.a.weight', or --on-indivisible pad or keep.",
        "model.b.weight [4, 7]: last dimension 7 is not a multiple of 32 (mxfp4_e2m1). "
        "Use --exclude 'model.b.weight', or --on-indivisible pad or keep.",
    )


def test_indivisible_lengths_are_kept_or_padded_on_request(tmp_path: Path) -> None:
    tensors = {"model.a.weight": noise(4, 100), "model.b.weight": noise(4, 64)}
    kept = plan_of(tmp_path / "m", tensors, Options("mxfp4", on_indivisible="keep"))
    assert reasons(kept)["model.a.weight"] == "kept: last dimension 100 is not a multiple of 32 (mxfp4_e2m1)"
    padded = plan_of(tmp_path / "m", tensors, Options("mxfp4", on_indivisible="pad"))
    assert [step.padded for step in padded.tensors] == [True, False]


def test_rows_that_two_dimensional_blocks_do_not_divide_are_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"dimension 0, 20, is not a multiple of 16 \(nvfp4_2d\)"):
        plan_of(tmp_path / "m", {"model.a.weight": noise(20, 32)}, Options("nvfp4_2d"))


# 128x128 blocks were refused for 576x2048.
def test_edges_of_fp8_blocks_are_not_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "m", {"model.a.weight": noise(130, 200)}, Options("fp8_e4m3_128x128"))
    assert not plan.tensors[0].padded


# Codes were quantized again as if they were floats.
def test_a_quantized_source_is_refused(tmp_path: Path) -> None:
    tensors = {
        "a.weight": ("F8_E4M3", np.zeros((128, 128), np.uint8)),
        "a.weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
    }
    with pytest.raises(RefusedError, match="already quantized") as refused:
        plan_of(tmp_path / "m", tensors, Options("mxfp4"), None)
    assert refused.value.exit_code == 4


def test_a_lora_adapter_is_not_a_model(tmp_path: Path) -> None:
    tensors = {"base.q_proj.lora_A.weight": noise(8, 64), "base.q_proj.lora_B.weight": noise(64, 8)}
    with pytest.raises(RefusedError, match="LoRA adapter"):
        plan_of(tmp_path / "m", tensors, Options("mxfp4"), None)


def test_nothing_to_quantize_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        RefusedError, match=r"nothing to quantize among 1 tensors \(1 kept: norm.*Name some with --incl"
    ):
        plan_of(tmp_path / "m", {"model.norm.weight": noise(64)}, Options("mxfp4"))
    turned = Options("mxfp4", axis="column", layout="compressed-tensors")
    source = open_checkpoint(write_model(tmp_path / "n", {"a.weight": noise(64, 64)}, LLAMA))
    with pytest.raises(RefusedError, match=r"\[out, in\] only\)\. Use another --layout, such as mxcli\."):
        arrange(source, make_plan(source, turned))


@pytest.mark.parametrize(
    "options",
    [
        Options("mxfp3"),
        Options("mxfp4", Rules(scale_rounding="up", nonfinite="error")),
        Options("mxfp4", Rules(rounding="down", nonfinite="error")),
        Options("mxfp4", Rules(dialect="nobody", nonfinite="error")),
        Options("mxfp4", Rules(nonfinite="ignore")),
        Options("mxfp4", on_indivisible="skip"),
        Options("mxfp4", layout="ggml"),
        Options("mxfp4", axis="diagonal"),
    ],
)
def test_unknown_names_are_usage_errors(tmp_path: Path, options: Options) -> None:
    with pytest.raises(UsageError):
        plan_of(tmp_path / "m", llama(), options)


# Gate and up with different tensor scales; the loader takes the larger one.
def test_fused_sets_share_a_tensor_scale_where_the_format_has_one(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "m", llama(), Options("nvfp4"))
    assert {name: [step.tensor.name.split(".")[-2] for step in steps] for name, steps in plan.groups.items()} == {
        "model.layers.0.self_attn.q_proj+k_proj+v_proj": ["q_proj", "k_proj", "v_proj"],
        "model.layers.0.mlp.gate_proj+up_proj": ["gate_proj", "up_proj"],
    }
    assert plan.notes == ("2 fused sets (such as q, k, v or gate, up): one tensor scale each.",)
    assert plan_of(tmp_path / "m", llama(), Options("mxfp4")).groups == {}


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (("e.experts.3.w1.weight", "e.experts.3.w3.weight"), "e.experts.3.w1+w3"),
        (("b.attention.query.weight", "b.attention.key.weight"), "b.attention.query+key+value"),
        (("l.attention.wq.weight", "l.attention.wv.weight"), "l.attention.wq+wk+wv"),
        (("e.experts.0.gate_proj.weight", "e.experts.0.up_proj.weight"), "e.experts.0.gate_proj+up_proj"),
    ],
)
def test_fused_sets_are_known_under_other_names(tmp_path: Path, names: tuple[str, ...], group: str) -> None:
    tensors = {name: noise(16, 32) for name in names} | {"e.experts.4.w1.weight": noise(16, 32)}
    assert list(plan_of(tmp_path / "m", tensors, Options("nvfp4"), None).groups) == [group]


def test_fused_members_may_be_in_different_shards(tmp_path: Path) -> None:
    shards = {
        "model-00001-of-00002.safetensors": {"l.gate_proj.weight": noise(16, 32)},
        "model-00002-of-00002.safetensors": {"l.up_proj.weight": noise(16, 32)},
    }
    assert len(plan_of(tmp_path / "m", shards, Options("nvfp4"), None).groups["l.gate_proj+up_proj"]) == 2


def test_a_partial_fused_set_is_not_a_group_and_noted(tmp_path: Path) -> None:
    rules = (Rule(False, "*.up_proj.weight"),)
    plan = plan_of(tmp_path / "m", llama(), Options("nvfp4", selection=rules))
    assert list(plan.groups) == ["model.layers.0.self_attn.q_proj+k_proj+v_proj"]
    assert any("quantized in part or differently" in note for note in plan.notes)


def test_overrides_give_single_layers_another_format_or_keep_them(tmp_path: Path) -> None:
    overrides = (Override("*.mlp.*", "mxfp8"), Override("*.down_proj.weight", keep=True))
    plan = plan_of(tmp_path / "m", layer("model.layers.0"), Options("mxfp4", overrides=overrides))
    found = decisions(plan)
    assert found["model.layers.0.mlp.up_proj.weight"] == "mxfp8_e4m3"
    assert found["model.layers.0.mlp.down_proj.weight"] is None
    assert found["model.layers.0.self_attn.q_proj.weight"] == "mxfp4_e2m1"
    assert reasons(plan)["model.layers.0.mlp.down_proj.weight"] == "kept: weight, kept by the recipe"


# GPT-2 stores its layers [in, out]: blocks must run down the columns.
def test_blocks_run_along_what_a_layer_sums_over(tmp_path: Path) -> None:
    tensors = {"h.0.attn.c_attn.weight": noise(32, 96), "h.0.mlp.c_fc.weight": noise(32, 100)}
    plan = plan_of(tmp_path / "m", tensors, Options("mxfp4"), {"model_type": "gpt2"})
    assert [(step.axis, step.shape) for step in plan.tensors] == [("column", (96, 32)), ("column", (100, 32))]
    rows = Options("mxfp4", axis="row", on_indivisible="keep")
    assert decisions(plan_of(tmp_path / "m", tensors, rows, {"model_type": "gpt2"})) == {
        "h.0.attn.c_attn.weight": "mxfp4_e2m1",
        "h.0.mlp.c_fc.weight": None,
    }


def test_a_tied_view_is_a_step_of_its_own(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.zeros(32, 64)
    state = {"model.embed_tokens.weight": shared, "lm_head.weight": shared, "model.l.weight": torch.ones(32, 64)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    plan = make_plan(open_checkpoint(tmp_path / "pytorch_model.bin"), Options("mxfp4"))
    tied = next(step for step in plan.tensors if step.tensor.name == "lm_head.weight")
    assert tied.tied_to == "model.embed_tokens.weight"
    assert tied.reason == "tied: the same as 'model.embed_tokens.weight', stored once"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_plans_a_model_its_blocks_divide(tmp_path: Path, name: str) -> None:
    tensors = {"model.a.weight": noise(128, 128), "model.norm.weight": noise(128)}
    assert decisions(plan_of(tmp_path / "m", tensors, Options(name))) == {
        "model.a.weight": name,
        "model.norm.weight": None,
    }


def test_sets_that_the_user_names_share_a_tensor_scale(tmp_path: Path) -> None:
    names = ("a.query_key.weight", "a.x.weight", "a.q_proj.weight", "a.k_proj.weight")
    source = write_model(tmp_path / "m", {name: noise(16, 32) for name in names})
    plan = make_plan(open_checkpoint(source), Options("nvfp4", fuse="query_key+x"))
    joined = "a.query_key+x"
    assert {step.tensor.name: step.group for step in plan.tensors} == {
        "a.query_key.weight": joined,
        "a.x.weight": joined,
        "a.q_proj.weight": "a.q_proj+k_proj+v_proj",
        "a.k_proj.weight": "a.q_proj+k_proj+v_proj",
    }


def test_a_set_that_is_named_joins_the_known_one_it_shares_a_member_with(tmp_path: Path) -> None:
    names = ("a.q_proj.weight", "a.k_proj.weight", "a.o_proj.weight")
    source = write_model(tmp_path / "m", {name: noise(16, 32) for name in names})
    plan = make_plan(open_checkpoint(source), Options("nvfp4", fuse="q_proj+o_proj"))
    assert {step.group for step in plan.tensors} == {"a.q_proj+o_proj+k_proj+v_proj"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q", "a set is the last parts of module paths joined by"),
        ("q+", "a set is the last parts"),
        ("attn.q+attn.k", "a set is the last parts"),
        ("q+k,k+v", "k is in two sets"),
        ("foo+bar", r"foo\+bar matches no two layers of one module"),
    ],
)
def test_sets_that_make_no_sense_are_refused(tmp_path: Path, text: str, words: str) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(16, 32)})
    with pytest.raises(UsageError, match=words):
        make_plan(open_checkpoint(source), Options("nvfp4", fuse=text))
