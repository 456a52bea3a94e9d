"""Reports along rows and columns: the array's own numbers and those of its transpose, the file being read once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from command_line import CAPTURES
from safetensors.numpy import load_file, save_file

import mxcli
from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError, UsageError
from mxcli.files import checkpoint as checkpoints
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.flows.measure import measure as measuring
from mxcli.flows.measure.measure import memory_to_measure
from mxcli.flows.measure.report import Report, make_report, planned_layers
from mxcli.flows.measure.worst_blocks import worst_blocks
from mxcli.flows.plan.plan import Options, make_plan, make_plans
from mxcli.numerics.blocks import BOTH
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules
from mxcli.numerics.streams import Sampling

GATE, UP, OUT = "mlp.gate_proj.weight", "mlp.up_proj.weight", "attn.o_proj.weight"
FORMATS = ["mxfp8", "mxfp4", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"]


def values(*shape: int) -> Any:
    """Columns of very different sizes, so that it matters which way blocks run."""
    random = np.random.default_rng(shape)
    return (random.standard_normal(shape) * np.exp(2 * random.standard_normal(shape[-1:]))).astype(np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    x = values(64, 96)
    save_file(
        {GATE: x, UP: 4 * x, OUT: values(40, 96), "norm.weight": np.ones(64, np.float32)}, tmp_path / "x.safetensors"
    )
    return tmp_path / "x.safetensors"


def options(format: str, rules: Rules = Rules(), **more: Any) -> Options:
    return Options(format, rules, analysis=True, **{"on_indivisible": "pad", "axis": BOTH, **more})


def reported(where: Path, format: str, sampling: Sampling | None = None, **more: Any) -> Report:
    checkpoint = open_checkpoint(where)
    plans = make_plans(checkpoint, options(format, **more))
    return make_report("x", checkpoint, *plans, backend=Cpu(2), sampling=sampling)


@pytest.mark.parametrize("format", FORMATS)
def test_captures_have_the_numbers_of_arrays_and_of_their_transposes(format: str) -> None:
    report, checkpoint = reported(CAPTURES, format), open_checkpoint(CAPTURES)
    assert [layer.axis for layer in report.layers] == ["row", "column"] * 58
    for at in (2, 3, 10, 11, 57):
        row, column = report.layers[2 * at : 2 * at + 2]
        x = read(checkpoint, checkpoint.tensors[row.name]).view(ml_dtypes.bfloat16)
        assert row.name == column.name
        assert dict(row.metrics) == mxcli.measure(x, format)
        assert dict(column.metrics) == mxcli.measure(np.ascontiguousarray(x.T), format)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_each_axis_has_the_numbers_that_it_has_alone(source: Path, format: str) -> None:
    """The tensor scale that gate and up share included."""
    both = reported(source, format)
    for axis in ("row", "column"):
        alone = reported(source, format, axis=axis)
        assert [layer for layer in both.layers if layer.axis == axis] == list(alone.layers)
        assert both.by_axis[axis].sum == alone.sum
        assert both.by_axis[axis].by_role == alone.by_role
    assert (both.sum, both.by_role) == (None, {})
    assert [layer.metrics["amax"] for layer in both.layers[:2]] == [both.layers[0].metrics["amax"]] * 2


def test_every_tensor_is_read_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    real = checkpoints.read
    monkeypatch.setattr(measuring, "read", lambda source, info: reads.update([info.name]) or real(source, info))
    reported(source, "nvfp4")
    assert reads == {GATE: 1, UP: 1, OUT: 1}


def test_one_dimension_has_no_column_and_is_kept_once(source: Path) -> None:
    report = reported(source, "mxfp8")
    assert [(layer.name, layer.axis) for layer in report.kept] == [("norm.weight", None)]
    assert report.counts == {"quantized": 5, "padded": 1, "kept": 1, "tied": 0}
    assert report.unfinished == 0
    assert [count for _, count in report.schemes] == [3]


def test_lengths_are_judged_per_axis(source: Path) -> None:
    """96 is three blocks of 32, 40 is not."""
    padded = {(layer.name, layer.axis): layer.decision for layer in reported(source, "mxfp8").layers}
    assert padded[OUT, "row"] == "quantized"
    assert padded[OUT, "column"] == "padded"
    kept = reported(source, "mxfp8", on_indivisible="keep")
    assert [(layer.name, layer.axis) for layer in kept.kept] == [(OUT, "column"), ("norm.weight", None)]
    assert [layer.axis for layer in kept.layers if layer.name == OUT] == ["row"]
    assert kept.by_axis["row"].sum["tensors"] == 3  # type: ignore[index]
    assert kept.by_axis["column"].sum["tensors"] == 2  # type: ignore[index]
    checkpoint = open_checkpoint(source)
    with pytest.raises(
        RefusedError, match=r"blocks run along dimension 0\): last dimension 40 is not a multiple of 32"
    ):
        make_plans(checkpoint, options("mxfp8", on_indivisible="error"))
    reasons = [layer.reason for layer in planned_layers(*make_plans(checkpoint, options("mxfp8"))) if layer.name == OUT]
    assert [reason.partition(":")[0] for reason in reasons] == ["row", "column"]


def test_two_dimensional_blocks_are_the_same_either_way_but_for_edges(source: Path) -> None:
    row, column = [layer for layer in reported(source, "nvfp4_2d").layers if layer.name == GATE]
    for key in ("saturated", "underflowed", "max_abs_error", "scale_exponent_histogram", "element_exponent_histogram"):
        assert row.metrics[key] == column.metrics[key]
    assert row.metrics["mse"] == pytest.approx(column.metrics["mse"])


def test_nothing_is_written_along_both_axes(source: Path) -> None:
    with pytest.raises(UsageError, match="unknown value 'both': --axis takes row, column"):
        make_plan(open_checkpoint(source), options("mxfp8"))
    with pytest.raises(UsageError, match="unknown value 'rows': --axis takes row, column, both"):
        make_plans(open_checkpoint(source), options("mxfp8", axis="rows"))


def test_arrays_per_block_of_both_axes_are_in_one_file(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    make_report(
        "x", checkpoint, *make_plans(checkpoint, options("mxfp8")), backend=Cpu(), per_block=tmp_path / "b.safetensors"
    )
    stored, x = load_file(tmp_path / "b.safetensors"), load_file(source)[OUT]
    assert len(stored) == 2 * 3 * 5
    assert stored[f"{OUT}.row.amax"].tolist() == np.abs(x.reshape(40, 3, 32)).max(-1).tolist()
    padded = np.pad(x.T, ((0, 0), (0, 24)))
    assert stored[f"{OUT}.column.amax"].tolist() == np.abs(padded.reshape(96, 2, 32)).max(-1).tolist()


def test_samples_read_the_same_rows_for_both_axes(tmp_path: Path) -> None:
    """Runs of rows are whole blocks of either axis."""
    save_file({"a.weight": values(640, 64)}, tmp_path / "x.safetensors")
    asked = Sampling(0.25, 0, run_bytes=512, whole_bytes=4096)
    report = reported(tmp_path / "x.safetensors", "mxfp4", asked)
    whole = reported(tmp_path / "x.safetensors", "mxfp4")
    row, column = report.layers
    assert row.metrics["sampled_elements"] == column.metrics["sampled_elements"]
    assert row.metrics["amax"] == column.metrics["amax"]
    assert int(str(row.metrics["sampled_elements"])) % (32 * 64) == 0
    for sampled, full in zip(report.layers, whole.layers, strict=True):
        assert float(str(sampled.metrics["sqnr_db"])) == pytest.approx(float(str(full.metrics["sqnr_db"])), abs=0.5)
    assert report.sample is not None
    assert report.sample.tensors == 1


@pytest.mark.parametrize("axis", ["row", "column"])
def test_samples_hold_whole_groups_and_draw_as_the_tensor_does(tmp_path: Path, axis: str) -> None:
    save_file({"a.weight": values(1280, 64)}, tmp_path / "x.safetensors")
    chance = {"axis": axis, "rules": Rules(rounding="stochastic", hadamard=find_hadamard(64), seed=3)}
    (whole,) = reported(tmp_path / "x.safetensors", "nvfp4", **chance).layers
    (read_whole,) = reported(tmp_path / "x.safetensors", "nvfp4", Sampling(1.0), **chance).layers
    assert read_whole.metrics["mse"] == whole.metrics["mse"]
    (part,) = reported(tmp_path / "x.safetensors", "nvfp4", Sampling(0.25, 0, 512, 4096), **chance).layers
    assert 0 < int(str(part.metrics["sampled_elements"])) < 1280 * 64
    assert float(str(part.metrics["sqnr_db"])) == pytest.approx(float(str(whole.metrics["sqnr_db"])), abs=0.5)


def test_worst_blocks_are_those_of_each_axis(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    plans = make_plans(checkpoint, options("nvfp4"))
    report = make_report("x", checkpoint, *plans, backend=Cpu())
    found = worst_blocks(checkpoint, plans, report.layers)
    assert [block.under for block in found] == [0, 0, 0, 1, 1, 1]
    for block in found:
        layer = next(
            each for each in report.layers if (each.name, each.axis) == (block.tensor, ("row", "column")[block.under])
        )
        place: Any = layer.metrics["worst_blocks"]
        assert (block.row, block.column) == (place[0]["row"], place[0]["column"])
        noise = sum((each.quantized - each.value) ** 2 for each in block.elements)
        assert noise == pytest.approx(place[0]["noise"], rel=1e-6)


def test_memory_counts_the_copy_that_is_turned(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    both, row = make_plans(checkpoint, options("mxfp8")), make_plan(checkpoint, options("mxfp8", axis="row"))
    assert memory_to_measure(*both).peak_bytes - memory_to_measure(row).peak_bytes == 64 * 96 * 4


def test_values_that_are_not_finite_are_refused_once(tmp_path: Path) -> None:
    x = values(4, 32)
    x[1, 3] = np.nan
    save_file({"a.weight": x}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    plans = make_plans(checkpoint, Options("mxfp8", on_indivisible="pad", axis=BOTH, analysis=True))
    with pytest.raises(RefusedError, match=r"^a.weight: 1 of 128 values are NaN or infinite, the first at \[1, 3\]"):
        make_report("x", checkpoint, *plans, backend=Cpu())
