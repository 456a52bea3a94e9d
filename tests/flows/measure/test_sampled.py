"""Samples: little is read, the numbers are those of the rows read, and the intervals hold what they say."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mxcli.backends import cpu
from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files import reading
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read_rows
from mxcli.files.tensors import TensorInfo
from mxcli.flows.measure.compare import Comparison, make_comparison, plan_comparison
from mxcli.flows.measure.report import Report, make_report
from mxcli.flows.measure.sampled import bytes_to_read, memory_to_sample
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.numerics.combinations import combine
from mxcli.numerics.metrics import METRICS, NUMBERS
from mxcli.numerics.scheme import Rules, resolve
from mxcli.numerics.streams import Sampling

GATE, UP, OUT, WIDE = "mlp.gate_proj.weight", "mlp.up_proj.weight", "attn.o_proj.weight", "experts.weight"
TAKEN = ("sampled_elements", "elements")


def values(*shape: int, outliers: float = 0.001) -> Any:
    """Rows of different sizes, larger towards the end, with an outlier here and there."""
    random = np.random.default_rng(shape)
    sizes = np.exp(0.4 * random.standard_normal((*shape[:-1], 1))) * np.linspace(0.5, 1.5, shape[-2])[:, None]
    x = random.standard_normal(shape) * sizes
    x[random.random(shape) < outliers] *= 9
    return x.astype(np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sampled") / "x.safetensors"
    x = values(512, 64)
    save_file({GATE: x, UP: 4 * x, OUT: values(12, 64), WIDE: values(5, 200, 96)}, path)
    return path


def sampling(fraction: float = 0.25, seed: int = 0, run_bytes: int = 512) -> Sampling:
    """For small tensors: a run is a row or two, and only OUT is read whole."""
    return Sampling(fraction, seed, run_bytes, whole_bytes=4096)


def reported(
    source: Path, format: str, asked: Sampling | None = None, threads: int = 1, *, rules: Rules = Rules(), **more: Any
) -> Report:
    checkpoint = open_checkpoint(source)
    options = Options(format, rules, on_indivisible="pad", analysis=True, **more)
    return make_report("x", checkpoint, make_plan(checkpoint, options), backend=Cpu(threads), sampling=asked)


def compared(source: Path, formats: list[str], asked: Sampling | None = None) -> Comparison:
    checkpoint = open_checkpoint(source)
    options = Options("mxfp8", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True)
    planned = plan_comparison(checkpoint, combine(formats), options)
    return make_comparison("x", checkpoint, planned, backend=Cpu(1), sampling=asked)


def metrics(report: Report, name: str) -> dict[str, Any]:
    return dict(next(layer.metrics for layer in report.layers if layer.name == name))


@pytest.fixture
def asked_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes requested from files each time."""
    asked: list[int] = []
    fill = reading._fill

    def counting(file: io.FileIO, info: TensorInfo, begin: int, wanted: memoryview) -> None:
        asked.append(len(wanted))
        fill(file, info, begin, wanted)

    monkeypatch.setattr(reading, "_fill", counting)
    return asked


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_e4m3", "fp8_e4m3_channel"])
def test_little_is_read(source: Path, format: str, asked_bytes: list[int]) -> None:
    """Of GATE 128 rows of 512, of UP as many, of WIDE 8 runs of 2 rows from each of 32 strata; OUT is small."""
    report = reported(source, format, sampling())
    rows = {GATE: 128 * 64, UP: 128 * 64, OUT: 12 * 64, WIDE: 256 * 96}
    assert {layer.name: layer.metrics["sampled_elements"] for layer in report.layers} == rows
    assert sum(asked_bytes) == 4 * sum(rows.values())
    assert report.sample is not None
    assert (report.sample.read_whole, report.sample.sampled_elements) == (1, sum(rows.values()))
    plan = make_plan(open_checkpoint(source), report.options)
    assert sum(bytes_to_read(sampling(), (step,)) for step in plan.quantized) == sum(asked_bytes)


