"""Reports: the quantization error of each tensor of a plan; optionally writes arrays with a value per block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from mxcli.atomic import whole_file
from mxcli.backends.backend import Backend
from mxcli.errors import written_to
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import Entry
from mxcli.files.shard_file import Shard, ShardFile
from mxcli.files.tensors import Array
from mxcli.flows.measure.findings import Finding, StepSeries, report_conclusion, report_findings, step_series
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.measure.measure import (
    PER_BLOCK,
    anomaly_notes,
    measure,
    measured_tensors,
    quantized_only,
)
from mxcli.flows.measure.nonfinite import nonfinite_refusals, refuse_nonfinite
from mxcli.flows.measure.sampled import Taken, measure_samples, sample_notes, taken
from mxcli.flows.measure.totals import Totals, TotalsByRole, TotalsByTrainingStep, TrainingStepTotal
from mxcli.flows.plan.plan import Options, Plan, TensorPlan
from mxcli.numerics.blocks import grid_shape
from mxcli.numerics.estimates import Counted, metrics_of
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Stats
from mxcli.numerics.streams import Sampling

QUANTIZED, PADDED, KEPT, TIED = "quantized", "padded", "kept", "tied"

WriteArray = Callable[[str, Array], None]
TensorStats = Iterable[tuple[TensorPlan, Stats | None]]


@dataclass(frozen=True, slots=True)
class Decided:
    """A tensor with the decision about it (QUANTIZED, PADDED, KEPT or TIED) and the reason; `shape` is that of the
    file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    decision: str
    reason: str


@dataclass(frozen=True, slots=True)
class LayerReport(Decided):
    """A tensor along an axis, and its metrics if it was measured (else empty).

    `scheme` is None for a tensor that is not quantized. `axis` is the one along which blocks run; of a kept tensor the
    one along which it is kept (None: along any). `layer` is the module at which it was captured (empty: it was not).
    """

    scheme: Scheme | None
    metrics: Mapping[str, Value]
    axis: str | None = None
    layer: str = ""


