"""Findings on reports and comparisons as data: thresholds, winners and facts worth reporting.

`Report.findings`, `Comparison.findings` and their `conclusion` hold them; `output.conclusion` makes sentences of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from mxcli.flows.measure.totals import Metrics, Totals, TrainingStepTotal, totals_over_steps
from mxcli.numerics.metrics import judged_number, number_of

if TYPE_CHECKING:
    from mxcli.flows.measure.compare import Comparison
    from mxcli.flows.measure.report import Report
    from mxcli.flows.measure.sampled import Taken

EQUAL_DB, EQUAL_BITS = 0.01, 0.001
"""Smaller differences in SQNR and in bits per element are not a reason to prefer a combination."""
AXIS_DB = 0.05
"""The smallest difference in SQNR between axes that is reported."""
UNDERFLOW_PERCENT, RELATIVE_CHANGE = 0.1, 0.05
"""The smallest underflow of which changes are reported, and the smallest change of underflow and saturation, as a share
of the larger value."""
OUTLIER_DB, MEDIAN_TENSORS = 3.0, 3
"""The distance of an outlier below the median SQNR, and the number of tensors that a median needs."""


class Finding:
    """A fact worth reporting."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor with its value of a metric."""

    tensor: str
    value: float


@dataclass(frozen=True, slots=True)
class Estimated(Finding):
    """Estimates from a sample of `percent` of the elements."""

    percent: float


@dataclass(frozen=True, slots=True)
class TotalError(Finding):
    """The error over all `tensors`: their SQNR (None: there is none, infinite: exact), and the tensors with the lowest
    and the highest (None: fewer than two have one)."""

    tensors: int
    sqnr_db: float | None
    lowest: TensorValue | None = None
    highest: TensorValue | None = None


@dataclass(frozen=True, slots=True)
class Outliers(Finding):
    """Tensors more than `below_db` below the median SQNR, the lowest first."""

    tensors: tuple[str, ...]
    median_db: float
    below_db: float = OUTLIER_DB


@dataclass(frozen=True, slots=True)
class Saturation(Finding):
    """The shares of elements and blocks that saturate, and the tensor with most (None: only one was measured)."""

    percent: float
    blocks_percent: float
    most: TensorValue | None = None


@dataclass(frozen=True, slots=True)
class Underflow(Finding):
    """The share of elements that underflow, and the tensor with most (None: only one was measured)."""

    percent: float
    most: TensorValue | None = None


@dataclass(frozen=True, slots=True)
class ScaleUnderflow(Finding):
    """Blocks lost to a scale that became zero or was clamped."""

    blocks: int


@dataclass(frozen=True, slots=True)
class ScaleRange(Finding):
    """Binades of the element format in use on average, those available, and the extreme exponents of the scales."""

    binades_used: float
    binades_available: float
    exponent_min: int
    exponent_max: int


@dataclass(frozen=True, slots=True)
class Kept(Finding):
    """Tensors kept as stored, by role, the most frequent first."""

    by_role: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AxisEffect(Finding):
    """The axis along which blocks have the higher SQNR (infinite: exact) for a role; `scheme` names the combination
    where there are several."""

    role: str
    better: str
    better_db: float
    worse: str
    worse_db: float
    scheme: str = ""


@dataclass(frozen=True, slots=True)
class AxesEqual(Finding):
    """Two axes that differ by less than `less_than_db` in every role; `scheme` as in AxisEffect."""

    axes: tuple[str, str]
    scheme: str = ""
    less_than_db: float = AXIS_DB


@dataclass(frozen=True, slots=True)
class AxesIncomparable(Finding):
    """Tensors that are measured along one axis only, so that totals of the axes are not comparable."""

    tensors: int


@dataclass(frozen=True, slots=True)
class StepTrend(Finding):
    """The SQNR of a role at the first, the last and the worst of `steps` training steps, each as (step, dB)."""

    role: str
    axis: str | None
    steps: int
    first: tuple[int, float]
    last: tuple[int, float]
    worst: tuple[int, float]