def test_what_is_needed_is_what_is_read(source: Path) -> None:
    plan = make_plan(open_checkpoint(source), Options("mxfp4", analysis=True))
    need, whole = memory_to_sample(sampling(), plan), memory_to_sample(Sampling(1.0), plan)
    assert (need.tensor, whole.tensor) == (WIDE, WIDE)
    assert whole.peak_bytes - need.peak_bytes == 2 * 4 * (5 * 200 * 96 - 256 * 96)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_e4m3", "fp8_e4m3_channel"])
def test_the_numbers_are_those_of_the_rows_read(source: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized alone, the rows give the same counts; GATE and UP share the scale that both their rows have."""
    read: dict[str, list[Any]] = {}
    rows_of = read_rows

    def kept(checkpoint: Checkpoint, info: TensorInfo, firsts: Any, rows: int) -> Any:
        x = rows_of(checkpoint, info, firsts, rows)
        read.setdefault(info.name, []).append(x.reshape(-1, x.shape[-1]))
        return x

    monkeypatch.setattr("mxcli.flows.measure.sampled.read_rows", kept)
    report = reported(source, format, sampling())
    rows = {name: np.concatenate(parts) for name, parts in read.items()}
    shared = float(max(np.abs(rows[GATE]).max(), np.abs(rows[UP]).max()))
    for name, x in rows.items():
        amax = shared if name in (GATE, UP) and resolve(format).format.scales_whole_tensor else None
        stats = cpu.quantize(x, "F32", resolve(format), tensor_amax=amax).stats
        assert stats is not None
        found = metrics(report, name)
        assert (found["saturated"], found["underflowed"]) == (stats.saturated, stats.underflowed)
        assert (found["saturated_blocks"], found["sampled_blocks"]) == (stats.saturated_blocks, stats.blocks)
        assert (found["amax"], found["max_abs_error"]) == (stats.amax, stats.max_abs_error)
        assert found["mse"] == pytest.approx(stats.noise / stats.measured)
        assert found["worst_blocks"][0]["noise"] == stats.worst[0][0]


def test_seed_and_name_decide_and_nothing_else(source: Path, tmp_path: Path) -> None:
    first = reported(source, "nvfp4", sampling())
    assert reported(source, "nvfp4", sampling(), threads=3).layers == first.layers
    assert reported(source, "nvfp4", sampling(seed=1)).layers != first.layers
    tensors = load_file(source)
    save_file({f"z{number}.weight": tensors[OUT] for number in range(3)} | tensors, tmp_path / "more.safetensors")
    more = reported(tmp_path / "more.safetensors", "nvfp4", sampling())
    assert [layer.metrics for layer in more.layers if not layer.name.startswith("z")] == [
        layer.metrics for layer in first.layers
    ]


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_e4m3"])
def test_a_sample_of_everything_is_not_a_sample(source: Path, format: str) -> None:
    whole, sample = reported(source, format), reported(source, format, Sampling(1.0))
    for all_of_it, read in zip(whole.layers, sample.layers, strict=True):
        assert {name: read.metrics[name] for name in METRICS} == dict(all_of_it.metrics)
        assert {value for key, value in read.metrics.items() if key.endswith("_uncertainty")} <= {0.0, None}
    assert whole.sum is not None
    assert sample.sum is not None
    assert {name: sample.sum[name] for name in whole.sum} == dict(whole.sum)
    assert sample.notes == whole.notes
    assert sample.sample is not None
    assert sample.sample.is_everything


def test_the_intervals_hold_what_they_say(tmp_path: Path) -> None:
    """Nineteen of twenty, of a tensor and of all together, one of which is read whole: 120 trials stray by 7."""
    save_file({GATE: values(640, 64, outliers=0), OUT: values(12, 64)}, tmp_path / "x.safetensors")
    whole = reported(tmp_path / "x.safetensors", "mxfp4", rules=Rules(scale_rounding="floor"))
    assert whole.sum is not None
    names = ("sqnr_db", "mse", "relative_error", "saturated_percent", "underflowed_percent", "bias", "binades_used")
    held = dict.fromkeys(names, 0)
    for seed in range(120):
        sample = reported(
            tmp_path / "x.safetensors", "mxfp4", sampling(0.25, seed), rules=Rules(scale_rounding="floor")
        )
        assert sample.sum is not None
        for of_whole, of_sample in ((whole.sum, sample.sum), (metrics(whole, GATE), metrics(sample, GATE))):
            for name in names:
                unsure = of_sample[f"{name}_uncertainty"]
                held[name] += abs(of_sample[name] - of_whole[name]) <= unsure  # type: ignore[operator]
    assert all(0.89 <= count / 240 <= 0.99 for count in held.values()), held


def test_an_interval_shrinks_as_more_is_read(source: Path) -> None:
    unsure = [
        metrics(reported(source, "mxfp4", sampling(fraction)), WIDE)["sqnr_db_uncertainty"]
        for fraction in (0.1, 0.4, 0.9)
    ]
    assert unsure[0] > unsure[1] > unsure[2] > 0


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4_2d", "e2m1:e8m0:24x8"])
@pytest.mark.parametrize("axis", [None, "column"])
def test_worst_blocks_are_where_the_report_says(source: Path, format: str, axis: str | None) -> None:
    """In both directions, and where blocks do not fill the matrices of a tensor: their noise is that of that place."""
    whole, sample = (reported(source, format, asked, axis=axis) for asked in (None, sampling(0.3)))
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, whole.options)
    seen = 0
    for step, layer in zip(plan.quantized, sample.layers, strict=True):
        x = load_file(source)[layer.name]
        turned = np.ascontiguousarray(np.swapaxes(x, -1, -2)) if axis else x
        assert step.scheme is not None
        rows, columns = step.scheme.format.block
        amax = max(metrics(sample, name)["amax"] for name in ((GATE, UP) if step.group else (layer.name,)))
        made = cpu.quantize(turned, "F32", step.scheme, tensor_amax=amax, per_block=True)
        assert made.per_block is not None
        noise = made.per_block.noise.reshape(-1, *made.per_block.noise.shape[-2:])
        for place in layer.metrics["worst_blocks"]:  # type: ignore[union-attr]
            at = place["index"], place["row"] // (rows or 1), place["column"] // (columns or 1)  # type: ignore[index]
            assert noise[at] == pytest.approx(place["noise"])  # type: ignore[index]
            seen += 1
    assert seen > 3 * 8
    assert sample.sample is not None
    assert not sample.sample.is_everything


def test_column_blocks_are_sampled_in_whole_blocks(source: Path) -> None:
    """GATE has 512 rows of blocks of 32: 16 units, so all is read; of blocks of 8 a quarter is."""
    assert metrics(reported(source, "mxfp4", sampling(), axis="column"), GATE)["sampled_elements"] == 512 * 64
    eights = metrics(reported(source, "e2m1:e8m0:1x8", sampling(), axis="column"), GATE)
    assert (eights["sampled_elements"], eights["sampled_blocks"]) == (128 * 64, 128 * 8)
    whole = metrics(reported(source, "e2m1:e8m0:1x8", axis="column"), GATE)
    assert abs(eights["sqnr_db"] - whole["sqnr_db"]) < 2 * eights["sqnr_db_uncertainty"]
    channel = reported(source, "fp8_e4m3_channel", sampling(), axis="column")
    assert channel.sample is not None
    assert channel.sample.read_whole == 4


def test_a_block_that_is_the_tensor_has_the_scale_of_the_sample(source: Path) -> None:
    """Groups are scaled as the sample is, so that they add up to it, outliers or not."""
    sample = reported(source, "int8:fp32:tensor", sampling())
    found = metrics(sample, GATE)
    assert (found["blocks"], found["sampled_blocks"], found["bits_per_element"]) == (1, 1, 8 + 32 / (512 * 64))
    # The noise of a uniform grid is about the same everywhere, however small the largest element of a group.
    assert found["mse_uncertainty"] < 0.1 * found["mse"]
    assert sample.sample is not None
    assert sample.sample.tensor_scales == ("int8:fp32:tensor",)
    assert any("follows from the amax of the sample, a lower bound" in note for note in sample.notes)


def test_a_tensor_scale_is_a_lower_bound_and_that_is_said(source: Path) -> None:
    sample, whole = reported(source, "nvfp4", sampling(0.1)), reported(source, "nvfp4")
    assert metrics(sample, WIDE)["amax"] < metrics(whole, WIDE)["amax"]
    assert sample.sample is not None
    assert sample.sample.tensor_scales == ("nvfp4",)
    assert any(
        note.startswith("nvfp4: the tensor scale follows from the amax of the sample, a lower bound")
        for note in sample.notes
    )
    plain = reported(source, "mxfp4", sampling(0.1))
    assert not any("tensor scale" in note for note in plain.notes)
    assert any(note.startswith("Counts, extremes, histograms") for note in plain.notes)
    assert any(note.startswith("1 of 4 tensors are read whole") for note in plain.notes)


def test_what_is_known_from_lengths_is_that_of_the_tensor(source: Path) -> None:
    for format in ("mxfp4", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"):
        whole, sample = reported(source, format), reported(source, format, sampling())
        assert whole.sum is not None
        assert sample.sum is not None
        for name in ("elements", "blocks", "bits_per_element", "binades_available"):
            assert [layer.metrics[name] for layer in sample.layers] == [layer.metrics[name] for layer in whole.layers]
            assert sample.sum[name] == whole.sum[name]


def test_a_comparison_measures_the_same_rows_under_all(source: Path) -> None:
    formats = ["mxfp4", "nvfp4", "fp8_e4m3"]
    comparison = compared(source, formats, sampling())
    for at, format in enumerate(formats):
        report = reported(source, format, sampling(), rules=Rules(comparison.combinations.schemes[at].scale_rule.name))
        assert [layer.metrics[at]["sampled_elements"] for layer in comparison.layers] == [
            layer.metrics["sampled_elements"] for layer in report.layers
        ]
        for layer, alone in zip(comparison.layers, report.layers, strict=True):
            for name in NUMBERS:
                assert layer.metrics[at][name] == pytest.approx(alone.metrics[name]), (layer.name, name)
                key = f"{name}_uncertainty"
                assert layer.metrics[at].get(key) == pytest.approx(alone.metrics.get(key))
    assert comparison.sample is not None
    assert comparison.sample.tensor_scales == ("nvfp4", "fp8_e4m3")
    whole = compared(source, formats, Sampling(1.0))
    assert [{name: each[name] for name in NUMBERS} for each in whole.layers[0].metrics] == [
        dict(each) for each in compared(source, formats).layers[0].metrics
    ]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    x = values(512, 64)
    x[::2] = np.nan
    save_file({GATE: x}, tmp_path / "x.safetensors")
    with pytest.raises(RefusedError, match=r"of 8,192 values of its sample are NaN or infinite\. Use --nonfinite"):
        reported(tmp_path / "x.safetensors", "mxfp4", sampling(), rules=Rules(nonfinite="error"))
    found = metrics(reported(tmp_path / "x.safetensors", "fp8_e4m3", sampling()), GATE)
    assert (found["sqnr_db"], found["sqnr_db_uncertainty"]) == (None, None)
    assert found["nonfinite"] > 3000


def test_a_sample_of_zeros_is_not_a_tensor_of_zeros(tmp_path: Path) -> None:
    save_file({GATE: np.zeros((512, 64), np.float32)}, tmp_path / "x.safetensors")
    assert any("of zeros only" in note for note in reported(tmp_path / "x.safetensors", "mxfp4").notes)
    sample = reported(tmp_path / "x.safetensors", "mxfp4", sampling())
    assert not any("of zeros only" in note for note in sample.notes)


def test_what_must_be_decoded_is_read_whole(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", weight=values(512, 64))
    report = reported(tmp_path / "x.npz", "mxfp4", sampling())
    assert report.sample is not None
    assert report.sample.is_everything


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_every_type_is_sampled(tmp_path: Path, dtype: str) -> None:
    from raw_checkpoint import safetensors_bytes

    x = values(512, 64)
    kept = {
        "F16": lambda: x.astype("<f2"),
        "BF16": lambda: (x.view("<u4") >> 16).astype("<u2"),
        "F64": lambda: x.astype("<f8"),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({GATE: (dtype, [512, 64], kept[dtype]().tobytes())}, {"format": "pt"}))
    for format in ("nvfp4", "fp8_e4m3"):
        whole, found = (metrics(reported(path, format, asked), GATE) for asked in (None, sampling()))
        assert found["sampled_elements"] < found["elements"]
        assert math.isclose(found["sqnr_db"], whole["sqnr_db"], abs_tol=4 * found["sqnr_db_uncertainty"])
