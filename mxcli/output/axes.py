"""Axes, labels and colours of charts. Widths are nominal: in pixels of a page's figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mxcli.output.screen import ELLIPSIS, Screen, shortened

WIDE, HALF = 1240.0, 610.0
"""Widths of charts: all of a page, and half of it."""
MARGIN, LEFT = 18.0, 64.0
"""Width right of a chart, and left of it for the numbers of the y axis."""
LABEL, TURNED = 230.0, 170.0
"""Largest width of a row's name, and height of a column's name that is turned by a quarter."""
CHARACTER, LINE = 6.9, 14.0
"""Average width of a character of a label (an estimate on the safe side, as fonts differ), and height of a line."""
DRAWABLE = 1e300
"""Largest magnitude that is drawn."""


def width_of(text: str) -> float:
    """Return the approximate width of a label."""
    return CHARACTER * len(text)


def fitted(text: str, width: float = LABEL) -> str:
    """Return a label, shortened like names in tables if it is wider."""
    return shortened(text, max(int(width / CHARACTER), len(ELLIPSIS) + 2), Screen(unicode=True))


def sparse(names: Sequence[str], width: float, turned: bool = False) -> int:
    """Return n such that every n-th name fits if each has this width."""
    needed = (LINE if turned else max(map(width_of, names), default=0.0) + 10) / width
    steps = (step * 10**power for power in range(7) for step in (1, 2, 5))
    return next((step for step in steps if step >= needed), len(names))


def is_drawable(value: float) -> bool:
    """Return whether a value can be drawn."""
    return abs(value) < DRAWABLE


def ticks(low: float, high: float, count: int = 6, *, whole: bool = False) -> list[float]:
    """Return round numbers in the range, at most about `count`."""
    span = high - low
    if not span or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / count))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    step = max(step, 1.0) if whole else step
    return [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Return round numbers as text, with as many decimals as their distance needs and real minus signs."""
    step = values[1] - values[0] if len(values) > 1 else abs(values[0])
    small = bool(step) and not 1e-5 <= step < 1e6
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step and not small else 0
    return [signed("0" if not value else f"{value:.3g}" if small else f"{value:,.{decimals}f}") for value in values]


def signed(text: str) -> str:
    """Return a number as text with a real minus sign."""
    return "\N{MINUS SIGN}" + text[1:] if text.startswith("-") else text


@dataclass(frozen=True, slots=True)
class Axis:
    """Range of an axis, and its ticks with their texts."""

    low: float
    high: float
    ticks: Sequence[float]
    texts: Sequence[str]


def axis(low: float, high: float, count: int = 6) -> Axis:
    """Return the axis of a range with about `count` ticks."""
    values = ticks(low, high, count)
    return Axis(low, high, values, tick_texts(values))


# Contrast with the background is 3:1 at least; between two series the CIE76 difference is above 20, also for
# protanopes, deuteranopes and tritanopes.
SERIES_LIGHT = ("#1f577c", "#ce700d", "#26a57b", "#891fb0", "#794101", "#3573fa", "#da3c51", "#4a363f")
SERIES_DARK = ("#7995fc", "#e39e42", "#2bd698", "#c371bd", "#f0d524", "#bbfae4", "#ff6c6b", "#bab1c0")

LIGHT: dict[str, str] = {
    "paper": "#ffffff",
    "card": "#ffffff",
    "sunken": "#f5f6f8",
    "ink": "#1a1e24",
    "soft": "#555d68",
    "rule": "#dde1e6",
    "grid": "#e8ebef",
    "accent": "#0b62a4",
    "hover": "#eef4fa",
    "sqnr": "#0b62a4",
    "saturated": "#bf4a06",
    "underflowed": "#1f5f93",
    "context": "#b3b9c2",
    **{f"series-{at}": colour for at, colour in enumerate(SERIES_LIGHT)},
}
DARK: dict[str, str] = {
    "paper": "#14171b",
    "card": "#1a1e23",
    "sunken": "#20252b",
    "ink": "#e9ecef",
    "soft": "#a3abb6",
    "rule": "#333a43",
    "grid": "#2a3038",
    "accent": "#6db3f2",
    "hover": "#232c36",
    "sqnr": "#6db3f2",
    "saturated": "#f79a56",
    "underflowed": "#74b8f5",
    "context": "#5d6671",
    **{f"series-{at}": colour for at, colour in enumerate(SERIES_DARK)},
}
