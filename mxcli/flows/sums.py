"""Running sums over measured tensors: by role along each axis, and by the step at which they were captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add

from mxcli.files.captures import Capture, number_told
from mxcli.flows.measuring import summed_formats
from mxcli.flows.plan import Step
from mxcli.numerics.estimates import Counted
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import METRICS

Metrics = Mapping[str, Value]
Sum = dict[BlockFormat, tuple[Counted, int]]
"""What was counted of the tensors of each format together, and how many they are."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Metrics of tensors taken together, with their number as `tensors`: all (None: nothing was measured), and those
    of each role."""

    sum: Metrics | None = None
    by_role: Mapping[str, Metrics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTotal:
    """The tensors of a role that were captured at one step, taken together: their metrics that are one number, with
    their number as `tensors`. `axis` is the one that blocks run along where both are measured."""

    step: int
    role: str
    axis: str | None
    metrics: Metrics


class StepSums:
    """Sums of what is counted of captured tensors at each step, each once along an axis (None: the only one)."""

    def __init__(self, captures: Mapping[str, Capture]) -> None:
        self._captures = captures
        self._sums: dict[tuple[int, str, str | None], Sum] = {}

    def add(self, step: Step, counted: Counted, axis: str | None = None) -> None:
        """Counts a measured tensor in, if its step is known."""
        assert step.recipe is not None
        at = number_told(self._captures.get(step.tensor.name), "step")
        if at is not None:
            _count(self._sums.setdefault((at, step.tensor.role, axis), {}), step.recipe.format, counted)

    @property
    def totals(self) -> tuple[StepTotal, ...]:
        """The totals of every step in order, each role along each axis; none where there are not several steps."""
        if len({step for step, _, _ in self._sums}) < 2:
            return ()
        ordered = sorted(self._sums.items(), key=lambda item: item[0][0])
        return tuple(StepTotal(*key, _numbers(summed_formats(found))) for key, found in ordered)


class RunningSums:
    """Sums of what is counted of tensors, each once along an axis (None: the only one)."""

    def __init__(self) -> None:
        self._by_role: dict[str | None, dict[str, Sum]] = {}

    def add(self, step: Step, counted: Counted, axis: str | None) -> None:
        """Counts a measured tensor in."""
        assert step.recipe is not None
        _count(self._by_role.setdefault(axis, {}).setdefault(step.tensor.role, {}), step.recipe.format, counted)

    def totals(self, axis: str | None) -> Totals:
        """The totals along an axis."""
        roles = self._by_role.get(axis, {})
        whole: Sum = {}
        for of_role in roles.values():
            for row, (counted, tensors) in of_role.items():
                _count(whole, row, counted, tensors)
        return Totals(
            summed_formats(whole) if whole else None, {role: summed_formats(found) for role, found in roles.items()}
        )


def series(totals: Iterable[StepTotal]) -> dict[tuple[str, str | None], list[StepTotal]]:
    """The totals over the steps, by role and axis."""
    found: dict[tuple[str, str | None], list[StepTotal]] = {}
    for each in totals:
        found.setdefault((each.role, each.axis), []).append(each)
    return found


def _numbers(metrics: Metrics) -> Metrics:
    """Without histograms and lists, which there may be thousands of."""
    return {name: value for name, value in metrics.items() if name not in METRICS or METRICS[name].number}


def _count(sums: Sum, row: BlockFormat, counted: Counted, tensors: int = 1) -> None:
    """Adds tensors of a format in."""
    sums[row] = (add(sums[row][0], counted), sums[row][1] + tensors) if row in sums else (counted, tensors)
