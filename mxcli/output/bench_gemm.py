"""Benchmarks of matrix products as a table, as records, as a picture, and compared with an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mxcli.atomic import whole_file
from mxcli.errors import InputError, LimitError, printable
from mxcli.output.bench import SPREAD, TIMES
from mxcli.output.fields import COUNT, FLAG, NUMBER, TEXT, TEXT_OR_NULL, Field, Fields
from mxcli.output.numbers import ABSENT, counted, significant
from mxcli.output.screen import Screen, folded_lines
from mxcli.output.table import aligned

if TYPE_CHECKING:
    from mxcli.flows.bench.gemm import GemmReport, GemmRow
    from mxcli.flows.bench.quantize import Timing


def _milliseconds(timing: Timing | None) -> str:
    return significant(None if timing is None else 1e3 * timing.median)


def _passes(row: GemmRow) -> str:
    layers = row.shape.layers
    return f"{row.shape.passes} ({counted(layers, 'layer')})" if layers > 1 else row.shape.passes


GEMM_ROW: Fields[GemmRow] = Fields(
    Field("kernel", lambda row: row.kernel, TEXT, "product", right=False),
    Field("format_a", lambda row: row.formats[0] if row.formats else "bf16", TEXT),
    Field("format_b", lambda row: row.formats[1] if row.formats else "bf16", TEXT),
    Field("m", lambda row: row.shape.m, COUNT),
    Field("n", lambda row: row.shape.n, COUNT),
    Field("k", lambda row: row.shape.k, COUNT),
    Field("shape", lambda row: row.shape.text, title="m x n x k", right=False),
    Field("pass", lambda row: row.shape.passes, TEXT, "pass", cell=_passes, right=False, drop=5),
    Field("layer", lambda row: row.shape.layer, TEXT_OR_NULL),
    Field("layers", lambda row: row.shape.layers, COUNT),
    Field("tflops", lambda row: row.tflops, NUMBER, "TFLOP/s"),
    Field("speedup", lambda row: row.speedup, NUMBER, "speedup"),
    Field("sqnr_db", lambda row: row.sqnr_db, NUMBER, "SQNR\ndB"),
    Field("deviation", lambda row: row.deviation, NUMBER),
    Field("inexact", lambda row: row.inexact, COUNT, "not exact", drop=4),
    TIMES.only("seconds_median"),
    Field("time", lambda row: row.timing, title="time\nms", cell=lambda row: _milliseconds(row.timing), drop=1),
    SPREAD.at(drop=3),
    TIMES.without("seconds_median"),
    Field("drift_percent", lambda row: row.drift_percent, NUMBER),
    Field("quantize_seconds_median", lambda row: row.quantize.median if row.quantize else None, NUMBER,
          "making A\nms", cell=lambda row: _milliseconds(row.quantize), drop=2),
    Field("includes_quantize", lambda row: row.includes_quantize, FLAG),
    Field("peak_percent", lambda row: row.peak_percent, NUMBER, "% of\npeak", drop=6),
    Field("problem", lambda row: row.problem, TEXT_OR_NULL),
)  # fmt: skip
RECORD_NAMES = tuple(GEMM_ROW.names)
_ALWAYS = ("kernel", "shape", "pass", "tflops", "speedup", "sqnr_db")
"""Columns that are shown even if they are empty."""
_IF_ANY = ("time", "spread", "quantize_seconds_median", "inexact", "peak_percent")
EVERY_TIME = ("kernel", "m", "n", "k", "pass", "includes_quantize")
"""The keys that identify a row in another run."""


def gemm_text(report: GemmReport, screen: Screen) -> str:
    """Return the settings, a row per product that was computed, and the reasons why others were not."""
    head = [
        f"{report.device}: {report.description}",
        f"operands: {report.data}; {report.own_data}",
        f"each result was first checked against an exact product of the same quantized operands; medians of "
        f"{report.rounds} rounds in random order after a warm-up, caches overwritten before each call",
    ]
    head += [f"peak: {report.peaks}"] if report.peaks else []
    head += [f"clocks before: {report.clocks[0]}; after: {report.clocks[1]}"] if report.clocks else []
    computed = [row for row in report.rows if row.problem is None]
    some = [key for key in _IF_ANY if any(GEMM_ROW[key].text(row) != ABSENT for row in computed)]
    fields = Fields(
        *(field.at(title=f"{report.reference}\n= 1") if field.key == "speedup" else field for field in GEMM_ROW)
    ).only(*_ALWAYS, *some)
    lines = [line for text in head for line in folded_lines(text, screen)]
    lines += ["", *aligned(fields.columns(), [fields.cells(row) for row in computed], screen)]
    problems = _problems(report.rows)
    if problems:
        lines += ["", *(line for text in problems for line in folded_lines(text, screen, indent="  "))]
    return "\n".join(lines)


def gemm_record(report: GemmReport) -> dict[str, object]:
    """Return the settings, and a record per row."""
    return {**asdict(report), "rows": row_records(report)}


def row_records(report: GemmReport) -> list[dict[str, object]]:
    """Return a flat record per row, with the keys RECORD_NAMES."""
    return [*map(GEMM_ROW.record, report.rows)]


Earlier = Mapping[tuple[object, ...], Mapping[str, object]]


def read_earlier(file: Path) -> Earlier:
    """Read the rows of an earlier record, by the values of EVERY_TIME. Raises InputError for any other file."""
    from mxcli.files.plain import read_json_object

    try:
        content = read_json_object(file)
    except OSError as error:
        raise InputError(f"{printable(file)}: cannot be read: {printable(error.strerror)}.") from error
    rows = content.get("rows")
    if content.get("schema") != "mxcli.bench.gemm/1" or not isinstance(rows, list):
        raise InputError(f"{printable(file)}: not a record of `mxcli bench gemm --json`.")
    return {tuple(row.get(key) for key in EVERY_TIME): row for row in rows if isinstance(row, Mapping)}


def compare_with(report: GemmReport, known: Earlier, earlier: str, threshold_percent: float) -> list[str]:
    """Return a line for every product that an earlier record has too. Raises InputError if it has none of them, and
    LimitError with the products that are slower by more than the threshold."""
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
    """Plot TFLOP/s against the number of operations, a line for each product, as PNG or SVG by the file's ending."""
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
    with whole_file(file, replace=True) as drawn:
        figure.savefig(drawn, format=file.suffix[1:], dpi=144)


def _problems(rows: Sequence[GemmRow]) -> list[str]:
    """Return the reasons why products were not computed, each with the shapes unless it is that of all."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.problem is not None:
            shapes.setdefault((row.kernel, row.problem), []).append(row.shape.text)
    everywhere = len({row.shape.text for row in rows})
    return [
        f"{kernel}: {problem}" + ("" if len(set(texts)) == everywhere else f" ({', '.join(dict.fromkeys(texts))})")
        for (kernel, problem), texts in shapes.items()
    ]
