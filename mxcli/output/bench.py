"""Benchmarks of `quantize`, on the CPU and on GPUs, as a table and as records."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from mxcli.output.fields import COUNT, FLAG, NUMBER, TEXT, TEXT_OR_NULL, Field, Fields, attributes, or_null
from mxcli.output.numbers import significant
from mxcli.output.screen import Screen
from mxcli.output.table import aligned

if TYPE_CHECKING:
    from mxcli.flows.bench.gpu import GpuReport, GpuRow
    from mxcli.flows.bench.quantize import BenchReport, Row, Timing

UNSTABLE_PERCENT = 5.0
"""A row of a GPU benchmark is unstable if its times spread over more."""


def spread_percent(timing: Timing) -> float:
    """Return the range from the 10th to the 90th percentile relative to the median."""
    return 100.0 * (timing.p90 - timing.p10) / timing.median


def _billions(rate: float | None) -> str:
    return significant(None if rate is None else rate / 1e9)


def _time(name: str, row: Any) -> float | int | None:
    return None if row.timing is None else getattr(row.timing, name)


TIMES: Fields[Any] = Fields(
    *(Field(f"seconds_{name}", partial(_time, name), NUMBER) for name in ("median", "p10", "p90")),
    Field("rounds", partial(_time, "rounds"), or_null(COUNT)),
)
"""Seconds per call of a row; null if it was not timed."""
SPREAD: Field[Any] = Field(
    "spread",
    lambda row: None if row.timing is None else spread_percent(row.timing),
    title="spread %\n(p10..p90)",
    drop=1,
)
_NAMES: Fields[Any] = Fields(
    Field("name", lambda row: row.name, TEXT, "what", right=False),
    Field("format", lambda row: row.format, TEXT_OR_NULL, "format", right=False),
    Field("scale_rounding", lambda row: row.scale_rounding, TEXT_OR_NULL, "scale\nrounding", right=False),
)
_RATES: Fields[Any] = Fields(
    TIMES,
    Field("elements_per_second", lambda row: row.elements_per_second, NUMBER, "G elements/s",
          cell=lambda row: _billions(row.elements_per_second)),
    Field("bytes_per_second", lambda row: row.bytes_per_second, NUMBER, "GB/s",
          cell=lambda row: _billions(row.bytes_per_second)),
)  # fmt: skip
_CHECKED: Fields[Any] = Fields(
    SPREAD,
    Field("bytes_equal", lambda row: row.bytes_equal, or_null(FLAG), "bytes\nequal ours", right=False, drop=2),
    Field("problem", lambda row: row.problem, TEXT_OR_NULL),
)
ROW: Fields[Row] = Fields(
    _NAMES,
    Field("threads", lambda row: row.threads, COUNT, "threads"),
    Field("statistics", lambda row: row.statistics, FLAG, "statistics", right=False),
    _RATES,
    Field("copy_percent", lambda row: row.copy_percent, NUMBER, "% of copy"),
    _CHECKED,
)
GPU_ROW: Fields[GpuRow] = Fields(
    _NAMES,
    Field("work", lambda row: row.work, TEXT, "work", right=False),
    _RATES,
    *attributes(NUMBER, "limit_seconds"),
    Field("limit_percent", lambda row: row.limit_percent, NUMBER, "% of\nlimit"),
    _CHECKED,
)
RECORD_NAMES, GPU_RECORD_NAMES = tuple(ROW.names), tuple(GPU_ROW.names)
"""The keys of rows, on the CPU and on GPUs."""


def bench_text(report: BenchReport | GpuReport, screen: Screen) -> str:
    """Return the settings, the checks, and a row per case timed."""
    from mxcli.flows.bench.quantize import BenchReport

    fields = _fields(report)
    head = _head(report) if isinstance(report, BenchReport) else _gpu_head(report)
    rows = [fields.cells(row) for row in report.rows if row.timing]
    problems = [f"{row.name} {row.format}: {row.problem}" for row in report.rows if row.problem]
    return "\n".join([*head, "", *aligned(fields.columns(), rows, screen), *problems])


def bench_record(report: BenchReport | GpuReport) -> dict[str, object]:
    """Return the settings and checks, and a record per row."""
    return {**asdict(report), "rows": row_records(report)}


def row_records(report: BenchReport | GpuReport) -> list[dict[str, object]]:
    """Return a flat record per row, with the keys RECORD_NAMES or GPU_RECORD_NAMES."""
    return [*map(_fields(report).record, report.rows)]


def _fields(report: BenchReport | GpuReport) -> Fields[Any]:
    from mxcli.flows.bench.quantize import BenchReport

    return ROW if isinstance(report, BenchReport) else GPU_ROW


def _head(report: BenchReport) -> list[str]:
    rows, columns = report.shape
    return [
        f"{report.processor}, kernel on {report.instruction_set}; {report.dtype} {rows}x{columns}, {report.data}",
        f"medians of {report.rounds} interleaved rounds after a warm-up; outputs reuse their memory; bytes are input "
        "read plus output written",
        *(f"checked: {check}" for check in report.checks),
    ]


def _gpu_head(report: GpuReport) -> list[str]:
    rows, columns = report.shape
    spreads = [spread_percent(row.timing) for row in report.rows if row.timing]
    unstable = sum(spread > UNSTABLE_PERCENT for spread in spreads)
    return [
        f"{report.device}: {report.description}; {report.dtype} {rows}x{columns}, {report.data}",
        f"clocks before {report.clocks[0]}; after {report.clocks[1]}",
        f"medians of {report.rounds} rounds in random order after a warm-up, timed on the device, L2 cache overwritten "
        "before each",
        "limit: this device's copy (of bytes read and written), its reading (where nothing is written), and one more "
        "reading where the tensor's amax comes first",
        f"checked: bytes and counts of {report.checks} schemes equal the CPU's",
        *(
            [f"unstable: {unstable} of {len(spreads)} rows spread over more than {UNSTABLE_PERCENT:g} %"]
            if unstable
            else []
        ),
    ]
