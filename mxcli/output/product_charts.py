"""Charts of products: totals of training recipes, SQNR along the layers and over the steps, and losses of operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from mxcli.errors import printable
from mxcli.flows.products.shapes import DY, OPERANDS, W, X
from mxcli.output.charts import COLOURS, COLUMNS, GREY, BarChart, Bars, Chart, HeatMap, Line, LineChart, Panel
from mxcli.output.study import Metrics, ProductStudy, RecipePass
from mxcli.output.training import PRODUCTS

_Place = TypeVar("_Place", str, int)


def product_charts(study: ProductStudy) -> list[Chart]:
    """Return the charts of a study of products in a fixed order, without those that would be empty."""
    found = [
        _recipes(study),
        _sqnr_heat_map(study),
        *_sqnr_by_layer(study),
        _operand_losses(study),
        *_sqnr_by_step(study),
    ]
    return [chart for chart in found if chart is not None]


def number_in(metrics: Metrics, name: str) -> float | None:
    """Return a metric of products or operands; None if it is absent."""
    value = metrics.get(name)
    return value if isinstance(value, (int, float)) else None


def _recipes(study: ProductStudy) -> Chart | None:
    """Return the SQNR of each product under each recipe."""
    if not study.compares:
        return None
    measures = tuple(
        Bars(
            f"{name}, {formula}: SQNR [dB]",
            "high",
            tuple(number_in(study.totals.get((recipe, name), {}), "sqnr_db") for recipe in study.recipes),
        )
        for name, formula in PRODUCTS.items()
    )
    return BarChart(
        "recipes",
        "SQNR of each product, by recipe",
        "All layers taken together, those that stay high included: the lower, the more is lost. A dot marks the best "
        "of a column.",
        study.recipes,
        tuple(bars for bars in measures if any(value is not None for value in bars.values)),
    )


def _spans(by_place: Mapping[RecipePass, Mapping[_Place, float | None]]) -> list[list[_Place]]:
    """Return the layers, or steps, in order; neighbours together if there are more than COLUMNS."""
    places = list(dict.fromkeys(place for found in by_place.values() for place in found))
    width = max(1, -(-len(places) // COLUMNS))
    return [places[at : at + width] for at in range(0, len(places), width)]


def _names(spans: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return a name for each span of layers, without the beginning that most of them share."""
    stacks = Counter(_stack(layer) for span in spans for layer in span)
    stack, count = stacks.most_common(1)[0]
    common = stack if count > 1 else ""
    firsts = [printable(span[0].removeprefix(common)) for span in spans]
    return tuple(
        first if len(span) == 1 else f"{first} (+{len(span) - 1})" for first, span in zip(firsts, spans, strict=True)
    )


def _stack(layer: str) -> str:
    """Return the part before the first number between dots: `model.layers.`; empty if there is none."""
    parts = layer.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), 0)
    return "".join(f"{part}." for part in parts[:number])


def _lowest(sqnrs: Mapping[_Place, float | None], span: Iterable[_Place]) -> float | None:
    return min((value for place in span if (value := sqnrs.get(place)) is not None), default=None)


def _lowest_of(spans: Sequence[Sequence[object]], noun: str) -> str:
    """Return a sentence on neighbours that are drawn together; empty if none are."""
    return f" Of {len(spans[0]):,} neighbouring {noun}s the lowest." if spans and len(spans[0]) > 1 else ""


def _line_name(study: ProductStudy, line: RecipePass) -> str:
    recipe, name = line
    return f"{recipe} {name}" if study.compares else f"{name}, {PRODUCTS[name]}"


def _sqnr_heat_map(study: ProductStudy) -> Chart | None:
    """Return the SQNR by layer, recipe and pass."""
    spans = _spans(study.by_layer)
    lines = {line: sqnrs for line, sqnrs in study.by_layer.items() if any(v is not None for v in sqnrs.values())}
    if not lines:
        return None
    values = tuple(tuple(_lowest(sqnrs, span) for span in spans) for sqnrs in lines.values())
    blank = (
        " Blank: exact, as the layer is not quantized." if any(value is None for row in values for value in row) else ""
    )
    return HeatMap(
        "product_sqnr",
        f"SQNR of products, by layer{', recipe and pass' if study.compares else ' and pass'}",
        f"The stronger the colour, the more is lost.{_lowest_of(spans, 'layer')}{blank}",
        "layer",
        _names(spans),
        tuple(_line_name(study, line) for line in lines),
        (Panel("SQNR", "dB", values, low_is_dark=True),),
    )


