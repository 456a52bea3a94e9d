"""What the JSON of reports holds, as JSON Schema: made from the rows of the metrics, kept in `schemas/`."""

from __future__ import annotations

from typing import Any

from mxcli.numerics.metrics import METRICS, Metric
from mxcli.numerics.recipe import NONFINITE_POLICIES

Schema = dict[str, Any]

_NUMBER: Schema = {"type": ["number", "null"]}
_TEXT: Schema = {"type": "string"}
_TEXT_OR_NONE: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_RECIPE: Schema = dict.fromkeys(("format", "scale_rounding", "rounding", "dialect"), _TEXT)
_DELTAS = ("sqnr_db_delta", "saturated_percent_delta", "underflowed_percent_delta")


def _object(properties: Schema, *, optional: frozenset[str] = frozenset(), **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **more}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _metric(row: Metric) -> Schema:
    kind = _NUMBER if row.number else {"type": ["object", "array", "null"]}
    unit = f" [{row.unit}]" if row.unit else ""
    return {**kind, "description": f"{row.meaning}{unit}: {row.formula}"}


_ALL = {name: _metric(row) for name, row in METRICS.items()}
_NUMBERS = {name: schema for name, schema in _ALL.items() if METRICS[name].number}
_TOTAL = _object({"tensors": _COUNT, "elements": _COUNT, "bytes": _COUNT})
_OPTIONS = _object(
    {
        "format": _TEXT,
        "scale_rounding": _TEXT_OR_NONE,
        "rounding": _TEXT_OR_NONE,
        "dialect": _TEXT_OR_NONE,
        "nonfinite": {"enum": list(NONFINITE_POLICIES)},
        "on_indivisible": {"enum": ["error", "pad", "keep"]},
    },
    optional=frozenset({"format", "scale_rounding", "rounding"}),
)
_SOURCE: Schema = {
    "source": {**_TEXT, "description": "what the user called it"},
    "elements": _COUNT,
    "bytes": _COUNT,
    "by_dtype": _mapping(_TOTAL),
    "options": _OPTIONS,
}
_DECIDED: Schema = {
    "name": _TEXT,
    "dtype": _TEXT,
    "shape": _list(_COUNT),
    "role": _TEXT,
    "decision": {"enum": ["quantized", "padded", "kept", "tied"]},
    "reason": _TEXT,
}


def report_schema() -> Schema:
    """Of `mxcli report --json` and of the report that `quantize --json` gives."""
    measured = _object({**_DECIDED, **_RECIPE, **_ALL})
    return _document(
        "report",
        {
            **_SOURCE,
            "recipes": _list(_object({**_RECIPE, "tensors": _COUNT})),
            "counts": _mapping(_COUNT),
            "unfinished": {**_COUNT, "description": "tensors that an interruption left unmeasured"},
            "totals": {"anyOf": [_object({"tensors": _COUNT, **_ALL}), {"type": "null"}]},
            "by_role": _mapping(_object({"tensors": _COUNT, **_ALL})),
            "notes": _list(_TEXT),
            "layers": _list(measured),
            "kept": _list(_object(_DECIDED)),
        },
    )


def compare_schema() -> Schema:
    """Of `mxcli compare --json`."""
    deltas = dict.fromkeys(_DELTAS, _NUMBER)
    per_combination = _mapping(_object({**_NUMBERS, **deltas}, optional=frozenset(deltas)))
    layer = _object({**_DECIDED, "best": _TEXT_OR_NONE, "metrics": per_combination})
    totals = _mapping(_object({"tensors": _COUNT, **_ALL}))
    return _document(
        "compare",
        {
            **_SOURCE,
            "combinations": _list(_object({"name": _TEXT, **_RECIPE, "best_on_tensors": _COUNT})),
            "counts": _mapping(_COUNT),
            "unfinished": _COUNT,
            "totals": {"anyOf": [totals, {"type": "null"}]},
            "by": {"enum": ["layer", "role", "kind"]},
            "groups": _mapping(totals),
            "conclusion": _list(_TEXT),
            "notes": _list(_TEXT),
            "layers": _list(layer),
            "kept": _list(layer),
        },
    )


SCHEMAS = {"report": report_schema, "compare": compare_schema}


def _document(verb: str, properties: Schema) -> Schema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"mxcli {verb} --json",
        "description": "Numbers that do not exist (no elements, an exact result) are null; none is NaN or infinite.",
        **_object({"schema": {"const": f"mxcli.{verb}/1"}, **properties}),
    }
