"""Charts as PNG and SVG files through matplotlib; the same charts give the same bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.atomic import whole_file
from mxcli.errors import import_extra
from mxcli.output.axes import LIGHT, SERIES_LIGHT, Axis, fitted, is_drawable
from mxcli.output.charts import (
    MARKERS,
    BarChart,
    BlockChart,
    Chart,
    HeatMap,
    Histogram,
    LineChart,
    RangeChart,
)
from mxcli.output.numbers import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = ("png", "svg")
DPI = 144
SYMBOLS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "down": "v",
    "cross": "x",
    "plus": "+",
    "ring": "o",
}
"""The names of matplotlib for `MARKERS`."""
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
    """Write two files for each chart to an existing folder; each appears whole and replaces a file of its name."""
    import_extra("matplotlib", "--plots")
    import matplotlib.style

    for chart in charts:
        with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
            # Names may hold characters that the font lacks; a box stands for them.
            warnings.filterwarnings("ignore", "Glyph")
            figure = DRAW[type(chart)](chart)
            for form in FORMS:
                file = folder / f"{chart.key}.{form}"
                with whole_file(file, replace=True) as drawn:
                    figure.savefig(
                        drawn, format=form, dpi=DPI, bbox_inches="tight", pad_inches=0.15,
                        metadata={"Date": None} if form == "svg" else {"Software": None},
                    )  # fmt: skip


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _axes(chart: Chart, width: float, height: float) -> tuple[Figure, Axes]:
    figure = _figure(width, height)
    axes = figure.add_subplot()
    axes.set_title(chart.title)
    return figure, axes


def _subplots(chart: Chart, width: float, height: float, down: int, across: int) -> tuple[Figure, list[Axes]]:
    figure = _figure(width, height)
    figure.suptitle(chart.title, x=0.01, ha="left", fontweight="bold", fontsize=10.5)
    return figure, list(figure.subplots(down, across, squeeze=False).flat)


def _legend(axes: Axes, handles: Sequence[Any], names: Sequence[str]) -> None:
    # A label that begins with an underscore would be left out.
    axes.legend(handles, [f" {fitted(name)}" for name in names], loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _y_axis(axes: Axes, y: Axis, title: str) -> None:
    axes.set_ylim(y.low, y.high)
    axes.set_yticks(y.ticks, y.texts)
    axes.set_ylabel(title)


def draw_lines(chart: LineChart) -> Figure:
    """Draw lines with markers, numbered or named along x."""
    figure, axes = _axes(chart, 10, 4.8 if chart.names else 3.8)
    for each in chart.others:
        axes.plot(*_points(each.points), color=LIGHT["context"], linewidth=0.8, alpha=0.5)
    handles = []
    for at, each in enumerate(chart.lines):
        face = "white" if MARKERS[at] == "ring" else SERIES_LIGHT[at]
        style: dict[str, Any] = {"marker": SYMBOLS[MARKERS[at]], "markersize": 5, "markerfacecolor": face}
        handles += axes.plot(
            *_points(each.points), color=SERIES_LIGHT[at], linewidth=1.4, **(style if chart.has_markers else {})
        )
    axes.set_xlabel(chart.x)
    x = chart.x_axis
    axes.set_xticks(x.ticks, x.texts, rotation=90 if chart.names else 0)
    _y_axis(axes, chart.y_axis, chart.y)
    _legend(axes, handles, [each.name for each in chart.lines])
    return figure


def _points(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [float("nan") if y is None else y for _, y in points]


def draw_heat_map(chart: HeatMap) -> Figure:
    """Draw the panels of a heat map, next to one another or one below the other."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    down, across = (1, len(chart.panels)) if chart.side_by_side else (len(chart.panels), 1)
    height = 0.27 * len(chart.rows) + (2.4 if chart.is_turned else 1.3)
    figure, panels = _subplots(chart, 11, height * down, down, across)
    for at, (panel, axes) in enumerate(zip(chart.panels, panels, strict=True)):
        values = np.array(panel.values, dtype=float)
        shades = [LIGHT["sunken"], LIGHT[panel.colour]]
        colours = LinearSegmentedColormap.from_list(panel.colour, shades[::-1] if panel.low_is_dark else shades)
        low, high = sorted((panel.light, panel.dark))
        image = axes.imshow(
            values, cmap=colours, vmin=low, vmax=high if high > low else low + 1.0, aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        axes.grid(False)
        axes.set_title(f"{panel.what}, {panel.unit}", fontsize=9)
        axes.set_xticks(list(chart.ticks), list(chart.ticks.values()), rotation=90 if chart.is_turned else 0)
        axes.set_xlabel(chart.x)
        is_first = not (chart.side_by_side and at)
        axes.set_yticks(range(len(chart.rows)), chart.labels if is_first else [""] * len(chart.rows))
        for (row, column), value in np.ndenumerate(values) if chart.has_values else ():
            if not np.isnan(value):
                colour = "white" if panel.level(value) > 0.5 else LIGHT["ink"]
                axes.text(column, row, significant(float(value)), ha="center", va="center", fontsize=8, color=colour)
        figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03).outline.set_visible(False)
    return figure


