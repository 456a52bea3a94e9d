"""The totals of comparisons: which columns there are, and what follows for stochastic rounding and axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.compare import Comparison, make_comparison, plan_comparison
from mxcli.flows.plan.plan import Options
from mxcli.numerics.combinations import combine
from mxcli.numerics.scheme import Rules
from mxcli.output.comparison import total_lines
from mxcli.output.conclusion import sentences
from mxcli.output.screen import Screen

SPECIAL = ("bias", "binades", "range")


def comparison(folder: Path, *names: Any, by: str = "role", **more: Any) -> Comparison:
    """Of a weight whose columns are of one size each, and its rows are not."""
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 64)) * np.exp(2 * random.standard_normal(64))
    save_file({"a.weight": x.astype(np.float32)}, folder / "x.safetensors")
    checkpoint = open_checkpoint(folder / "x.safetensors")
    asked = Options("nvfp4", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True)
    planned = plan_comparison(checkpoint, combine(*names, **more), asked)
    return make_comparison("x", checkpoint, planned, backend=Cpu(), by=by)


def concluded(made: Comparison) -> list[str]:
    return sentences(made.conclusion)


def headings(made: Comparison) -> str:
    first, second, *_ = total_lines(made, Screen())
    return f"{first} {second}"


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ((["nvfp4"], ["te"], ["nearest-even", "stochastic"]), {}),
        ((["nvfp4"], ["te"], [], ["none", "16"]), {}),
        ((["nvfp4"], ["te"]), {"axes": ("row", "column")}),
    ],
)
def test_roundings_transforms_and_axes_have_columns_of_their_own(
    tmp_path: Path, names: tuple[list[str], ...], more: dict[str, Any]
) -> None:
    made = comparison(tmp_path, *names, **more)
    assert all(word in headings(made) for word in SPECIAL)
    _, _, first, _ = total_lines(made, Screen())
    quantiles: Any = made.sums[0]["block_dynamic_range"]
    assert f"{quantiles['p50']:.1f}/{quantiles['p99']:.1f}" in first.split()
    assert not any(word in headings(comparison(tmp_path, ["nvfp4", "mxfp4"])) for word in SPECIAL)


def test_a_transform_narrows_the_range_of_blocks(tmp_path: Path) -> None:
    plain, transformed = comparison(tmp_path, ["nvfp4"], ["te"], [], ["none", "16"]).sums
    ranges: list[Any] = [each["block_dynamic_range"] for each in (plain, transformed)]
    assert ranges[1]["p99"] < ranges[0]["p99"]
    assert float(str(transformed["underflowed_percent"])) < float(str(plain["underflowed_percent"]))


def test_bias_of_stochastic_rounding_is_reported_with_that_of_independent_errors(tmp_path: Path) -> None:
    made = comparison(tmp_path, ["nvfp4"], ["te"], ["nearest-even", "stochastic"])
    sentence = concluded(made)[-1]
    assert sentence.startswith("Bias (mean error, and how many times RMS error / sqrt(elements)")
    assert "of nvfp4 te stochastic against nvfp4 te nearest-even: weight " in sentence
    total = made.sums[1]
    share = abs(float(str(total["bias"]))) * 64 / float(str(total["rmse"]))
    assert f" ({share:.1f}) against " in sentence


def test_the_better_axis_is_reported(tmp_path: Path) -> None:
    made = comparison(tmp_path, ["nvfp4"], ["te"], axes=("row", "column"))
    row, column = (float(str(total["sqnr_db"])) for total in made.sums)
    assert concluded(made)[-1] == (
        f"weight: blocks along rows have {row:.2f} dB SQNR, {row - column:.2f} dB more than along columns "
        f"({column:.2f} dB)."
    )
    assert concluded(comparison(tmp_path, ["nvfp4"], ["te"], axes=("row", "column"), by="kind"))[-1].startswith(
        "Against"
    )
    several = concluded(comparison(tmp_path, ["nvfp4", "mxfp4"], axes=("row", "column")))
    assert several[-2].startswith("nvfp4 te: weight: blocks along rows have ")
    assert several[-1].startswith("mxfp4_e2m1 rceil: weight: blocks along ")
