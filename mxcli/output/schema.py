"""What the JSON of reports holds, as JSON Schema: made from the rows of the metrics, kept in `schemas/`."""

from __future__ import annotations

from typing import Any

from mxcli.files.captures import CAPTURED_ROLES
from mxcli.flows.products.shapes import DY, PASSES, W, X
from mxcli.flows.verify.check import SEVERITIES
from mxcli.numerics.estimates import SAMPLED, is_estimated, uncertainty_key
from mxcli.numerics.metrics import METRICS, Metric
from mxcli.numerics.samples import CONFIDENCE_PERCENT
from mxcli.numerics.scheme import NONFINITE_POLICIES
from mxcli.output import products

Schema = dict[str, Any]

_NUMBER: Schema = {"type": ["number", "null"]}
_TEXT: Schema = {"type": "string"}
_TEXT_OR_NONE: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_HARM: Schema = {"type": "number", "minimum": 0}
_AXIS: Schema = {"enum": ["row", "column"], "description": "along which blocks run"}
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
_SURE: Schema = {**_NUMBER, "description": f"half of the {CONFIDENCE_PERCENT} % interval of an estimate; null: unknown"}
_SAMPLED: Schema = {
    **{key: {**_COUNT, "description": "of a sample: how many were measured"} for key in SAMPLED},
    **{uncertainty_key(name): _SURE for name, row in METRICS.items() if is_estimated(row)},
}
_SAMPLE = _object(
    {
        "fraction": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "seed": _COUNT,
        "tensors": _COUNT,
        "read_whole": {**_COUNT, "description": "tensors of which nothing was left out"},
        "elements": _COUNT,
        "sampled_elements": _COUNT,
        "tensor_scales": {**_list(_TEXT), "description": "formats with a scale of the sample, not of the tensor"},
        "confidence_percent": {"const": CONFIDENCE_PERCENT},
    },
    description="the sample that --sample took; without it there is no such key, and no key of a sample",
)
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


def _metrics(properties: Schema, *, optional: frozenset[str] = frozenset()) -> Schema:
    """An object of metrics, and of what only a sample has."""
    return _object({**properties, **_SAMPLED}, optional=optional | _SAMPLED.keys())


def report_schema() -> Schema:
    """Of `mxcli report --json` and of the report that `quantize --json` gives."""
    measured = _metrics({**_DECIDED, **_RECIPE, "axis": _AXIS, **_ALL})
    totals = _metrics({"tensors": _COUNT, **_ALL})
    some_totals: Schema = {"anyOf": [totals, {"type": "null"}]}
    kept = _object({**_DECIDED, "axis": _AXIS}, optional=frozenset({"axis"}))
    by_step = _metrics(
        {"step": _COUNT, "role": _TEXT, "axis": _AXIS, "tensors": _COUNT, **_NUMBERS}, optional=frozenset({"axis"})
    )
    of_axis = _object({"totals": some_totals, "by_role": _mapping(totals)})
    return _document(
        "report",
        {
            **_SOURCE,
            "recipes": _list(_object({**_RECIPE, "tensors": _COUNT})),
            "counts": _mapping(_COUNT),
            "unfinished": {**_COUNT, "description": "tensors that an interruption left unmeasured"},
            "sample": _SAMPLE,
            "totals": {**some_totals, "description": "null: nothing was measured, or along both axes (by_axis)"},
            "by_role": {**_mapping(totals), "description": "empty where both axes were measured (by_axis)"},
            "by_axis": {
                **_mapping(of_axis),
                "description": "with --axis both, by row and column; layers, counts and unfinished tell them apart too",
            },
            "conclusion": {**_list(_TEXT), "description": "with --axis both: which axis serves a role better"},
            "by_step": {
                **_list(by_step),
                "description": "of captures of several steps: the tensors of each role at each step taken together",
            },
            "notes": _list(_TEXT),
            "layers": _list(measured),
            "kept": _list(kept),
        },
        optional=frozenset({"by_axis", "conclusion", "by_step"}),
    )


