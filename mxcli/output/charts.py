"""Charts as descriptions: data, ranges, ticks and labels. `svg` draws them for pages, `plots` for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxcli.output import axes
from mxcli.output.numbers import significant

Cell = str | int | float | None
Table = tuple[tuple[str, ...], list[tuple[Cell, ...]]]
"""Names of columns, and rows."""

MARKERS = ("circle", "square", "diamond", "triangle", "down", "cross", "plus", "ring")
"""Shapes of points, one for each colour of a series."""
COLOURS, GREY, COLUMNS = len(MARKERS), 56, 400
"""Most lines with colours, most lines for context, and most points of a line or columns of a heat map."""
MOST_MARKERS, MOST_VALUES, VALUE_WIDTH = 64, 14, 38.0
"""Most points of a line with markers, most bars of a histogram with numbers, and least width of a cell with one."""
PANEL_GAP = 44.0


@dataclass(frozen=True, slots=True)
class Chart:
    """Base of all charts: a key (also a file name: letters, digits and underscores), a title, and a caption that says
    how to read it."""

    key: str
    title: str
    caption: str

    @property
    def table(self) -> Table:
        """The data, with units in the names of columns."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Line:
    """Points with rising x; None breaks the line."""

    name: str
    points: tuple[tuple[int, float | None], ...]


