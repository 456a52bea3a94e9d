"""Errors of the products of layers as a table, JSON and CSV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mxcli.flows.products.shapes import DY, PASSES, W, X
from mxcli.output.export import csv_text, json_text
from mxcli.output.fields import (
    COUNT,
    METRIC,
    SCHEME,
    SCHEME_OPTIONS,
    TEXT,
    Field,
    Fields,
    Metrics,
    choice,
    records,
    records_by_name,
)
from mxcli.output.formats import rules_words
from mxcli.output.numbers import counted, significant
from mxcli.output.report import NOTES
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Row, aligned

if TYPE_CHECKING:
    from mxcli.flows.products.report import LayerProduct, ProductReport

FORMULAS = {"fprop": "Y = X W^T", "dgrad": "dX = dY W", "wgrad": "dW = dY^T X"}
METRICS = ("sqnr_db", "relative_error", "cosine", "bias")
SORTS = (*METRICS, "name")


def _cosine(metrics: Metrics) -> str:
    value = metrics["cosine"]
    return f"{value:.5f}" if isinstance(value, float) else significant(None)


_METRICS: Fields[Metrics] = Fields(
    METRIC["sqnr_db"].at(cell=None),
    METRIC["relative_error"].at(cell=None, drop=2),
    METRIC["cosine"].at(title="cosine", cell=_cosine, drop=3),
    METRIC["bias"].at(title=None),
)
SIZES: Fields[Any] = Fields(
    Field("m", lambda product: product.sizes[0], COUNT),
    Field("n", lambda product: product.sizes[1], COUNT),
    Field("k", lambda product: product.sizes[2], COUNT),
)
_PRODUCT: Fields[LayerProduct] = Fields(
    Field("layer", lambda product: product.layer, TEXT, "layer", right=False),
    Field("pass", lambda product: product.passes, choice(PASSES), "product", right=False),
    SIZES,
    Field("sizes", lambda product: "{}x{}x{}".format(*product.sizes), title="m x n x k", right=False, drop=4),
    Field("format_a", lambda product: product.formats[0], TEXT),
    Field("format_b", lambda product: product.formats[1], TEXT),
    Field(
        "formats", lambda product: list(dict.fromkeys(product.formats)), title="formats of A, B", right=False, drop=5
    ),
    _METRICS.through(lambda product: product.energies.metrics),
)
RECORD_NAMES = tuple(_PRODUCT.names)
"""The columns of CSV."""
PRODUCTS: Fields[ProductReport] = Fields(
    Field("source", lambda report: report.source, TEXT),
    Field("captures", lambda report: report.captures, TEXT),
    records_by_name("rules", lambda report: report.recipes, Fields(SCHEME, SCHEME_OPTIONS)),
    NOTES,
    records_by_name(
        "by_pass", lambda report: {name: energies.metrics for name, energies in report.by_pass.items()}, _METRICS
    ),
    records("products", lambda report: report.products, _PRODUCT),
)
"""The JSON of products."""


def products_text(report: ProductReport, screen: Screen, sort: str = "sqnr_db", top: int | None = None) -> str:
    """Return the rules, a row per product with the worst first, and totals by pass."""
    head = [
        f"{report.source} with {report.captures}: {counted(len(report.products), 'product')} of "
        f"{counted(len({product.layer for product in report.products}), 'layer')}",
        *(
            f"{name}: {scheme.format.name}, {rules_words(scheme)}"
            for name in (X, W, DY)
            if (scheme := report.recipes.get(name)) is not None
        ),
    ]
    lines = [line for text in head for line in folded_lines(text, screen)]
    ranked = _ranked(report.products, sort)
    shown = ranked if top is None else ranked[:top]
    rows: list[Row] = [*map(_PRODUCT.cells, shown), None]
    rows += [
        [f"all of {FORMULAS[name]}", name, "", "", *_METRICS.cells(energies.metrics)]
        for name, energies in report.by_pass.items()
    ]
    lines = [bold(lines[0], screen), *lines[1:], "", *aligned(_PRODUCT.columns(), rows, screen)]
    if len(shown) < len(ranked):
        lines += ["", f"{len(shown)} of {counted(len(ranked), 'product')} shown, worst {sort} first"]
    return "\n".join(lines)


def products_json(report: ProductReport) -> str:
    """Return the report as JSON."""
    return json_text("products", PRODUCTS.record(report))


def products_csv(report: ProductReport) -> str:
    """Return a row per product."""
    return csv_text(map(_PRODUCT.record, report.products), RECORD_NAMES)


def _ranked(products: tuple[LayerProduct, ...], sort: str) -> list[LayerProduct]:
    """Return products with the worst first and exact ones last."""
    if sort == "name":
        return sorted(products, key=lambda product: (product.layer, product.passes))
    high_is_good = sort in ("sqnr_db", "cosine")

    def badness(product: LayerProduct) -> float:
        value = product.energies.metrics[sort]
        if value is None:
            return math.inf
        return value if high_is_good else -abs(value)

    return sorted(products, key=badness)
