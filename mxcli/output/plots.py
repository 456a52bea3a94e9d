"""Charts as PNG and SVG files through matplotlib; the same charts have the same bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.output.charts import (
    DRAWABLE,
    LIGHT,
    SERIES_LIGHT,
    BarChart,
    BlockChart,
    Chart,
    HeatMap,
    Histogram,
    LineChart,
    RangeChart,
)
from mxcli.output.numbers import significant
from mxcli.output.svg import fitted, signed, sparse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = ("png", "svg")
DPI = 144
MARKERS = ("o", "s", "D", "^", "v", "x", "+", "o")
"""As `mxcli.output.svg.MARKERS`."""
MARKED_LAYERS, LABELLED_CELLS, LABELLED_BINS = 64, 20, 14
LABEL = 240.0
"""The widest label, in the pixels of `mxcli.output.svg`."""
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "mxcli",
    "text.parse_math": False,
    "font.size": 9.0,
    "axes.edgecolor": LIGHT["rule"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "axes.titlepad": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LIGHT["grid"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": LIGHT["soft"],
}


def write_plots(charts: Iterable[Chart], folder: Path) -> None:
    """Two files for each chart in a folder that exists; each appears whole, and replaces what has its name."""
    import matplotlib.style

    for chart in charts:
        with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
            # Names may hold characters that the font lacks; a box stands for them.
            warnings.filterwarnings("ignore", "Glyph")
            figure = DRAW[type(chart)](chart)
            for form in FORMS:
                file = folder / f"{chart.key}.{form}"
                partial = file.with_name(file.name + ".partial")
                try:
                    figure.savefig(
                        partial, format=form, dpi=DPI, bbox_inches="tight", pad_inches=0.15,
                        metadata={"Date": None} if form == "svg" else {"Software": None},
                    )  # fmt: skip
                    partial.replace(file)
                finally:
                    partial.unlink(missing_ok=True)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _axes(chart: Chart, width: float, height: float) -> tuple[Figure, Axes]:
    figure = _figure(width, height)
    axes = figure.add_subplot()
    axes.set_title(chart.title)
    return figure, axes


def _legend(axes: Axes, handles: Sequence[Any], names: Sequence[str]) -> None:
    # A label that begins with an underscore would be left out.
    axes.legend(handles, [f" {fitted(name, LABEL)}" for name in names], loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _lines(chart: LineChart) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(chart, 10, 3.8)
    marked = len({x for each in chart.lines for x, _ in each.points}) <= MARKED_LAYERS
    for each in chart.others:
        axes.plot(*_points(each.points), color=LIGHT["context"], linewidth=0.8, alpha=0.5)
    handles = []
    for at, each in enumerate(chart.lines):
        face = "white" if at == len(MARKERS) - 1 else SERIES_LIGHT[at]
        style: dict[str, Any] = {"marker": MARKERS[at], "markersize": 5, "markerfacecolor": face} if marked else {}
        handles += axes.plot(*_points(each.points), color=SERIES_LIGHT[at], linewidth=1.4, **style)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, handles, [each.name for each in chart.lines])
    return figure


def _points(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [float("nan") if y is None else y for _, y in points]


def _heat(chart: HeatMap) -> Figure:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    few = len(chart.columns) <= LABELLED_CELLS
    down, across = (1, len(chart.panels)) if few else (len(chart.panels), 1)
    figure = _figure(11, (0.27 * len(chart.rows) + 1.3) * down)
    figure.suptitle(chart.title, x=0.01, ha="left", fontweight="bold", fontsize=10.5)
    for at, (panel, axes) in enumerate(
        zip(chart.panels, figure.subplots(down, across, squeeze=False).flat, strict=True)
    ):
        values = np.array(panel.values, dtype=float)
        shades = LinearSegmentedColormap.from_list(panel.what, [LIGHT["sunken"], LIGHT[panel.what]])
        image = axes.imshow(values, cmap=shades, vmin=0, vmax=panel.most or 1.0, aspect="auto", interpolation="nearest")
        axes.grid(False)
        axes.set_title(f"{panel.what}, {panel.unit}", fontsize=9)
        every = sparse(chart.columns, 11 * 72 / across / max(len(chart.columns), 1))
        axes.set_xticks(range(0, len(chart.columns), every), chart.columns[::every])
        axes.set_xlabel(chart.x)
        axes.set_yticks(
            range(len(chart.rows)),
            [fitted(row, LABEL) for row in chart.rows] if not (few and at) else [""] * len(chart.rows),
        )
        for (row, column), value in np.ndenumerate(values) if few and len(chart.columns) <= 12 else ():
            if not np.isnan(value):
                colour = "white" if panel.most and value > panel.most / 2 else LIGHT["ink"]
                axes.text(column, row, significant(float(value)), ha="center", va="center", fontsize=8, color=colour)
        figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03).outline.set_visible(False)
    return figure


def _histogram(chart: Histogram) -> Figure:
    figure, axes = _axes(chart, 6.4, 3.4)
    edges = list(range(len(chart.bins) + 1))
    handles: list[Any] = []
    for at, each in enumerate(chart.series):
        if len(chart.series) == 1:
            bars = axes.bar([edge + 0.5 for edge in edges[:-1]], each.shares, width=0.94, color=SERIES_LIGHT[0])
            if len(chart.bins) <= LABELLED_BINS:
                texts = [significant(share) if share else "" for share in each.shares]
                axes.bar_label(bars, texts, padding=2, fontsize=7.5, color=LIGHT["soft"])
        else:
            colour = SERIES_LIGHT[at]
            axes.stairs(each.shares, edges, fill=True, color=colour, alpha=0.1)
            handles.append(axes.stairs(each.shares, edges, color=colour, linewidth=1.4))
    for mark in chart.marks:
        axes.axvline(mark.at, color=LIGHT["ink"], linewidth=0.8, linestyle=":")
        axes.text(mark.at, 1.0, mark.name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=7.5)
    every = sparse(chart.bins, 5.6 * 72 / len(chart.bins))
    shown = [at for at, name in enumerate(chart.bins) if name.isalpha() or int(name) % every == 0]
    axes.set_xticks([at + 0.5 for at in shown], [signed(chart.bins[at]) for at in shown])
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    if handles:
        _legend(axes, handles, [each.name for each in chart.series])
    return figure


def _ranges(chart: RangeChart) -> Figure:
    figure, axes = _axes(chart, 6.4, 0.28 * len(chart.rows) + 1.2)
    places = range(len(chart.rows))
    axes.barh(places, [row.limit for row in chart.rows], height=0.5, color=LIGHT["grid"])
    axes.barh(places, [row.middle for row in chart.rows], height=0.5, color=SERIES_LIGHT[0])
    axes.hlines(places, [row.low for row in chart.rows], [row.high for row in chart.rows], colors=LIGHT["ink"])
    for at, row in enumerate(chart.rows):
        axes.text(row.limit * 1.02, at, f"{row.middle:.2f}", va="center", color=LIGHT["soft"])
    axes.set_yticks(places, [fitted(row.name, LABEL) for row in chart.rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(chart.x)
    return figure


def _bars(chart: BarChart) -> Figure:
    figure = _figure(11, 0.3 * len(chart.rows) + 1.0)
    figure.suptitle(chart.title, x=0.01, ha="left", fontweight="bold", fontsize=10.5)
    places = range(len(chart.rows))
    colours = [SERIES_LIGHT[at % len(SERIES_LIGHT)] for at in places]
    for at, (measure, axes) in enumerate(
        zip(chart.measures, figure.subplots(1, len(chart.measures), squeeze=False).flat, strict=True)
    ):
        bars = axes.barh(places, [value or 0.0 for value in measure.values], height=0.6, color=colours)
        texts = [significant(value) for value in measure.values]
        for label, place in zip(axes.bar_label(bars, texts, padding=3, fontsize=8), places, strict=True):
            label.set_fontweight("bold" if place in measure.best else "normal")
        axes.set_title(measure.label, fontsize=8.5)
        axes.set_yticks(places, [fitted(row, LABEL) for row in chart.rows] if at == 0 else [""] * len(chart.rows))
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_xticks([])
        axes.margins(x=0.3)
    return figure


def _block(chart: BlockChart) -> Figure:
    figure, axes = _axes(chart, 6.4, 3.0)
    axes.set_title(_in_lines(chart.title))
    places = range(len(chart.elements))
    before = [_drawable(each.value) for each in chart.elements]
    after = [_drawable(each.quantized) for each in chart.elements]
    axes.axhline(0, color=LIGHT["soft"], linewidth=0.8)
    axes.vlines(places, before, after, colors=LIGHT["saturated"], linewidth=1.3)
    axes.plot(places, before, "o", markerfacecolor="white", markeredgecolor=LIGHT["ink"], markersize=5)
    axes.plot(places, after, "o", color=LIGHT["accent"], markersize=3)
    low, high = axes.get_ylim()
    for limit in (chart.limit, -chart.limit):
        if low < limit < high:
            axes.axhline(limit, color=LIGHT["saturated"], linewidth=1, linestyle="--")
    every = -(-len(chart.elements) // (16 if chart.x == "element" else 8)) or 1
    axes.set_xticks(places[::every], [each.place for each in chart.elements[::every]])
    axes.set_xlabel(chart.x)
    axes.set_ylabel("value (ring), quantized (dot)")
    return figure


def _drawable(value: float) -> float:
    """The value; not a number where it is beyond what can be drawn."""
    return value if abs(value) < DRAWABLE else float("nan")


def _in_lines(text: str, length: int = 70) -> str:
    return "\n".join(text[at : at + length] for at in range(0, len(text), length))


DRAW: dict[type, Callable[[Any], Figure]] = {
    LineChart: _lines,
    HeatMap: _heat,
    Histogram: _histogram,
    RangeChart: _ranges,
    BarChart: _bars,
    BlockChart: _block,
}
