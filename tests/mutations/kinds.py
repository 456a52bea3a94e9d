"""The row of a kind of damage, and what one application of it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mutations.outputs import Cells, Output, Stored

Random = np.random.Generator
FOLDER = "[the output]"
"""The name of the output's folder as a damaged place."""
INPUT_SCALES = (".input_scale", ".input_global_scale")


@dataclass(frozen=True)
class Harm:
    """What was damaged: `places` are the tensors or files, each with the names it may be called by; `what` is for
    people. `values` and `seen` replace those of the kind if this application differs from it."""

    places: tuple[tuple[str, ...], ...]
    what: str
    values: bool | None = None
    seen: bool | None = None


@dataclass(frozen=True)
class Damage:
    """A kind of damage. `apply` damages a copy of an output and returns what it did, or None where the kind needs
    what the output does not have.

    `values`: a decoded value changes by more than the rounding of the rule that made it. `seen`: a person could see it
    in the files alone, without record and source. `record`: it is in the record only.
    """

    name: str
    apply: Callable[[Output, Random], Harm | None]
    values: bool
    seen: bool
    record: bool = False


def names_of(weight: Stored) -> tuple[str, ...]:
    """Return the names a weight may be called by."""
    return tuple(dict.fromkeys((weight.name, weight.module, *weight.entries)))


def weights(what: str, *found: Stored, values: bool | None = None, seen: bool | None = None) -> Harm:
    return Harm(tuple(names_of(weight) for weight in found), what, values, seen)


def tensor(what: str, *names: str, values: bool | None = None, seen: bool | None = None) -> Harm:
    """Return harm to tensors that are no weight of ours; a module is named by its tensor."""
    places = tuple((name, name.removesuffix(".weight").removesuffix(".bias")) for name in names)
    return Harm(places, what, values, seen)


def files(what: str, *names: str, values: bool | None = None, seen: bool | None = None) -> Harm:
    return Harm(tuple((name,) for name in names), what, values, seen)


def one_of(random: Random, things: Sequence[Stored]) -> Stored | None:
    return things[int(random.integers(len(things)))] if things else None


def two_alike(output: Output, random: Random) -> tuple[Stored, Stored] | None:
    """Return weights of one kind and shape in two layers."""
    groups = output.alike()
    if not groups:
        return None
    group = groups[int(random.integers(len(groups)))]
    first, second = random.choice(len(group), 2, replace=False)
    return group[int(first)], group[int(second)]


def plain_cells(output: Output, random: Random, *roles: str, least: int = 1) -> Cells | None:
    """Return a plain tensor of one of the roles."""
    found = [cells for role, cells in output.plain.values() if role in roles and cells.nbytes >= least]
    return found[int(random.integers(len(found)))] if found else None
