"""The benchmark of a GPU, on the device that tests have: what it checks, what it says; not how fast."""

from __future__ import annotations

import pytest
from command_line import strict_json
from processor_device import TimedProcessorDevice
from same_results import needs_cxx

from mxcli.errors import LimitError, UsageError
from mxcli.flows.bench import gpu as bench_gpu
from mxcli.flows.bench.gpu import CODES, COPY, READ, WORK, GpuReport, recipes_to_time, run_gpu_bench
from mxcli.flows.bench.quantize import named_peers
from mxcli.numerics.scheme import Rules, resolve
from mxcli.output.bench import GPU_RECORD_NAMES, bench_record, bench_text, row_records
from mxcli.output.export import json_text
from mxcli.output.screen import Screen

pytestmark = needs_cxx


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32768 values, so that a tensor of 256 x 256 repeats one; a cache of a kilobyte."""
    monkeypatch.setattr(bench_gpu, "TILE", 1 << 15)
    monkeypatch.setattr(bench_gpu, "FLUSH_BYTES", 1 << 10)


def report(*names: str, **options: object) -> GpuReport:
    recipes = [resolve(name) for name in names]
    return run_gpu_bench(TimedProcessorDevice(), recipes, size=256, rounds=2, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_row_for_the_copy_the_reading_and_every_kind_of_work() -> None:
    found = report("mxfp8", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128")
    assert [(row.name, row.format, row.work) for row in found.rows[:2]] == [(COPY, None, COPY), (READ, None, READ)]
    assert [(row.format, row.scale_rounding, row.work) for row in found.rows[2:6]] == [
        ("mxfp8_e4m3", "rceil", work) for work in WORK
    ]
    assert len(found.rows) == 2 + 4 * len(WORK)
    assert (found.checks, found.shape, found.rounds, found.device) == (4, (256, 256), 2, "cuda:0")


def test_rates_and_limits_follow_from_the_medians() -> None:
    found = report("mxfp8", "nvfp4", work=(CODES,))
    copy, read, mxfp8, nvfp4 = found.rows
    tensor, copied, reading = 256 * 256 * 2, copy.bytes_per_second, read.bytes_per_second
    assert copy.timing and read.timing and mxfp8.timing and nvfp4.timing and copied and reading  # noqa: PT018
    assert copied == 2 * tensor / copy.timing.median
    assert reading == tensor / read.timing.median
    moved = tensor + 256 * 256 + 256 * 8
    assert mxfp8.bytes_per_second == moved / mxfp8.timing.median
    assert mxfp8.limit_seconds == moved / copied
    assert mxfp8.elements_per_second == 256 * 256 / mxfp8.timing.median
    # The tensor's amax is one reading more.
    assert nvfp4.limit_seconds == (tensor + 256 * 128 + 256 * 16) / copied + tensor / reading
    assert nvfp4.limit_percent == 100 * nvfp4.limit_seconds / nvfp4.timing.median


def test_other_bytes_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel under another rule than the CPU's."""
    other = resolve("mxfp8", Rules(scale_rounding="floor"))
    real = bench_gpu.cpu.quantize
    monkeypatch.setattr(bench_gpu.cpu, "quantize", lambda x, dtype, recipe, **options: real(x, dtype, other, **options))
    with pytest.raises(LimitError, match=r"mxfp8_e4m3 rceil \(codes\): the GPU's bytes are not the CPU's"):
        report("mxfp8")


def test_other_counts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "_repeats", lambda *_: False)
    with pytest.raises(LimitError, match="mxfp4_e2m1 rceil: the GPU's counts are not the CPU's"):
        report("mxfp4")


def test_a_missing_peer_stays_with_its_reason() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch has a GPU here")
    found = report("mxfp8", work=(CODES,), peers=named_peers(["torchao"]))
    assert [(row.name, row.format) for row in found.rows[3:]] == [
        ("torchao", "mxfp8_e4m3"),
        ("torchao", "mxfp4_e2m1"),
        ("torchao", "nvfp4"),
    ]
    assert "has no CUDA here" in str(found.rows[3].problem)
    assert "torchao mxfp8_e4m3: torch" in bench_text(found, Screen(width=120, unicode=True, color=False))


@pytest.mark.parametrize(("size", "rounds"), [(128, 1), (1000, 1), (256, 0)])
def test_sizes_and_rounds_that_mean_nothing(size: int, rounds: int) -> None:
    with pytest.raises(UsageError):
        run_gpu_bench(TimedProcessorDevice(), [resolve("mxfp8")], size=size, rounds=rounds)


def test_every_rule_of_every_format_unless_named() -> None:
    every = recipes_to_time([], None, None)
    assert len(every) == len({(recipe.format.name, recipe.scale_rule.name) for recipe in every}) > 100
    two = recipes_to_time(["mxfp8", "nvfp4_2d"], None, None)
    assert [recipe.scale_rule.name for recipe in two if recipe.format.name == "mxfp8_e4m3"] == [
        *("floor", "ceil", "rceil", "even", "nearest", "ct-even1", "best")
    ]
    assert {recipe.format.name for recipe in recipes_to_time([], "te", None)} == {"nvfp4", "nvfp4_2d"}
    assert [recipe.scale_rule.name for recipe in recipes_to_time(["mxfp8", "mxfp4"], "floor", None)] == ["floor"] * 2
    with pytest.raises(UsageError, match="unknown scale rounding 'flor'"):
        recipes_to_time([], "flor", None)


def test_the_forms_of_a_report() -> None:
    found = report("mxfp8", work=(CODES,))
    record = strict_json(json_text("bench.quantize", bench_record(found)))
    assert record["schema"] == "mxcli.bench.quantize/1"
    assert (record["device"], record["clocks"]) == ("cuda:0", ["not known", "not known"])
    assert [tuple(row) for row in row_records(found)] == [GPU_RECORD_NAMES] * 3
    lines = bench_text(found, Screen(width=120, unicode=True, color=False)).splitlines()
    assert lines[0].startswith("cuda:0: this processor, in place of a GPU; BF16 256x256")
    assert lines[4] == "checked: bytes and counts of 1 schemes equal the CPU's"
    assert [line.split()[0] for line in lines[-3:]] == ["copy", "read", "mxcli"]