def compare_schema() -> Schema:
    """Of `mxcli compare --json`."""
    deltas = dict.fromkeys(_DELTAS, _NUMBER)
    per_combination = _mapping(_metrics({**_NUMBERS, **deltas}, optional=frozenset(deltas)))
    layer = _object({**_DECIDED, "best": _TEXT_OR_NONE, "metrics": per_combination})
    totals = _mapping(_metrics({"tensors": _COUNT, **_ALL}))
    of_step = _metrics({"tensors": _COUNT, **_NUMBERS})
    usual_axis = {"enum": ["row", "column", None], "description": "null: the dimension that each layer sums over"}
    return _document(
        "compare",
        {
            **_SOURCE,
            "combinations": _list(_object({"name": _TEXT, **_RECIPE, "axis": usual_axis, "best_on_tensors": _COUNT})),
            "counts": _mapping(_COUNT),
            "unfinished": _COUNT,
            "sample": _SAMPLE,
            "totals": {"anyOf": [totals, {"type": "null"}]},
            "by": {"enum": ["layer", "role", "kind"]},
            "groups": _mapping(totals),
            "by_step": {
                **_list(_object({"step": _COUNT, "role": _TEXT, "metrics": _mapping(of_step)})),
                "description": "of captures of several steps: the tensors of each role at each step taken together",
            },
            "conclusion": _list(_TEXT),
            "notes": _list(_TEXT),
            "layers": _list(layer),
            "kept": _list(layer),
        },
        optional=frozenset({"by_step"}),
    )


def recommend_schema() -> Schema:
    """Of `mxcli recommend --json`."""
    effect = {"bits_per_element": _HARM, "harm": _HARM, "sqnr_db": {**_NUMBER, "description": "null: exact"}}
    choice = {
        "chosen": {**_TEXT, "description": "the name of one of the options"},
        "options": _mapping(_object(effect)),
    }
    group = {"name": _TEXT, "tensors": _list(_TEXT), "elements": _COUNT, **choice}
    tensor = {key: _DECIDED[key] for key in ("name", "role", "dtype", "shape")}
    return _document(
        "recommend",
        {
            **{key: schema for key, schema in _SOURCE.items() if key != "options"},
            "target": {**_mapping({"type": "number"}), "minProperties": 1, "maxProperties": 1},
            "objective": _object({"name": _TEXT, "formula": _TEXT}),
            "formats": _list(_TEXT),
            "chosen_for_elements": _COUNT,
            "bits_per_element": _HARM,
            "harm": _HARM,
            "harm_lower_bound": _HARM,
            "exact": {"type": "boolean", "description": "no other choice within the target does less harm"},
            "smallest_harm": _HARM,
            "kept_elements_percent": _HARM,
            "conclusion": _list(_TEXT),
            "notes": _list(_TEXT),
            "predicted_totals": {"anyOf": [_object({"tensors": _COUNT, **_ALL}), {"type": "null"}]},
            "recipe": _OPTIONS,
            "groups": _list(_object(group)),
            "tensors": _list(_object({**tensor, "group": _TEXT, "elements": _COUNT, **choice})),
            "written": {**_list(_TEXT), "description": "files"},
        },
    )


def verify_schema() -> Schema:
    """Of `mxcli verify --json`."""
    severity: Schema = {"enum": list(SEVERITIES)}
    counts = _object(dict.fromkeys(("problems", "warnings", "notes"), _COUNT))
    errors = dict.fromkeys(("sqnr_db", "relative_error", "mse", "max_abs_error"), _NUMBER)
    made = {
        **_RECIPE,
        "exact": {"type": "boolean", "description": "all of its bytes are those that this makes of the source"},
        "equal_blocks": _COUNT,
        "blocks_tried": _COUNT,
        "tensor_scale_equal": {"type": "boolean"},
        "draws_unknown": {"type": "boolean", "description": "said to be rounded at random, and by which seed is not"},
    }
    drawn: Schema = {"seed": _COUNT, "hadamard": {"type": "object"}}
    check = {"name": _TEXT, "severity": severity, "meaning": _TEXT, "how": _TEXT, "findings": _COUNT}
    finding = {"check": _TEXT, "severity": severity, **dict.fromkeys(("where", "value", "need", "way_out"), _TEXT)}
    weight = {
        "name": _TEXT,
        "format": _TEXT,
        "shape": _list(_COUNT),
        **dict.fromkeys(("problems", "warnings", "notes"), _COUNT),
        "amax": _NUMBER,
        "tensor_scale": _NUMBER,
        **errors,
        "bytes_of": {"anyOf": [_object({**made, **drawn}, optional=frozenset(drawn)), {"type": "null"}]},
    }
    return _document(
        "verify",
        {
            **{key: schema for key, schema in _SOURCE.items() if key != "options"},
            "layout": _TEXT,
            "against": {**_TEXT_OR_NONE, "description": "what it was held against"},
            "sound": {"type": "boolean", "description": "there are no problems"},
            "counts": counts,
            "conclusion": _list(_TEXT),
            "totals": {"anyOf": [_object({"tensors": _COUNT, **errors}), {"type": "null"}]},
            "notes": _list(_TEXT),
            "checks": _list(_object({**check, "skipped": {**_TEXT_OR_NONE, "description": "why it was not made"}})),
            "findings": _list(_object(finding)),
            "weights": _list(_object(weight, optional=frozenset(errors))),
        },
    )


def diff_schema() -> Schema:
    """Of `mxcli diff --json`."""
    shape: Schema = {"anyOf": [_list(_COUNT), {"type": "null"}]}
    counted = ("elements", "blocks", "codes", "codes_sign_of_zero", "codes_one_step", "blocks_with_codes", "scales")
    of_blocks: Schema = {
        **dict.fromkeys(counted, _COUNT),
        **dict.fromkeys(("codes_percent", "scales_percent"), _HARM),
        "scale_steps": {**_mapping(_COUNT), "description": "scales by how many steps those of B are above those of A"},
        **dict.fromkeys(("tensor_scale_a", "tensor_scale_b"), _NUMBER),
    }
    of_blocks["nan_scales"] = {**_COUNT, "description": "scales that differ and of which one is NaN"}
    of_values: Schema = dict.fromkeys(("relative_difference", "max_abs_difference"), _NUMBER)
    of_ways: Schema = {
        **dict.fromkeys(("axis_a", "axis_b"), _AXIS),
        **dict.fromkeys(("hadamard_signs_a", "hadamard_signs_b"), _TEXT_OR_NONE),
    }
    tensor = {
        "name": _TEXT,
        "in_a": _TEXT_OR_NONE,
        "in_b": _TEXT_OR_NONE,
        "shape_a": shape,
        "shape_b": shape,
        "differs": {**_list(_TEXT), "description": "in what; empty where nothing differs"},
        **of_blocks,
        **of_values,
        **of_ways,
    }
    side = {"source": _TEXT, "layout": _TEXT_OR_NONE, "elements": _COUNT, "bytes": _COUNT, "by_dtype": _mapping(_TOTAL)}
    pair = {"a": _TEXT, "b": _TEXT}
    rule = {
        "format": _TEXT,
        "blocks": _COUNT,
        "explained_by": {**_list(_object(pair)), "description": "pairs of rules that explain the scales of all blocks"},
        "nearest": {"anyOf": [_object({**pair, "blocks": _COUNT}), {"type": "null"}]},
        "contradictory_blocks": _COUNT,
    }
    return _document(
        "diff",
        {
            "a": _object(side),
            "b": _object(side),
            "same": {"type": "boolean"},
            "counts": _mapping(_COUNT),
            "conclusion": _list(_TEXT),
            "rules": _list(_object(rule)),
            "tensors": _list(_object(tensor, optional=frozenset((*of_blocks, *of_values, *of_ways)))),
        },
    )


