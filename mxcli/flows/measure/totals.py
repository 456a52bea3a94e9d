"""Running sums over measured tensors: by role along each axis, and by the step at which they were captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Protocol

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.files.captures import Capture, recorded_number
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.flows.measure.measure import pooled_over_formats
from mxcli.flows.plan.plan import TensorPlan
from mxcli.numerics.estimates import Counted
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import METRICS

Metrics = Mapping[str, Value]
SumsByFormat = dict[BlockFormat, tuple[Counted, int]]
"""What was counted of the tensors of each format together, and how many they are."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Metrics of tensors taken together, with their number as `tensors`: all (None: nothing was measured), and those
    of each role."""

    sum: Metrics | None = None
    by_role: Mapping[str, Metrics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingStepTotal:
    """The tensors of a role that were captured at one step, taken together: their metrics that are one number, with
    their number as `tensors`. `axis` is the one that blocks run along where both are measured."""

    step: int
    role: str
    axis: str | None
    metrics: Metrics


class TotalsByTrainingStep:
    """Sums of what is counted of captured tensors at each step, each once along an axis (None: the only one)."""

    def __init__(self, captures: Mapping[str, Capture]) -> None:
        self._captures = captures
        self._sums: dict[tuple[int, str, str | None], SumsByFormat] = {}

    def add(self, step: TensorPlan, counted: Counted, axis: str | None = None) -> None:
        """Count a measured tensor in, if its step is known."""
        assert step.scheme is not None
        at = recorded_number(self._captures.get(step.tensor.name), "step")
        if at is not None:
            _count(self._sums.setdefault((at, step.tensor.role, axis), {}), step.scheme.format, counted)

    @property
    def totals(self) -> tuple[TrainingStepTotal, ...]:
        """The totals of every step in order, each role along each axis; none where there are not several steps."""
        if len({step for step, _, _ in self._sums}) < 2:
            return ()
        ordered = sorted(self._sums.items(), key=lambda item: item[0][0])
        return tuple(TrainingStepTotal(*key, _numbers(pooled_over_formats(found))) for key, found in ordered)


class TotalsByRole:
    """Sums of what is counted of tensors, each once along an axis (None: the only one)."""

    def __init__(self) -> None:
        self._by_role: dict[str | None, dict[str, SumsByFormat]] = {}

    def add(self, step: TensorPlan, counted: Counted, axis: str | None) -> None:
        """Count a measured tensor in."""
        assert step.scheme is not None
        _count(self._by_role.setdefault(axis, {}).setdefault(step.tensor.role, {}), step.scheme.format, counted)

    def totals(self, axis: str | None) -> Totals:
        """Return the totals along an axis."""
        roles = self._by_role.get(axis, {})
        whole: SumsByFormat = {}
        for of_role in roles.values():
            for row, (counted, tensors) in of_role.items():
                _count(whole, row, counted, tensors)
        return Totals(
            pooled_over_formats(whole) if whole else None,
            {role: pooled_over_formats(found) for role, found in roles.items()},
        )


def totals_over_steps(totals: Iterable[TrainingStepTotal]) -> dict[tuple[str, str | None], list[TrainingStepTotal]]:
    """Return the totals over the steps, by role and axis."""
    found: dict[tuple[str, str | None], list[TrainingStepTotal]] = {}
    for each in totals:
        found.setdefault((each.role, each.axis), []).append(each)
    return found


def _numbers(metrics: Metrics) -> Metrics:
    """Return without histograms and lists, which there may be thousands of."""
    return {name: value for name, value in metrics.items() if name not in METRICS or METRICS[name].number}


def _count(sums: SumsByFormat, row: BlockFormat, counted: Counted, tensors: int = 1) -> None:
    """Add tensors of a format in."""
    sums[row] = (add(sums[row][0], counted), sums[row][1] + tensors) if row in sums else (counted, tensors)


OUTSIDE = "outside layers"
_LAYER = re.compile(r"((?:.*?\.)?\d+)\.(.+)")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PARAMETER = re.compile(rf"\.({WEIGHT}|{ACTIVATION}|{GRADIENT}|bias)$")


class Named(Protocol):
    """A tensor as far as it is grouped."""

    @property
    def name(self) -> str:
        """As the file has it."""

    @property
    def role(self) -> str:
        """What it is for."""

    @property
    def layer(self) -> str:
        """The module that it was captured at; empty where it was not."""


def layer_of(info: Named) -> str:
    """Return the layer a tensor is in, such as `model.layers.3`: its name up to the first number."""
    found = _LAYER.fullmatch(_name(info))
    return found[1] if found else OUTSIDE


def kind_of(info: Named) -> str:
    """Return what a tensor is in every layer, such as `mlp.down_proj` or `mlp.experts.*.w1`: its module after the
    layer."""
    module = _PARAMETER.sub("", _name(info))
    found = _LAYER.fullmatch(module)
    return _NUMBER.sub("*", found[2]) if found else module


def _name(info: Named) -> str:
    """Return what a tensor is called at every step and rank: the names of captured ones may begin with their file's."""
    return f"{info.layer}.{info.role}" if info.layer else info.name


GROUPINGS: dict[str, Callable[[Named], str]] = {"layer": layer_of, "role": lambda info: info.role, "kind": kind_of}


def check_grouping(by: str) -> None:
    """Raise UsageError for a name that means nothing."""
    if by not in GROUPINGS:
        raise UsageError(f"--by {printable(by)}: it takes {', '.join(GROUPINGS)}.{did_you_mean(by, GROUPINGS)}")


def labels(by: str, infos: Iterable[Named]) -> dict[str, str]:
    """Return the group of each tensor by its name. Where there are several roles, each has groups of its own: a sum
    over activations and gradients would be one of activations, whose values are so much larger."""
    listed, group = list(infos), GROUPINGS[by]
    several = by != "role" and len({info.role for info in listed}) > 1
    return {info.name: f"{group(info)} {info.role}" if several else group(info) for info in listed}
