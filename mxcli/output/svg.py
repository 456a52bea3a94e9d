"""Charts as SVG for pages: a function for each kind of chart. Colours are CSS classes, so that a page can change
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mxcli.output.axes import HALF, LEFT, LINE, MARGIN, WIDE, Axis, fitted, is_drawable, width_of
from mxcli.output.charts import (
    MARKERS,
    PANEL_GAP,
    BarChart,
    Bars,
    BlockChart,
    Chart,
    HeatMap,
    Histogram,
    Line,
    LineChart,
    Panel,
    RangeChart,
)
from mxcli.output.numbers import significant

BOTTOM = 48.0
"""Height below a chart for the numbers and the title of the x axis."""


def draw(chart: Chart) -> str:
    """Return the picture of a chart: an `svg` element with classes for colours."""
    return DRAW[type(chart)](chart)


def is_wide(chart: Chart) -> bool:
    """Return whether a chart takes the width of a page."""
    return isinstance(chart, (LineChart, HeatMap, BarChart))


def draw_lines(chart: LineChart) -> str:
    """Return lines with markers, numbered or named along x."""
    right, names = WIDE - MARGIN, [each.name for each in chart.lines]
    keys, above = _legend(names, LEFT, 4, right, MARKERS)
    top, across, up = above + 12, chart.x_axis, chart.y_axis
    inset = 24.0 if chart.has_markers else 8.0
    x = Scale(across.low, across.high, LEFT + inset, right - inset)
    y = Scale(up.low, up.high, top + 300.0, top)
    if chart.names:
        below, texts = _turned_names(
            [(x(at), text) for at, text in zip(across.ticks, across.texts, strict=True)], y.start
        )
    else:
        below, texts = BOTTOM, _x_numbers(across, x, y.start)
    parts = [
        keys,
        _y_axis(up, y, LEFT, right, chart.y),
        *texts,
        _x_title(chart.x, LEFT, right, y.start + below - BOTTOM),
    ]
    parts += [f'<path class="context" d="{_path(each, x, y)}"/>' for each in chart.others]
    for at, each in enumerate(chart.lines):
        parts.append(f'<g class="s{at}"><path class="stroke" d="{_path(each, x, y)}"/>')
        if chart.has_markers:
            parts += [
                _marker(x(place), y(value), MARKERS[at], chart.text(each, place, value))
                for place, value in each.points
                if value is not None
            ]
        parts.append("</g>")
    return _picture(WIDE, y.start + below, chart, parts, "wide")


def _path(each: Line, x: Scale, y: Scale) -> str:
    """Return straight lines from point to point; a missing point breaks them."""
    path, joined = [], False
    for place, value in each.points:
        if value is not None:
            path.append(f"{'L' if joined else 'M'}{pixels(x(place))} {pixels(y(value))}")
        joined = value is not None
    return "".join(path)


def draw_heat_map(chart: HeatMap) -> str:
    """Return the panels of a heat map, next to one another or one below the other."""
    cell, height, top = chart.cell_width, 24.0, 4.0
    across = cell * len(chart.columns)
    below, labels, parts, bottom = 0.0, chart.labels, list[str](), 0.0
    for at, panel in enumerate(chart.panels):
        left = chart.left + at * (across + PANEL_GAP) * chart.side_by_side
        parts.append(_shades(panel, left, top))
        above = top + 30
        for row, name in enumerate(labels):
            y = above + row * height
            if not (chart.side_by_side and at):
                parts.append(_label(name, chart.left - 8, y + 16, anchor="end"))
            parts += _cells(chart, panel, row, left, y, height)
        bottom = above + len(labels) * height
        ticks = [(left + (place + 0.5) * cell, name) for place, name in chart.ticks.items()]
        if chart.is_turned:
            below, names = _turned_names(ticks, bottom)
        else:
            below, names = BOTTOM - 2, [_label(name, x, bottom + 16, anchor="middle") for x, name in ticks]
        parts += [*names, _x_title(chart.x, left, left + across, bottom + below - BOTTOM)]
        if not chart.side_by_side:
            top = bottom + below + 10
    return _picture(WIDE, bottom + below, chart, parts, "wide")


def _shades(panel: Panel, x: float, y: float) -> str:
    """Return the name of a panel and the meaning of its shades."""
    name = f"{panel.what}, {panel.unit}"
    if panel.light == panel.dark == 0:
        return _label(f"{name}: none", x, y + 14, kind="h")
    light, dark = significant(panel.light) if panel.light else "0", significant(panel.dark)
    start = x + width_of(name) * 1.25 + 20 + width_of(light)
    shades = [_box(start + 12 * at, y + 5, 12, 10, panel.colour, more=_shade((at + 1) / 10)) for at in range(10)]
    ends = [_label(light, start - 6, y + 14, anchor="end"), *shades, _label(dark, start + 126, y + 14)]
    return "".join([_label(name, x, y + 14, kind="h"), *ends])


def _cells(chart: HeatMap, panel: Panel, row: int, left: float, y: float, height: float) -> list[str]:
    parts, cell = [], chart.cell_width
    gap = 1.5 if cell > 12 else 0.5 if cell > 5 else 0.0
    for place, value in enumerate(panel.values[row]):
        if value is None:
            continue
        level, x = panel.level(value), left + place * cell
        is_empty = value == 0 and not panel.low_is_dark
        kind, shade = ("empty", "") if is_empty else (panel.colour, _shade(level))
        text = chart.text(panel, row, place, value)
        parts.append(_box(x, y, cell - gap, height - min(gap, 1.5), kind, text, shade))
        if chart.has_values:
            shown = "over" if level > 0.5 else "cell"
            parts.append(_label(significant(value), x + (cell - gap) / 2, y + 15.5, kind=shown, anchor="middle"))
    return parts


def _shade(level: float) -> str:
    return f' fill-opacity="{0.08 + 0.92 * level:.2f}"'


def draw_histogram(chart: Histogram) -> str:
    """Return bars of a single series, or outlines of several."""
    several, right = len(chart.series) > 1, HALF - MARGIN
    names = [each.name for each in chart.series]
    keys, above = _legend(names, LEFT, 4, right, ["box"] * 8) if several else ("", 14)
    top, up = above + 12, chart.y_axis
    x = Scale(0, len(chart.bins), LEFT + 6, right)
    y = Scale(up.low, up.high, top + 220.0, top)
    width = x(1) - x(0)
    parts = [keys, _y_axis(up, y, LEFT, right, chart.y), _x_title(chart.x, LEFT, right, y.start)]
    parts += [_label(name, x(at + 0.5), y.start + 18, anchor="middle") for at, name in chart.ticks.items()]
    for at, each in enumerate(chart.series):
        parts.append(f'<g class="s{at}">')
        if several:
            parts += _outline(each.shares, x, y)
        for place, share in enumerate(each.shares):
            if share and not several:
                bar, gap = max(y.start - y(share), 1.5), 2.0 if width > 8 else 0.4
                text = (
                    f"{each.name}, {chart.bins[place]}: {each.counts[place]:,} {chart.counted}, {significant(share)} %"
                )
                parts.append(_box(x(place) + gap / 2, y.start - bar, width - gap, bar, "fill", text))
                if chart.has_values:
                    parts.append(_label(significant(share), x(place + 0.5), y.start - bar - 5, anchor="middle"))
        parts.append("</g>")
    for mark in chart.marks:
        parts.append(_line(x(mark.at), y.start, x(mark.at), top - 2, "mark"))
        parts.append(_label(mark.name, x(mark.at), top - 6, anchor="middle"))
    parts.append(_line(LEFT, y.start, right, y.start, "base"))
    return _picture(HALF, y.start + BOTTOM, chart, parts)


def _outline(shares: tuple[float, ...], x: Scale, y: Scale) -> list[str]:
    """Return the tops of the bars of a series, softly filled."""
    path = f"M{pixels(x(0))} {pixels(y.start)}"
    for at, share in enumerate(shares):
        path += f"V{pixels(min(y(share), y.start - 1.5) if share else y.start)}H{pixels(x(at + 1))}"
    path += f"V{pixels(y.start)}"
    return [f'<path class="soft" d="{path}z"/>', f'<path class="stroke" d="{path}"/>']


def draw_ranges(chart: RangeChart) -> str:
    """Return a bar up to the middle of each range, with a line from its low to its high end."""
    labels = [fitted(row.name) for row in chart.rows]
    left, top, right = max(map(width_of, labels)) + 16, 8.0, HALF - 52
    height, across = min(max(25.0, 210 / len(labels)), 42.0), chart.x_axis
    x = Scale(across.low, across.high, left, right)
    bottom = top + height * len(labels)
    parts = [_line(x(value), top, x(value), bottom, "grid") for value in across.ticks]
    parts += _x_numbers(across, x, bottom)
    for at, row in enumerate(chart.rows):
        y = top + at * height + height / 2
        text = f"{row.name}: median {row.middle:.2f}, {row.low:.2f} to {row.high:.2f} of {row.limit:.2f} {chart.x}"
        parts += [
            _label(labels[at], left - 8, y + 4, anchor="end"),
            _box(left, y - 6, x(row.limit) - left, 12, "track", text),
            f'<g class="s0">{_box(left, y - 6, x(row.middle) - left, 12, "fill", text)}</g>',
            _line(x(row.low), y, x(row.high), y, "whisker"),
            _label(f"{row.middle:.2f}", HALF - 44, y + 4),
        ]
    parts.append(_x_title(chart.x, left, right, bottom))
    return _picture(HALF, bottom + BOTTOM, chart, parts)


def draw_bars(chart: BarChart) -> str:
    """Return the measures of a bar chart side by side."""
    labels = [fitted(row) for row in chart.rows]
    left, top, height = max(map(width_of, labels)) + 16, 30.0, 28.0
    width = (WIDE - left - MARGIN) / len(chart.measures)
    parts = [_label(name, left - 8, top + at * height + 18, anchor="end") for at, name in enumerate(labels)]
    for place, bars in enumerate(chart.measures):
        parts.append(_label(bars.label, left + place * width, top - 10, kind="h"))
        parts += _measure(chart, bars, left + place * width, width - 104, top, height)
    return _picture(WIDE, top + height * len(labels) + 8, chart, parts, "wide")


def _measure(chart: BarChart, bars: Bars, left: float, width: float, top: float, height: float) -> list[str]:
    x = Scale(0, bars.most, left, left + width)
    parts = []
    for at, (value, shown) in enumerate(zip(bars.values, bars.texts, strict=True)):
        y = top + at * height
        parts.append(_box(left, y + 5, width, 16, "track"))
        if value is not None and value > 0:
            text = f"{chart.rows[at]}: {shown}, {bars.label}"
            parts.append(f'<g class="s{at % 8}">{_box(left, y + 5, x(value) - left, 16, "fill", text)}</g>')
        best = at in bars.best
        parts.append(_label(shown, left + width + 8, y + 18, kind="b" if best else "t"))
        if best:
            parts.append(_dot(left + width + 18 + 1.12 * width_of(shown), y + 13.5, "best", 3))
    return parts


def draw_block(chart: BlockChart) -> str:
    """Return the elements of a block: a ring for each value, a dot for its code, and its error between them."""
    left, top, right, up = 76.0, 28.0, HALF - MARGIN, chart.y_axis
    x = Scale(0, max(len(chart.elements) - 1, 1), left + 12, right - 10)
    y = Scale(up.low, up.high, top + 190.0, top)
    parts = [_block_key(left), _y_axis(up, y, left, right, "value")]
    parts += [_line(left, y(limit), right, y(limit), "limit") for limit in chart.limits]
    parts.append(_line(left, y(0), right, y(0), "base"))
    for at, each in enumerate(chart.elements):
        text = chart.text(each)
        has_value, has_code = is_drawable(each.value), is_drawable(each.quantized)
        if has_value and has_code:
            parts.append(_line(x(at), y(each.value), x(at), y(each.quantized), "error"))
        if has_value:
            parts.append(_dot(x(at), y(each.value), "before", 3.6, text))
        if has_code:
            parts.append(_dot(x(at), y(each.quantized), "after", 2.6, text))
    parts += [_label(place, x(at), y.start + 18, anchor="middle") for at, place in chart.ticks.items()]
    parts.append(_x_title(chart.x, left, right, y.start))
    return _picture(HALF, y.start + BOTTOM, chart, parts)


def _block_key(left: float) -> str:
    """Return the signs of a block's elements with their meaning."""
    return "".join(
        [
            _dot(left + 6, 10, "before", 3.6),
            _label("value", left + 16, 14),
            _dot(left + 74, 10, "after", 2.6),
            _label("quantized", left + 84, 14),
            _line(left + 162, 10, left + 180, 10, "limit"),
            _label("largest a code can reach", left + 186, 14),
        ]
    )


