"""The same tensors under several recipes side by side; writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from mxcli.backends.backend import Backend
from mxcli.errors import RefusedError, together
from mxcli.files.checkpoint import Checkpoint
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
from mxcli.flows.measure.report import KEPT, PADDED, QUANTIZED, TIED, decision_of
from mxcli.flows.measure.sampled import Taken, measure_samples, sample_notes, taken
from mxcli.flows.measure.totals import TotalsByTrainingStep, TrainingStepTotal, labels
from mxcli.flows.plan.plan import Options, Plan, TensorPlan, make_plan
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.combinations import Combinations
from mxcli.numerics.estimates import Counted, metrics_of
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import NUMBERS, judged_number, number_of
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.streams import Sampling

Metrics = Mapping[str, Value]
_Lengths = tuple[str, int | None, str | None]
"""A format, the size of a transform and an axis."""

EQUAL_DB = 0.01
"""A smaller difference is no reason to prefer one of two combinations."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor: what was decided about it and why, its metrics that are numbers under each combination, and which of
    them is best (None: none is, for want of a signal). Without metrics it was not compared. `layer` is the module it
    was captured at (empty: it was not)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    decision: str
    reason: str
    metrics: tuple[Metrics, ...] = ()
    best: int | None = None
    layer: str = ""


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """A plan for each combination. What all of them quantize is compared, so that every total is of the same tensors;
    a tensor that one of them keeps is kept.

    `compared` holds the steps of each tensor that is compared, `decided` what becomes of every tensor, nothing of it
    being measured yet.
    """

    combinations: Combinations
    options: Options
    plans: tuple[Plan, ...]
    compared: tuple[TensorPlans, ...]
    decided: tuple[Compared, ...]

    @property
    def quantized_bytes(self) -> list[int]:
        """What the tensors compared take under each combination, scales included."""
        return [sum(map(stored_bytes, steps)) for steps in zip(*self.compared, strict=True)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say about the combinations and the plans, each once."""
        return tuple(dict.fromkeys([*self.combinations.notes, *(note for plan in self.plans for note in plan.notes)]))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared of a source, in the order of its tensors, and what was decided about the others.

    `sums` holds all metrics of everything compared under each combination (none: nothing was), `groups` those of the
    tensors `by` layer, role or kind, each with their number as `tensors`. `unfinished` is how many tensors an
    interruption left out. `sample` is the sample that was measured (None: no sample was asked for). `by_step` has the
    totals of each step under each combination, of captures of several steps (else empty).
    """

    source: str
    total: Total
    by_dtype: Mapping[str, Total]
    options: Options
    combinations: Combinations
    layers: tuple[Compared, ...]
    kept: tuple[Compared, ...]
    sums: tuple[Metrics, ...]
    by: str
    groups: Mapping[str, tuple[Metrics, ...]]
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    unfinished: int
    sample: Taken | None = None
    by_step: tuple[tuple[TrainingStepTotal, ...], ...] = ()


def plan_comparison(checkpoint: Checkpoint, combinations: Combinations, options: Options) -> ComparisonPlan:
    """The plans of all combinations, with everything but format and rules from `options`.

    Raises like `make_plan`, with the refusals of all formats at once.
    """
    made, refusals = dict[_Lengths, Plan](), list[str]()
    for scheme, axis in zip(combinations.schemes, combinations.axes, strict=True):
        if (lengths := _lengths(scheme, axis)) in made:
            continue
        asked = replace(
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
            made[lengths] = make_plan(checkpoint, asked)
        except RefusedError as refused:
            refusals += refused.reasons
    if refusals:
        raise together(RefusedError, "What cannot be compared as it is", list(dict.fromkeys(refusals)))
    plans = tuple(
        _under(scheme, made[_lengths(scheme, axis)])
        for scheme, axis in zip(combinations.schemes, combinations.axes, strict=True)
    )
    compared = tuple(steps for steps in measured_tensors(plans) if len(quantized_only(steps)) == len(plans))
    if not compared:
        raise RefusedError(
            "nothing to compare: no tensor is quantized under all of the formats. Use --on-indivisible pad, or other "
            "formats."
        )
    decided = tuple(_compared(steps) for steps in zip(*(plan.tensors for plan in plans), strict=True))
    names = {steps[0].tensor.name for steps in compared}
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
    """Measures every tensor under every combination, each tensor read once, or with `sampling` a sample of each.

    `on_layer` is told of each as it is done. An interruption ends the measuring and leaves a comparison of what was
    done. Raises RefusedError for values that are not finite, if the options refuse them.
    """
    layers: list[Compared] = []
    by_role = _Sums(planned, "role")
    groups = by_role if by == "role" else _Sums(planned, by)
    by_step = [TotalsByTrainingStep(checkpoint.captures) for _ in planned.plans]
    refusals: list[str] = []
    try:
        for steps, counted in _counted(checkpoint, planned, backend, sampling):
            refusals += nonfinite_refusals(steps[0], counted[0])
            layers.append(_compared(steps, counted))
            for sums in {by_role, groups}:
                sums.add(steps, counted)
            for of_plan, step, each in zip(by_step, steps, counted, strict=True):
                of_plan.add(step, each)
            if on_layer is not None:
                on_layer(layers[-1])
    except KeyboardInterrupt:
        pass
    refuse_nonfinite(refusals)
    infos, decided = checkpoint.tensors.values(), planned.decided
    read = ((layer.metrics[0], planned.combinations.schemes) for layer in layers)
    sample = None if sampling is None else taken(sampling, read)
    return Comparison(
        source=source,
        total=Total.of(infos),
        by_dtype=totals_by(lambda info: info.dtype, infos),
        options=planned.options,
        combinations=planned.combinations,
        layers=tuple(layers),
        kept=tuple(layer for layer in decided if layer.decision in (KEPT, TIED)),
        sums=by_role.total,
        by=by,
        groups=groups.groups,
        counts=counts_of(decided),
        notes=(
            *checkpoint.notes,
            *planned.notes,
            *anomaly_notes((layer.name, layer.metrics) for layer in layers),
            *sample_notes(sample),
        ),
        unfinished=len(planned.compared) - len(layers),
        sample=sample,
        by_step=tuple(totals for each in by_step if (totals := each.totals)),
    )


def _counted(
    checkpoint: Checkpoint, planned: ComparisonPlan, backend: Backend, sampling: Sampling | None
) -> Iterator[tuple[TensorPlans, list[Counted]]]:
    """What is counted of each tensor, or of a sample of it, under every combination."""
    if sampling is None:
        for steps, made in measure(checkpoint, planned.plans, backend):
            yield steps, [q.stats for q in made if q.stats is not None]
    else:
        for steps, samples in measure_samples(checkpoint, planned.plans, backend, sampling):
            yield steps, list(samples)


def counts_of(layers: Sequence[Compared]) -> dict[str, int]:
    """How many tensors there are of each decision."""
    decisions = [layer.decision for layer in layers]
    return {word: decisions.count(word) for word in (QUANTIZED, PADDED, KEPT, TIED)}


def best_of(metrics: Sequence[Metrics]) -> int | None:
    """Which combination `best` says is best."""
    return best([(sqnr_or_infinity(each), number_of(each, "bits_per_element") or 0.0) for each in metrics])


def best(standings: Sequence[tuple[float | None, float]]) -> int | None:
    """The best of SQNRs in dB (infinite: exact, None: there is none) with bits per element: the highest; of those that
    are as good to within EQUAL_DB the one with the fewest bits, then the first. None where there is no SQNR."""
    highest = max((sqnr for sqnr, _ in standings if sqnr is not None), default=None)
    if highest is None:
        return None
    as_good = [at for at, (sqnr, _) in enumerate(standings) if sqnr is not None and is_as_good(sqnr, highest)]
    return min(as_good, key=lambda at: standings[at][1])


def is_as_good(sqnr_db: float, other_db: float) -> bool:
    """Whether an SQNR is not less than another by a difference worth a word."""
    return sqnr_db == other_db or other_db - sqnr_db < EQUAL_DB


def sqnr_or_infinity(metrics: Metrics) -> float | None:
    """SQNR in dB, infinite where the result is exact; None where there is none."""
    return judged_number(metrics, "sqnr_db")


def _lengths(scheme: Scheme, axis: str | None) -> _Lengths:
    """What a combination hangs on as to which tensors can be quantized."""
    return scheme.format.name, None if scheme.hadamard is None else scheme.hadamard.size, axis


def _under(scheme: Scheme, plan: Plan) -> Plan:
    """The plan for the recipe's format with the recipe itself: rules have no say in what is quantized."""
    steps = tuple(replace(step, scheme=scheme) if step.scheme not in (None, scheme) else step for step in plan.tensors)
    return replace(plan, tensors=steps)


def _only(names: Collection[str], plan: Plan) -> Plan:
    """The plan with all tensors kept but those."""
    steps = tuple(step if step.tensor.name in names else replace(step, scheme=None) for step in plan.tensors)
    return replace(plan, tensors=steps)


class _Sums:
    """Running sums of statistics: over everything, and over the groups of tensors."""

    def __init__(self, planned: ComparisonPlan, by: str) -> None:
        self._rows = [scheme.format for scheme in planned.combinations.schemes]
        self._label = labels(by, (steps[0].tensor for steps in planned.compared))
        self._groups: dict[str, list[Counted]] = {}
        self._counts: dict[str, int] = {}

    def add(self, steps: TensorPlans, counted: list[Counted]) -> None:
        """Counts a tensor in."""
        label = self._label[steps[0].tensor.name]
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
        return tuple(pooled_metrics(each, row, tensors) for each, row in zip(counted, self._rows, strict=False))


def _compared(steps: TensorPlans, counted: Sequence[Counted] = ()) -> Compared:
    metrics = tuple(
        metrics_of(each, step.scheme.format, step.shape, metrics=NUMBERS)
        for step, each in zip(steps, counted, strict=False)
        if step.scheme is not None
    )
    decision = _decision(steps)
    info, reason = steps[0].tensor, next(step.reason for step in steps if decision_of(step) == decision)
    return Compared(
        info.name, info.dtype, info.shape, info.role, decision, reason, metrics, best_of(metrics), info.layer
    )


def _decision(steps: TensorPlans) -> str:
    """What becomes of a tensor: kept if any combination keeps it, padded if any pads it."""
    decisions = [decision_of(step) for step in steps]
    return next(word for word in (TIED, KEPT, PADDED, QUANTIZED) if word in decisions)


def stored_bytes(step: TensorPlan) -> int:
    """Bytes of the codes and scales of a tensor that is quantized."""
    assert step.scheme is not None
    row, shape = step.scheme.format, step.shape
    codes = math.prod(shape[:-1]) * packed_columns(row, shape[-1])
    tensor_scale = row.tensor_scale.bits if row.tensor_scale else 0
    return codes + (math.prod(grid_shape(row, shape)) * row.scale.bits + tensor_scale) // 8
