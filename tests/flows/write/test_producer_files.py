"""Files of transformers' `fp8`, of gpt-oss and of AMD Quark: read as their packages decode them, written as they are.

torchao's and GGUF's have files of their own here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Raw, floats, noise, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.measure.inspect import inspect_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

FOLDERS = Path(__file__).parents[2] / "data" / "layouts"
DIALECTS = {
    "fp8-block-float": "fp8-block",
    "fp8-block-ue8m0": "fp8-block",
    "fp8-mxfp8-1x32-ue8m0": "mxfp8",
    "gptoss-mxfp4": "gpt-oss",
    "llama64-quark-mxfp4wo": "quark",
    "llama64-quark-mxfp6e2m3": "quark",
}


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDERS / name / "config.json").read_text())
    return found


def written(folder: Path, original: str, sample: str, options: Options) -> tuple[dict[str, Raw], dict[str, Any]]:
    """What we make of an original: tensors and quantization_config."""
    plain = {key: value for key, value in config(sample).items() if key != "quantization_config"}
    source = folder / "m"
    source.mkdir()
    shutil.copy(FOLDERS / original, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(plain))
    checkpoint = open_checkpoint(source)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), folder / "q", backend=Cpu())
    settings = json.loads((folder / "q" / "config.json").read_text())["quantization_config"]
    return read_raw(folder / "q" / "model.safetensors"), settings


def theirs(sample: str) -> dict[str, Raw]:
    return read_raw(FOLDERS / sample / "model.safetensors")


@pytest.mark.parametrize("name", DIALECTS)
def test_they_are_read_as_their_packages_decode_them(tmp_path: Path, name: str) -> None:
    source = tmp_path / "q"
    source.mkdir()
    for file in ("model.safetensors", "config.json"):
        shutil.copy(FOLDERS / name / file, source / file)
    checkpoint = open_checkpoint(source)
    assert inspect_checkpoint(name, checkpoint).dialect == DIALECTS[name]
    dequantize_checkpoint(checkpoint, tmp_path / "d", backend=Cpu())
    restored = read_raw(tmp_path / "d" / "model.safetensors")
    for tensor, raw in read_raw(FOLDERS / name / "dequantized.safetensors").items():
        assert restored[tensor] == raw, tensor
    kept = {tensor for tensor, raw in theirs(name).items() if raw[0] == "BF16"}
    assert {tensor: restored[tensor] for tensor in kept} == {tensor: theirs(name)[tensor] for tensor in kept}


# transformers stores 1 / (448 / amax), which no rule here makes: the codes are the same, one scale is off by its last
# bit. A block of zeros has the scale 1 in both.
def test_codes_of_transformers_with_binary32_scales(tmp_path: Path) -> None:
    options = Options("fp8_e4m3_128x128", Rules(scale_rounding="amax", nonfinite="error"), layout="fp8")
    ours, settings = written(tmp_path, "fp8-block.safetensors", "fp8-block-float", options)
    expected = theirs("fp8-block-float")
    assert ours["fc1.weight"] == expected["fc1.weight"]
    assert ours["fc1.weight_scale_inv"][:2] == ("F32", [2, 1])
    bits = [np.frombuffer(raw["fc1.weight_scale_inv"][2], np.int32) for raw in (ours, expected)]
    assert list(bits[0] - bits[1]) == [0, 1]
    assert settings == {**config("fp8-block-float")["quantization_config"], "modules_to_not_convert": []}


# What differs are blocks of zeros: their scale is 2^-127 here and 1 there.
@pytest.mark.parametrize(
    ("format", "sample", "dtype"),
    [("e4m3:e8m0:128x128", "fp8-block-ue8m0", "F8_E8M0"), ("mxfp8", "fp8-mxfp8-1x32-ue8m0", "U8")],
)
def test_codes_of_transformers_with_power_of_two_scales(tmp_path: Path, format: str, sample: str, dtype: str) -> None:
    options = Options(format, Rules(scale_rounding="rceil", nonfinite="error"), layout="fp8")
    ours, settings = written(tmp_path, "fp8-block.safetensors", sample, options)
    expected = theirs(sample)
    assert ours["fc1.weight"] == expected["fc1.weight"]
    scales, wanted = (np.frombuffer(raw["fc1.weight_scale_inv"][2], np.uint8) for raw in (ours, expected))
    zero = scales == 0
    assert ours["fc1.weight_scale_inv"][:2] == (dtype, expected["fc1.weight_scale_inv"][1])
    assert 0 < zero.sum() < zero.size
    assert (scales[~zero] == wanted[~zero]).all()
    assert (wanted[zero] == 127).all()
    assert settings == {**config(sample)["quantization_config"], "modules_to_not_convert": []}


def test_powers_of_two_may_be_stored_as_binary32(tmp_path: Path) -> None:
    options = Options("fp8_e4m3_128x128", Rules(scale_rounding="rceil", nonfinite="error"), layout="fp8")
    ours, settings = written(tmp_path, "fp8-block.safetensors", "fp8-block-ue8m0", options)
    assert ours["fc1.weight"] == theirs("fp8-block-ue8m0")["fc1.weight"]
    assert floats(ours["fc1.weight_scale_inv"]).tolist() == [[2.0**-127], [2.0**-12]]
    assert settings["scale_fmt"] == "ue8m0"


def test_bytes_of_gpt_oss(tmp_path: Path) -> None:
    options = Options("mxfp4", Rules(scale_rounding="floor", nonfinite="error"), layout="gpt-oss")
    ours, settings = written(tmp_path, "gptoss.safetensors", "gptoss-mxfp4", options)
    stack = "model.layers.0.mlp.experts"
    expected = {
        name: raw for name, raw in theirs("gptoss-mxfp4").items() if name.startswith(stack) and "bias" not in name
    }
    assert ours == expected
    assert settings == {"quant_method": "mxfp4", "modules_to_not_convert": []}


def test_a_module_of_gpt_oss_has_all_its_stacks_quantized_or_none(tmp_path: Path) -> None:
    up, down = (f"model.layers.{{}}.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
    tensors = {name.format(layer): noise(4, 64, 64) for name in (up, down) for layer in (0, 1)}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, {"model_type": "gpt_oss"}))
    options = Options("mxfp4", layout="gpt-oss", selection=(Rule(False, down.format(1)),))
    result = quantize_checkpoint(checkpoint, make_plan(checkpoint, options), tmp_path / "q", backend=Cpu())
    kept = {step.tensor.name: step.reason for step, _ in result.layers if step.scheme is None}
    assert kept.keys() == {up.format(1), down.format(1)}
    assert kept[up.format(1)] == "kept: gpt-oss cannot hold it: another stack of its experts is kept"


@pytest.mark.parametrize(
    ("format", "sample"), [("mxfp4", "llama64-quark-mxfp4wo"), ("mxfp6", "llama64-quark-mxfp6e2m3")]
)
def test_bytes_and_configuration_of_quark(tmp_path: Path, format: str, sample: str) -> None:
    options = Options(format, Rules(dialect="quark", nonfinite="error"), layout="quark")
    ours, settings = written(tmp_path, "llama64-original/model.safetensors", sample, options)
    assert ours == theirs(sample)
    stated = config(sample)["quantization_config"]
    stated["global_quant_config"]["input_tensors"] = None  # Of these weights alone are quantized here.
    assert settings == stated


def test_fp8_scales_of_quark_are_of_the_dtype_of_the_model(tmp_path: Path) -> None:
    options = Options("fp8_e4m3", layout="quark")
    ours, _ = written(tmp_path, "llama64-original/model.safetensors", "llama64-quark-mxfp4wo", options)
    assert ours["model.layers.0.mlp.up_proj.weight"][:2] == ("F8_E4M3", [128, 64])
    assert ours["model.layers.0.mlp.up_proj.weight_scale"][:2] == ("BF16", [])
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "d", backend=Cpu())
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.frombuffer(ours[name][2], np.uint8)
    restored = floats(read_raw(tmp_path / "d" / "model.safetensors")[name])
    torch = pytest.importorskip("torch")
    codes = torch.from_numpy(values.copy()).view(torch.float8_e4m3fn).float().reshape(128, 64)
    product = (codes * float(floats(ours[name + "_scale"]))).bfloat16().float()
    np.testing.assert_array_equal(restored, product.numpy())
