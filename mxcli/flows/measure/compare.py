"""Comparisons: the same tensors under several schemes side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from mxcli.backends.backend import Backend
from mxcli.errors import RefusedError, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.flows.measure.comparison_findings import comparison_conclusion, comparison_findings
from mxcli.flows.measure.findings import ComparedSeries, Finding, best_of, compared_series
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.measure.measure import (
    TensorPlans,
    anomaly_notes,
    measure,
    measured_tensors,
    pooled_metrics,
    quantized_only,
)
from mxcli.flows.measure.nonfinite import nonfinite_refusals, refuse_nonfinite
from mxcli.flows.measure.report import KEPT, PADDED, QUANTIZED, TIED, Decided, Result, decision_counts, decision_of
from mxcli.flows.measure.sampled import measure_samples, sample_notes, taken
from mxcli.flows.measure.totals import TotalsByTrainingStep, TrainingStepTotal, labels
from mxcli.flows.plan.plan import Options, Plan, TensorPlan, make_plan
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.combinations import Combinations
from mxcli.numerics.estimates import Counted, metrics_of
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import NUMBERS
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.streams import Sampling

Metrics = Mapping[str, Value]
_Lengths = tuple[str, int | None, str | None]
"""A format, the size of a transform and an axis."""


@dataclass(frozen=True, slots=True)
class Compared(Decided):
    """A tensor with its metrics that are numbers under each combination, and the best of them (None: there is no SQNR).
    Without metrics it was not compared. `layer` is the module at which it was captured (empty: it was not)."""

    metrics: tuple[Metrics, ...] = ()
    best: int | None = None
    layer: str = ""


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """A plan for each combination. Tensors that all of them quantize are compared, so that every total is of the same
    tensors; a tensor that one of them keeps is kept.

    `compared` holds the plans of each tensor that is compared, `decided` the decision about every tensor, unmeasured.
    """

    combinations: Combinations
    options: Options
    plans: tuple[Plan, ...]
    compared: tuple[TensorPlans, ...]
    decided: tuple[Compared, ...]

    @property
    def quantized_bytes(self) -> list[int]:
        """Bytes of the tensors compared under each combination, scales included."""
        return [sum(map(stored_bytes, of_combination)) for of_combination in zip(*self.compared, strict=True)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the combinations and the plans, each once."""
        return tuple(dict.fromkeys([*self.combinations.notes, *(note for plan in self.plans for note in plan.notes)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Result[Compared]):
    """Measurements of a source under several combinations; the first is the baseline.

    `sums` holds all metrics of everything compared under each combination (none: nothing was), `groups` those of the
    tensors `by` layer, role or kind, each with their number as `tensors`. `by_step` has the totals of each step under
    each combination, of captures of several steps (else empty).
    """

    combinations: Combinations
    sums: tuple[Metrics, ...]
    by: str
    groups: Mapping[str, tuple[Metrics, ...]]
    by_step: tuple[tuple[TrainingStepTotal, ...], ...] = ()

    @property
    def best(self) -> int | None:
        """The combination that is best over all tensors; None where there is no SQNR."""
        return best_of(self.sums)

    def best_in(self, group: str) -> int | None:
        """Return the combination that is best over the tensors of a group."""
        return best_of(self.groups[group])

    @property
    def wins(self) -> tuple[int, ...]:
        """The number of tensors on which each combination is best."""
        best = Counter(layer.best for layer in self.layers)
        return tuple(best[at] for at in range(len(self.combinations.names)))

    @property
    def series(self) -> tuple[ComparedSeries, ...]:
        """The totals over the training steps by role."""
        return compared_series(self.by_step)

    @property
    def conclusion(self) -> tuple[Finding, ...]:
        """The effects of rules and formats, the winner, and what roundings and axes change."""
        return comparison_conclusion(self)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The conclusion, and the combinations that are best at training steps."""
        return comparison_findings(self)


def plan_comparison(checkpoint: Checkpoint, combinations: Combinations, options: Options) -> ComparisonPlan:
    """Make the plans of all combinations, with everything but format and rules from `options`.

    Raises like `make_plan`, with the refusals of all formats at once.
    """
    made, refusals = dict[_Lengths, Plan](), list[str]()
    for scheme, axis in zip(combinations.schemes, combinations.axes, strict=True):
        if (lengths := _lengths(scheme, axis)) in made:
            continue
        requested = replace(
            options,
            format=scheme.format.name,
            rules=replace(
                options.rules,
                scale_rounding=scheme.scale_rule.name,
                rounding=scheme.rounding.name,
                hadamard=scheme.hadamard,
            ),
            axis=axis or options.axis,
        )
        try:
            made[lengths] = make_plan(checkpoint, requested)
        except RefusedError as refused:
            refusals += refused.reasons
    if refusals:
        raise together(RefusedError, "What cannot be compared as it is", list(dict.fromkeys(refusals)))
    plans = tuple(
        _under(scheme, made[_lengths(scheme, axis)])
        for scheme, axis in zip(combinations.schemes, combinations.axes, strict=True)
    )
    compared = tuple(each for each in measured_tensors(plans) if len(quantized_only(each)) == len(plans))
    if not compared:
        raise RefusedError(
            "nothing to compare: no tensor is quantized under all of the formats. Use --on-indivisible pad, or other "
            "formats."
        )
    decided = tuple(_compared(of_tensor) for of_tensor in zip(*(plan.tensors for plan in plans), strict=True))
    names = {of_tensor[0].tensor.name for of_tensor in compared}
    return ComparisonPlan(combinations, options, tuple(_only(names, plan) for plan in plans), compared, decided)


def make_comparison(
    source: str,
    checkpoint: Checkpoint,
    planned: ComparisonPlan,
    *,
    backend: Backend,
    by: str = "role",
    on_layer: Callable[[Compared], None] | None = None,
    sampling: Sampling | None = None,
) -> Comparison:
    """Measure every tensor under every combination, each tensor read once, or with `sampling` a sample of each.

    `on_layer` receives each as it is done. After an interruption the comparison covers what was measured. Raises
    RefusedError for values that are not finite, if the options refuse them.
    """
    layers: list[Compared] = []
    by_role = _Sums(planned, "role")
    groups = by_role if by == "role" else _Sums(planned, by)
    by_step = [TotalsByTrainingStep(checkpoint.captures) for _ in planned.plans]
    refusals: list[str] = []
    try:
        for of_tensor, counted in _counted(checkpoint, planned, backend, sampling):
            refusals += nonfinite_refusals(of_tensor[0], counted[0])
            layers.append(_compared(of_tensor, counted))
            for sums in {by_role, groups}:
                sums.add(of_tensor, counted)
            for of_plan, under, each in zip(by_step, of_tensor, counted, strict=True):
                of_plan.add(under, each)
            if on_layer is not None:
                on_layer(layers[-1])
    except KeyboardInterrupt:
        pass
    refuse_nonfinite(refusals)
    read = ((layer.metrics[0], planned.combinations.schemes) for layer in layers)
    sample = None if sampling is None else taken(sampling, read)
    unmeasured = unmeasured_comparison(source, checkpoint, planned)
    return replace(
        unmeasured,
        layers=tuple(layers),
        sums=by_role.total,
        by=by,
        groups=groups.groups,
        notes=(
            *unmeasured.notes,
            *anomaly_notes((layer.name, layer.metrics) for layer in layers),
            *sample_notes(sample),
        ),
        unfinished=len(planned.compared) - len(layers),
        sample=sample,
        by_step=tuple(totals for each in by_step if (totals := each.totals)),
    )


def unmeasured_comparison(source: str, checkpoint: Checkpoint, planned: ComparisonPlan) -> Comparison:
    """Return the comparison before anything is measured: without layers and totals."""
    infos, decided = checkpoint.tensors.values(), planned.decided
    return Comparison(
        source=source,
        total=Total.of(infos),
        by_dtype=totals_by(lambda info: info.dtype, infos),
        options=planned.options,
        combinations=planned.combinations,
        layers=(),
        kept=tuple(layer for layer in decided if layer.decision in (KEPT, TIED)),
        sums=(),
        by="role",
        groups={},
        counts=decision_counts([layer.decision for layer in decided]),
        notes=(*checkpoint.notes, *planned.notes),
        unfinished=0,
    )


def _counted(
    checkpoint: Checkpoint, planned: ComparisonPlan, backend: Backend, sampling: Sampling | None
) -> Iterator[tuple[TensorPlans, list[Counted]]]:
    """Yield the statistics of each tensor, or of a sample of it, under every combination."""
    if sampling is None:
        for of_tensor, made in measure(checkpoint, planned.plans, backend):
            yield of_tensor, [q.stats for q in made if q.stats is not None]
    else:
        for of_tensor, samples in measure_samples(checkpoint, planned.plans, backend, sampling):
            yield of_tensor, list(samples)


def _lengths(scheme: Scheme, axis: str | None) -> _Lengths:
    """Return the part of a combination that decides which tensors can be quantized."""
    return scheme.format.name, None if scheme.hadamard is None else scheme.hadamard.size, axis


def _under(scheme: Scheme, plan: Plan) -> Plan:
    """Return the plan for the scheme's format with the scheme itself: rules do not decide which tensors are
    quantized."""
    tensors = tuple(
        replace(planned, scheme=scheme) if planned.scheme not in (None, scheme) else planned for planned in plan.tensors
    )
    return replace(plan, tensors=tensors)


def _only(names: Collection[str], plan: Plan) -> Plan:
    """Return the plan with all other tensors kept."""
    tensors = tuple(
        planned if planned.tensor.name in names else replace(planned, scheme=None) for planned in plan.tensors
    )
    return replace(plan, tensors=tensors)


class _Sums:
    """Running sums of statistics: over everything, and over the groups of tensors."""

    def __init__(self, planned: ComparisonPlan, by: str) -> None:
        self._formats = [scheme.format for scheme in planned.combinations.schemes]
        self._label = labels(by, (of_tensor[0].tensor for of_tensor in planned.compared))
        self._groups: dict[str, list[Counted]] = {}
        self._counts: dict[str, int] = {}

    def add(self, of_tensor: TensorPlans, counted: list[Counted]) -> None:
        """Add the statistics of a tensor."""
        label = self._label[of_tensor[0].tensor.name]
        known = self._groups.get(label)
        self._groups[label] = list(map(add, known, counted)) if known else counted
        self._counts[label] = self._counts.get(label, 0) + 1

    @property
    def groups(self) -> dict[str, tuple[Metrics, ...]]:
        """Metrics of each group under each combination."""
        return {label: self._metrics(each, self._counts[label]) for label, each in self._groups.items()}

    @property
    def total(self) -> tuple[Metrics, ...]:
        """Metrics of everything under each combination."""
        columns = list(zip(*self._groups.values(), strict=True))
        return self._metrics([reduce(add, column) for column in columns], sum(self._counts.values()))

    def _metrics(self, counted: Sequence[Counted], tensors: int) -> tuple[Metrics, ...]:
        return tuple(pooled_metrics(each, fmt, tensors) for each, fmt in zip(counted, self._formats, strict=False))


def _compared(of_tensor: TensorPlans, counted: Sequence[Counted] = ()) -> Compared:
    metrics = tuple(
        metrics_of(each, planned.scheme.format, planned.shape, metrics=NUMBERS)
        for planned, each in zip(of_tensor, counted, strict=False)
        if planned.scheme is not None
    )
    decision = _decision(of_tensor)
    info = of_tensor[0].tensor
    return Compared(
        name=info.name,
        dtype=info.dtype,
        shape=info.shape,
        role=info.role,
        decision=decision,
        reason=next(planned.reason for planned in of_tensor if decision_of(planned) == decision),
        metrics=metrics,
        best=best_of(metrics),
        layer=info.layer,
    )


def _decision(of_tensor: TensorPlans) -> str:
    """Return the decision about a tensor: kept if any combination keeps it, padded if any pads it."""
    decisions = [decision_of(planned) for planned in of_tensor]
    return next(word for word in (TIED, KEPT, PADDED, QUANTIZED) if word in decisions)


def stored_bytes(planned: TensorPlan) -> int:
    """Return the bytes of the codes and scales of a quantized tensor."""
    assert planned.scheme is not None
    fmt, shape = planned.scheme.format, planned.shape
    codes = math.prod(shape[:-1]) * packed_columns(fmt, shape[-1])
    tensor_scale = fmt.tensor_scale.bits if fmt.tensor_scale else 0
    return codes + (math.prod(grid_shape(fmt, shape)) * fmt.scale.bits + tensor_scale) // 8
