"""Charts as SVG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxcli.output.charts import (
    DRAWABLE,
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
from mxcli.output.svg import (
    MARKERS,
    Scale,
    box,
    dot,
    drawing,
    fitted,
    label,
    legend,
    line,
    marker,
    pixels,
    signed,
    sparse,
    ticks,
    width_of,
    x_numbers,
    x_title,
    y_axis,
)

WIDE, HALF = 1240.0, 610.0
RIGHT, BOTTOM = 18.0, 48.0
MARKED_LAYERS, LABELLED_BINS, SIDE_BY_SIDE = 64, 14, 20


def svg(chart: Chart) -> str:
    """The picture of a chart: an `svg` element with classes for colours."""
    return DRAW[type(chart)](chart)


def is_wide(chart: Chart) -> bool:
    """Whether a chart takes the width of a page."""
    return isinstance(chart, (LineChart, HeatMap, BarChart))


def _lines(chart: LineChart) -> str:
    known = [(x, y) for each in (*chart.lines, *chart.others) for x, y in each.points if y is not None]
    low, high = min(y for _, y in known), max(y for _, y in known)
    pad = max((high - low) * 0.08, abs(high) * 0.005, 0.05)
    left, height = 64.0, 300.0
    names, above = legend([each.name for each in chart.lines], left, 4, WIDE - RIGHT, MARKERS)
    top = above + 12
    xs = [x for x, _ in known]
    inset = 24.0 if len(set(xs)) <= MARKED_LAYERS else 8.0
    x = Scale(min(xs), max(xs), left + inset, WIDE - RIGHT - inset)
    if x.low == x.high:
        x = Scale(x.low - 1, x.high + 1, x.start, x.end)
    y = Scale(low - pad, high + pad, top + height, top)
    parts = [names, y_axis(y, left, WIDE - RIGHT, chart.y)]
    parts += x_numbers(ticks(min(xs), max(xs), 20, whole=True), x, y.start)
    parts.append(x_title(chart.x, left, WIDE - RIGHT, y.start))
    parts += [f'<path class="context" d="{_path(each, x, y)}"/>' for each in chart.others]
    marked = len(set(xs)) <= MARKED_LAYERS
    for at, each in enumerate(chart.lines):
        parts.append(f'<g class="s{at}"><path class="stroke" d="{_path(each, x, y)}"/>')
        for place, value in each.points if marked else ():
            if value is not None:
                told = f"{each.name}, {chart.x} {place}: {significant(value)} {chart.unit}".rstrip()
                parts.append(marker(x(place), y(value), MARKERS[at], told))
        parts.append("</g>")
    return drawing(WIDE, y.start + BOTTOM, chart.title, chart.caption, parts, "wide")


def _path(each: Line, x: Scale, y: Scale) -> str:
    """Straight from point to point; a point that is missing breaks it."""
    path, joined = [], False
    for place, value in each.points:
        if value is not None:
            path.append(f"{'L' if joined else 'M'}{pixels(x(place))} {pixels(y(value))}")
        joined = value is not None
    return "".join(path)


def _heat(chart: HeatMap) -> str:
    labels = [fitted(row, 230) for row in chart.rows]
    left = max(map(width_of, labels)) + 16
    beside = len(chart.columns) <= SIDE_BY_SIDE
    gap = 44.0
    width = (WIDE - left - RIGHT - gap) / 2 if beside else WIDE - left - RIGHT
    cell = min(width / len(chart.columns), 132.0)
    height, top = 24.0, 4.0
    parts = []
    for at, panel in enumerate(chart.panels):
        start = left + at * (cell * len(chart.columns) + gap) if beside else left
        parts.append(_panel_key(panel, start, top))
        above = top + 30
        for row, name in enumerate(labels):
            y = above + row * height
            if not (beside and at):
                parts.append(label(name, left - 8, y + 16, anchor="end"))
            parts += _cells(chart, panel, row, start, y, cell, height)
        bottom = above + len(labels) * height
        every = sparse(chart.columns, cell)
        for place in range(0, len(chart.columns), every):
            parts.append(label(chart.columns[place], start + (place + 0.5) * cell, bottom + 16, anchor="middle"))
        parts.append(label(chart.x, start + cell * len(chart.columns) / 2, bottom + 36, kind="l", anchor="middle"))
        if not beside:
            top = bottom + 56
    total = 34 + len(labels) * height + 44
    return drawing(WIDE, total if beside else top - 12, chart.title, chart.caption, parts, "wide")


def _panel_key(panel: Panel, x: float, y: float) -> str:
    """What a panel shows, and what its shades stand for."""
    name = f"{panel.what}, {panel.unit}"
    if not panel.most:
        return label(f"{name}: none", x, y + 14, kind="h")
    start = x + width_of(name) * 1.25 + 26
    shades = [box(start + 12 * at, y + 5, 12, 10, panel.what, more=_shade((at + 1) / 10)) for at in range(10)]
    high = label(significant(panel.most), start + 126, y + 14)
    return "".join([label(name, x, y + 14, kind="h"), label("0", start - 6, y + 14, anchor="end"), *shades, high])


def _cells(chart: HeatMap, panel: Panel, row: int, left: float, y: float, cell: float, height: float) -> list[str]:
    parts = []
    gap, most = 1.5 if cell > 12 else 0.5 if cell > 5 else 0.0, panel.most
    for place, value in enumerate(panel.values[row]):
        if value is None:
            continue
        level = value / most if most else 0.0
        x = left + place * cell
        told = f"{chart.rows[row]}, {chart.x} {chart.columns[place]}: {significant(value)} {panel.unit} {panel.what}"
        kind, shade = (panel.what, _shade(level)) if value else ("empty", "")
        parts.append(box(x, y, cell - gap, height - min(gap, 1.5), kind, told, shade))
        if cell >= 38:
            shown = "over" if level > 0.5 else "cell"
            parts.append(label(significant(value), x + (cell - gap) / 2, y + 15.5, kind=shown, anchor="middle"))
    return parts


def _shade(level: float) -> str:
    return f' fill-opacity="{0.08 + 0.92 * level:.2f}"'


def _histogram(chart: Histogram) -> str:
    left, height = 64.0, 220.0
    several = len(chart.series) > 1
    names, above = (
        legend([each.name for each in chart.series], left, 4, HALF - RIGHT, ["box"] * 8) if several else ("", 14)
    )
    top = above + 12
    most = max(share for each in chart.series for share in each.shares)
    x = Scale(0, len(chart.bins), left + 6, HALF - RIGHT)
    y = Scale(0, most * 1.12 or 1.0, top + height, top)
    width = x(1) - x(0)
    parts = [names, y_axis(y, left, HALF - RIGHT, chart.y)]
    parts += _bin_names(chart.bins, x, y.start)
    parts.append(x_title(chart.x, left, HALF - RIGHT, y.start))
    for at, each in enumerate(chart.series):
        told = [f"{each.name}, {name}: {n:,} {chart.counted}, {significant(share)} %" for name, n, share in
                zip(chart.bins, each.counts, each.shares, strict=True)]  # fmt: skip
        parts.append(f'<g class="s{at}">')
        if several:
            parts += _outline(each.shares, x, y)
        for place, share in enumerate(each.shares):
            bar = max(y.start - y(share), 1.5) if share else 0.0
            if share and not several:
                gap = 2.0 if width > 8 else 0.4
                parts.append(box(x(place) + gap / 2, y.start - bar, width - gap, bar, "fill", told[place]))
                if len(chart.bins) <= LABELLED_BINS:
                    parts.append(label(significant(share), x(place + 0.5), y.start - bar - 5, anchor="middle"))
        parts.append("</g>")
    for mark in chart.marks:
        parts.append(line(x(mark.at), y.start, x(mark.at), top - 2, "mark"))
        parts.append(label(mark.name, x(mark.at), top - 6, anchor="middle"))
    parts.append(line(left, y.start, HALF - RIGHT, y.start, "base"))
    return drawing(HALF, y.start + BOTTOM, chart.title, chart.caption, parts)


def _bin_names(bins: tuple[str, ...], x: Scale, bottom: float) -> list[str]:
    """The names of bins for which there is room: round numbers, and what is no number."""
    every = sparse(bins, x(1) - x(0))
    shown = []
    for at, name in enumerate(bins):
        odd = name.isalpha()
        beside = {bins[near] for near in range(max(at - every + 1, 0), min(at + every, len(bins)))}
        if odd or (int(name) % every == 0 and not any(map(str.isalpha, beside))):
            shown.append(label(signed(name), x(at + 0.5), bottom + 18, anchor="middle"))
    return shown


def _outline(shares: tuple[float, ...], x: Scale, y: Scale) -> list[str]:
    """The tops of the bars of a series, softly filled."""
    path = f"M{pixels(x(0))} {pixels(y.start)}"
    for at, share in enumerate(shares):
        path += f"V{pixels(min(y(share), y.start - 1.5) if share else y.start)}H{pixels(x(at + 1))}"
    path += f"V{pixels(y.start)}"
    return [f'<path class="soft" d="{path}z"/>', f'<path class="stroke" d="{path}"/>']


def _ranges(chart: RangeChart) -> str:
    labels = [fitted(row.name, 230) for row in chart.rows]
    left, top = max(map(width_of, labels)) + 16, 8.0
    height = min(max(25.0, 210 / len(labels)), 42.0)
    limit = max(row.limit for row in chart.rows)
    x = Scale(0, limit, left, HALF - 52)
    bottom = top + height * len(labels)
    parts = []
    values = ticks(0, limit)
    parts += [*(line(x(value), top, x(value), bottom, "grid") for value in values), *x_numbers(values, x, bottom)]
    for at, row in enumerate(chart.rows):
        y = top + at * height + height / 2
        told = f"{row.name}: median {row.middle:.2f}, {row.low:.2f} to {row.high:.2f} of {row.limit:.2f} {chart.x}"
        parts += [
            label(labels[at], left - 8, y + 4, anchor="end"),
            box(left, y - 6, x(row.limit) - left, 12, "track", told),
            '<g class="s0">',
            box(left, y - 6, x(row.middle) - left, 12, "fill", told),
            "</g>",
            line(x(row.low), y, x(row.high), y, "whisker"),
            label(f"{row.middle:.2f}", HALF - 44, y + 4),
        ]
    parts.append(x_title(chart.x, left, HALF - 52, bottom))
    return drawing(HALF, bottom + BOTTOM, chart.title, chart.caption, parts)


def _bars(chart: BarChart) -> str:
    labels = [fitted(row, 230) for row in chart.rows]
    left, top, height = max(map(width_of, labels)) + 16, 30.0, 28.0
    width = (WIDE - left - RIGHT) / len(chart.measures)
    parts = [label(name, left - 8, top + at * height + 18, anchor="end") for at, name in enumerate(labels)]
    for place, bars in enumerate(chart.measures):
        parts.append(label(bars.label, left + place * width, top - 10, kind="h"))
        parts += _measure(chart, bars, left + place * width, width - 104, top, height)
    return drawing(WIDE, top + height * len(labels) + 8, chart.title, chart.caption, parts, "wide")


def _measure(chart: BarChart, bars: Bars, left: float, width: float, top: float, height: float) -> list[str]:
    most = max((value for value in bars.values if value is not None), default=0.0)
    x = Scale(0, most or 1.0, left, left + width)
    parts = []
    for at, value in enumerate(bars.values):
        y = top + at * height
        parts.append(box(left, y + 5, width, 16, "track"))
        shown = significant(value)
        if value is not None and value > 0:
            told = f"{chart.rows[at]}: {shown}, {bars.label}"
            parts.append(f'<g class="s{at % 8}">{box(left, y + 5, x(value) - left, 16, "fill", told)}</g>')
        best = at in bars.best
        parts.append(label(shown, left + width + 8, y + 18, kind="b" if best else "t"))
        if best:
            parts.append(dot(left + width + 18 + 1.12 * width_of(shown), y + 13.5, "best", 3))
    return parts


def _block(chart: BlockChart) -> str:
    left, height = 76.0, 190.0
    values = [number for each in chart.elements for number in (each.value, each.quantized) if abs(number) < DRAWABLE]
    low, high = min([0.0, *values]), max([0.0, *values])
    pad = (high - low) * 0.08 or 1.0
    top = 28.0
    x = Scale(0, max(len(chart.elements) - 1, 1), left + 12, HALF - RIGHT - 10)
    y = Scale(low - pad, high + pad, top + height, top)
    parts = [_block_key(left), y_axis(y, left, HALF - RIGHT, "value")]
    for limit in (chart.limit, -chart.limit):
        if y.low < limit < y.high:
            parts.append(line(left, y(limit), HALF - RIGHT, y(limit), "limit"))
    parts.append(line(left, y(0), HALF - RIGHT, y(0), "base"))
    every = max(1, -(-len(chart.elements) // (16 if "," not in chart.x else 8)))
    for at, each in enumerate(chart.elements):
        told = f"{chart.x} {each.place}: {each.value:.6g} became {each.quantized:.6g}, code {each.code}"
        has_value, has_code = (abs(number) < DRAWABLE for number in (each.value, each.quantized))
        if has_value and has_code:
            parts.append(line(x(at), y(each.value), x(at), y(each.quantized), "error"))
        if has_value:
            parts.append(dot(x(at), y(each.value), "before", 3.6, told))
        if has_code:
            parts.append(dot(x(at), y(each.quantized), "after", 2.6, told))
        if at % every == 0:
            parts.append(label(each.place, x(at), y.start + 18, anchor="middle"))
    parts.append(x_title(chart.x, left, HALF - RIGHT, y.start))
    return drawing(HALF, y.start + BOTTOM, chart.title, chart.caption, parts)


def _block_key(left: float) -> str:
    """What the signs of a block's elements mean."""
    return "".join(
        [
            dot(left + 6, 10, "before", 3.6),
            label("value", left + 16, 14),
            dot(left + 74, 10, "after", 2.6),
            label("quantized", left + 84, 14),
            line(left + 162, 10, left + 180, 10, "limit"),
            label("largest a code can reach", left + 186, 14),
        ]
    )


DRAW: dict[type, Callable[[Any], str]] = {
    LineChart: _lines,
    HeatMap: _heat,
    Histogram: _histogram,
    RangeChart: _ranges,
    BarChart: _bars,
    BlockChart: _block,
}
