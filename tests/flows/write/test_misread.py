from __future__ import annotations

from pathlib import Path

import pytest
from planted import found, quantized, verified
from tiny_models import Tensor, noise, write_model

from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.arrange import arrange

LAYOUTS = [("modelopt", "mxfp8"), ("fp8", "fp8_e4m3_128x128"), ("torchao", "mxfp8"), ("compressed-tensors", "nvfp4")]
MLP = "model.layers.0.mlp.gate_proj.weight"
A, B = "model.layers.0.attn.r_proj.weight", "model.layers.0.ffn.key.weight"


@pytest.mark.parametrize(("layout", "format"), LAYOUTS)
@pytest.mark.parametrize("bare", ["model.layers.0.attn.x_r", "model.layers.0.modulation", "model.shift"])
def test_a_bare_parameter_does_not_list_its_parent(tmp_path: Path, layout: str, format: str, bare: str) -> None:
    tensors = {A: noise(128, 128, seed=1), B: noise(128, 128, seed=2), bare: noise(1, 1, 128, seed=3)}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, {"model_type": "x"}))
    found = arrange(checkpoint, make_plan(checkpoint, Options(format)), layout)
    assert found.ignored == ()


def test_a_list_that_catches_a_quantized_module_is_refused(tmp_path: Path) -> None:
    gate = {
        "model.layers.0.mlp.gate.weight": noise(8, 128, seed=1),
        "model.layers.0.mlp.gate_proj.weight": noise(128, 128, seed=2),
    }
    checkpoint = open_checkpoint(write_model(tmp_path / "m", gate, {"model_type": "x"}))
    with pytest.raises(RefusedError, match=r"would take it for plain, since 'model\.layers\.0\.mlp\.gate' is"):
        arrange(checkpoint, make_plan(checkpoint, Options("mxfp8")), "modelopt")
    assert arrange(checkpoint, make_plan(checkpoint, Options("mxfp8")), "torchao").ignored


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("re:(", "is not a regular expression: missing"),
        ("re:[", "is not a regular expression: unterminated character set"),
        ("re:(a*)*", "repeats what is repeated"),
    ],
)
@pytest.mark.parametrize("layout", ["compressed-tensors", "quark"])
def test_a_plain_module_that_loaders_take_for_an_expression_is_refused(
    tmp_path: Path, layout: str, module: str, fault: str
) -> None:
    tensors = {MLP: noise(128, 128, seed=1), f"{module}.weight": noise(128, 128, seed=2)}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, {"model_type": "x"}))
    plan = make_plan(checkpoint, Options("mxfp4", selection=(Rule(include=True, selector="*gate_proj*"),)))
    with pytest.raises(RefusedError, match=f"of the layout {layout} would not find it in their list") as refused:
        arrange(checkpoint, plan, layout)
    assert fault in refused.value.reasons[0]
    assert arrange(checkpoint, plan, "mxcli").layout.name == "mxcli"


@pytest.mark.parametrize(("layout", "format"), [("torchao", "mxfp8"), ("fp8", "fp8_e4m3_128x128")])
def test_an_old_scale_of_a_weight_is_refused(tmp_path: Path, layout: str, format: str) -> None:
    tensors = {A: noise(128, 128, seed=1), f"{A}_scale": noise(128, 1, seed=2)}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, {"model_type": "x"}))
    with pytest.raises(RefusedError, match="which gets new scales"):
        arrange(checkpoint, make_plan(checkpoint, Options(format)), layout)


WAN = {
    "blocks.0.modulation": noise(1, 6, 128, seed=1),
    "blocks.0.self_attn.q.weight": noise(128, 128, seed=2),
    "blocks.0.ffn.0.weight": noise(256, 128, seed=3),
    "blocks.1.modulation": noise(1, 6, 128, seed=4),
    "blocks.1.self_attn.q.weight": noise(128, 128, seed=5),
    "blocks.1.ffn.0.weight": noise(256, 128, seed=7),
    "patch_embedding.weight": noise(128, 16, 1, 2, 2, seed=6),
}
LTX = {
    "transformer_blocks.0.scale_shift_table": noise(6, 128, seed=1),
    "transformer_blocks.0.attn1.to_q.weight": noise(128, 128, seed=2),
    "transformer_blocks.1.scale_shift_table": noise(6, 128, seed=3),
    "transformer_blocks.1.attn1.to_q.weight": noise(128, 128, seed=4),
}


@pytest.mark.parametrize(("layout", "format"), [*LAYOUTS, ("quark", "mxfp4"), ("mxcli", "mxfp8")])
@pytest.mark.parametrize("tensors", [WAN, LTX], ids=["wan", "ltx"])
def test_models_with_bare_parameters_are_written_soundly(
    tmp_path: Path, layout: str, format: str, tensors: dict[str, Tensor]
) -> None:
    model = write_model(tmp_path / "m", tensors, {"dtype": "bfloat16"})
    out = quantized(model, tmp_path / "q", Options(format, layout=layout))
    assert found(verified(out, model)) == {}
    checkpoint = open_checkpoint(model)
    plan = make_plan(checkpoint, Options(format, layout=layout, selection=(Rule(False, "*blocks.0.*"),)))
    linear = [name.removesuffix(".weight") for name in tensors if "blocks.0." in name and name.endswith(".weight")]
    assert list(arrange(checkpoint, plan).ignored) == sorted(linear)
