"""ModelOpt's exported checkpoints of whole models are ours, byte for byte."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("modelopt", "torch", "transformers")]
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
quantization: Any = Lazy("modelopt.torch.quantization")
exporting: Any = Lazy("modelopt.torch.export")


def produced(source: Path, output: Path, config: str) -> Path:
    """What ModelOpt exports of a model that it quantized with one of its configurations."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")

    def calibrate(model: Any) -> None:
        model(input_ids=torch.arange(3, 19)[None])

    model = quantization.quantize(model, copy.deepcopy(getattr(quantization, f"{config}_CFG")), calibrate)
    with torch.no_grad():
        exporting.export_hf_checkpoint(model, dtype=model.dtype, export_dir=str(output))
    return output


@pytest.mark.parametrize(("dtype", "dialect"), [("BF16", "modelopt-bf16"), ("F32", "modelopt")])
@pytest.mark.parametrize(
    ("config", "format", "without"),
    [
        ("W4A16_NVFP4", "nvfp4", ()),
        ("NVFP4_DEFAULT", "nvfp4", ()),
        ("MXFP8_DEFAULT", "mxfp8", ()),
        ("MXFP4_DEFAULT", "mxfp4", ()),
        ("W4A8_MXFP4_FP8", "mxfp4", ()),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY", "fp8_e4m3_128x128", ()),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8_e4m3_channel", ("tiny",)),
    ],
)
def test_every_byte(
    tmp_path: Path, config: str, format: str, without: tuple[str, ...], dtype: str, dialect: str
) -> None:
    source = llama(tmp_path / "m", dtype, without=without)
    exported = theirs(produced(source, tmp_path / "theirs", config))
    expected = {name: raw for name, raw in exported.items() if not name.endswith(".input_scale")}
    assert differing(expected, ours(source, tmp_path / "ours", format, "modelopt", dialect)) == {}


@pytest.mark.parametrize(("dtype", "dialect"), [("BF16", "modelopt-bf16"), ("F32", "modelopt")])
def test_every_byte_of_one_fp8_scale_for_a_tensor(tmp_path: Path, dtype: str, dialect: str) -> None:
    # The layout modelopt holds these with stored scales of inputs only.
    source = llama(tmp_path / "m", dtype, equal_amax=True)
    exported = theirs(produced(source, tmp_path / "theirs", "FP8_DEFAULT"))
    expected = {name: raw for name, raw in exported.items() if not name.endswith(".input_scale")}
    stored = ours(source, tmp_path / "ours", "fp8_e4m3", "quark", dialect)
    assert {name: raw[2] for name, raw in expected.items()} == {name: raw[2] for name, raw in stored.items()}
