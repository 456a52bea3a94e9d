"""Forms of charts: what is drawn, without how. Each has a key (also a file name), a title, a caption that says how to
read it, and its data as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Cell = str | int | float | None
Table = tuple[tuple[str, ...], list[tuple[Cell, ...]]]
"""Names of columns, and rows."""


class Chart(Protocol):
    """What all charts have."""

    @property
    def key(self) -> str:
        """A name for files and links: letters, digits and underscores."""

    @property
    def title(self) -> str:
        """What is seen."""

    @property
    def caption(self) -> str:
        """How to read it."""

    @property
    def table(self) -> Table:
        """The data, with units in the names of columns."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points with rising x; None breaks the line."""

    name: str
    points: tuple[tuple[int, float | None], ...]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over layers or steps; `others` are drawn without colour, for context. A unit stands in brackets in `y`."""

    key: str
    title: str
    caption: str
    x: str
    y: str
    lines: tuple[Line, ...]
    others: tuple[Line, ...] = ()

    @property
    def unit(self) -> str:
        """What follows a number, if anything does."""
        return self.y.partition("[")[2].rstrip("]")

    @property
    def table(self) -> Table:
        """A row per point."""
        rows: list[tuple[Cell, ...]] = [
            (line.name, x, y) for line in (*self.lines, *self.others) for x, y in line.points if y is not None
        ]
        return ("series", self.x, self.y), rows


@dataclass(frozen=True, slots=True)
class Panel:
    """A heat map of the `values` (None: nothing there) in rows and columns; darker is `what` there is more of."""

    what: str
    unit: str
    values: tuple[tuple[float | None, ...], ...]

    @property
    def most(self) -> float:
        """The largest value; 0 where there is none."""
        return max((value for row in self.values for value in row if value is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Panels with the same rows and columns."""

    key: str
    title: str
    caption: str
    x: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    panels: tuple[Panel, ...]

    @property
    def table(self) -> Table:
        """A row per cell."""
        rows: list[tuple[Cell, ...]] = []
        for at, name in enumerate(self.rows):
            for place, column in enumerate(self.columns):
                values = [panel.values[at][place] for panel in self.panels]
                if any(value is not None for value in values):
                    rows.append((name, column, *values))
        return ("row", self.x, *(f"{panel.what} [{panel.unit}]" for panel in self.panels)), rows


@dataclass(frozen=True, slots=True)
class Series:
    """The counts of a histogram's bins."""

    name: str
    counts: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Percent of all that was counted."""
        total = sum(self.counts) or 1
        return tuple(100.0 * count / total for count in self.counts)


@dataclass(frozen=True, slots=True)
class Mark:
    """A value on the x axis worth a line: `at` counts bins from the left edge of the first."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Shares of what `counted` names, by bin."""

    key: str
    title: str
    caption: str
    x: str
    counted: str
    bins: tuple[str, ...]
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()

    @property
    def y(self) -> str:
        """The label of the shares."""
        return f"% of {self.counted}"

    @property
    def table(self) -> Table:
        """A row per bin and series."""
        rows: list[tuple[Cell, ...]] = [
            (each.name, name, count, share)
            for each in self.series
            for name, count, share in zip(self.bins, each.counts, each.shares, strict=True)
        ]
        return ("series", self.x, self.counted, self.y), rows


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` over the `middle` to `high`, of at most `limit`."""

    name: str
    low: float
    middle: float
    high: float
    limit: float


@dataclass(frozen=True, slots=True)
class RangeChart:
    """Ranges below one another."""

    key: str
    title: str
    caption: str
    x: str
    rows: tuple[Range, ...]

    @property
    def table(self) -> Table:
        """A row per range."""
        rows: list[tuple[Cell, ...]] = [(row.name, row.low, row.middle, row.high, row.limit) for row in self.rows]
        return ("row", *(f"{word} {self.x}" for word in ("least", "median", "most", "available"))), rows


@dataclass(frozen=True, slots=True)
class Bars:
    """One measure of each row (None: absent); `better` is high or low."""

    label: str
    better: str
    values: tuple[float | None, ...]

    @property
    def best(self) -> frozenset[int]:
        """The rows that are best, none where all are equal."""
        known = [value for value in self.values if value is not None]
        if len(set(known)) < 2:
            return frozenset()
        wanted = max(known) if self.better == "high" else min(known)
        return frozenset(at for at, value in enumerate(self.values) if value == wanted)


@dataclass(frozen=True, slots=True)
class BarChart:
    """Several measures of the same rows side by side."""

    key: str
    title: str
    caption: str
    rows: tuple[str, ...]
    measures: tuple[Bars, ...]

    @property
    def table(self) -> Table:
        """A row per row."""
        rows = [(name, *(bars.values[at] for bars in self.measures)) for at, name in enumerate(self.rows)]
        return ("row", *(bars.label for bars in self.measures)), list(rows)


DRAWABLE = 1e300
"""What is beyond has no place beside anything else."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a block by its place: value, code as text, the value that the code stands for."""

    place: str
    value: float
    code: str
    quantized: float


@dataclass(frozen=True, slots=True)
class BlockChart:
    """The elements of one block before and after; none lies beyond `limit`, the largest value that can be held."""

    key: str
    title: str
    caption: str
    x: str
    limit: float
    elements: tuple[Element, ...]

    @property
    def table(self) -> Table:
        """A row per element."""
        rows: list[tuple[Cell, ...]] = [
            (each.place, each.value, each.code, each.quantized, each.quantized - each.value) for each in self.elements
        ]
        return (self.x, "value", "code", "quantized", "error"), rows


# Each stands out from its background by 3:1 at least, and from the others also to those who see two colours only
# (a CIE76 difference above 20 as protanopes, deuteranopes and tritanopes see them).
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
    "saturated": "#f79a56",
    "underflowed": "#74b8f5",
    "context": "#5d6671",
    **{f"series-{at}": colour for at, colour in enumerate(SERIES_DARK)},
}


def variables(colours: dict[str, str]) -> str:
    """The colours as CSS custom properties."""
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
