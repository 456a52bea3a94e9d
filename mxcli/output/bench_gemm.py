"""Timed products as a table, as records, as a picture, and beside an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mxcli.errors import InputError, LimitError, printable
from mxcli.files.plain import read_json_object
from mxcli.flows.bench.gemm import GemmReport, GemmRow
from mxcli.flows.bench.quantize import Timing
from mxcli.output.numbers import ABSENT, counted, significant
from mxcli.output.screen import Screen, folded_lines
from mxcli.output.table import Column, aligned

_COLUMNS = (
    Column("product", right=False),
    Column("m x n x k", right=False),
    Column("pass", right=False, drop=5),
    Column("TFLOP/s"),
    Column("{reference}"),
    Column("SQNR\ndB"),
    Column("time\nms", drop=1),
    Column("spread %\n(p10..p90)", drop=3),
    Column("making A\nms", drop=2),
    Column("not exact", drop=4),
    Column("% of\npeak", drop=6),
)
_ALWAYS = 6
"""Columns that are there even when nothing is in them."""
RECORD_NAMES = (
    "kernel",
    "format_a",
    "format_b",
    "m",
    "n",
    "k",
    "pass",
    "layer",
    "layers",
    "tflops",
    "speedup",
    "sqnr_db",
    "deviation",
    "inexact",
    "seconds_median",
    "seconds_p10",
    "seconds_p90",
    "rounds",
    "drift_percent",
    "quantize_seconds_median",
    "includes_quantize",
    "peak_percent",
    "problem",
)
EVERY_TIME = ("kernel", "m", "n", "k", "pass", "includes_quantize")
"""Keys by which rows of two runs are the same."""


def gemm_text(report: GemmReport, screen: Screen) -> str:
    """What was measured and how, a row per product that was computed, and why the others were not."""
    head = [
        f"{report.device}: {report.description}",
        f"operands: {report.data}; {report.own_data}",
        f"each product was first compared with that of its own operands; medians of {report.rounds} rounds in random "
        "order after a warm-up, caches overwritten before each call",
    ]
    head += [f"peak: {report.peaks}"] if report.peaks else []
    head += [f"clocks before: {report.clocks[0]}; after: {report.clocks[1]}"] if report.clocks else []
    computed = [_cells(row) for row in report.rows if row.problem is None]
    said = [at for at in range(len(_COLUMNS)) if at < _ALWAYS or any(cells[at] != ABSENT for cells in computed)]
    titles = [column.title.format(reference=f"{report.reference}\n= 1") for column in _COLUMNS]
    columns = [replace(_COLUMNS[at], title=titles[at]) for at in said]
    computed = [[cells[at] for at in said] for cells in computed]
    lines = [line for text in head for line in folded_lines(text, screen)]
    lines += ["", *aligned(columns, computed, screen)]
    problems = _problems(report.rows)
    if problems:
        lines += ["", *(line for text in problems for line in folded_lines(text, screen, indent="  "))]
    return "\n".join(lines)


def gemm_record(report: GemmReport) -> dict[str, object]:
    """The same for JSON."""
    settings = asdict(report)
    return {**settings, "rows": row_records(report)}


def row_records(report: GemmReport) -> list[dict[str, object]]:
    """One flat record per row, with RECORD_NAMES for keys."""
    return [_record(row) for row in report.rows]


Earlier = Mapping[tuple[object, ...], Mapping[str, object]]


def read_earlier(file: Path) -> Earlier:
    """The rows of an earlier record by what they are of; raises InputError for a file that is no such record."""
    try:
        content = read_json_object(file)
    except OSError as error:
        raise InputError(f"{printable(file)}: cannot be read: {printable(error.strerror)}.") from error
    rows = content.get("rows")
    if content.get("schema") != "mxcli.bench.gemm/1" or not isinstance(rows, list):
        raise InputError(f"{printable(file)}: no record of `mxcli bench gemm --json`.")
    return {tuple(row.get(key) for key in EVERY_TIME): row for row in rows if isinstance(row, Mapping)}


def compare_with(report: GemmReport, known: Earlier, earlier: str, threshold_percent: float) -> list[str]:
    """A line for every product that an earlier record has too. Raises InputError where it has none of them, and
    LimitError naming the products that are slower by more than the threshold."""
    lines, slower = [], []
    for record in row_records(report):
        before = known.get(tuple(record[key] for key in EVERY_TIME))
        now, then = record["tflops"], before.get("tflops") if before else None
        if not isinstance(now, float) or not isinstance(then, int | float) or not then:
            continue
        change = 100 * (now / then - 1)
        name = f"{record['kernel']} {record['m']}x{record['n']}x{record['k']}"
        lines.append(f"{name}: {significant(then)} TFLOP/s before, {significant(now)} now ({change:+.1f} %)")
        if change < -threshold_percent:
            slower.append(f"{name} by {-change:.1f} %")
    if not lines:
        raise InputError(f"{printable(earlier)}: holds none of these products.")
    if slower:
        raise LimitError(
            f"slower than in {printable(earlier)} by more than {threshold_percent:g} %: {', '.join(slower)}."
        )
    return lines


def plot_rates(report: GemmReport, file: Path) -> None:
    """TFLOP/s against the number of operations, a line for each product, as PNG or SVG by the file's ending."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row.kernel for row in report.rows):
        points = sorted(
            (row.shape.operations, row.tflops) for row in report.rows if row.kernel == name and row.tflops is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations (2 m n k)", ylabel="TFLOP/s", title=report.device)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=144)


def _problems(rows: Sequence[GemmRow]) -> list[str]:
    """Why products were not computed: a line for each product and reason, with the shapes where they matter."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.problem is not None:
            shapes.setdefault((row.kernel, row.problem), []).append(row.shape.text)
    everywhere = len({row.shape.text for row in rows})
    return [
        f"{kernel}: {problem}" + ("" if len(set(texts)) == everywhere else f" ({', '.join(dict.fromkeys(texts))})")
        for (kernel, problem), texts in shapes.items()
    ]


def _cells(row: GemmRow) -> list[str]:
    shape = row.shape
    times = f" ({counted(shape.layers, 'layer')})" if shape.layers > 1 else ""
    return [
        row.kernel,
        shape.text,
        f"{shape.passes}{times}",
        significant(row.tflops),
        significant(row.speedup),
        significant(row.sqnr_db),
        _milliseconds(row.timing),
        significant(None if row.timing is None else 100 * (row.timing.p90 - row.timing.p10) / row.timing.median),
        _milliseconds(row.quantize),
        ABSENT if row.inexact is None else f"{row.inexact:,}",
        significant(row.peak_percent),
    ]


def _milliseconds(timing: Timing | None) -> str:
    return significant(None if timing is None else 1e3 * timing.median)


def _record(row: GemmRow) -> dict[str, object]:
    shape, timing = row.shape, row.timing
    values: dict[str, object] = {
        **{name: getattr(row, name) for name in RECORD_NAMES if hasattr(row, name)},
        "format_a": row.formats[0] if row.formats else "bf16",
        "format_b": row.formats[1] if row.formats else "bf16",
        **{name: getattr(shape, name) for name in ("m", "n", "k", "layer", "layers")},
        "pass": shape.passes,
        **{f"seconds_{name}": getattr(timing, name) if timing else None for name in ("median", "p10", "p90")},
        "rounds": timing.rounds if timing else None,
        "quantize_seconds_median": row.quantize.median if row.quantize else None,
    }
    return {name: values[name] for name in RECORD_NAMES}
