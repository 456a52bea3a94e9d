from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import LLAMA, bf16, layer, noise, read_raw, safetensors_bytes, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.input_scales import with_input_scales
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
INPUTS = {
    **dict.fromkeys((f"{ATTENTION}.{name}" for name in ("q_proj", "k_proj", "v_proj")), 3.5),
    f"{ATTENTION}.o_proj": 0.75,
    f"{MLP}.gate_proj": 5.25,
    f"{MLP}.up_proj": 5.25,
    f"{MLP}.down_proj": 21.0,
}
"""The amax of the inputs of each layer."""


def captured(folder: Path, inputs: dict[str, float], **replaced: Any) -> Path:
    tensors = {}
    for module, amax in inputs.items():
        values = np.zeros((3, 128 if module.endswith("down_proj") else 64), np.float32)
        values[1, 7] = -amax
        tensors[f"{module}.activation"] = bf16(values)
    path = folder / "captures.safetensors"
    path.write_bytes(safetensors_bytes(tensors | replaced))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", layer(), LLAMA)


def planned(source: Path, captures: Path, options: Options) -> Plan:
    checkpoint = open_checkpoint(source)
    return with_input_scales(checkpoint, make_plan(checkpoint, options), open_checkpoint(captures), backend=Cpu())


def written(source: Path, captures: Path, output: Path, options: Options) -> dict[str, tuple[str, list[int], bytes]]:
    checkpoint = open_checkpoint(source)
    quantize_checkpoint(checkpoint, planned(source, captures, options), output, backend=Cpu())
    return read_raw(output / "model.safetensors")


def config(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "config.json").read_text())["quantization_config"]
    return found


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


@pytest.mark.parametrize(
    ("layout", "dialect", "ending", "shape", "scales"),
    [
        (
            "compressed-tensors",
            None,
            "input_global_scale",
            [1],
            {"q": 768.0, "o": 3584.0, "gate": 512.0, "down": 128.0},
        ),
        ("modelopt", "modelopt", "input_scale", [], {"q": 1 / 768, "o": 1 / 3584, "gate": 1 / 512, "down": 1 / 128}),
    ],
)
def test_nvfp4_layers_store_the_tensor_scale_of_their_inputs(
    tmp_path: Path,
    source: Path,
    layout: str,
    dialect: str | None,
    ending: str,
    shape: list[int],
    scales: dict[str, float],
) -> None:
    options = Options("nvfp4", Rules(dialect=dialect, nonfinite="error"), layout=layout)
    raw = written(source, captured(tmp_path, INPUTS), tmp_path / "q", options)
    found = {name: each for name, each in raw.items() if name.endswith(f".{ending}")}
    assert found == {
        f"{module}.{ending}": ("F32", shape, f32(scales[name]))
        for name, modules in {
            "q": [f"{ATTENTION}.{part}_proj" for part in "qkv"],
            "o": [f"{ATTENTION}.o_proj"],
            "gate": [f"{MLP}.gate_proj", f"{MLP}.up_proj"],
            "down": [f"{MLP}.down_proj"],
        }.items()
        for module in modules
    }


def test_scales_of_inputs_follow_the_rule_of_the_weights(tmp_path: Path, source: Path) -> None:
    captures = captured(tmp_path, INPUTS)
    raw = written(
        source, captures, tmp_path / "q", Options("nvfp4", Rules(dialect="compressed-tensors", nonfinite="error"))
    )
    # compressed-tensors multiplies by 1/3.5, rounded: its own file has this number for this amax too.
    theirs = read_raw(Path(__file__).parents[2] / "data" / "layouts" / "ct-nvfp4" / "model.safetensors")
    assert raw[f"{ATTENTION}.q_proj.input_global_scale"] == theirs["fc1.input_global_scale"]
    assert theirs["fc1.input_global_scale"] == ("F32", [1], bytes.fromhex("01004044"))


def test_the_largest_of_several_steps_counts_and_is_said(tmp_path: Path, source: Path) -> None:
    (tmp_path / "steps").mkdir()
    for step, factor in ((0, 0.5), (10, 1), (20, 0.25)):
        one = captured(tmp_path, {module: amax * factor for module, amax in INPUTS.items()})
        one.rename(tmp_path / "steps" / f"step-{step}.safetensors")
    plan = planned(source, tmp_path / "steps", Options("nvfp4"))
    once = planned(source, captured(tmp_path, INPUTS), Options("nvfp4"))
    assert [step.input_scale for step in plan.tensors] == [step.input_scale for step in once.tensors]
    assert plan.notes[-1].endswith("that amax saturate. The amax is the largest over 3 steps (0 to 20).")


def test_compressed_tensors_says_that_inputs_are_nvfp4_too(tmp_path: Path, source: Path) -> None:
    written(source, captured(tmp_path, INPUTS), tmp_path / "q", Options("nvfp4"))
    assert config(tmp_path / "q")["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": "local",
        "scale_dtype": "torch.float8_e4m3fn",
    }


def test_modelopt_says_that_inputs_are_nvfp4_too(tmp_path: Path, source: Path) -> None:
    written(source, captured(tmp_path, INPUTS), tmp_path / "q", Options("nvfp4", layout="modelopt"))
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert config(tmp_path / "q")["quant_algo"] == "NVFP4"
    assert config(tmp_path / "q")["config_groups"] == {
        "group_0": {"weights": group, "input_activations": group, "targets": ["Linear"]}
    }
    stated = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())["quantization"]
    assert (stated["quant_algo"], stated["group_size"]) == ("NVFP4", 16)


def test_fp8_layers_store_the_scale_of_their_inputs(tmp_path: Path, source: Path) -> None:
    captures = captured(tmp_path, INPUTS)
    raw = written(
        source, captures, tmp_path / "ct", Options("fp8_e4m3", Rules(scale_rounding="amax", nonfinite="error"))
    )
    assert raw[f"{MLP}.down_proj.input_scale"] == ("F32", [1], f32(21 / 448))
    assert raw[f"{ATTENTION}.k_proj.input_scale"] == ("F32", [1], f32(3.5 / 448))
    inputs = config(tmp_path / "ct")["config_groups"]["group_0"]["input_activations"]
    assert inputs == {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    # The default rule for bfloat16 weights rounds their scales to it, and these as well: 0.75/448 = 0x3ADB6DB7.
    raw = written(source, captures, tmp_path / "bf16", Options("fp8_e4m3"))
    assert raw[f"{ATTENTION}.o_proj.input_scale"] == ("BF16", [1], bytes.fromhex("DB3A"))
    raw = written(source, captures, tmp_path / "modelopt", Options("fp8_e4m3", layout="modelopt"))
    assert raw[f"{MLP}.down_proj.input_scale"] == ("F32", [], f32(21 / 448))
    assert config(tmp_path / "modelopt")["quant_algo"] == "FP8"
    group = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert config(tmp_path / "modelopt")["config_groups"]["group_0"]["input_activations"] == group


def test_what_else_is_in_a_mixed_checkpoint_needs_no_captures(tmp_path: Path, source: Path) -> None:
    overrides = (Override("*.self_attn.*", "mxfp8"), Override("*.down_proj", keep=True))
    captures = captured(tmp_path, {f"{MLP}.gate_proj": 5.25, f"{MLP}.up_proj": 2.0})
    options = Options("nvfp4", Rules(dialect="modelopt", nonfinite="error"), overrides=overrides, layout="modelopt")
    raw = written(source, captures, tmp_path / "q", options)
    scales = {name: each[2] for name, each in raw.items() if "input_scale" in name}
    # Loaders fuse gate and up, whose inputs are one: the larger amax holds for both.
    assert scales == {f"{MLP}.{name}_proj.input_scale": f32(1 / 512) for name in ("gate", "up")}
    layers = config(tmp_path / "q")["quantized_layers"]
    assert layers[f"{MLP}.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers[f"{ATTENTION}.q_proj"] == {"quant_algo": "MXFP8", "group_size": 32}


def test_weights_are_those_without_captures(tmp_path: Path, source: Path) -> None:
    raw = written(source, captured(tmp_path, INPUTS), tmp_path / "q", Options("nvfp4"))
    checkpoint = open_checkpoint(source)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, Options("nvfp4")), tmp_path / "alone", backend=Cpu())
    alone = read_raw(tmp_path / "alone" / "model.safetensors")
    assert {name: each for name, each in raw.items() if not name.endswith("input_global_scale")} == alone
    for name in ("q", "alone"):
        dequantize_checkpoint(open_checkpoint(tmp_path / name), tmp_path / f"{name} floats", backend=Cpu())
    files = [tmp_path / f"{name} floats" / "model.safetensors" for name in ("q", "alone")]
    assert read_raw(files[0]) == read_raw(files[1])