def draw_histogram(chart: Histogram) -> Figure:
    """Draw bars of a single series, or outlines of several."""
    figure, axes = _axes(chart, 6.4, 3.4)
    edges = list(range(len(chart.bins) + 1))
    handles: list[Any] = []
    for at, each in enumerate(chart.series):
        if len(chart.series) == 1:
            bars = axes.bar([edge + 0.5 for edge in edges[:-1]], each.shares, width=0.94, color=SERIES_LIGHT[0])
            if chart.has_values:
                texts = [significant(share) if share else "" for share in each.shares]
                axes.bar_label(bars, texts, padding=2, fontsize=7.5, color=LIGHT["soft"])
        else:
            colour = SERIES_LIGHT[at]
            axes.stairs(each.shares, edges, fill=True, color=colour, alpha=0.1)
            handles.append(axes.stairs(each.shares, edges, color=colour, linewidth=1.4))
    for mark in chart.marks:
        axes.axvline(mark.at, color=LIGHT["ink"], linewidth=0.8, linestyle=":")
        axes.text(mark.at, 1.0, mark.name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks([at + 0.5 for at in chart.ticks], list(chart.ticks.values()))
    axes.set_xlabel(chart.x)
    _y_axis(axes, chart.y_axis, chart.y)
    if handles:
        _legend(axes, handles, [each.name for each in chart.series])
    return figure


def draw_ranges(chart: RangeChart) -> Figure:
    """Draw a bar up to the middle of each range, with a line from its low to its high end."""
    figure, axes = _axes(chart, 6.4, 0.28 * len(chart.rows) + 1.2)
    places = range(len(chart.rows))
    axes.barh(places, [row.limit for row in chart.rows], height=0.5, color=LIGHT["grid"])
    axes.barh(places, [row.middle for row in chart.rows], height=0.5, color=SERIES_LIGHT[0])
    axes.hlines(places, [row.low for row in chart.rows], [row.high for row in chart.rows], colors=LIGHT["ink"])
    for at, row in enumerate(chart.rows):
        axes.text(row.limit * 1.02, at, f"{row.middle:.2f}", va="center", color=LIGHT["soft"])
    x = chart.x_axis
    axes.set_xticks(x.ticks, x.texts)
    axes.set_yticks(places, [fitted(row.name) for row in chart.rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(chart.x)
    return figure


def draw_bars(chart: BarChart) -> Figure:
    """Draw the measures of a bar chart side by side."""
    figure, panels = _subplots(chart, 11, 0.3 * len(chart.rows) + 1.0, 1, len(chart.measures))
    places = range(len(chart.rows))
    colours = [SERIES_LIGHT[at % len(SERIES_LIGHT)] for at in places]
    for at, (measure, axes) in enumerate(zip(chart.measures, panels, strict=True)):
        bars = axes.barh(places, [value or 0.0 for value in measure.values], height=0.6, color=colours)
        labels = axes.bar_label(bars, measure.texts, padding=3, fontsize=8)
        for label, place in zip(labels, places, strict=True):
            label.set_fontweight("bold" if place in measure.best else "normal")
        axes.set_title(measure.label, fontsize=8.5)
        axes.set_yticks(places, [fitted(row) for row in chart.rows] if at == 0 else [""] * len(chart.rows))
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_xticks([])
        axes.margins(x=0.3)
    return figure


def draw_block(chart: BlockChart) -> Figure:
    """Draw the elements of a block: a ring for each value, a dot for its code, and its error between them."""
    figure, axes = _axes(chart, 6.4, 3.0)
    axes.set_title(_in_lines(chart.title))
    places = range(len(chart.elements))
    before = [_drawable(each.value) for each in chart.elements]
    after = [_drawable(each.quantized) for each in chart.elements]
    axes.axhline(0, color=LIGHT["soft"], linewidth=0.8)
    axes.vlines(places, before, after, colors=LIGHT["saturated"], linewidth=1.3)
    axes.plot(places, before, "o", markerfacecolor="white", markeredgecolor=LIGHT["ink"], markersize=5)
    axes.plot(places, after, "o", color=LIGHT["accent"], markersize=3)
    for limit in chart.limits:
        axes.axhline(limit, color=LIGHT["saturated"], linewidth=1, linestyle="--")
    axes.set_xticks(list(chart.ticks), list(chart.ticks.values()))
    axes.set_xlabel(chart.x)
    _y_axis(axes, chart.y_axis, "value (ring), quantized (dot)")
    return figure


def _drawable(value: float) -> float:
    """Return the value, or NaN if it is not drawable."""
    return value if is_drawable(value) else float("nan")


def _in_lines(text: str, length: int = 70) -> str:
    return "\n".join(text[at : at + length] for at in range(0, len(text), length))


DRAW: dict[type, Callable[[Any], Figure]] = {
    LineChart: draw_lines,
    HeatMap: draw_heat_map,
    Histogram: draw_histogram,
    RangeChart: draw_ranges,
    BarChart: draw_bars,
    BlockChart: draw_block,
}
