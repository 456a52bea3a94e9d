"""A benchmark as a table and as records."""

from __future__ import annotations

from mxcli.flows.bench import BenchReport, Row
from mxcli.output.numbers import ABSENT, significant
from mxcli.output.screen import Screen
from mxcli.output.table import Column, aligned
from mxcli.output.timed import (
    TIMING_NAMES,
    equal_cell,
    flat_records,
    rate_cells,
    settings_record,
    spread_percent,
)

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
