"""The LoaderRule row: what an engine does with some formats of a layout, why, and how that is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxcli.files.layouts.layout import Weight


REFUSES, WRONGLY, NOT_KNOWN, AT_A_LOSS, LOADS = "refuses", "loads wrongly", "not known", "loads at a loss", "loads"
OUTCOMES = (REFUSES, WRONGLY, NOT_KNOWN, AT_A_LOSS, LOADS)
"""Worst first: an engine that refuses one weight loads none."""
FAULTS = frozenset({REFUSES, WRONGLY})
"""Outcomes with which an engine does not compute what the weights are."""
RUN, READ = "run", "read, not run"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The way a rule is known: by running the engine, or by reading its source or documents; its version, and the
    month."""

    kind: str
    version: str = ""
    date: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.date}".strip() if self.kind == RUN else self.kind


@dataclass(frozen=True, slots=True)
class Loading:
    """A checkpoint as a loader is given it.

    `fused` are the sets of weights that loaders join, quantized or plain, by name; `unshared` those of them whose
    members have different scales of the whole tensor. `devices` is the number of devices to divide it over (None: not
    requested). `plain` are names of linear layers that are not quantized.
    """

    layout: str
    weights: Sequence[Weight]
    config: Mapping[str, object] = field(default_factory=dict)
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unshared: Sequence[str] = ()
    devices: int | None = None
    plain: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A weight, or other part of a checkpoint, that a rule is about, and the value there."""

    where: str
    value: str


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a rule: what it is in words, and `places(loading, weights of the rule's formats)`, which finds
    where it holds. Without `of_shapes` it holds for nearly every checkpoint of those formats. With
    `of_weights` each place is a weight, and it does not hold once these are plain."""

    meaning: str
    places: Callable[[Loading, Sequence[Weight]], Sequence[Place]]
    of_shapes: bool = True
    of_weights: bool = False


@dataclass(frozen=True, slots=True)
class LoaderRule:
    """The outcome that an engine has with weights of some formats (none listed: of all) in some layouts, and `why` in a
    clause.

    With `when` the rule applies where its condition holds, in addition to those without one. `way_out` is what to do
    instead. `checked_by` names the check of `verify` that reports the same with more detail. `unless` says where, or
    with which setting, the engine loads it all right.
    """

    engine: str
    layouts: tuple[str, ...]
    formats: tuple[str, ...]
    outcome: str
    evidence: Evidence
    why: str = ""
    way_out: str = ""
    when: Condition | None = None
    checked_by: str = ""
    unless: str = ""

    def covers(self, format: str) -> bool:
        """Return whether the rule is about weights of a format."""
        return not self.formats or format in self.formats
