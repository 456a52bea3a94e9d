"""Reports: the same numbers whichever way they are gathered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mxcli.backends import cpu
from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.report import LayerReport, Report, make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.arrange import arrange
from mxcli.flows.write.quantize import quantize_checkpoint, report_from_stats
from mxcli.numerics.metrics import measured
from mxcli.numerics.scheme import Rules, resolve

RANDOM = np.random.default_rng(0)
GATE, UP, OUT, NORM = "mlp.gate_proj.weight", "mlp.up_proj.weight", "attn.o_proj.weight", "norm.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    x = RANDOM.normal(size=(8, 64)).astype(np.float32)
    path = tmp_path / "x.safetensors"
    save_file({GATE: x, UP: 4 * x, OUT: x[:, :32].copy(), NORM: np.ones(64, np.float32)}, path)
    return path


def reported(source: Path, options: Options, per_block: Path | None = None) -> Report:
    checkpoint = open_checkpoint(source)
    return make_report("x", checkpoint, make_plan(checkpoint, options), backend=Cpu(2), per_block=per_block)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8_e4m3_128x128", "e3m2:e8m0:1x16"])
def test_layers_are_what_the_backend_measures_alone(source: Path, format: str) -> None:
    report = reported(source, Options(format, Rules(nonfinite="saturate")))
    tensors = load_file(source)
    largest = float(max(np.abs(tensors[GATE]).max(), np.abs(tensors[UP]).max()))
    for layer in report.layers:
        x = tensors[layer.name]
        recipe = resolve(format)
        q = cpu.quantize(x, "F32", recipe, tensor_amax=largest if layer.name in (GATE, UP) else None)
        assert q.stats is not None
        assert layer.scheme == recipe
        assert dict(layer.metrics) == measured(q.stats, recipe.format, x.shape)


def test_a_sum_counts_the_tensor_scale_of_every_tensor(source: Path) -> None:
    """1280 elements in 80 blocks: 4 bits each, 8 per block, 32 for each of three tensors."""
    report = reported(source, Options("nvfp4"))
    assert report.sum is not None
    assert report.sum["bits_per_element"] == (1280 * 4 + 80 * 8 + 3 * 32) / 1280


def test_a_run_and_a_report_agree(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options("nvfp4"))
    written = quantize_checkpoint(checkpoint, plan, tmp_path / "out", backend=Cpu())
    gathered = report_from_stats("x", checkpoint, plan, arrange(checkpoint, plan), written.layers)
    measured_alone = make_report("x", checkpoint, plan, backend=Cpu())
    assert gathered.layers == measured_alone.layers
    assert gathered.sum == measured_alone.sum
    assert gathered.by_role == measured_alone.by_role
    assert gathered.counts == measured_alone.counts == {"quantized": 3, "padded": 0, "kept": 1, "tied": 0}


def test_sums_are_over_elements_not_over_tensors(source: Path) -> None:
    report = reported(source, Options("mxfp4", Rules(nonfinite="saturate")))
    assert report.sum is not None
    elements = sum(layer.metrics["elements"] for layer in report.layers)  # type: ignore[misc]
    noise = sum(layer.metrics["mse"] * layer.metrics["elements"] for layer in report.layers)  # type: ignore[operator]
    assert report.sum["tensors"] == 3
    assert report.sum["elements"] == elements == 8 * 64 * 2 + 8 * 32
    assert report.sum["mse"] == pytest.approx(noise / elements)


def test_column_blocks_are_those_of_the_transpose(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(32, 5)).astype(np.float32)
    x[7, 3] = np.nan
    save_file({"layer.weight": x}, tmp_path / "x.safetensors")
    save_file({"layer.weight": x.T.copy()}, tmp_path / "turned.safetensors")
    columns = reported(tmp_path / "x.safetensors", Options("mxfp8", Rules(nonfinite="saturate"), axis="column"))
    rows = reported(tmp_path / "turned.safetensors", Options("mxfp8", Rules(nonfinite="saturate")))
    assert columns.layers[0].metrics == rows.layers[0].metrics
    assert columns.layers[0].shape == (32, 5)
    with pytest.raises(Exception, match=r"1 of 160 values are NaN or infinite, the first at \[7, 3\]"):
        reported(tmp_path / "x.safetensors", Options("mxfp8", Rules(nonfinite="error"), axis="column"))


def test_an_interruption_leaves_the_layers_done_and_no_half_file(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options("mxfp8"))
    seen: list[str] = []

    def stop_at_second(layer: LayerReport) -> None:
        seen.append(layer.name)
        if len(seen) == 2:
            raise KeyboardInterrupt

    arrays = tmp_path / "blocks.safetensors"
    report = make_report("x", checkpoint, plan, backend=Cpu(), on_layer=stop_at_second, per_block=arrays)
    assert [layer.name for layer in report.layers] == seen
    assert report.unfinished == 1
    assert report.sum is not None
    assert report.sum["tensors"] == 2
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_per_block_arrays(source: Path, tmp_path: Path) -> None:
    arrays = tmp_path / "blocks.safetensors"
    reported(source, Options("mxfp8", Rules(nonfinite="saturate")), per_block=arrays)
    stored, x = load_file(arrays), load_file(source)[UP]
    assert stored[f"{UP}.amax"].tolist() == np.abs(x.reshape(8, 2, 32)).max(-1).tolist()
    assert {name.rpartition(".")[2]: array.dtype.str for name, array in stored.items()} == {
        "amax": "<f4", "decode": "<f4", "saturated": "<i4", "underflowed": "<i4", "noise": "<f8"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "rules", "overflows"),
    [
        ("mxfp8_e4m3", Rules(), True),
        ("mxfp8_e4m3", Rules(scale_rounding="floor"), False),
        ("mxfp6_e2m3", Rules(), True),
        ("mxfp4_e2m1", Rules(), True),
        ("fp8_e4m3", Rules(scale_rounding="rceil"), True),
        ("fp8_e4m3", Rules(), False),
    ],
)
def test_values_that_decode_to_infinity_are_a_note(tmp_path: Path, format: str, rules: Rules, overflows: bool) -> None:
    """Weights near the largest float, in a format whose scales are powers of two."""
    path = tmp_path / "x.safetensors"
    save_file({"a.weight": np.full((2, 32), 3.38e38, np.float32), "b.weight": np.ones((2, 32), np.float32)}, path)
    note = "1 tensor ('a.weight') with values that decode to infinity, which --exclude keeps as they are."
    checkpoint = open_checkpoint(path)
    plan = make_plan(checkpoint, Options(format, rules, layout="mxcli"))
    written = quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    gathered = report_from_stats("x", checkpoint, plan, arrange(checkpoint, plan), written.layers)
    assert (note in gathered.notes) is overflows
    assert (note in make_report("x", checkpoint, plan, backend=Cpu()).notes) is overflows
