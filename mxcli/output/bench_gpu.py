"""A GPU benchmark as a table and as records."""

from __future__ import annotations

from mxcli.flows.bench.gpu import GpuReport, GpuRow
from mxcli.output.bench import TIMING_NAMES, equal_cell, flat_records, rate_cells, settings_record, spread_percent
from mxcli.output.numbers import ABSENT, significant
from mxcli.output.screen import Screen
from mxcli.output.table import Column, aligned

_COLUMNS = (
    Column("what", right=False),
    Column("format", right=False),
    Column("scale\nrounding", right=False),
    Column("work", right=False),
    Column("G elements/s"),
    Column("GB/s"),
    Column("% of\nlimit"),
    Column("spread %\n(p10..p90)", drop=1),
    Column("bytes\nequal ours", right=False, drop=2),
)
UNSTABLE_PERCENT = 5.0
RECORD_NAMES = (
    "name",
    "format",
    "scale_rounding",
    "work",
    *TIMING_NAMES,
    "elements_per_second",
    "bytes_per_second",
    "limit_seconds",
    "limit_percent",
    "bytes_equal",
    "problem",
)


def bench_text(report: GpuReport, screen: Screen) -> str:
    """The settings, what was checked, and a row per timed thing."""
    rows, columns = report.shape
    head = [
        f"{report.device}: {report.description}; {report.dtype} {rows}x{columns}, {report.data}",
        f"clocks before {report.clocks[0]}; after {report.clocks[1]}",
        f"medians of {report.rounds} rounds in random order after a warm-up, timed on the device, L2 cache overwritten "
        "before each",
        "limit: this device's copy (of bytes read and written), its reading (where nothing is written), and one more "
        "reading where the tensor's amax comes first",
        f"checked: bytes and counts of {report.checks} recipes are the CPU's",
    ]
    timed = [row for row in report.rows if row.timing]
    unstable = [row for row in timed if spread_percent(row) > UNSTABLE_PERCENT]
    if unstable:
        head.append(f"unstable: {len(unstable)} of {len(timed)} rows spread over more than {UNSTABLE_PERCENT:g} %")
    problems = [f"{row.name} {row.format}: {row.problem}" for row in report.rows if row.problem]
    return "\n".join([*head, "", *aligned(_COLUMNS, [_cells(row) for row in timed], screen), *problems])


def bench_record(report: GpuReport) -> dict[str, object]:
    """The same for JSON: settings and a record per row."""
    return settings_record(report, row_records(report))


def row_records(report: GpuReport) -> list[dict[str, object]]:
    """One flat record per row, with RECORD_NAMES for keys."""
    return flat_records(report.rows, RECORD_NAMES)


def _cells(row: GpuRow) -> list[str]:
    return [
        row.name,
        row.format or ABSENT,
        row.scale_rounding or ABSENT,
        row.work,
        *rate_cells(row),
        significant(row.limit_percent),
        significant(spread_percent(row)),
        equal_cell(row),
    ]
