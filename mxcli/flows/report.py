"""How far each tensor of a plan is from its quantized form; writes per-block arrays if asked, else nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path

from mxcli.backends import Backend
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import Entry
from mxcli.files.writer_shards import Shard, ShardFile, partial_path
from mxcli.flows.arrange import Arrangement
from mxcli.flows.inspect import Total, totals_by
from mxcli.flows.measuring import PER_BLOCK, measure, not_finite, oddities, refuse, summed_formats
from mxcli.flows.plan import Options, Plan, Step
from mxcli.flows.sampled import Taken, measure_samples, sample_notes, taken
from mxcli.numerics.blocks import grid_shape
from mxcli.numerics.draws import Sampling
from mxcli.numerics.estimates import Counted, metrics_of
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.measures import Value
from mxcli.numerics.recipe import Recipe
from mxcli.numerics.stats import Stats

QUANTIZED, PADDED, KEPT, TIED = "quantized", "padded", "kept", "tied"

Gathered = Iterable[tuple[Step, Stats | None]]
Sums = dict[BlockFormat, tuple[Counted, int]]
"""What was counted of the tensors of each format together, and how many they are."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One tensor: what was decided about it and why, and its metrics where it was measured (else empty).

    `shape` is that of the file; `recipe` is None for a tensor that is not quantized.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    decision: str
    reason: str
    recipe: Recipe | None
    metrics: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured of a source, in the order of its tensors, and what was decided about the others.

    `source` is what the user called it. `recipes` counts the tensors of each recipe, `counts` those of every
    decision. `sum` (None: nothing measured) and `by_role` are the metrics of tensors taken together, with their number
    as `tensors`. `unfinished` is how many tensors an interruption left unmeasured. `sample` is the sample that was
    measured (None: no sample was asked for).
    """

    source: str
    total: Total
    by_dtype: Mapping[str, Total]
    options: Options
    recipes: tuple[tuple[Recipe, int], ...]
    layers: tuple[LayerReport, ...]
    kept: tuple[LayerReport, ...]
    sum: Mapping[str, Value] | None
    by_role: Mapping[str, Mapping[str, Value]]
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    unfinished: int
    sample: Taken | None = None


def decision_of(step: Step) -> str:
    """What a step does with its tensor, in one word."""
    if step.recipe is not None:
        return PADDED if step.padded else QUANTIZED
    return TIED if step.tied_to is not None else KEPT


class Tally:
    """Layer reports as they come in, and the running sums over them: all that a report is made of."""

    def __init__(self, source: str, checkpoint: Checkpoint, plan: Plan, sampling: Sampling | None = None) -> None:
        self._source, self._checkpoint, self._plan, self._sampling = source, checkpoint, plan, sampling
        self._layers: list[LayerReport] = []
        self._sums: dict[str, Sums] = {}

    def add(self, step: Step, counted: Counted) -> LayerReport:
        """Counts a measured tensor in: samples, if there is a sampling."""
        assert step.recipe is not None
        layer = _layer(step, metrics_of(counted, step.recipe.format, step.shape))
        self._layers.append(layer)
        _count(self._sums.setdefault(layer.role, {}), step.recipe.format, counted)
        return layer

    def report(self) -> Report:
        """The report on what was counted in so far."""
        plan, infos = self._plan, self._checkpoint.tensors.values()
        whole: Sums = {}
        for of_role in self._sums.values():
            for row, (counted, tensors) in of_role.items():
                _count(whole, row, counted, tensors)
        decisions = [decision_of(step) for step in plan.steps]
        read = ((layer.metrics, [layer.recipe]) for layer in self._layers if layer.recipe is not None)
        sample = None if self._sampling is None else taken(self._sampling, read)
        return Report(
            source=self._source,
            total=Total.of(infos),
            by_dtype=totals_by(lambda info: info.dtype, infos),
            options=plan.options,
            recipes=_recipes(plan),
            layers=tuple(self._layers),
            kept=tuple(_layer(step) for step in plan.steps if step.recipe is None),
            sum=summed_formats(whole) if whole else None,
            by_role={role: summed_formats(sums) for role, sums in self._sums.items()},
            counts={word: decisions.count(word) for word in (QUANTIZED, PADDED, KEPT, TIED)},
            notes=(
                *self._checkpoint.notes,
                *plan.notes,
                *oddities((layer.name, [layer.metrics]) for layer in self._layers),
                *sample_notes(sample),
            ),
            unfinished=len(plan.quantized) - len(self._layers),
            sample=sample,
        )


def _count(sums: Sums, row: BlockFormat, counted: Counted, tensors: int = 1) -> None:
    """Adds tensors of a format in."""
    sums[row] = (add(sums[row][0], counted), sums[row][1] + tensors) if row in sums else (counted, tensors)


def planned_layers(plan: Plan) -> tuple[LayerReport, ...]:
    """What is to become of every tensor, nothing of it being measured yet."""
    return tuple(_layer(step) for step in plan.steps)


def report_of(
    source: str, checkpoint: Checkpoint, plan: Plan, arrangement: Arrangement, layers: Gathered = ()
) -> Report:
    """The report on a plan as its layout lets it be carried out, with the statistics gathered on the way."""
    steps = tuple(task.step for task in arrangement.tasks)
    tally = Tally(source, checkpoint, replace(plan, steps=steps, notes=arrangement.notes))
    for step, stats in layers:
        if stats is not None:
            tally.add(step, stats)
    return tally.report()


def make_report(
    source: str,
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    backend: Backend,
    on_layer: Callable[[LayerReport], None] | None = None,
    per_block: Path | None = None,
    sampling: Sampling | None = None,
) -> Report:
    """Measures every tensor that the plan quantizes, each read once, or with `sampling` a sample of each.

    `on_layer` is told of each as it is done. `per_block` names a safetensors file for arrays with a value per
    block; it is replaced, and appears only when complete. An interruption ends the measuring and leaves a
    report on what was done. Raises RefusedError for values that are not finite, if the options refuse them.
    """
    tally = Tally(source, checkpoint, plan, sampling)
    refusals: list[str] = []
    try:
        with _block_file(per_block, plan) as file:
            for step, counted in _counted(checkpoint, plan, backend, file, sampling):
                refusals += not_finite(step, counted)
                layer = tally.add(step, counted)
                if on_layer is not None:
                    on_layer(layer)
    except KeyboardInterrupt:
        pass
    refuse(refusals)
    return tally.report()


def _counted(
    checkpoint: Checkpoint, plan: Plan, backend: Backend, file: ShardFile | None, sampling: Sampling | None
) -> Iterator[tuple[Step, Counted]]:
    """What is counted of each tensor, or of a sample of it; arrays per block are written to the file, if any."""
    if sampling is not None:
        for (step,), (sample,) in measure_samples(checkpoint, (plan,), backend, sampling):
            yield step, sample
        return
    for (step,), (q,) in measure(checkpoint, (plan,), backend, per_block=file is not None):
        assert q.stats is not None
        if file is not None:
            for array in PER_BLOCK:
                file.write(f"{step.tensor.name}.{array}", getattr(q.per_block, array))
        yield step, q.stats


def _layer(step: Step, metrics: Mapping[str, Value] | None = None) -> LayerReport:
    info, decision = step.tensor, decision_of(step)
    return LayerReport(info.name, info.dtype, info.shape, info.role, decision, step.reason, step.recipe, metrics or {})


@contextmanager
def _block_file(path: Path | None, plan: Plan) -> Iterator[ShardFile | None]:
    """The file for per-block arrays under its partial name; it gets its own name when all went well."""
    if path is None:
        yield None
        return
    entries = tuple(
        Entry(f"{step.tensor.name}.{array}", dtype, grid_shape(step.recipe.format, step.shape))
        for step in plan.quantized
        for array, dtype in PER_BLOCK.items()
        if step.recipe is not None
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


def _recipes(plan: Plan) -> tuple[tuple[Recipe, int], ...]:
    """The recipes of a plan with the number of tensors of each, most used first."""
    return tuple(Counter(step.recipe for step in plan.quantized if step.recipe is not None).most_common())