DRAW: dict[type, Callable[[Any], str]] = {
    LineChart: draw_lines,
    HeatMap: draw_heat_map,
    Histogram: draw_histogram,
    RangeChart: draw_ranges,
    BarChart: draw_bars,
    BlockChart: draw_block,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale from data, `low` to `high`, to pixels, `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start) if span else self.start


def pixels(value: float) -> str:
    """Return a length to a tenth, without trailing zeros."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def _label(text: str, x: float, y: float, *, kind: str = "t", anchor: str = "start", turned: bool = False) -> str:
    """Return text at its baseline; `kind` is a class: t small, l for axes, h a heading."""
    turn = f' transform="rotate(-90 {pixels(x)} {pixels(y)})"' if turned else ""
    return f'<text class="{kind}" x="{pixels(x)}" y="{pixels(y)}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{pixels(x1)} {pixels(y1)}L{pixels(x2)} {pixels(y2)}"/>'


def _box(x: float, y: float, width: float, height: float, kind: str, title: str = "", more: str = "") -> str:
    """Return a filled rectangle that shows its `title` when pointed at."""
    end = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return (
        f'<rect class="{kind}" x="{pixels(x)}" y="{pixels(y)}" width="{pixels(max(width, 0))}" '
        f'height="{pixels(max(height, 0))}"{more}{end}'
    )


def _marker(x: float, y: float, shape: str, title: str = "", size: float = 3.4) -> str:
    """Return a marker in the colour of its group."""
    s = size
    outlines = {
        "square": f"M{-s} {-s}h{2 * s}v{2 * s}h{-2 * s}z",
        "diamond": f"M0 {-1.35 * s}L{1.35 * s} 0L0 {1.35 * s}L{-1.35 * s} 0z",
        "triangle": f"M0 {-1.2 * s}L{1.2 * s} {s}H{-1.2 * s}z",
        "down": f"M0 {1.2 * s}L{1.2 * s} {-s}H{-1.2 * s}z",
        "cross": f"M{-s} {-s}L{s} {s}M{-s} {s}L{s} {-s}",
        "plus": f"M0 {-1.3 * s}V{1.3 * s}M{-1.3 * s} 0H{1.3 * s}",
    }
    inside = f"<title>{escape(title)}</title>" if title else ""
    kind = {"cross": "stroke", "plus": "stroke", "ring": "hollow"}.get(shape, "fill")
    place = f"{pixels(x)} {pixels(y)}"
    if shape in outlines:
        return f'<path class="{kind}" transform="translate({place})" d="{outlines[shape]}">{inside}</path>'
    return f'<circle class="{kind}" cx="{pixels(x)}" cy="{pixels(y)}" r="{s}">{inside}</circle>'


def _dot(x: float, y: float, kind: str, radius: float, title: str = "") -> str:
    end = f"><title>{escape(title)}</title></circle>" if title else "/>"
    return f'<circle class="{kind}" cx="{pixels(x)}" cy="{pixels(y)}" r="{pixels(radius)}"{end}'


def _y_axis(axis: Axis, y: Scale, left: float, right: float, title: str) -> str:
    """Return grid lines with numbers on the left, and the turned title."""
    parts = []
    for value, text in zip(axis.ticks, axis.texts, strict=True):
        parts += [_line(left, y(value), right, y(value), "grid"), _label(text, left - 8, y(value) + 4, anchor="end")]
    return "".join([*parts, _label(title, 14, (y.start + y.end) / 2, kind="l", anchor="middle", turned=True)])


def _x_numbers(axis: Axis, x: Scale, bottom: float) -> list[str]:
    """Return the numbers below the x axis."""
    pairs = zip(axis.ticks, axis.texts, strict=True)
    return [_label(text, x(value), bottom + 18, anchor="middle") for value, text in pairs]


def _turned_names(names: Sequence[tuple[float, str]], bottom: float) -> tuple[float, list[str]]:
    """Return the height below the x axis with names turned by a quarter, and the names."""
    height = max(width_of(text) for _, text in names) * 0.9 + 36
    return height, [_label(text, x + LINE / 3, bottom + 8, anchor="end", turned=True) for x, text in names]


def _x_title(title: str, left: float, right: float, bottom: float) -> str:
    """Return the title of the x axis, below its numbers."""
    return _label(title, (left + right) / 2, bottom + 38, kind="l", anchor="middle")


def _legend(names: Sequence[str], left: float, top: float, right: float, shapes: Sequence[str]) -> tuple[str, float]:
    """Return a sign and a name for each series in as many rows as needed, and the height."""
    parts, x, y = [], left, top + 10
    for at, name in enumerate(names):
        shown = fitted(name, right - left - 40)
        width = 26 + width_of(shown) + 18
        if x > left and x + width > right:
            x, y = left, y + 20
        if shapes[at] == "box":
            sign = _box(x + 3, y - 9, 12, 10, "fill")
        else:
            sign = _line(x, y - 4, x + 18, y - 4, "stroke") + _marker(x + 9, y - 4, shapes[at])
        parts.append(f'<g class="s{at}">{sign}</g>{_label(shown, x + 26, y)}')
        x += width
    return "".join(parts), y + 12 - top if names else 0.0


def _picture(width: float, height: float, chart: Chart, parts: Sequence[str], kind: str = "") -> str:
    """Return the whole picture, with the title and the caption for screen readers."""
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {pixels(width)} {pixels(height)}" role="img" '
        f'aria-label="{escape(f"{chart.title}. {chart.caption}", quote=True)}" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )
