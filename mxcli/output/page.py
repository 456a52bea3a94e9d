"""Content of a page, without markup: its head, summary, totals and the table to search and sort. A page of tensors and
a page of products have the same form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxcli.errors import printable
from mxcli.flows.measure.worst_blocks import COMPARED
from mxcli.flows.products.shapes import DY, W, X
from mxcli.numerics.metric_columns import PageColumn
from mxcli.numerics.metrics import METRICS, number_of
from mxcli.output.axes import signed
from mxcli.output.charts import Chart
from mxcli.output.inspection import dtype_mix
from mxcli.output.numbers import (
    ABSENT,
    EXACT,
    byte_size,
    counted,
    noise_cell,
    number_cell,
    quantity,
    shape_text,
    significant,
)
from mxcli.output.product_charts import number_in, product_charts
from mxcli.output.study import Metrics, Product, ProductStudy, Study, Tensor
from mxcli.output.study_charts import tensor_charts
from mxcli.output.training import PRODUCTS

TEXT, WORD, SHAPE, NUMBER, WHOLE = "text", "word", "shape", "number", "whole"
"""Kinds of columns."""
TITLES = {
    "report": "Quantization report",
    "compare": "Comparison of quantization recipes",
    "training": "Products under training recipes",
    "products": "Products of quantized layers",
}


@dataclass(frozen=True, slots=True)
class Tile:
    """A large number of the summary."""

    name: str
    value: str
    unit: str
    more: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Table of totals: groups of rows, each row with its name (`rows` heads that column; empty: none) and cells.
    `first_is_all`: the first group is the grand total."""

    groups: str
    rows: str
    columns: tuple[tuple[str, str], ...]
    bodies: Mapping[str, Sequence[tuple[str, Sequence[str]]]]
    first_is_all: bool = True


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the table: its kind, the heading below that of its group, the unit, the meaning, and whether
    higher or lower is better."""

    key: str
    kind: str
    label: str
    of: Callable[[Any], object]
    group: str = ""
    unit: str = ""
    meaning: str = ""
    better: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Table to search and sort; its first column is the text that is searched. `filters` has the words to choose from
    in a column, by its key."""

    noun: str
    searched: str
    columns: Sequence[Column]
    rows: Sequence[object]
    filters: Mapping[str, Sequence[str]]

    @property
    def heading(self) -> str:
        """Return the heading of its section."""
        return f"{self.noun.capitalize()}s"


@dataclass(frozen=True, slots=True)
class Page:
    """Content of a page; `worst` introduces the charts of blocks."""

    title: str
    source: str
    facts: str
    rules: Sequence[str]
    tiles: Sequence[Tile]
    findings: Sequence[str]
    notes: Sequence[str]
    charts: Sequence[Chart]
    totals: Totals | None
    table: Table
    worst: str = ""


def page_of(study: Study | ProductStudy) -> Page:
    """Return the content of the page of a study."""
    return _page_of_products(study) if isinstance(study, ProductStudy) else _page_of_tensors(study)


def _page_of_tensors(study: Study) -> Page:
    total = study.total
    notes = [*study.notes]
    if study.unfinished:
        notes.insert(0, f"Interrupted: {counted(study.unfinished, 'tensor')} not measured.")
    some = f"each {study.scheme_noun}" if len(study.schemes) <= COMPARED else f"each of the first {COMPARED} recipes"
    under = f", under {some}" if study.compares else ""
    return Page(
        title=TITLES[study.verb],
        source=study.source,
        facts=f"{quantity(total.elements)} elements in {counted(total.tensors, 'tensor')}, {byte_size(total.bytes)}, "
        f"{dtype_mix(study.by_dtype)}",
        rules=study.rules,
        tiles=() if study.compares or not study.sums else _tensor_tiles(study),
        findings=study.findings,
        notes=notes,
        charts=tensor_charts(study),
        totals=_tensor_totals(study) if study.sums else None,
        table=_tensor_table(study),
        worst=f"The block with most error of each of the tensors with the lowest SQNR{under}: every element before and "
        "after, joined by its error.",
    )


def _tensor_tiles(study: Study) -> list[Tile]:
    total = study.sums[0]
    sqnr = noise_cell(total, "sqnr_db")
    decided = ", ".join(f"{word} {count:,}" for word, count in study.counts.items() if count)
    in_blocks = f"of elements, in {number_cell(total, 'saturated_blocks_percent')} % of blocks"
    return [
        Tile("SQNR", sqnr, "dB" if sqnr not in (EXACT, ABSENT) else "", "signal over quantization noise"),
        Tile("Saturated", number_cell(total, "saturated_percent"), "%", in_blocks),
        Tile("Underflowed", number_cell(total, "underflowed_percent"), "%", "of elements became zero"),
        Tile("Size", number_cell(total, "bits_per_element"), "bits", "per element, scales included"),
        Tile("Tensors", f"{len(study.measured):,}", "measured", decided),
    ]


_TENSOR_TOTALS: dict[tuple[str, str], Callable[[Metrics], str]] = {
    ("SQNR", "dB"): lambda m: noise_cell(m, "sqnr_db"),
    ("relative error", ""): lambda m: noise_cell(m, "relative_error"),
    ("saturated", "% of elements"): lambda m: number_cell(m, "saturated_percent"),
    ("saturated", "% of blocks"): lambda m: number_cell(m, "saturated_blocks_percent"),
    ("underflowed", "% of elements"): lambda m: number_cell(m, "underflowed_percent"),
    ("size", "bits per element"): lambda m: number_cell(m, "bits_per_element"),
    ("scale exponents", "least to most"): lambda m: _exponents(m),
    ("largest error", "of an element"): lambda m: number_cell(m, "max_abs_error"),
}


def _exponents(metrics: Metrics) -> str:
    low, high = metrics["scale_exponent_min"], metrics["scale_exponent_max"]
    return ABSENT if low is None else signed(f"{low} to {signed(str(high))}")


def _tensor_totals(study: Study) -> Totals:
    """Return the totals of all tensors and of each group, under each scheme."""
    groups = {f"all {counted(len(study.measured), 'tensor')}": study.sums}
    if len(study.groups) > 1:
        groups |= {f"{printable(label)} ({sums[0]['tensors']:,})": sums for label, sums in study.groups.items()}
    bodies = {
        label: [
            (scheme, [cell(metrics) for cell in _TENSOR_TOTALS.values()])
            for scheme, metrics in zip(study.schemes, sums, strict=True)
        ]
        for label, sums in groups.items()
    }
    return Totals(study.by, study.scheme_noun if study.compares else "", tuple(_TENSOR_TOTALS), bodies)


def _tensor_table(study: Study) -> Table:
    """Return the table of tensors: name, what the tensor is, its metrics under each scheme, and the decision."""
    tensors = (*study.measured, *study.kept)
    first = [
        Column("name", TEXT, "tensor", lambda tensor: tensor.name),
        Column("role", WORD, "role", lambda tensor: tensor.role),
        Column("shape", SHAPE, "shape", lambda tensor: shape_text(tensor.shape)),
        Column("dtype", WORD, "dtype", lambda tensor: tensor.dtype),
    ]
    last = [
        Column("decision", WORD, "decision", lambda tensor: tensor.decision),
        Column("reason", WORD, "reason", lambda tensor: tensor.reason),
    ]
    if study.compares:
        best = Column("best", WORD, "best", lambda tensor: "" if tensor.best is None else study.schemes[tensor.best])
        compared = {name: page for name, page in _METRICS.items() if page.compared}
        metrics = [
            _tensor_metric(name, page, at, scheme)
            for at, scheme in enumerate(study.schemes)
            for name, page in compared.items()
        ]
        columns = [*first, best, *metrics, *last]
    else:
        metrics = [_tensor_metric(name, page, 0) for name, page in _METRICS.items()]
        columns = [*first, *metrics, *last]
    filters = {
        "role": sorted({tensor.role for tensor in tensors}),
        "decision": [word for word, count in study.counts.items() if count],
    }
    return Table("tensor", "Name", columns, tensors, filters)


_COLUMNS = {name: row.page for name, row in METRICS.items() if row.page}
_METRICS = {name: _COLUMNS[name] for name in sorted(_COLUMNS, key=lambda name: _COLUMNS[name].place)}
"""Columns of metrics by name, in the order of their places."""


def _tensor_metric(name: str, page: PageColumn, at: int, scheme: str | None = None) -> Column:
    """Return the column of a metric under the scheme with index `at`, and that name in a comparison; of quantiles over
    blocks it holds the least."""
    metric = METRICS[name]

    def of(tensor: Tensor) -> object:
        if at >= len(tensor.metrics):
            return None
        metrics = tensor.metrics[at]
        value = metrics.get(name)
        if isinstance(value, dict):
            value = value.get("p0")
        return EXACT if metric.noise and number_of(metrics, "mse") == 0 else value

    key, group, label = (
        (name, page.group, page.label) if scheme is None else (f"{name} {scheme}", scheme, page.compared)
    )
    kind = WHOLE if metric.unit == "exponent" else NUMBER
    meaning = f"{page.meaning or metric.meaning}: {metric.formula}"
    return Column(key, kind, label, of, group, page.unit, meaning, _better(name))


def _better(name: str) -> str:
    return "" if METRICS[name].better == "neither" else METRICS[name].better


def _page_of_products(study: ProductStudy) -> Page:
    return Page(
        title=TITLES[study.verb],
        source=study.source,
        facts=study.facts,
        rules=study.rules,
        tiles=() if study.compares else [_product_tile(name, found) for (_, name), found in study.totals.items()],
        findings=study.findings,
        notes=study.notes,
        charts=product_charts(study),
        totals=_product_totals(study),
        table=_product_table(study),
    )