def _charts_of_lines(study: ProductStudy) -> Iterable[tuple[str, str, list[tuple[str, RecipePass]]]]:
    """Yield key, title and named lines of each chart: a chart with a line for each pass, or one for each pass with a
    line for each recipe."""
    if not study.compares:
        yield "product", "by pass", [(_line_name(study, line), line) for line in study.by_layer]
        return
    for name in dict.fromkeys(name for _, name in study.by_layer):
        lines = [(line[0], line) for line in study.by_layer if line[1] == name]
        yield name, f"{PRODUCTS[name]} ({name}), by recipe", lines


def _sqnr_by_layer(study: ProductStudy) -> Iterable[LineChart]:
    spans = _spans(study.by_layer)
    names = _names(spans) if spans else ()
    for of, title, lines in _charts_of_lines(study):
        drawn = [
            Line(name, tuple((at, _lowest(study.by_layer[line], span)) for at, span in enumerate(spans)))
            for name, line in lines
        ]
        chart = _line_chart(
            f"{of}_sqnr_by_layer", f"SQNR along the layers, {title}", "layer", drawn, _lowest_of(spans, "layer"), names
        )
        if chart is not None:
            yield chart


def _sqnr_by_step(study: ProductStudy) -> Iterable[LineChart]:
    spans = _spans(study.by_step)
    for of, title, lines in _charts_of_lines(study):
        drawn = [
            Line(name, tuple((span[0], _lowest(study.by_step[line], span)) for span in spans))
            for name, line in lines
            if line in study.by_step
        ]
        chart = _line_chart(
            f"{of}_sqnr_by_step", f"SQNR over the steps, {title}", "step", drawn, _lowest_of(spans, "step")
        )
        if chart is not None:
            yield chart


def _line_chart(
    key: str, title: str, x: str, lines: Sequence[Line], joined: str, names: tuple[str, ...] = ()
) -> LineChart | None:
    """Return the chart of lines that have a value (None if there are none); `joined` is a sentence of the caption."""
    known = [line for line in lines if any(y is not None for _, y in line.points)]
    if not known:
        return None
    more = f" The first {COLOURS} have colours; grey: the others." if len(known) > COLOURS else ""
    caption = f"The lower, the more is lost.{joined}{more}"
    coloured, others = tuple(known[:COLOURS]), tuple(known[COLOURS : COLOURS + GREY])
    return LineChart(key, title, caption, x, "SQNR [dB]", coloured, others, names)


def _operand_losses(study: ProductStudy) -> Chart | None:
    """Return saturation and underflow of the operands of each product, by recipe."""
    columns = [(letter, name) for name, pair in OPERANDS.items() for letter, _ in pair]
    rows = [recipe for recipe in study.recipes if any(_has_operands(study, recipe, name) for _, name in columns)]
    if not rows:
        return None
    panels = [
        Panel(
            what,
            "% of elements",
            tuple(
                tuple(
                    number_in(study.totals.get((recipe, name), {}), f"{letter.lower()}_{what}_percent")
                    for letter, name in columns
                )
                for recipe in rows
            ),
        )
        for what in ("saturated", "underflowed")
    ]
    return HeatMap(
        "operand_losses",
        "Saturation and underflow of operands, by recipe",
        "Saturated: clamped at the largest value the scale lets a code reach. Underflowed: not zero, but became zero. "
        "An operand has other codes in each of its two products.",
        "operand",
        tuple(f"{letter} in {name}" for letter, name in columns),
        tuple(rows),
        tuple(panels),
    )


def _has_operands(study: ProductStudy, recipe: str, name: str) -> bool:
    total = study.totals.get((recipe, name), {})
    return any(f"{letter.lower()}_saturated_percent" in total for letter in (X, W, DY))
