"""How far each tensor of a plan is from its quantized form; writes per-block arrays if asked, else nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import Entry
from mxcli.files.shard_file import Shard, ShardFile, partial_path
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
from mxcli.numerics.measures import Value
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Stats
from mxcli.numerics.streams import Sampling

QUANTIZED, PADDED, KEPT, TIED = "quantized", "padded", "kept", "tied"

TensorStats = Iterable[tuple[TensorPlan, Stats | None]]


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One tensor along one axis: what was decided about it and why, and its metrics where it was measured (else
    empty).

    `shape` is that of the file; `recipe` is None for a tensor that is not quantized. `axis` is the one that blocks run
    along; of a tensor that is kept the one along which it is (None: along any). `layer` is the module that it was
    captured at (empty: it was not).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    decision: str
    reason: str
    scheme: Scheme | None
    metrics: Mapping[str, Value]
    axis: str | None = None
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured of a source, in the order of its tensors, and what was decided about the others.

    `source` is what the user called it. `recipes` counts the tensors of each recipe, `counts` those of every
    decision. `sum` (None: nothing measured) and `by_role` are the metrics of tensors taken together, with their number
    as `tensors`. `unfinished` is how many tensors an interruption left unmeasured. `sample` is the sample that was
    measured (None: no sample was asked for).

    Along both axes `layers` has a tensor once for each, and so do `counts` and `unfinished`; sums are `by_axis` (else
    empty), for one over both would be of neither: `sum` is None and `by_role` empty. `by_step` has the totals of
    each step of captures of several steps.
    """

    source: str
    total: Total
    by_dtype: Mapping[str, Total]
    options: Options
    schemes: tuple[tuple[Scheme, int], ...]
    layers: tuple[LayerReport, ...]
    kept: tuple[LayerReport, ...]
    sum: Mapping[str, Value] | None
    by_role: Mapping[str, Mapping[str, Value]]
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    unfinished: int
    sample: Taken | None = None
    by_axis: Mapping[str, Totals] = field(default_factory=dict)
    by_step: tuple[TrainingStepTotal, ...] = ()

    @property
    def totals(self) -> tuple[tuple[str | None, Totals], ...]:
        """The sums with the axis that they are along; None where no axes are told apart."""
        return tuple(self.by_axis.items()) or ((None, Totals(self.sum, self.by_role)),)


def decision_of(step: TensorPlan) -> str:
    """What a step does with its tensor, in one word."""
    if step.scheme is not None:
        return PADDED if step.padded else QUANTIZED
    return TIED if step.tied_to is not None else KEPT


class Tally:
    """Layer reports as they come in, and the running sums over them: all that a report is made of. There is a plan, or
    one for each axis."""

    def __init__(self, source: str, checkpoint: Checkpoint, *plans: Plan, sampling: Sampling | None = None) -> None:
        self._source, self._checkpoint, self._plans, self._sampling = source, checkpoint, plans, sampling
        self._layers: list[LayerReport] = []
        self._sums, self._steps = TotalsByRole(), TotalsByTrainingStep(checkpoint.captures)

    def add(self, step: TensorPlan, counted: Counted) -> LayerReport:
        """Counts a measured tensor in: samples, if there is a sampling."""
        assert step.scheme is not None
        layer = _layer(step, metrics_of(counted, step.scheme.format, step.shape), step.axis)
        self._layers.append(layer)
        axis = step.axis if len(self._plans) > 1 else None
        self._sums.add(step, counted, axis)
        self._steps.add(step, counted, axis)
        return layer

    def report(self) -> Report:
        """The report on what was counted in so far."""
        plans, infos = self._plans, self._checkpoint.tensors.values()
        quantized = [step for plan in plans for step in plan.quantized]
        kept = tuple(_kept(plans))
        decisions = [*map(decision_of, quantized), *(layer.decision for layer in kept)]
        of_tensor: dict[str, list[LayerReport]] = {}
        for layer in self._layers:
            of_tensor.setdefault(layer.name, []).append(layer)
        read = ((rows[0].metrics, [row.scheme for row in rows if row.scheme]) for rows in of_tensor.values())
        sample = None if self._sampling is None else taken(self._sampling, read)
        totals = self._sums.totals(None)
        return Report(
            source=self._source,
            total=Total.of(infos),
            by_dtype=totals_by(lambda info: info.dtype, infos),
            options=plans[0].options,
            schemes=_recipes(plans),
            layers=tuple(self._layers),
            kept=kept,
            sum=totals.sum,
            by_role=totals.by_role,
            counts={word: decisions.count(word) for word in (QUANTIZED, PADDED, KEPT, TIED)},
            notes=(
                *self._checkpoint.notes,
                *dict.fromkeys(note for plan in plans for note in plan.notes),
                *anomaly_notes((name, [row.metrics for row in rows]) for name, rows in of_tensor.items()),
                *sample_notes(sample),
            ),
            unfinished=len(quantized) - len(self._layers),
            sample=sample,
            by_axis={str(plan.axis): self._sums.totals(plan.axis) for plan in plans} if len(plans) > 1 else {},
            by_step=self._steps.totals,
        )