@dataclass(frozen=True, slots=True)
class StepWins(Finding):
    """The combinations that are best for a role, with the number of `steps` at which they are, the most first."""

    role: str
    steps: int
    wins: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The totals of a role over the training steps of captures, in order; `axis` is None where only one is measured."""

    role: str
    axis: str | None
    totals: tuple[TrainingStepTotal, ...]

    @property
    def worst(self) -> int | None:
        """The place of the step with the lowest SQNR, the first of equals; None where none has one."""
        known = [
            (sqnr, at) for at, each in enumerate(self.totals) if (sqnr := sqnr_or_infinity(each.metrics)) is not None
        ]
        return min(known)[1] if known else None


@dataclass(frozen=True, slots=True)
class ComparedSeries:
    """The totals of a role over the steps under each combination, and the number of steps at which each is best."""

    role: str
    under: tuple[StepSeries, ...]

    @property
    def wins(self) -> list[int]:
        """The number of steps at which each combination is best."""
        at_step = zip(*(series.totals for series in self.under), strict=True)
        best = [best_of([total.metrics for total in totals]) for totals in at_step]
        return [best.count(place) for place in range(len(self.under))]


def step_series(totals: Iterable[TrainingStepTotal]) -> tuple[StepSeries, ...]:
    """Return the totals by role and axis."""
    return tuple(StepSeries(role, axis, tuple(found)) for (role, axis), found in totals_over_steps(totals).items())


def compared_series(by_step: Sequence[Sequence[TrainingStepTotal]]) -> tuple[ComparedSeries, ...]:
    """Return the totals under each combination by role."""
    under = [step_series(totals) for totals in by_step]
    return tuple(ComparedSeries(found[0].role, found) for found in zip(*under, strict=True))


def sqnr_or_infinity(metrics: Metrics) -> float | None:
    """Return the SQNR in dB, infinite where the result is exact; None where there is none."""
    return judged_number(metrics, "sqnr_db")


def best_of(metrics: Sequence[Metrics]) -> int | None:
    """Return the combination that `best` prefers."""
    return best([(sqnr_or_infinity(each), number_of(each, "bits_per_element") or 0.0) for each in metrics])


def best(standings: Sequence[tuple[float | None, float]]) -> int | None:
    """Return the best of SQNRs in dB (infinite: exact, None: there is none) with bits per element: the highest; of
    those as good to within EQUAL_DB the one with the fewest bits, then the first. None where there is no SQNR."""
    highest = max((sqnr for sqnr, _ in standings if sqnr is not None), default=None)
    if highest is None:
        return None
    as_good = [at for at, (sqnr, _) in enumerate(standings) if sqnr is not None and is_as_good(sqnr, highest)]
    return min(as_good, key=lambda at: standings[at][1])


def is_as_good(sqnr_db: float, other_db: float) -> bool:
    """Return whether an SQNR is less than EQUAL_DB below another."""
    return sqnr_db == other_db or other_db - sqnr_db < EQUAL_DB


def report_findings(report: Report) -> tuple[Finding, ...]:
    """Return the findings on a report, the most important first; none if nothing was measured."""
    ends = [*step_trends(report.series), *_kept(report.kept_by_role)]
    if report.by_axis and any(totals.sum for totals in report.by_axis.values()):
        return (*estimated(report.sample), *report_conclusion(report), *ends)
    if report.sum is None:
        return ()
    return (*estimated(report.sample), *_of_total(report, report.sum), *ends)


def report_conclusion(report: Report) -> tuple[Finding, ...]:
    """Return the effects of the axis, where the same tensors were measured along both."""
    apart = {layer.name for layer in report.kept if layer.axis is not None}
    return (AxesIncomparable(len(apart)),) if apart else tuple(axis_effects(report.by_axis))


def estimated(sample: Taken | None) -> list[Finding]:
    """Return the finding that everything is estimated, if something was left out."""
    if sample is None or sample.is_everything:
        return []
    return [Estimated(100 * sample.sampled_elements / sample.elements)]


def axis_effects(by_axis: Mapping[str, Totals], scheme: str = "") -> list[Finding]:
    """Return a finding per role that one axis serves better, or that none does; none where only one was measured."""
    if len(by_axis) < 2 or not all(totals.by_role for totals in by_axis.values()):
        return []
    (first, one), (second, other) = by_axis.items()
    shared = [role for role in one.by_role if role in other.by_role]
    pairs = ((role, {first: one.by_role[role], second: other.by_role[role]}) for role in shared)
    found: list[Finding] = [effect for role, along in pairs for effect in _axis_effect(role, along, scheme)]
    return found or ([AxesEqual((first, second), scheme)] if shared else [])


def _axis_effect(role: str, along: Mapping[str, Metrics], scheme: str) -> Iterator[AxisEffect]:
    known = [(sqnr, axis) for axis, metrics in along.items() if (sqnr := sqnr_or_infinity(metrics)) is not None]
    if len(known) < len(along):
        return
    (low, worse), (high, better) = sorted(known, key=lambda pair: pair[0])
    if low != high and high - low >= AXIS_DB:
        yield AxisEffect(role, better, high, worse, low, scheme)


def comparison_steps(comparison: Comparison) -> Iterator[StepWins]:
    """Yield the combinations that are best at steps, of each role."""
    for found in comparison.series:
        pairs = sorted(zip(comparison.combinations.names, found.wins, strict=True), key=lambda pair: -pair[1])
        wins = tuple((name, won) for name, won in pairs if won)
        if wins:
            yield StepWins(found.role, len(found.under[0].totals), wins)


def step_trends(series: Iterable[StepSeries]) -> Iterator[StepTrend]:
    """Yield the trend of each role that has an SQNR at the first and the last step."""
    for each in series:
        if each.worst is None:
            continue
        points = [(total.step, sqnr_or_infinity(total.metrics)) for total in each.totals]
        (first, before), (last, after), (worst, lowest) = points[0], points[-1], points[each.worst]
        if before is not None and after is not None and lowest is not None:
            yield StepTrend(each.role, each.axis, len(points), (first, before), (last, after), (worst, lowest))


def _kept(by_role: Mapping[str, int]) -> list[Finding]:
    return [Kept(by_role)] if by_role else []


def _of_total(report: Report, total: Metrics) -> Iterator[Finding]:
    """Yield the error, outliers, saturation, underflow and the range of scales."""
    ranked = _ranked(report, "sqnr_db")
    sqnr = math.inf if total["mse"] == 0 else number_of(total, "sqnr_db")
    ends = (ranked[0], ranked[-1]) if len(ranked) > 1 else (None, None)
    yield TotalError(len(report.layers), sqnr, *ends)
    if len(ranked) >= MEDIAN_TENSORS:
        middle = median(each.value for each in ranked)
        low = tuple(each.tensor for each in ranked if each.value < middle - OUTLIER_DB)
        if low:
            yield Outliers(low, middle)
    elements, blocks = (number_of(total, name) or 0.0 for name in ("saturated_percent", "saturated_blocks_percent"))
    yield Saturation(elements, blocks, _most(report, "saturated_percent"))
    yield Underflow(number_of(total, "underflowed_percent") or 0.0, _most(report, "underflowed_percent"))
    lost = number_of(total, "scale_underflowed_blocks")
    if lost:
        yield ScaleUnderflow(int(lost))
    used, available = number_of(total, "binades_used"), number_of(total, "binades_available")
    low_exponent, high_exponent = number_of(total, "scale_exponent_min"), number_of(total, "scale_exponent_max")
    if used is not None and available is not None and low_exponent is not None and high_exponent is not None:
        yield ScaleRange(used, available, int(low_exponent), int(high_exponent))


def _ranked(report: Report, name: str) -> list[TensorValue]:
    """Return the tensors that have a metric, the least first."""
    known = [
        TensorValue(layer.name, value)
        for layer in report.layers
        if (value := number_of(layer.metrics, name)) is not None
    ]
    return sorted(known, key=lambda each: each.value)


def _most(report: Report, name: str) -> TensorValue | None:
    ranked = _ranked(report, name)
    return ranked[-1] if len(ranked) > 1 else None