def test_the_record_and_the_notes_report_it(tmp_path: Path, source: Path) -> None:
    captures = captured(tmp_path, INPUTS)
    plan = planned(source, captures, Options("nvfp4"))
    assert plan.notes[-1] == (
        "Activations of 7 layers are quantized with static scales calibrated on captures.safetensors; values above "
        "that amax saturate."
    )
    written(source, captures, tmp_path / "q", Options("nvfp4"))
    tensors = json.loads((tmp_path / "q" / "mxcli.json").read_text())["tensors"]
    assert tensors[f"{MLP}.down_proj.weight"]["input_scale"] == {"amax": 21.0, "decode": 1 / 128, "encode": 128.0}
    assert "input_scale" not in tensors["model.layers.0.input_layernorm.weight"]


def test_every_layer_without_captures_is_named(tmp_path: Path, source: Path) -> None:
    captures = captured(tmp_path, {f"{MLP}.gate_proj": 1.0, f"{MLP}.up_proj": 1.0, f"{MLP}.down_proj": 1.0})
    with pytest.raises(RefusedError) as caught:
        planned(source, captures, Options("nvfp4"))
    assert caught.value.message == f"Inputs missing in {captures}: 4 problems."
    assert [line.split(":")[0] for line in caught.value.details] == [
        f"{ATTENTION}.{name}_proj.weight" for name in "qkvo"
    ]
    assert caught.value.details[0].endswith(
        "Capture them, --exclude the layer, or omit --captures to quantize only weights."
    )


def test_captures_that_are_of_no_use_are_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(InputError, match="holds no activations of the layers to be quantized"):
        planned(source, captured(tmp_path, {"other": 1.0}), Options("nvfp4"))
    with pytest.raises(InputError, match=r"down_proj\.activation \[2, 64\] does not fit .*which takes 128 features"):
        planned(source, captured(tmp_path, INPUTS, **{f"{MLP}.down_proj.activation": noise(2, 64)}), Options("nvfp4"))
    infinite = ("F32", np.full((2, 128), np.inf, np.float32))
    with pytest.raises(InputError, match=r"down_proj\.activation holds NaN or infinities"):
        planned(source, captured(tmp_path, INPUTS, **{f"{MLP}.down_proj.activation": infinite}), Options("nvfp4"))
    with pytest.raises(RefusedError, match=r"the layout compressed-tensors stores no scales of inputs of mxfp8_e4m3"):
        planned(source, captured(tmp_path, INPUTS), Options("mxfp8"))


def test_modelopt_fp8_is_refused_without_scales_of_inputs(tmp_path: Path, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options("fp8_e4m3", layout="modelopt"))
    with pytest.raises(
        RefusedError, match=r"^fp8_e4m3: loaders of the layout modelopt take a stored scale .*--captures"
    ):
        quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    assert not (tmp_path / "q").exists()
