"""What a page or a set of plots is about: tensors, each measured under one recipe or several. Reports and comparisons
are brought to this one form, so that everything drawn of one can be drawn of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxcli.errors import printable
from mxcli.flows.inspect import Total
from mxcli.flows.worst_blocks import WorstBlock
from mxcli.numerics.measures import Value
from mxcli.output.comparison import concluded, rule_lines, titles
from mxcli.output.findings import findings
from mxcli.output.report import policy_line, recipe_line, sample_lines

if TYPE_CHECKING:
    from mxcli.flows.compare import Compared, Comparison
    from mxcli.flows.report import LayerReport, Report

Metrics = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: what was decided and why, and its metrics under each recipe (none: it was not measured).

    `best` is the recipe with the best SQNR (None: there is one recipe only, or none is best).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    decision: str
    reason: str
    metrics: tuple[Metrics, ...]
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a result comes from: the command that makes it again, the version, and what identifies each input file
    (as `mxcli.flows.fingerprint` has it)."""

    command: Sequence[str]
    version: str
    inputs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Study:
    """A finished report or comparison.

    `recipes` names what every measured tensor was measured under; all `metrics` and `sums` have that order. `sums`
    (empty: nothing was measured) holds the metrics of everything together, `groups` those of the tensors `by` role,
    layer or kind. `rules` says in words how things were quantized, `findings` what came of it.
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

    @property
    def compares(self) -> bool:
        """Whether there are several recipes to tell apart."""
        return len(self.recipes) > 1


def study_of_report(report: Report, worst_blocks: Sequence[WorstBlock] = ()) -> Study:
    """A report as a study of one recipe."""
    return Study(
        verb="report",
        source=report.source,
        total=report.total,
        by_dtype=report.by_dtype,
        recipes=(_recipe_name(report),),
        rules=(*map(recipe_line, report.recipes), policy_line(report.options), *sample_lines(report.sample)),
        measured=tuple(_reported(layer) for layer in report.layers),
        kept=tuple(_reported(layer) for layer in report.kept),
        sums=() if report.sum is None else (report.sum,),
        by="role",
        groups={role: (total,) for role, total in report.by_role.items()},
        counts=report.counts,
        findings=tuple(findings(report)),
        notes=report.notes,
        unfinished=report.unfinished,
        worst_blocks=tuple(worst_blocks),
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
        findings=tuple(concluded(comparison)),
        notes=comparison.notes,
        unfinished=comparison.unfinished,
        worst_blocks=tuple(worst_blocks),
    )


def _recipe_name(report: Report) -> str:
    names = [f"{recipe.format.name} {recipe.scale_rule.name}" for recipe, _ in report.recipes]
    return ", ".join(names) or printable(report.options.format)


def _reported(layer: LayerReport) -> Tensor:
    metrics = (layer.metrics,) if layer.metrics else ()
    return Tensor(layer.name, layer.dtype, layer.shape, layer.role, layer.decision, layer.reason, metrics)


def _compared(layer: Compared) -> Tensor:
    return Tensor(
        layer.name, layer.dtype, layer.shape, layer.role, layer.decision, layer.reason, layer.metrics, layer.best
    )
