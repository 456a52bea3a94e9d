"""A report in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.findings import Kept, Saturation, ScaleRange, TensorValue, TotalError, Underflow
from mxcli.flows.measure.report import Report, make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.numerics.scheme import Rules
from mxcli.output.conclusion import sentences


def findings(report: Report) -> list[str]:
    return sentences(report.findings)


def report(tmp_path: Path, format: str = "mxfp8_e4m3", rule: str = "floor", **tensors: np.ndarray) -> Report:
    save_file(
        {name.replace("__", "."): x.astype(np.float32) for name, x in tensors.items()}, tmp_path / "x.safetensors"
    )
    checkpoint = open_checkpoint(str(tmp_path / "x.safetensors"))
    plan = make_plan(
        checkpoint,
        Options(format, Rules(scale_rounding=rule, nonfinite="saturate"), on_indivisible="pad", analysis=True),
    )
    return make_report("x", checkpoint, plan, backend=Cpu(1))


def test_saturation_underflow_and_what_is_kept(tmp_path: Path) -> None:
    x = np.ones((4, 32))
    x[0, :3] = 957.0, 1e-9, 3.3
    found = findings(report(tmp_path, a__weight=x, b__weight=np.full((2, 32), 1.07), norm__weight=np.ones(32)))
    assert found == [
        "SQNR is 23.9 dB over all 2 tensors; single tensors have 23.9 to 25.8 dB, a.weight the least.",
        "0.521 % of elements saturate, in 16.7 % of blocks; most in a.weight (0.781 %).",
        "0.521 % of elements underflow to zero; most in a.weight (0.781 %).",
        "On average blocks use 17.2 of the 17.8 binades of the element format; scale exponents run from -8 to 1.",
        "1 tensor kept as stored: norm 1.",
    ]


def test_the_exact_and_nothing(tmp_path: Path) -> None:
    exact = report(tmp_path, a__weight=np.ones((2, 32)))
    assert findings(exact)[0] == "Exact: the only tensor measured can be represented without error."
    assert (
        findings(exact)[1] == "Nothing saturates: no element exceeds the largest value that its block's scale reaches."
    )
    assert findings(exact)[2] == "Nothing underflows: every nonzero element keeps a nonzero code."
    assert findings(replace(exact, layers=(), sum=None)) == []


def test_findings_are_data(tmp_path: Path) -> None:
    x = np.ones((4, 32))
    x[0, :3] = 957.0, 1e-9, 3.3
    made = report(tmp_path, a__weight=x, b__weight=np.full((2, 32), 1.07), norm__weight=np.ones(32))
    error, saturation, underflow, scales, kept = made.findings
    assert isinstance(error, TotalError)
    assert made.sum is not None
    assert (error.tensors, error.sqnr_db) == (2, made.sum["sqnr_db"])
    assert error.lowest == TensorValue("a.weight", float(str(made.layers[0].metrics["sqnr_db"])))
    assert saturation == Saturation(100 / 192, 100 / 6, TensorValue("a.weight", 100 / 128))
    assert underflow == Underflow(100 / 192, TensorValue("a.weight", 100 / 128))
    assert isinstance(scales, ScaleRange)
    assert (scales.exponent_min, scales.exponent_max) == (-8, 1)
    assert kept == Kept({"norm": 1})
    assert made.conclusion == ()


def test_tensors_far_below_the_others_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    usual = {f"layers__{at}__w__weight": rng.normal(size=(8, 32)) for at in range(5)}
    lost = np.full((8, 32), 0.25)  # zero beside a 4, as half a step below the smallest value of E2M1
    lost[:, 0] = 4.0
    assert findings(report(tmp_path, "mxfp4", **usual, odd__weight=lost))[1] == (
        "1 tensor is more than 3 dB below the median of 18.7 dB: odd.weight."
    )
    usual_only = report(tmp_path, "mxfp4", **usual)
    assert not [sentence for sentence in findings(usual_only) if "below the median" in sentence]


def test_odd_names_are_shown_harmlessly(tmp_path: Path) -> None:
    found = findings(report(tmp_path, **{"\x1b[31m": np.full((2, 32), 1.07), "b": np.full((2, 32), 1.3)}))
    assert "\x1b" not in "".join(found)


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3", "mxint8"])
def test_every_format(tmp_path: Path, format: str) -> None:
    x = np.random.default_rng(0).normal(size=(8, 64))
    assert findings(report(tmp_path, format, None, a__weight=x))  # type: ignore[arg-type]
