"""torchao's configurations on whole models in transformers: its files are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("accelerate", "torch", "torchao", "transformers")]
torch: Any = Lazy("torch")
torchao: Any = Lazy("torchao.quantization")
formats: Any = Lazy("torchao.prototype.mx_formats")
transformers: Any = Lazy("transformers")


def produced(source: Path, output: Path, config: Any) -> Path:
    """What transformers saves of a model that torchao quantized."""
    settings = transformers.TorchAoConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", device_map="cpu", quantization_config=settings
    )
    model.save_pretrained(output)
    return output


def mx(dtype: str, mode: str = "RCEIL", **more: Any) -> Any:
    """The configuration of MX weights and inputs."""
    modes: Any = Lazy("torchao.prototype.mx_formats.mx_tensor")
    kernels: Any = Lazy("torchao.quantization.quantize_.common.kernel_preference")
    element = getattr(torch, dtype)
    return formats.MXDynamicActivationMXWeightConfig(
        activation_dtype=element, weight_dtype=element, kernel_preference=kernels.KernelPreference.EMULATED,
        scaling_mode=getattr(modes.ScaleCalculationMode, mode), **more,
    )  # fmt: skip


MODES = ["FLOOR", "CEIL", "EVEN", "RCEIL"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "format"),
    [("float8_e4m3fn", "mxfp8"), ("float8_e5m2", "mxfp8_e5m2"), ("float4_e2m1fn_x2", "mxfp4")],
)
def test_every_byte_of_mx_formats(tmp_path: Path, dtype: str, format: str, mode: str) -> None:
    source = llama(tmp_path / "m")
    expected = theirs(produced(source, tmp_path / "theirs", mx(dtype, mode)))
    found = ours(source, tmp_path / "ours", format, "torchao", "torchao", scale_rounding=mode.lower())
    assert differing(expected, found) == {}


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(("format", "two_levels"), [("nvfp4", True), ("e2m1:e4m3:1x16", False)])
def test_every_byte_of_nvfp4(tmp_path: Path, format: str, two_levels: bool, dtype: str) -> None:
    source = llama(tmp_path / "m", dtype, equal_amax=True)
    config = formats.NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=two_levels)
    expected = theirs(produced(source, tmp_path / "theirs", config))
    assert differing(expected, ours(source, tmp_path / "ours", format, "torchao", "torchao")) == {}


@pytest.mark.parametrize(("dtype", "dialect"), [("BF16", "torchao"), ("F32", "torchao-casts")])
@pytest.mark.parametrize("element", ["e4m3fn", "e5m2"])
def test_every_byte_of_fp8(tmp_path: Path, element: str, dtype: str, dialect: str) -> None:
    source = llama(tmp_path / "m", dtype, without=("zeros", "negative zeros", "tiny"))
    config = torchao.Float8WeightOnlyConfig(weight_dtype=getattr(torch, f"float8_{element}"))
    expected = theirs(produced(source, tmp_path / "theirs", config))
    format = f"fp8_{element.removesuffix('fn')}_channel"
    assert differing(expected, ours(source, tmp_path / "ours", format, "torchao", dialect)) == {}


def test_rows_of_zeros_become_nan_in_fp8(tmp_path: Path) -> None:
    source = llama(tmp_path / "m", without=("negative zeros", "tiny"))
    expected = theirs(produced(source, tmp_path / "theirs", torchao.Float8WeightOnlyConfig()))
    name = "model.layers.0.self_attn.q_proj._weight_qdata"
    assert set(expected[name][2][:256]) <= {0x7F, 0xFF}
    assert set(ours(source, tmp_path / "ours", "fp8_e4m3_channel", "torchao", "torchao")[name][2][:256]) == {0}
