"""What SVG charts are made of: escaped text, scales from data to pixels, axes and legends. Colours are CSS classes, so
that a page can change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mxcli.output.screen import ELLIPSIS, Screen, shortened

CHARACTER = 6.9
"""Pixels a character takes on average at the size of labels; a guess on the safe side, as fonts differ."""
MARKERS = ("circle", "square", "diamond", "triangle", "down", "cross", "plus", "ring")


@dataclass(frozen=True, slots=True)
class Scale:
    """From data, `low` to `high`, to pixels, `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start) if span else self.start


def pixels(value: float) -> str:
    """To a tenth, without trailing zeros."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def width_of(text: str) -> float:
    """About how wide a label is."""
    return CHARACTER * len(text)


def fitted(text: str, width: float) -> str:
    """A label, shortened as names in tables are where it would be wider."""
    return shortened(text, max(int(width / CHARACTER), len(ELLIPSIS) + 2), Screen(unicode=True))


def label(text: str, x: float, y: float, *, kind: str = "t", anchor: str = "start", turned: bool = False) -> str:
    """Text at its baseline; `kind` is a class: t small, l for axes, h a heading."""
    turn = f' transform="rotate(-90 {pixels(x)} {pixels(y)})"' if turned else ""
    return f'<text class="{kind}" x="{pixels(x)}" y="{pixels(y)}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<path class="{kind}" d="M{pixels(x1)} {pixels(y1)}L{pixels(x2)} {pixels(y2)}"/>'


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "", more: str = "") -> str:
    """A filled rectangle that says its `title` when pointed at."""
    told = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return (
        f'<rect class="{kind}" x="{pixels(x)}" y="{pixels(y)}" width="{pixels(max(width, 0))}" '
        f'height="{pixels(max(height, 0))}"{more}{told}'
    )


def marker(x: float, y: float, shape: str, title: str = "", size: float = 3.4) -> str:
    """A mark in the colour of its group."""
    s = size
    outlines = {
        "square": f"M{-s} {-s}h{2 * s}v{2 * s}h{-2 * s}z",
        "diamond": f"M0 {-1.35 * s}L{1.35 * s} 0L0 {1.35 * s}L{-1.35 * s} 0z",
        "triangle": f"M0 {-1.2 * s}L{1.2 * s} {s}H{-1.2 * s}z",
        "down": f"M0 {1.2 * s}L{1.2 * s} {-s}H{-1.2 * s}z",
        "cross": f"M{-s} {-s}L{s} {s}M{-s} {s}L{s} {-s}",
        "plus": f"M0 {-1.3 * s}V{1.3 * s}M{-1.3 * s} 0H{1.3 * s}",
    }
    told = f"<title>{escape(title)}</title>" if title else ""
    kind = {"cross": "stroke", "plus": "stroke", "ring": "hollow"}.get(shape, "fill")
    place = f"{pixels(x)} {pixels(y)}"
    if shape in outlines:
        return f'<path class="{kind}" transform="translate({place})" d="{outlines[shape]}">{told}</path>'
    return f'<circle class="{kind}" cx="{pixels(x)}" cy="{pixels(y)}" r="{s}">{told}</circle>'


def dot(x: float, y: float, kind: str, radius: float, title: str = "") -> str:
    """A disc."""
    told = f"><title>{escape(title)}</title></circle>" if title else "/>"
    return f'<circle class="{kind}" cx="{pixels(x)}" cy="{pixels(y)}" r="{pixels(radius)}"{told}'


def ticks(low: float, high: float, count: int = 6, *, whole: bool = False) -> list[float]:
    """Round numbers in the range, about `count`."""
    span = high - low
    if not span or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / count))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    step = max(step, 1.0) if whole else step
    return [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Round numbers with as many decimals as their distance needs, and real minus signs."""
    step = values[1] - values[0] if len(values) > 1 else abs(values[0])
    small = bool(step) and not 1e-5 <= step < 1e6
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step and not small else 0
    return [signed("0" if not value else f"{value:.3g}" if small else f"{value:,.{decimals}f}") for value in values]


def signed(text: str) -> str:
    """A number with a real minus sign."""
    return "\N{MINUS SIGN}" + text[1:] if text.startswith("-") else text


def y_axis(y: Scale, left: float, right: float, title: str) -> str:
    """Grid lines with numbers on the left, and the turned title."""
    values = ticks(y.low, y.high, max(3, round(abs(y.start - y.end) / 36)))
    parts = []
    for value, text in zip(values, tick_texts(values), strict=True):
        parts += [line(left, y(value), right, y(value), "grid"), label(text, left - 8, y(value) + 4, anchor="end")]
    middle = (y.start + y.end) / 2
    return "".join([*parts, label(title, 14, middle, kind="l", anchor="middle", turned=True)])


def x_numbers(values: Sequence[float], x: Scale, bottom: float) -> list[str]:
    """Numbers below the x axis."""
    texts = tick_texts(values)
    return [label(text, x(value), bottom + 18, anchor="middle") for value, text in zip(values, texts, strict=True)]


def sparse(names: Sequence[str], width: float) -> int:
    """Every how many of the names there is room for, if each has so much."""
    needed = (max(map(width_of, names), default=0.0) + 10) / width
    steps = (step * 10**power for power in range(7) for step in (1, 2, 5))
    return next((step for step in steps if step >= needed), len(names))


def x_title(title: str, left: float, right: float, bottom: float) -> str:
    """What runs along the x axis, below its numbers."""
    return label(title, (left + right) / 2, bottom + 38, kind="l", anchor="middle")


def legend(names: Sequence[str], left: float, top: float, right: float, shapes: Sequence[str]) -> tuple[str, float]:
    """A sign and a name for each series, in as many rows as it takes, and the height of all."""
    parts, x, y = [], left, top + 10
    for at, name in enumerate(names):
        shown = fitted(name, right - left - 40)
        width = 26 + width_of(shown) + 18
        if x > left and x + width > right:
            x, y = left, y + 20
        sign = line(x, y - 4, x + 18, y - 4, "stroke") if shapes[at] != "box" else box(x + 3, y - 9, 12, 10, "fill")
        mark = marker(x + 9, y - 4, shapes[at]) if shapes[at] not in ("box", "line") else ""
        parts.append(f'<g class="s{at}">{sign}{mark}</g>{label(shown, x + 26, y)}')
        x += width
    return "".join(parts), y + 12 - top if names else 0.0


def drawing(width: float, height: float, title: str, description: str, parts: Sequence[str], kind: str = "") -> str:
    """The whole picture, described for those who cannot see it."""
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {pixels(width)} {pixels(height)}" role="img" '
        f'aria-label="{escape(f"{title}. {description}", quote=True)}" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )
