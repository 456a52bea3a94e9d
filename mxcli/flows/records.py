"""The record an output carries (`mxcli.json`): from what it was made, how, and what became of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import COLUMN
from mxcli.flows.arrange import Arrangement
from mxcli.flows.doctor import own_version
from mxcli.flows.fingerprint import fingerprint
from mxcli.flows.overrides import Override
from mxcli.flows.plan import Options, Plan, Step
from mxcli.numerics.formats import find_format
from mxcli.numerics.hadamard import Hadamard, signs_text
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import measured
from mxcli.numerics.recipe import Recipe
from mxcli.numerics.stats import Stats

QUANTIZED = "mxcli.quantized/1"


def planned_record(
    checkpoint: Checkpoint, plan: Plan, arrangement: Arrangement, command: Sequence[str]
) -> dict[str, object]:
    """The record of a quantized checkpoint before anything is measured: no time, host or path, so that the same work
    has the same bytes."""
    return {
        "schema": QUANTIZED,
        "version": own_version(),
        "command": list(command),
        "options": options_record(plan.options),
        "input": fingerprint(checkpoint),
        "requantized_from": checkpoint.restored_from,
        "layout": arrangement.layout.name,
        "notes": list(arrangement.notes),
        "tensors": {task.step.tensor.name: _tensor(task.step) for task in arrangement.tasks},
    }


def with_statistics(record: Mapping[str, Any], stats: Mapping[str, Stats]) -> dict[str, object]:
    """The record of a quantized checkpoint from the planned one; for every quantized tensor there are statistics."""
    tensors = {
        name: {**told, "statistics": _measured(told, stats[name])} if told["decision"] == "quantized" else told
        for name, told in record["tensors"].items()
    }
    return {**record, "tensors": tensors}


def options_record(options: Options) -> dict[str, object]:
    """The options by their names, with selectors as typed."""
    return {
        "format": options.format,
        "scale_rounding": options.scale_rounding,
        "rounding": options.rounding,
        "dialect": options.dialect,
        "nonfinite": options.nonfinite,
        "on_indivisible": options.on_indivisible,
        "selection": [{"include" if rule.include else "exclude": rule.selector} for rule in options.selection],
        "overrides": [_override(each) for each in options.overrides],
        "layout": options.layout,
        "axis": options.axis,
        "fuse": options.fuse,
        "seed": options.seed,
        "hadamard": hadamard_record(options.hadamard),
    }


def hadamard_record(hadamard: Hadamard | None) -> dict[str, object] | None:
    """A transform by its size, the seed of its signs where it has one, and these."""
    if hadamard is None:
        return None
    return {"size": hadamard.size, "seed": hadamard.seed, "signs": signs_text(hadamard)}


def _override(override: Override) -> dict[str, object]:
    """What an override names."""
    return {key: value for key, value in asdict(override).items() if value not in (None, False)}


def _tensor(step: Step) -> dict[str, object]:
    info = step.tensor
    record: dict[str, object] = {
        "decision": "quantized" if step.recipe else "tied" if step.tied_to else "kept",
        "reason": step.reason,
        "role": info.role,
        "dtype": info.dtype,
        "shape": list(info.shape),
    }
    if step.recipe is not None:
        record |= recipe_record(step.recipe)
        record |= {"axis": step.axis, "padded": step.padded, "shares_tensor_scale_with": step.group}
    if step.input_scale is not None:
        record["input_scale"] = asdict(step.input_scale)
    return record


def _measured(told: Mapping[str, Any], stats: Stats) -> dict[str, Value]:
    shape = told["shape"]
    if told["axis"] == COLUMN:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return measured(stats, find_format(told["format"]), tuple(shape))


def recipe_record(recipe: Recipe) -> dict[str, object]:
    """A recipe by the names that mean it."""
    return {
        "format": recipe.format.name,
        "scale_rounding": recipe.scale_rule.name,
        "rounding": recipe.rounding.name,
        "dialect": recipe.dialect.name,
        **({"seed": recipe.seed} if recipe.rounding.is_random else {}),
        **({"hadamard": hadamard_record(recipe.hadamard)} if recipe.hadamard else {}),
    }
