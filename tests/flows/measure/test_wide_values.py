"""F64 values are rounded to binary32, which is said, and those beyond its range are called that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.report import make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules


def _source(path: Path, value: float, dtype: str) -> Path:
    x = np.ones((4, 32), dtype)
    x[2, 5] = value
    save_file({"x.weight": x}, path)
    return path


@pytest.mark.parametrize("value", [1e300, -1e39, np.inf, np.nan])
def test_values_beyond_binary32_are_named(tmp_path: Path, value: float) -> None:
    checkpoint = open_checkpoint(_source(tmp_path / "x.safetensors", value, "f8"))
    assert "1 tensor ('x.weight') of F64, rounded to binary32 before being quantized or measured." in checkpoint.notes
    plan = make_plan(checkpoint, Options("mxfp8_e4m3", Rules(nonfinite="error")))
    sentence = (
        r"x\.weight: 1 of 128 values are NaN, infinite or, as F64 can be, beyond binary32 \(3\.4e38\), the first at "
        r"\[2, 5\]\. Use --nonfinite"
    )
    with pytest.raises(RefusedError, match=sentence):
        quantize_checkpoint(checkpoint, plan, tmp_path / "out", backend=Cpu(1))


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_of_other_types_nothing_more_is_said(tmp_path: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(_source(tmp_path / "x.safetensors", np.inf, dtype))
    assert not any("binary32" in note for note in checkpoint.notes)
    plan = make_plan(checkpoint, Options("mxfp8_e4m3", Rules(nonfinite="error")))
    with pytest.raises(RefusedError, match=r"1 of 128 values are NaN or infinite, the first at \[2, 5\]\. Use"):
        quantize_checkpoint(checkpoint, plan, tmp_path / "out", backend=Cpu(1))


def test_values_that_binary32_holds_are_measured(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_source(tmp_path / "x.safetensors", 3e38, "f8"))
    plan = make_plan(checkpoint, Options("mxfp8_e4m3", Rules(), analysis=True))
    assert make_report("x", checkpoint, plan, backend=Cpu(1)).layers[0].metrics["nonfinite"] == 0