def planned_layers(*plans: Plan) -> tuple[LayerReport, ...]:
    """What is to become of every tensor, nothing of it being measured yet; once, or where that is not the same along
    both axes once for each."""
    layers = list[LayerReport]()
    for steps in zip(*(plan.tensors for plan in plans), strict=True):
        if len({step.reason for step in steps}) == 1:
            layers.append(_layer(steps[0]))
        else:
            layers += [
                _layer(replace(step, reason=f"{plan.axis}: {step.reason}"), axis=plan.axis)
                for plan, step in zip(plans, steps, strict=True)
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
    """Measures every tensor that the plan quantizes, or the plan for either axis; each is read once, or with `sampling`
    a sample of each.

    `on_layer` is told of each as it is done. `per_block` names a safetensors file for arrays with a value per
    block; it is replaced, and appears only when complete. An interruption ends the measuring and leaves a
    report on what was done. Raises RefusedError for values that are not finite, if the options refuse them.
    """
    tally = Tally(source, checkpoint, *plans, sampling=sampling)
    refusals: dict[str, list[str]] = {}
    try:
        with _block_file(per_block, plans) as file:
            for step, counted in _counted(checkpoint, plans, backend, file, sampling):
                refusals.setdefault(step.tensor.name, nonfinite_refusals(step, counted))
                layer = tally.add(step, counted)
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
    file: ShardFile | None,
    sampling: Sampling | None,
) -> Iterator[tuple[TensorPlan, Counted]]:
    """What is counted of each tensor, or of a sample of it; arrays per block are written to the file, if any."""
    if sampling is not None:
        for steps, samples in measure_samples(checkpoint, plans, backend, sampling):
            yield from zip(steps, samples, strict=True)
        return
    for steps, made in measure(checkpoint, plans, backend, per_block=file is not None):
        for step, q in zip(steps, made, strict=True):
            assert q.stats is not None
            if file is not None:
                for array in PER_BLOCK:
                    file.write(_array_name(step, array, plans), getattr(q.per_block, array))
            yield step, q.stats


def _array_name(step: TensorPlan, array: str, plans: Sequence[Plan]) -> str:
    """What an array with a value per block is called: NAME.ARRAY, or of both axes NAME.AXIS.ARRAY."""
    return ".".join([step.tensor.name, *([step.axis] if len(plans) > 1 else []), array])


def _layer(step: TensorPlan, metrics: Mapping[str, Value] | None = None, axis: str | None = None) -> LayerReport:
    info, word = step.tensor, decision_of(step)
    return LayerReport(
        info.name, info.dtype, info.shape, info.role, word, step.reason, step.scheme, metrics or {}, axis, info.layer
    )


def _kept(plans: Sequence[Plan]) -> Iterator[LayerReport]:
    """The tensors that are not quantized: once, or along the axes along which they are not."""
    for steps in zip(*(plan.tensors for plan in plans), strict=True):
        left = [(plan.axis, step) for plan, step in zip(plans, steps, strict=True) if step.scheme is None]
        if len(left) == len(plans) and len({step.reason for _, step in left}) == 1:
            yield _layer(steps[0])
        else:
            yield from (_layer(step, axis=axis) for axis, step in left)


@contextmanager
def _block_file(path: Path | None, plans: Sequence[Plan]) -> Iterator[ShardFile | None]:
    """The file for per-block arrays under its partial name; it gets its own name when all went well."""
    if path is None:
        yield None
        return
    entries = tuple(
        Entry(_array_name(step, array, plans), dtype, grid_shape(step.scheme.format, step.shape))
        for steps in measured_tensors(plans)
        for step in steps
        for array, dtype in PER_BLOCK.items()
        if step.scheme is not None
    )
    partial = partial_path(path)
    try:
        file = ShardFile(Shard(path.name, entries, {"schema": "mxcli.per_block/1"}), partial.open("wb"))
        try:
            yield file
        finally:
            file.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _recipes(plans: Sequence[Plan]) -> tuple[tuple[Scheme, int], ...]:
    """The recipes of plans with the number of tensors of each, most used first."""
    found = (quantized_only(steps)[0].scheme for steps in measured_tensors(plans))
    return tuple(Counter(scheme for scheme in found if scheme is not None).most_common())
