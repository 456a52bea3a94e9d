"""Errors of the products of layers as a table, JSON and CSV."""

from __future__ import annotations

import math

from mxcli.flows.products.report import LayerProduct, ProductReport
from mxcli.flows.products.shapes import DY, W, X
from mxcli.flows.write.records import scheme_record
from mxcli.output.export import csv_text, json_text
from mxcli.output.formats import rules_words
from mxcli.output.numbers import counted, significant
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

_COLUMNS = (
    Column("layer", right=False),
    Column("product", right=False),
    Column("m x n x k", right=False, drop=4),
    Column("formats of A, B", right=False, drop=5),
    Column("SQNR\ndB"),
    Column("relative\nerror", drop=2),
    Column("cosine", drop=3),
)
_FORMULAS = {"fprop": "Y = X W^T", "dgrad": "dX = dY W", "wgrad": "dW = dY^T X"}
METRICS = ("sqnr_db", "relative_error", "cosine", "bias")
RECORD_NAMES = ("layer", "pass", "m", "n", "k", "format_a", "format_b", *METRICS)
SORTS = (*METRICS, "name")


def products_text(report: ProductReport, screen: Screen, sort: str = "sqnr_db", top: int | None = None) -> str:
    """The rules, a row per product with the worst first, and sums by pass."""
    head = [
        f"{report.source} with {report.captures}: {counted(len(report.products), 'product')} of "
        f"{counted(len({product.layer for product in report.products}), 'layer')}",
        *(
            f"{name}: {recipe.format.name}, {rules_words(recipe)}"
            for name in (X, W, DY)
            if (recipe := report.recipes.get(name)) is not None
        ),
    ]
    lines = [line for text in head for line in folded_lines(text, screen)]
    ranked = _ranked(report.products, sort)
    shown = ranked if top is None else ranked[:top]
    rows: list[Row] = [_cells(product) for product in shown]
    rows.append(None)
    rows += [
        [f"all of {_FORMULAS[name]}", name, "", "", *_numbers(energies.metrics)]
        for name, energies in report.by_pass.items()
    ]
    lines = [bold(lines[0], screen), *lines[1:], "", *aligned(_COLUMNS, rows, screen)]
    if len(shown) < len(ranked):
        lines += ["", f"{len(shown)} of {counted(len(ranked), 'product')} shown, worst {sort} first"]
    return "\n".join(lines)


def products_json(report: ProductReport) -> str:
    """The same as one object."""
    return json_text(
        "products",
        {
            "source": report.source,
            "captures": report.captures,
            "rules": {name: scheme_record(recipe) for name, recipe in report.recipes.items()},
            "notes": list(report.notes),
            "by_pass": {name: energies.metrics for name, energies in report.by_pass.items()},
            "products": [_record(product) for product in report.products],
        },
    )


def products_csv(report: ProductReport) -> str:
    """One row per product, with RECORD_NAMES for columns."""
    return csv_text([_record(product) for product in report.products], RECORD_NAMES)


def _ranked(products: tuple[LayerProduct, ...], sort: str) -> list[LayerProduct]:
    """Worst first; a product without a number, which has no error, comes last."""
    if sort == "name":
        return sorted(products, key=lambda product: (product.layer, product.passes))
    high_is_good = sort in ("sqnr_db", "cosine")

    def badness(product: LayerProduct) -> float:
        value = product.energies.metrics[sort]
        if value is None:
            return math.inf
        return value if high_is_good else -abs(value)

    return sorted(products, key=badness)


def _cells(product: LayerProduct) -> list[str]:
    m, n, k = product.sizes
    formats = ", ".join(dict.fromkeys(product.formats))
    return [product.layer, product.passes, f"{m}x{n}x{k}", formats, *_numbers(product.energies.metrics)]


def _numbers(metrics: dict[str, float | None]) -> list[str]:
    cosine = metrics["cosine"]
    return [
        significant(metrics["sqnr_db"]),
        significant(metrics["relative_error"]),
        significant(None) if cosine is None else f"{cosine:.5f}",
    ]


def _record(product: LayerProduct) -> dict[str, object]:
    m, n, k = product.sizes
    return {
        "layer": product.layer,
        "pass": product.passes,
        "m": m,
        "n": n,
        "k": k,
        "format_a": product.formats[0],
        "format_b": product.formats[1],
        **product.energies.metrics,
    }
