"""A benchmark as a table and as records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from mxcli.flows.bench.quantize import BenchReport, Row, Timing
from mxcli.output.numbers import ABSENT, significant
from mxcli.output.screen import Screen
from mxcli.output.table import Column, aligned

TIMING_NAMES = ("seconds_median", "seconds_p10", "seconds_p90", "rounds")


class TimedRow(Protocol):
    """A row of a benchmark, a frozen record."""

    @property
    def timing(self) -> Timing | None:
        """How long it took; None where it could not be timed."""

    @property
    def elements_per_second(self) -> float | None:
        """From the median."""

    @property
    def bytes_per_second(self) -> float | None:
        """From the median."""

    @property
    def bytes_equal(self) -> bool | None:
        """Whether another package's bytes are ours."""


def settings_record(report: Any, rows: list[dict[str, object]]) -> dict[str, object]:
    """A benchmark for JSON: its settings and checks as they are, and its rows as records."""
    return {**asdict(report), "rows": rows}


def flat_records(rows: Iterable[Any], names: Sequence[str]) -> list[dict[str, object]]:
    """One flat record per row, with `names` for keys; times under TIMING_NAMES."""
    return [_record(row, names) for row in rows]


def spread_percent(row: TimedRow) -> float:
    """From the 10th to the 90th percentile, against the median."""
    assert row.timing is not None
    return 100.0 * (row.timing.p90 - row.timing.p10) / row.timing.median


def rate_cells(row: TimedRow) -> list[str]:
    """Billions of elements and of bytes a second."""
    rates = (row.elements_per_second, row.bytes_per_second)
    return [significant(None if rate is None else rate / 1e9) for rate in rates]


def equal_cell(row: TimedRow) -> str:
    """Whether bytes are ours, where there was anything to compare."""
    return ABSENT if row.bytes_equal is None else "yes" if row.bytes_equal else "no"


def _record(row: Any, names: Sequence[str]) -> dict[str, object]:
    values = asdict(row)
    timing = values.pop("timing") or {}
    values |= {f"seconds_{name}": timing.get(name) for name in ("median", "p10", "p90")}
    values["rounds"] = timing.get("rounds")
    return {name: values[name] for name in names}


_COLUMNS = (
    Column("what", right=False),
    Column("format", right=False),
    Column("scale\nrounding", right=False),
    Column("threads"),
    Column("statistics", right=False),
    Column("G elements/s"),
    Column("GB/s"),
    Column("% of copy"),
    Column("spread %\n(p10..p90)", drop=1),
    Column("bytes\nequal ours", right=False, drop=2),
)
RECORD_NAMES = (
    "name",
    "format",
    "scale_rounding",
    "threads",
    "statistics",
    *TIMING_NAMES,
    "elements_per_second",
    "bytes_per_second",
    "copy_percent",
    "bytes_equal",
    "problem",
)


def bench_text(report: BenchReport, screen: Screen) -> str:
    """The settings, what was checked, and a row per timed thing."""
    rows, columns = report.shape
    head = [
        f"{report.processor}, kernel on {report.instruction_set}; {report.dtype} {rows}x{columns}, {report.data}",
        f"medians of {report.rounds} interleaved rounds after a warm-up; outputs reuse their memory; bytes are input "
        "read plus output written",
    ]
    checks = [f"checked: {check}" for check in report.checks]
    problems = [f"{row.name} {row.format}: {row.problem}" for row in report.rows if row.problem]
    timed = [_cells(row) for row in report.rows if row.timing]
    return "\n".join([*head, *checks, "", *aligned(_COLUMNS, timed, screen), *problems])


def bench_record(report: BenchReport) -> dict[str, object]:
    """The same for JSON: settings, checks, and a record per row."""
    return settings_record(report, row_records(report))


def row_records(report: BenchReport) -> list[dict[str, object]]:
    """One flat record per row, with RECORD_NAMES for keys."""
    return flat_records(report.rows, RECORD_NAMES)


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.format or ABSENT,
        row.scale_rounding or ABSENT,
        str(row.threads),
        "yes" if row.statistics else "no",
        *rate_cells(row),
        significant(row.copy_percent),
        significant(spread_percent(row)),
        equal_cell(row),
    ]