@dataclass(frozen=True, slots=True)
class LineChart(Chart):
    """Lines over layers or steps; `others` are drawn without colour, for context. A unit stands in brackets in `y`.
    With `names`, x counts them."""

    x: str
    y: str
    lines: tuple[Line, ...]
    others: tuple[Line, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The unit of the values; empty if there is none."""
        return self.y.partition("[")[2].rstrip("]")

    @property
    def places(self) -> list[int]:
        """Return the x of each point that has a value."""
        return sorted({x for line in (*self.lines, *self.others) for x, y in line.points if y is not None})

    @property
    def has_markers(self) -> bool:
        """Return whether each point has a marker."""
        return len(self.places) <= MOST_MARKERS

    @property
    def x_axis(self) -> axes.Axis:
        """The x axis; a single x is in the middle."""
        low, high = (0, len(self.names) - 1) if self.names else (self.places[0], self.places[-1])
        if self.names:
            every = axes.sparse(self.names, (axes.WIDE - axes.LEFT - axes.MARGIN) / len(self.names), turned=True)
            shown: Sequence[float] = range(0, len(self.names), every)
            texts = [axes.fitted(self.names[int(at)], axes.TURNED) for at in shown]
        else:
            shown = axes.ticks(low, high, 20, whole=True)
            texts = axes.tick_texts(shown)
        return axes.Axis(low - (low == high), high + (low == high), shown, texts)

    @property
    def y_axis(self) -> axes.Axis:
        """The y axis, with room above and below."""
        known = [y for line in (*self.lines, *self.others) for _, y in line.points if y is not None]
        low, high = min(known), max(known)
        pad = max((high - low) * 0.08, abs(high) * 0.005, 0.05)
        return axes.axis(low - pad, high + pad, 8)

    def text(self, line: Line, x: int, y: float) -> str:
        """Return the description of a point."""
        place = self.names[x] if self.names else f"{self.x} {x}"
        return f"{line.name}, {place}: {significant(y)} {self.unit}".rstrip()

    @property
    def table(self) -> Table:
        """A row per point."""
        rows: list[tuple[Cell, ...]] = [
            (line.name, self.names[x] if self.names else x, y)
            for line in (*self.lines, *self.others)
            for x, y in line.points
            if y is not None
        ]
        return ("series", self.x, self.y), rows


@dataclass(frozen=True, slots=True)
class Panel:
    """Values of a heat map in rows and columns (None: blank). More is darker, from 0 on; with `low_is_dark` less is
    darker, from the highest value to the lowest. `what` also names the colour."""

    what: str
    unit: str
    values: tuple[tuple[float | None, ...], ...]
    low_is_dark: bool = False

    @property
    def colour(self) -> str:
        """The name of the colour."""
        return self.what.lower()

    @property
    def light(self) -> float:
        """The value with the lightest shade."""
        return max(self._known, default=0.0) if self.low_is_dark else 0.0

    @property
    def dark(self) -> float:
        """The value with the darkest shade; the lightest where there is no other."""
        return min(self._known, default=0.0) if self.low_is_dark else max(self._known, default=0.0)

    @property
    def _known(self) -> list[float]:
        return [value for row in self.values for value in row if value is not None]

    def level(self, value: float) -> float:
        """Return the darkness of a value, 0 to 1."""
        span = self.dark - self.light
        return (value - self.light) / span if span else 0.0


@dataclass(frozen=True, slots=True)
class HeatMap(Chart):
    """Panels with the same rows and columns."""

    x: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    panels: tuple[Panel, ...]

    @property
    def side_by_side(self) -> bool:
        """Return whether panels are next to one another."""
        return len(self.columns) <= 20

    @property
    def labels(self) -> list[str]:
        """The names of rows, shortened."""
        return [axes.fitted(row) for row in self.rows]

    @property
    def left(self) -> float:
        """The width left of the cells."""
        return max(map(axes.width_of, self.labels)) + 16

    @property
    def cell_width(self) -> float:
        """The width of a cell."""
        across = len(self.panels) if self.side_by_side else 1
        width = (axes.WIDE - self.left - axes.MARGIN - PANEL_GAP * (across - 1)) / across
        return min(width / len(self.columns), 132.0)

    @property
    def has_values(self) -> bool:
        """Return whether cells have their numbers."""
        return self.cell_width >= VALUE_WIDTH

    @property
    def is_turned(self) -> bool:
        """Return whether names of columns are turned by a quarter."""
        return max(map(axes.width_of, self.columns)) > max(self.cell_width, 60.0)

    @property
    def ticks(self) -> dict[int, str]:
        """The names of columns that fit, by index."""
        names = [axes.fitted(name, axes.TURNED) for name in self.columns] if self.is_turned else self.columns
        return {at: names[at] for at in range(0, len(names), axes.sparse(names, self.cell_width, self.is_turned))}

    def text(self, panel: Panel, row: int, column: int, value: float) -> str:
        """Return the description of a cell."""
        return f"{self.rows[row]}, {self.x} {self.columns[column]}: {significant(value)} {panel.unit} {panel.what}"

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
    """Counts of a histogram's bins."""

    name: str
    counts: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Percent of the sum of counts."""
        total = sum(self.counts) or 1
        return tuple(100.0 * count / total for count in self.counts)


@dataclass(frozen=True, slots=True)
class Mark:
    """A line at a value of the x axis: `at` counts bins from the left edge of the first."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Histogram(Chart):
    """Shares of `counted`, by bin. A single series has bars, several have outlines."""

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
    def y_axis(self) -> axes.Axis:
        """The y axis, from 0, with room above."""
        return axes.axis(0.0, max(share for each in self.series for share in each.shares) * 1.12 or 1.0)

    @property
    def has_values(self) -> bool:
        """Return whether bars have their numbers."""
        return len(self.series) == 1 and len(self.bins) <= MOST_VALUES

    @property
    def ticks(self) -> dict[int, str]:
        """The names of bins that fit, by index: multiples of a round number, and words."""
        every = axes.sparse(self.bins, (axes.HALF - axes.LEFT - axes.MARGIN) / len(self.bins))
        shown = {}
        for at, name in enumerate(self.bins):
            near = self.bins[max(at - every + 1, 0) : at + every]
            if name.isalpha() or (int(name) % every == 0 and not any(map(str.isalpha, near))):
                shown[at] = axes.signed(name)
        return shown

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
class RangeChart(Chart):
    """Ranges below one another."""

    x: str
    rows: tuple[Range, ...]

    @property
    def x_axis(self) -> axes.Axis:
        """The x axis, from 0 to the largest limit."""
        return axes.axis(0.0, max(row.limit for row in self.rows))

    @property
    def table(self) -> Table:
        """A row per range."""
        rows: list[tuple[Cell, ...]] = [(row.name, row.low, row.middle, row.high, row.limit) for row in self.rows]
        return ("row", *(f"{word} {self.x}" for word in ("least", "median", "most", "available"))), rows


@dataclass(frozen=True, slots=True)
class Bars:
    """A measure of each row (None: absent); `better` is high or low."""

    label: str
    better: str
    values: tuple[float | None, ...]

    @property
    def texts(self) -> list[str]:
        """The values as text."""
        return [significant(value) for value in self.values]

    @property
    def most(self) -> float:
        """The value of the longest bar."""
        return max((value for value in self.values if value is not None), default=0.0) or 1.0

    @property
    def best(self) -> frozenset[int]:
        """The rows that are best; empty where all are equal."""
        known = [value for value in self.values if value is not None]
        if len(set(known)) < 2:
            return frozenset()
        wanted = max(known) if self.better == "high" else min(known)
        return frozenset(at for at, value in enumerate(self.values) if value == wanted)


@dataclass(frozen=True, slots=True)
class BarChart(Chart):
    """Several measures of the same rows side by side."""

    rows: tuple[str, ...]
    measures: tuple[Bars, ...]

    @property
    def table(self) -> Table:
        """A row per row."""
        rows = [(name, *(bars.values[at] for bars in self.measures)) for at, name in enumerate(self.rows)]
        return ("row", *(bars.label for bars in self.measures)), list(rows)


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a block by its place: value, code as text, and the code's value."""

    place: str
    value: float
    code: str
    quantized: float


@dataclass(frozen=True, slots=True)
class BlockChart(Chart):
    """The elements of a block before and after quantization; `limit` is the largest magnitude of a code."""

    x: str
    limit: float
    elements: tuple[Element, ...]

    @property
    def y_axis(self) -> axes.Axis:
        """The y axis: all values that can be drawn, and 0."""
        numbers = (number for each in self.elements for number in (each.value, each.quantized))
        known = list(filter(axes.is_drawable, numbers))
        low, high = min([0.0, *known]), max([0.0, *known])
        pad = (high - low) * 0.08 or 1.0
        return axes.axis(low - pad, high + pad, 5)

    @property
    def limits(self) -> list[float]:
        """The limits, plus and minus, that are in the range."""
        span = self.y_axis
        return [limit for limit in (self.limit, -self.limit) if span.low < limit < span.high]

    @property
    def ticks(self) -> dict[int, str]:
        """The places of elements that fit, by index."""
        every = max(1, -(-len(self.elements) // (16 if "," not in self.x else 8)))
        return {at: self.elements[at].place for at in range(0, len(self.elements), every)}

    def text(self, element: Element) -> str:
        """Return the description of an element."""
        return f"{self.x} {element.place}: {element.value:.6g} became {element.quantized:.6g}, code {element.code}"

    @property
    def table(self) -> Table:
        """A row per element."""
        rows: list[tuple[Cell, ...]] = [
            (each.place, each.value, each.code, each.quantized, each.quantized - each.value) for each in self.elements
        ]
        return (self.x, "value", "code", "quantized", "error"), rows