L = TypeVar("L", bound=Decided, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Generic[L]):
    """Measurements of a source, in the order of its tensors: what reports and comparisons have in common.

    `source` is as the user named it, `total` and `by_dtype` are its sizes. `layers` are the tensors measured, `kept`
    the others. `counts` is the number of tensors by decision, `unfinished` that of tensors left unmeasured by an
    interruption. `sample` is the sample that was measured (None: whole tensors).
    """

    source: str
    total: Total
    by_dtype: Mapping[str, Total]
    options: Options
    layers: tuple[L, ...]
    kept: tuple[L, ...]
    counts: Mapping[str, int]
    unfinished: int
    notes: tuple[str, ...]
    sample: Taken | None = None

    @property
    def kept_by_role(self) -> dict[str, int]:
        """The number of tensors kept as stored by role, the most frequent first; tied ones are not counted."""
        return dict(Counter(layer.role for layer in self.kept if layer.decision == KEPT).most_common())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Result[LayerReport]):
    """Measurements of a source under the schemes of a plan.

    `schemes` has the number of tensors of each scheme. `sum` (None: nothing measured) and `by_role` are the metrics of
    tensors taken together, with their number as `tensors`. `by_step` has the totals of each step of captures of several
    steps.

    Along both axes `layers` has a tensor once for each, and so do `counts` and `unfinished`; totals are `by_axis` (else
    empty): `sum` is None and `by_role` empty, since a total over both axes means nothing.
    """

    schemes: tuple[tuple[Scheme, int], ...]
    sum: Mapping[str, Value] | None
    by_role: Mapping[str, Mapping[str, Value]]
    by_axis: Mapping[str, Totals] = field(default_factory=dict)
    by_step: tuple[TrainingStepTotal, ...] = ()

    @property
    def totals(self) -> tuple[tuple[str | None, Totals], ...]:
        """The totals with their axis; None where there is only one."""
        return tuple(self.by_axis.items()) or ((None, Totals(self.sum, self.by_role)),)

    @property
    def series(self) -> tuple[StepSeries, ...]:
        """The totals over the training steps by role and axis."""
        return step_series(self.by_step)

    @property
    def conclusion(self) -> tuple[Finding, ...]:
        """The effects of the axis, where both are measured."""
        return report_conclusion(self)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Facts worth reporting, the most important first."""
        return report_findings(self)


def decision_of(planned: TensorPlan) -> str:
    """Return QUANTIZED, PADDED, KEPT or TIED."""
    if planned.scheme is not None:
        return PADDED if planned.padded else QUANTIZED
    return TIED if planned.tied_to is not None else KEPT


def decision_counts(decisions: Sequence[str]) -> dict[str, int]:
    """Return the number of tensors by decision."""
    return {word: decisions.count(word) for word in (QUANTIZED, PADDED, KEPT, TIED)}


class Tally:
    """A report in the making: reports on layers, and running sums over them. There is a plan, or one for each axis."""

    def __init__(self, source: str, checkpoint: Checkpoint, *plans: Plan, sampling: Sampling | None = None) -> None:
        self._source, self._checkpoint, self._plans, self._sampling = source, checkpoint, plans, sampling
        self._layers: list[LayerReport] = []
        self._sums, self._steps = TotalsByRole(), TotalsByTrainingStep(checkpoint.captures)

    def add(self, planned: TensorPlan, counted: Counted) -> LayerReport:
        """Add the statistics of a tensor; those of its sample, if there is a sampling."""
        assert planned.scheme is not None
        layer = _layer(planned, metrics_of(counted, planned.scheme.format, planned.shape), planned.axis)
        self._layers.append(layer)
        axis = planned.axis if len(self._plans) > 1 else None
        self._sums.add(planned, counted, axis)
        self._steps.add(planned, counted, axis)
        return layer

    def report(self) -> Report:
        """Return the report on the tensors added so far."""
        plans, infos = self._plans, self._checkpoint.tensors.values()
        quantized = [planned for plan in plans for planned in plan.quantized]
        kept = tuple(_kept(plans))
        decisions = [*map(decision_of, quantized), *(layer.decision for layer in kept)]
        of_tensor: dict[str, list[LayerReport]] = {}
        for layer in self._layers:
            of_tensor.setdefault(layer.name, []).append(layer)
        read = ((each[0].metrics, [layer.scheme for layer in each if layer.scheme]) for each in of_tensor.values())
        sample = None if self._sampling is None else taken(self._sampling, read)
        totals = self._sums.totals(None)
        return Report(
            source=self._source,
            total=Total.of(infos),
            by_dtype=totals_by(lambda info: info.dtype, infos),
            options=plans[0].options,
            schemes=_schemes(plans),
            layers=tuple(self._layers),
            kept=kept,
            sum=totals.sum,
            by_role=totals.by_role,
            counts=decision_counts(decisions),
            notes=(
                *self._checkpoint.notes,
                *dict.fromkeys(note for plan in plans for note in plan.notes),
                *anomaly_notes((name, [layer.metrics for layer in each]) for name, each in of_tensor.items()),
                *sample_notes(sample),
            ),
            unfinished=len(quantized) - len(self._layers),
            sample=sample,
            by_axis={str(plan.axis): self._sums.totals(plan.axis) for plan in plans} if len(plans) > 1 else {},
            by_step=self._steps.totals,
        )


def planned_layers(*plans: Plan) -> tuple[LayerReport, ...]:
    """Return the decision about every tensor, unmeasured: once, or once for each axis where the reasons differ."""
    layers = list[LayerReport]()
    for along in zip(*(plan.tensors for plan in plans), strict=True):
        if len({planned.reason for planned in along}) == 1:
            layers.append(_layer(along[0]))
        else:
            layers += [
                _layer(replace(planned, reason=f"{plan.axis}: {planned.reason}"), axis=plan.axis)
                for plan, planned in zip(plans, along, strict=True)
            ]
    return tuple(layers)


def make_report(
    source: str,
    checkpoint: Checkpoint,
    *plans: Plan,
    backend: Backend,
    on_layer: Callable[[LayerReport], None] | None = None,
    per_block: Path | None = None,
    sampling: Sampling | None = None,
) -> Report:
    """Measure every tensor that the plan quantizes, or the plan for either axis; each is read once, or with `sampling`
    a sample of each.

    `on_layer` receives each as it is done. `per_block` names a safetensors file for arrays with a value per block; it
    is replaced, and appears only when complete. After an interruption the report covers what was measured. Raises
    RefusedError for values that are not finite, if the options refuse them.
    """
    tally = Tally(source, checkpoint, *plans, sampling=sampling)
    refusals: dict[str, list[str]] = {}
    try:
        with _block_file(per_block, plans) as write:
            for planned, counted in _counted(checkpoint, plans, backend, write, sampling):
                refusals.setdefault(planned.tensor.name, nonfinite_refusals(planned, counted))
                layer = tally.add(planned, counted)
                if on_layer is not None:
                    on_layer(layer)
    except KeyboardInterrupt:
        pass
    refuse_nonfinite([reason for reasons in refusals.values() for reason in reasons])
    return tally.report()


def _counted(
    checkpoint: Checkpoint,
    plans: Sequence[Plan],
    backend: Backend,
    write: WriteArray | None,
    sampling: Sampling | None,
) -> Iterator[tuple[TensorPlan, Counted]]:
    """Yield the statistics of each tensor, or of a sample of it; write arrays per block to the file, if any."""
    if sampling is not None:
        for along, samples in measure_samples(checkpoint, plans, backend, sampling):
            yield from zip(along, samples, strict=True)
        return
    for along, made in measure(checkpoint, plans, backend, per_block=write is not None):
        for planned, q in zip(along, made, strict=True):
            assert q.stats is not None
            if write is not None:
                for array in PER_BLOCK:
                    write(_array_name(planned, array, plans), getattr(q.per_block, array))
            yield planned, q.stats


def _array_name(planned: TensorPlan, array: str, plans: Sequence[Plan]) -> str:
    """Return the name of an array with a value per block: NAME.ARRAY, or of both axes NAME.AXIS.ARRAY."""
    return ".".join([planned.tensor.name, *([planned.axis] if len(plans) > 1 else []), array])


def _layer(planned: TensorPlan, metrics: Mapping[str, Value] | None = None, axis: str | None = None) -> LayerReport:
    info = planned.tensor
    return LayerReport(
        name=info.name,
        dtype=info.dtype,
        shape=info.shape,
        role=info.role,
        decision=decision_of(planned),
        reason=planned.reason,
        scheme=planned.scheme,
        metrics=metrics or {},
        axis=axis,
        layer=info.layer,
    )


def _kept(plans: Sequence[Plan]) -> Iterator[LayerReport]:
    """Yield the tensors that are not quantized: once, or for the axes along which they are not."""
    for along in zip(*(plan.tensors for plan in plans), strict=True):
        left = [(plan.axis, planned) for plan, planned in zip(plans, along, strict=True) if planned.scheme is None]
        if len(left) == len(plans) and len({planned.reason for _, planned in left}) == 1:
            yield _layer(along[0])
        else:
            yield from (_layer(planned, axis=axis) for axis, planned in left)


@contextmanager
def _block_file(path: Path | None, plans: Sequence[Plan]) -> Iterator[WriteArray | None]:
    """Yield a function that adds an array to the file of per-block arrays, which gets its name when all went well."""
    if path is None:
        yield None
        return
    entries = tuple(
        Entry(_array_name(planned, array, plans), dtype, grid_shape(planned.scheme.format, planned.shape))
        for along in measured_tensors(plans)
        for planned in along
        for array, dtype in PER_BLOCK.items()
        if planned.scheme is not None
    )
    with ExitStack() as opened:
        with written_to(path):
            file = opened.enter_context(whole_file(path, replace=True))
            shard = ShardFile(Shard(path.name, entries, {"schema": "mxcli.per_block/1"}), file)

        def write(name: str, array: Array) -> None:
            with written_to(path):
                shard.write(name, array)

        yield write
        with written_to(path):
            opened.close()


def _schemes(plans: Sequence[Plan]) -> tuple[tuple[Scheme, int], ...]:
    """Return the schemes of plans with the number of tensors of each, most used first."""
    found = (quantized_only(along)[0].scheme for along in measured_tensors(plans))
    return tuple(Counter(scheme for scheme in found if scheme is not None).most_common())