def _product_tile(name: str, total: Metrics) -> Tile:
    sqnr = _product_cell(total, "sqnr_db")
    error = f"SQNR; relative error {significant(number_in(total, 'relative_error'))}"
    return Tile(f"{PRODUCTS[name]} ({name})", sqnr, "dB" if sqnr not in (EXACT, ABSENT) else "", error)


def _product_cell(total: Metrics, name: str) -> str:
    """Return a metric of products as text; the SQNR is `exact` without noise."""
    value = number_in(total, name)
    if value is None:
        return EXACT if name in _EXACT_WITHOUT_NOISE and total.get("relative_error") == 0 else ABSENT
    return signed(significant(value))


_EXACT_WITHOUT_NOISE = ("sqnr_db", "averaged_sqnr_db")


@dataclass(frozen=True, slots=True)
class _ProductMetric:
    """A metric of products or of an operand, in the totals and in the table; `meaning` is that of METRICS where
    empty."""

    key: str
    label: str
    unit: str = ""
    group: str = "product"
    meaning: str = ""

    def value(self, product: Product) -> object:
        """Return the value in a row of the table."""
        if self.key in _EXACT_WITHOUT_NOISE and product.metrics.get("relative_error") == 0:
            return EXACT
        return product.metrics.get(self.key)

    @property
    def column(self) -> Column:
        """Return the column of the table."""
        name = self.key if self.group == "product" else self.key.partition("_")[2]
        known = METRICS.get(name)
        meaning = self.meaning or (f"{known.meaning}: {known.formula}" if known else "")
        better = _better(name) if known else ""
        return Column(self.key, NUMBER, self.label, self.value, self.group, self.unit, meaning, better)


def _product_metrics(study: ProductStudy) -> list[_ProductMetric]:
    """Return the metrics that the study has."""
    known = {name for total in study.totals.values() for name in total}
    metrics = [
        _ProductMetric("sqnr_db", "SQNR", "dB"),
        _ProductMetric(
            "averaged_sqnr_db", "averaged SQNR", "dB", meaning="SQNR of the mean of the products of all draws"
        ),
        _ProductMetric("quantized_sqnr_db", "quantized SQNR", "dB", meaning="SQNR of the layers that are not high"),
        _ProductMetric("relative_error", "relative error"),
        _ProductMetric("cosine", "cosine"),
        _ProductMetric("bias", "bias"),
        _ProductMetric("shrunk_percent", "shrunk", "%"),
    ]
    for letter in (X, W, DY):
        for name, label in (("saturated_percent", "saturated"), ("underflowed_percent", "underflowed")):
            metrics.append(_ProductMetric(f"{letter.lower()}_{name}", label, "%", group=letter))
    return [metric for metric in metrics if metric.key in known]


def _product_totals(study: ProductStudy) -> Totals:
    """Return the totals by recipe and pass."""
    metrics = [metric for metric in _product_metrics(study) if (study.verb, metric.key) != ("training", "cosine")]
    columns = tuple((_heading(metric), metric.unit) for metric in metrics)
    bodies: dict[str, list[tuple[str, list[str]]]] = {}
    for (recipe, name), total in study.totals.items():
        cells = [_product_cell(total, metric.key) for metric in metrics]
        bodies.setdefault(recipe, []).append((f"{name}, {PRODUCTS[name]}", cells))
    return Totals("recipe" if study.verb == "training" else "formats", "product", columns, bodies, first_is_all=False)


def _heading(metric: _ProductMetric) -> str:
    return metric.label if metric.group == "product" else f"{metric.group} {metric.label}"


def _product_table(study: ProductStudy) -> Table:
    """Return the table of products: layer, step and rank where there are several, recipe, pass and metrics."""
    products = study.products
    columns = [
        Column("layer", TEXT, "layer", lambda product: product.layer),
        Column("recipe", WORD, "recipe", lambda product: product.recipe),
        Column("pass", WORD, "pass", lambda product: product.product_pass),
        Column("sizes", SHAPE, "m x n x k", lambda product: shape_text(product.sizes)),
        Column("formats", WORD, "formats", lambda product: product.formats),
        Column("high", WORD, "high", lambda product: "yes" if product.high else "no"),
    ]
    places = [
        Column("step", WHOLE, "step", lambda product: product.step),
        Column("rank", WHOLE, "rank", lambda product: product.rank),
    ]
    columns[1:1] = [column for column in places if len({column.of(product) for product in products}) > 1]
    columns += [metric.column for metric in _product_metrics(study) if metric.key != "quantized_sqnr_db"]
    filters = {"recipe": study.recipes} if study.compares else {}
    passes = dict.fromkeys(product.product_pass for product in products)
    return Table("product", "Layer", columns, products, {**filters, "pass": list(passes)})
