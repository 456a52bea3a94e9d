"""The data of a page, once and compactly: columns of the table of tensors, and of each chart its table.

Names share their beginnings with the name before, words are numbered, numbers have four significant digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from mxcli.numerics.metrics import METRICS, number_of
from mxcli.output.charts import Cell, Chart
from mxcli.output.numbers import EXACT, shape_text
from mxcli.output.study import Study, Tensor

TEXT, WORD, NUMBER, WHOLE = "text", "word", "number", "whole"
"""Kinds of columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: what it holds, its heading below that of its group, unit, meaning, and which of high and
    low is better."""

    key: str
    kind: str
    label: str
    of: Callable[[Tensor], object]
    group: str = ""
    unit: str = ""
    meaning: str = ""
    better: str = ""


def page_data(study: Study, charts: Sequence[Chart]) -> dict[str, object]:
    """What the page's script reads: `columns`, for each its values under `data`, and `charts` by key."""
    columns = columns_of(study)
    tensors = [*study.measured, *study.kept]
    return {
        "rows": len(tensors),
        "columns": [
            {
                "key": column.key,
                "kind": column.kind,
                "label": column.label,
                "group": column.group,
                "unit": column.unit,
                "meaning": column.meaning,
                "better": column.better,
            }
            for column in columns
        ],
        "data": [_encoded(column, tensors) for column in columns],
        "charts": {chart.key: _table(chart) for chart in charts},
    }


def embedded(data: object) -> str:
    """JSON that may stand in a `script` element: ASCII only, and no `<` that could end it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def columns_of(study: Study) -> list[Column]:
    """Name, what the tensor is, its metrics under each recipe, and what was decided."""
    first = [
        Column("name", TEXT, "tensor", lambda tensor: tensor.name),
        Column("role", WORD, "role", lambda tensor: tensor.role),
        Column("shape", WORD, "shape", lambda tensor: shape_text(tensor.shape)),
        Column("dtype", WORD, "dtype", lambda tensor: tensor.dtype),
    ]
    last = [
        Column("decision", WORD, "decision", lambda tensor: tensor.decision),
        Column("reason", WORD, "reason", lambda tensor: tensor.reason),
    ]
    if study.compares:
        best = Column("best", WORD, "best", lambda tensor: "" if tensor.best is None else study.recipes[tensor.best])
        names = ("sqnr_db", "saturated_percent", "underflowed_percent")
        measures = [_measure(name, at, recipe) for at, recipe in enumerate(study.recipes) for name in names]
        return [*first, best, *measures, *last]
    return [*first, *(_measure(name, 0, group) for group, names in _GROUPS.items() for name in names), *last]


_GROUPS = {
    "error": ("sqnr_db", "block_sqnr_db", "relative_error"),
    "saturated": ("saturated_percent", "saturated_blocks_percent"),
    "underflowed": ("underflowed_percent",),
    "scale exponent": ("scale_exponent_min", "scale_exponent_max"),
    "binades": ("binades_used",),
}
_LABELS = {
    "sqnr_db": "SQNR",
    "block_sqnr_db": "worst block",
    "relative_error": "relative",
    "saturated_percent": "elements",
    "saturated_blocks_percent": "blocks",
    "underflowed_percent": "elements",
    "scale_exponent_min": "least",
    "scale_exponent_max": "most",
    "binades_used": "used",
}
_COMPARED_LABELS = {"saturated_percent": "saturated", "underflowed_percent": "underflowed"}
_UNITS = {
    "sqnr_db": "dB",
    "block_sqnr_db": "dB",
    "saturated_percent": "%",
    "saturated_blocks_percent": "%",
    "underflowed_percent": "%",
}


def _measure(name: str, at: int, group: str) -> Column:
    """A metric under one recipe; of quantiles over blocks, the least."""
    metric = METRICS[name]

    def of(tensor: Tensor) -> object:
        if at >= len(tensor.metrics):
            return None
        metrics = tensor.metrics[at]
        value = metrics.get(name)
        if isinstance(value, dict):
            value = value.get("p0")
        if name in ("sqnr_db", "block_sqnr_db", "relative_error") and number_of(metrics, "mse") == 0:
            return EXACT
        return value

    compared = group not in _GROUPS
    shown = _COMPARED_LABELS.get(name, _LABELS[name]) if compared else _LABELS[name]
    meaning = metric.meaning if name != "block_sqnr_db" else "SQNR of the worst block"
    key = f"{name} {group}" if compared else name
    better = "" if metric.better == "neither" else metric.better
    kind = WHOLE if name in ("scale_exponent_min", "scale_exponent_max") else NUMBER
    return Column(key, kind, shown, of, group, _UNITS.get(name, ""), f"{meaning}: {metric.formula}", better)


def _encoded(column: Column, tensors: Sequence[Tensor]) -> object:
    values = [column.of(tensor) for tensor in tensors]
    if column.kind == TEXT:
        return _shared_beginnings([str(value) for value in values])
    if column.kind == WORD:
        words = list(dict.fromkeys(str(value) for value in values))
        place = {word: at for at, word in enumerate(words)}
        return {"words": words, "index": [place[str(value)] for value in values]}
    return [rounded(value) for value in values]


def _shared_beginnings(texts: Iterable[str]) -> dict[str, list[object]]:
    """How many characters (UTF-16 units, as scripts count) each text shares with the one before, and its rest."""
    shared, rest, before = list[object](), list[object](), ""
    for text in texts:
        pairs = enumerate(zip(before, text, strict=False))
        common = next((at for at, (a, b) in pairs if a != b), min(len(before), len(text)))
        shared.append(common + sum(1 for character in text[:common] if character > "\uffff"))
        rest.append(text[common:])
        before = text
    return {"shared": shared, "rest": rest}


def rounded(value: object, digits: int = 4) -> object:
    """A number with so many significant digits, whole where it is; None if it is not finite; other things as is."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _table(chart: Chart) -> dict[str, object]:
    columns, rows = chart.table
    return {"columns": list(columns), "cells": [_cell(cell) for cell in chain.from_iterable(rows)]}


def _cell(cell: Cell) -> object:
    return rounded(cell, 7)
