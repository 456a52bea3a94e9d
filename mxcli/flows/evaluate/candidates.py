"""Candidates to evaluate next to the original: formats, recipes and quantized checkpoints, and the size of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxcli.files.checkpoint import Checkpoint, open_checkpoint
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.flows.plan.recipe_file import options_from, options_named, read_recipe
from mxcli.numerics.blocks import stored_bytes
from mxcli.numerics.formats import find_format

SAME, NONE = "same", "none"
"""Inputs of layers in the format of their weights, or as they are."""
FORMAT, RECIPE, CHECKPOINT = "format", "recipe", "checkpoint"
_PADDED = {"on_indivisible": "pad"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute the model: a format or a recipe for its weights, with `activations` SAME, NONE or a format, or
    another checkpoint of it. `options` plan the weights (None: a checkpoint), and `emulation` are the arguments of
    `emulate` that make it. `published` is the change of the loss that a study has for it, on another model."""

    name: str
    kind: str
    weights: str
    activations: str = NONE
    options: Options | None = None
    emulation: Mapping[str, Any] = field(default_factory=dict)
    published: float | None = None

    @property
    def key(self) -> str:
        """The name that no other candidate of a run has."""
        return f"{self.kind} {self.weights} {self.activations}"


@dataclass(frozen=True, slots=True)
class Size:
    """The bytes of a model's tensors and its bits for each weight, those that stay high counted too."""

    nbytes: int
    elements: int

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


def of_formats(names: Iterable[str], activations: Iterable[str], given: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield a candidate for each format of weights and each of inputs; `given` are rules and `fuse` by name."""
    inputs = tuple(activations)
    for name in names:
        weights = find_format(name).name
        for each in inputs:
            taken = weights if each == SAME else each if each == NONE else find_format(each).name
            options = options_named({"format": name, **_PADDED, **given}, (), analysis=True)
            arguments = {"format": weights, "activations": SAME if taken == weights else taken, **_PADDED, **given}
            yield Candidate(_name(weights, taken), FORMAT, weights, taken, options, arguments)


def of_recipe(path: str, activations: str, given: Mapping[str, Any]) -> Candidate:
    """Return the candidate of a recipe file, which `given` options override."""
    recipe = read_recipe(path)
    options = options_from(recipe, given, (), defaults=_PADDED, analysis=True)
    arguments = {"recipe": recipe, "activations": activations, **given}
    return Candidate(_name(Path(path).name, activations), RECIPE, path, activations, options, arguments)


def of_checkpoint(path: str) -> Candidate:
    """Return the candidate of another checkpoint of the model, whose layers take inputs as they are."""
    return Candidate(path, CHECKPOINT, path)


def _name(weights: str, activations: str) -> str:
    if activations == NONE:
        return weights
    return f"{weights}, inputs {activations}"


def size_of(candidate: Candidate, original: Checkpoint) -> Size:
    """Return the size of the model as a candidate has it."""
    if candidate.options is None:
        stored = open_checkpoint(candidate.weights)
        return Size(sum(info.nbytes for info in stored.tensors.values()), _elements(original))
    return _planned_size(original, make_plan(original, candidate.options))


def original_size(original: Checkpoint) -> Size:
    """Return the size of the model as it is."""
    stored = original if original.stored is None else original.stored
    return Size(sum(info.nbytes for info in stored.tensors.values()), _elements(original))


def _elements(original: Checkpoint) -> int:
    return sum(info.elements for info in original.tensors.values())


def _planned_size(original: Checkpoint, plan: Plan) -> Size:
    nbytes = 0
    for planned in plan.tensors:
        if planned.tied_to is not None:
            continue
        if planned.scheme is None:
            nbytes += planned.tensor.nbytes
        else:
            nbytes += stored_bytes(planned.scheme.format, planned.shape)
    return Size(nbytes, _elements(original))
