"""What a page or a set of plots is about: tensors, each measured under one recipe or several. Reports and comparisons
are brought to this one form, so that everything drawn of one can be drawn of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxcli.errors import printable
from mxcli.flows.measure.compare import best_of
from mxcli.flows.measure.inspect import Total
from mxcli.flows.measure.totals import TrainingStepTotal, totals_over_steps
from mxcli.flows.measure.worst_blocks import WorstBlock
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import METRICS
from mxcli.output.comparison import rule_lines, titles
from mxcli.output.conclusion import concluded
from mxcli.output.findings import findings
from mxcli.output.report import policy_line, sample_lines, scheme_line
from mxcli.output.series import compared_series_sentences, series_name

if TYPE_CHECKING:
    from mxcli.flows.measure.compare import Compared, Comparison
    from mxcli.flows.measure.report import LayerReport, Report

Metrics = Mapping[str, Value]
_NOTHING: Metrics = {"tensors": 0, **dict.fromkeys(METRICS)}
"""Of what was not measured: along one axis, where blocks do not divide a length, a tensor may be kept."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: what was decided and why, and its metrics under each recipe (none: it was not measured).

    `best` is the recipe with the best SQNR (None: there is one recipe only, or none is best), `layer` the module that
    it was captured at (empty: it was not).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    decision: str
    reason: str
    metrics: tuple[Metrics, ...]
    best: int | None = None
    layer: str = ""


@dataclass(frozen=True, slots=True)
class PageSource:
    """Where a result comes from: the command that makes it again, the version, and what identifies each input file
    (as `mxcli.flows.write.records` has it)."""

    command: Sequence[str]
    version: str
    inputs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Study:
    """A finished report or comparison.

    `recipes` names what every measured tensor was measured under; all `metrics` and `sums` have that order. `sums`
    (empty: nothing was measured) holds the metrics of everything together, `groups` those of the tensors `by` role,
    layer or kind. `rules` says in words how things were quantized, `findings` what came of it. `series` has the totals
    of each step of captures of several steps, by role and recipe. A report along both axes is a study of two recipes,
    which differ in that; `ways` is what several recipes are called, by what tells them apart.
    """

    verb: str
    source: str
    total: Total
    by_dtype: Mapping[str, Total]
    recipes: tuple[str, ...]
    rules: tuple[str, ...]
    measured: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]
    sums: tuple[Metrics, ...]
    by: str
    groups: Mapping[str, tuple[Metrics, ...]]
    counts: Mapping[str, int]
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    unfinished: int
    worst_blocks: tuple[WorstBlock, ...] = ()
    series: Mapping[str, Sequence[TrainingStepTotal]] = field(default_factory=dict)
    ways: str = "recipe"

    @property
    def compares(self) -> bool:
        """Whether there are several recipes to tell apart."""
        return len(self.recipes) > 1


def study_of_report(report: Report, worst_blocks: Sequence[WorstBlock] = ()) -> Study:
    """A report as a study of one recipe, or of one along each axis."""
    along = [axis for axis, _ in report.totals if axis is not None]
    sums = [totals.sum for _, totals in report.totals]
    return Study(
        verb="report",
        source=report.source,
        total=report.total,
        by_dtype=report.by_dtype,
        recipes=tuple(along) or (_recipe_name(report),),
        rules=(*map(scheme_line, report.schemes), policy_line(report.options), *sample_lines(report.sample)),
        measured=tuple(_reported(rows, along) for rows in _by_tensor(report.layers)),
        kept=tuple(_kept(layer) for layer in report.kept),
        sums=() if not any(sums) else tuple(each or _NOTHING for each in sums),
        by="role",
        groups=_groups(report),
        counts=report.counts,
        findings=tuple(findings(report)),
        notes=report.notes,
        unfinished=report.unfinished,
        worst_blocks=tuple(worst_blocks),
        series={series_name(*key): found for key, found in totals_over_steps(report.by_step).items()},
        ways="axis" if along else "recipe",
    )


def study_of_comparison(comparison: Comparison, worst_blocks: Sequence[WorstBlock] = ()) -> Study:
    """A comparison as a study of several recipes."""
    return Study(
        verb="compare",
        source=comparison.source,
        total=comparison.total,
        by_dtype=comparison.by_dtype,
        recipes=tuple(titles(comparison.combinations)),
        rules=(*rule_lines(comparison.combinations), policy_line(comparison.options), *sample_lines(comparison.sample)),
        measured=tuple(_compared(layer) for layer in comparison.layers),
        kept=tuple(_compared(layer) for layer in comparison.kept),
        sums=comparison.sums,
        by=comparison.by,
        groups=comparison.groups,
        counts=comparison.counts,
        findings=(*concluded(comparison), *compared_series_sentences(comparison)),
        notes=comparison.notes,
        unfinished=comparison.unfinished,
        worst_blocks=tuple(worst_blocks),
        series=_compared_series(comparison),
    )


def _compared_series(comparison: Comparison) -> dict[str, list[TrainingStepTotal]]:
    """The series of each role, one recipe after the other."""
    named = list(zip(titles(comparison.combinations), map(totals_over_steps, comparison.by_step), strict=False))
    roles = dict.fromkeys(key for _, found in named for key in found)
    return {series_name(role, title): found[role, axis] for role, axis in roles for title, found in named}


def _recipe_name(report: Report) -> str:
    names = [f"{recipe.format.name} {recipe.scale_rule.name}" for recipe, _ in report.schemes]
    return ", ".join(names) or printable(report.options.format)


def _by_tensor(layers: Sequence[LayerReport]) -> Iterable[list[LayerReport]]:
    """The rows of each tensor."""
    found: dict[str, list[LayerReport]] = {}
    for layer in layers:
        found.setdefault(layer.name, []).append(layer)
    return found.values()


def _reported(rows: Sequence[LayerReport], along: Sequence[str]) -> Tensor:
    """A tensor that was measured, along each axis where there are both."""
    layer = rows[0]
    metrics = tuple(
        next((row.metrics for row in rows if row.axis == axis), _NOTHING) for axis in along
    ) or (layer.metrics,)  # fmt: skip
    best = best_of(metrics) if along else None
    return _tensor(layer, layer.reason, metrics, best)


def _kept(layer: LayerReport) -> Tensor:
    reason = layer.reason if layer.axis is None else f"{layer.axis}: {layer.reason}"
    return _tensor(layer, reason, ())


def _groups(report: Report) -> dict[str, tuple[Metrics, ...]]:
    """The totals of each role, along each axis."""
    parts = [totals.by_role for _, totals in report.totals]
    roles = dict.fromkeys(role for part in parts for role in part)
    return {role: tuple(part.get(role, _NOTHING) for part in parts) for role in roles}


def _compared(layer: Compared) -> Tensor:
    return _tensor(layer, layer.reason, layer.metrics, layer.best)


def _tensor(row: LayerReport | Compared, reason: str, metrics: tuple[Metrics, ...], best: int | None = None) -> Tensor:
    return Tensor(row.name, row.dtype, row.shape, row.role, row.decision, reason, metrics, best, row.layer)
