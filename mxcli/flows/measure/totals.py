"""Totals over measured tensors: by role along each axis, and by the training step of captures."""

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
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import METRICS

Metrics = Mapping[str, Value]
SumsByFormat = dict[BlockFormat, tuple[Counted, int]]
"""The summed statistics of the tensors of each format, and their number."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Metrics of all tensors together (None: nothing was measured) and of each role, with their number as `tensors`."""

    sum: Metrics | None = None
    by_role: Mapping[str, Metrics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingStepTotal:
    """Metrics of the tensors of a role captured at one training step, those that are one number, with `tensors`, the
    number
    of tensors. `axis` is that of the blocks where both are measured."""

    step: int
    role: str
    axis: str | None
    metrics: Metrics


class TotalsByTrainingStep:
    """Summed statistics of captured tensors by training step, role and axis (None: the only one)."""

    def __init__(self, captures: Mapping[str, Capture]) -> None:
        self._captures = captures
        self._sums: dict[tuple[int, str, str | None], SumsByFormat] = {}

    def add(self, step: TensorPlan, counted: Counted, axis: str | None = None) -> None:
        """Add a measured tensor, if its training step is known."""
        assert step.scheme is not None
        at = recorded_number(self._captures.get(step.tensor.name), "step")
        if at is not None:
            _count(self._sums.setdefault((at, step.tensor.role, axis), {}), step.scheme.format, counted)

    @property
    def totals(self) -> tuple[TrainingStepTotal, ...]:
        """The totals of every training step in order, by role and axis; empty unless there are several steps."""
        if len({step for step, _, _ in self._sums}) < 2:
            return ()
        ordered = sorted(self._sums.items(), key=lambda item: item[0][0])
        return tuple(TrainingStepTotal(*key, _numbers(pooled_over_formats(found))) for key, found in ordered)


class TotalsByRole:
    """Summed statistics of tensors by role and axis (None: the only one)."""

    def __init__(self) -> None:
        self._by_role: dict[str | None, dict[str, SumsByFormat]] = {}

    def add(self, step: TensorPlan, counted: Counted, axis: str | None) -> None:
        """Add a measured tensor."""
        assert step.scheme is not None
        _count(self._by_role.setdefault(axis, {}).setdefault(step.tensor.role, {}), step.scheme.format, counted)

    def totals(self, axis: str | None) -> Totals:
        """Return the totals along an axis."""
        roles = self._by_role.get(axis, {})
        whole: SumsByFormat = {}
        for of_role in roles.values():
            for fmt, (counted, tensors) in of_role.items():
                _count(whole, fmt, counted, tensors)
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
    """Return the metrics without histograms and lists, of which there may be thousands."""
    return {name: value for name, value in metrics.items() if name not in METRICS or METRICS[name].number}


def _count(sums: SumsByFormat, fmt: BlockFormat, counted: Counted, tensors: int = 1) -> None:
    """Add tensors of a format."""
    sums[fmt] = (add(sums[fmt][0], counted), sums[fmt][1] + tensors) if fmt in sums else (counted, tensors)


OUTSIDE = "outside layers"
_LAYER = re.compile(r"((?:.*?\.)?\d+)\.(.+)")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PARAMETER = re.compile(rf"\.({WEIGHT}|{ACTIVATION}|{GRADIENT}|bias)$")


class Named(Protocol):
    """A tensor with what groups it."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def role(self) -> str:
        """Its role."""

    @property
    def layer(self) -> str:
        """The module it was captured at, or ""."""


def layer_of(info: Named) -> str:
    """Return the layer a tensor is in, such as `model.layers.3`: its name up to the first number."""
    found = _LAYER.fullmatch(_name(info))
    return found[1] if found else OUTSIDE


def kind_of(info: Named) -> str:
    """Return the kind of a tensor, the same in every layer, such as `mlp.down_proj` or `mlp.experts.*.w1`: its module
    after the
    layer."""
    module = _PARAMETER.sub("", _name(info))
    found = _LAYER.fullmatch(module)
    return _NUMBER.sub("*", found[2]) if found else module


def _name(info: Named) -> str:
    """Return a tensor's name without step and rank, which names of captures may begin with."""
    return f"{info.layer}.{info.role}" if info.layer else info.name


GROUPINGS: dict[str, Callable[[Named], str]] = {"layer": layer_of, "role": lambda info: info.role, "kind": kind_of}


def check_grouping(by: str) -> None:
    """Raise UsageError for an unknown name."""
    if by not in GROUPINGS:
        raise UsageError(f"--by {printable(by)}: it takes {', '.join(GROUPINGS)}.{did_you_mean(by, GROUPINGS)}")


def labels(by: str, infos: Iterable[Named]) -> dict[str, str]:
    """Return the group of each tensor by its name. Each of several roles has groups of its own: in a sum over
    activations
    and gradients the activations, whose values are much larger, would decide."""
    listed, group = list(infos), GROUPINGS[by]
    several = by != "role" and len({info.role for info in listed}) > 1
    return {info.name: f"{group(info)} {info.role}" if several else group(info) for info in listed}