def training_schema() -> Schema:
    """Of `mxcli report --training --json`."""
    number_or_none: Schema = {"type": ["integer", "null"], "minimum": 0}
    errors: Schema = {
        **{name: _ALL[name] for name in products.METRICS},
        "shrunk_percent": {**_NUMBER, "description": "100 * -sum of D * error / sum of D^2: how much shorter along D"},
        "averaged_relative_error": {**_NUMBER, "description": "of the mean of all draws"},
    }
    operands: Schema = {
        f"{letter.lower()}_{name}": _ALL[name]
        for letter in (X, W, DY)
        for name in ("saturated_percent", "underflowed_percent", "sqnr_db", "bias")
    }
    of_recipe: Schema = {"recipe": _TEXT, "pass": {"enum": list(PASSES)}}
    sums = {**of_recipe, "products": _COUNT, "high": _COUNT, **errors, "quantized_sqnr_db": _NUMBER, **operands}
    operand = _object(
        {
            **dict.fromkeys(("format", "scale_rounding", "rounding"), _TEXT),
            "hadamard": {**number_or_none, "description": "size of the transform before"},
            "history": {**number_or_none, "description": "steps that a delayed scale looks back"},
        }
    )
    recipe = {
        **dict.fromkeys(("name", "meaning", "source"), _TEXT),
        "high_blocks": _list(_TEXT),
        "operands": _mapping(_mapping({"anyOf": [operand, {"type": "null"}]})),
    }
    product = {
        "layer": _TEXT,
        "step": number_or_none,
        "rank": number_or_none,
        **of_recipe,
        **dict.fromkeys(("m", "n", "k"), _COUNT),
        "high": {"type": "boolean", "description": "its operands are not quantized"},
        **errors,
        **operands,
    }
    return _document(
        "training",
        {
            "source": _TEXT,
            "captures": _TEXT,
            "seed": _COUNT,
            "draws": {"type": "integer", "minimum": 1},
            "recipes": _list(_object(recipe)),
            "notes": _list(_TEXT),
            "sums": _list(_object(sums)),
            "by_step": _list(_object({"step": _COUNT, **sums})),
            "products": _list(_object(product)),
        },
        command="report --training",
    )


def capture_schema() -> Schema:
    """Of `mxcli capture --json`."""
    loss: Schema = {**_NUMBER, "description": "mean cross-entropy in nats per token; null: not finite"}
    step = {"step": _COUNT, "file": _TEXT, "loss": loss}
    return _document(
        "capture",
        {
            **dict.fromkeys(("source", "output", "text"), _TEXT),
            "layers": _list(_TEXT),
            "roles": _list({"enum": list(CAPTURED_ROLES)}),
            "dtype": {**_TEXT, "description": "what the model computes in"},
            **{key: {"type": "integer", "minimum": 1} for key in ("batch", "tokens_per_window")},
            "tokens": {**_COUNT, "description": "that all steps read"},
            "sample_rows": {"type": ["integer", "null"], "minimum": 1},
            "seed": _COUNT,
            "learning_rate": _HARM,
            "bytes": {**_COUNT, "description": "of all files"},
            "seconds": {**_HARM, "description": "that this run's steps took"},
            "steps": _list(_object({**step, "resumed": {"type": "boolean", "description": "was there before"}})),
            "notes": _list(_TEXT),
        },
    )


SCHEMAS = {
    "report": report_schema,
    "compare": compare_schema,
    "recommend": recommend_schema,
    "verify": verify_schema,
    "diff": diff_schema,
    "capture": capture_schema,
    "training": training_schema,
}


def _document(
    verb: str, properties: Schema, command: str | None = None, *, optional: frozenset[str] = frozenset()
) -> Schema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"mxcli {command or verb} --json",
        "description": "Numbers that do not exist (no elements, an exact result) are null; none is NaN or infinite.",
        **_object({"schema": {"const": f"mxcli.{verb}/1"}, **properties}, optional=optional | {"sample"}),
    }
