"""Contents of pages and plots: tensors measured under one scheme or several (`report`, `compare`), or products of
layers under training recipes or one set of rules (`training`, `products`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxcli.errors import printable
from mxcli.flows.measure.findings import best_of
from mxcli.flows.measure.inspect import Total
from mxcli.flows.measure.totals import TrainingStepTotal, totals_over_steps
from mxcli.flows.measure.worst_blocks import WorstBlock
from mxcli.numerics.metric_formulas import Value, percent
from mxcli.numerics.metrics import METRICS
from mxcli.output.comparison import rule_lines, titles
from mxcli.output.conclusion import sentences
from mxcli.output.formats import rules_words
from mxcli.output.numbers import counted, significant
from mxcli.output.report import policy_line, sample_lines, scheme_line
from mxcli.output.series import series_name
from mxcli.output.training import PRODUCTS

if TYPE_CHECKING:
    from mxcli.flows.measure.compare import Compared, Comparison
    from mxcli.flows.measure.report import LayerReport, Report
    from mxcli.flows.products.operands import Energies
    from mxcli.flows.products.report import ProductReport
    from mxcli.flows.products.training import Counts, TrainedProduct, TrainingReport

Metrics = Mapping[str, Value]
_NOTHING: Metrics = {"tensors": 0, **dict.fromkeys(METRICS)}
"""Metrics of a tensor that was kept along one axis, because blocks do not divide its length there."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: the decision on it and why, and its metrics under each scheme (empty: it was not measured).

    `best` is the index of the scheme with the best SQNR (None: a single scheme, or a tie), `layer` the module where it
    was captured (empty: not a capture).
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
    """Origin of a result: the command that repeats it, the version, and the identity of each input file (in the form
    of `mxcli.flows.write.records`)."""

    command: Sequence[str]
    version: str
    inputs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Study:
    """A finished report or comparison of tensors.

    `schemes` names the schemes every measured tensor was measured under; all `metrics` and `sums` have that order.
    `sums` (empty: nothing was measured) holds the metrics of all tensors together, `groups` those of the tensors `by`
    role, layer or kind. `rules` describes the quantization, `findings` its results. `series` has the totals of each
    step of captures with several steps, by role and scheme. A report along both axes is a study of two schemes that
    differ in the axis; `scheme_noun` is the heading of the schemes' names.
    """

    verb: str
    source: str
    total: Total
    by_dtype: Mapping[str, Total]
    schemes: tuple[str, ...]
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
    scheme_noun: str = "recipe"

    @property
    def compares(self) -> bool:
        """Return whether there are several schemes."""
        return len(self.schemes) > 1


def study_of_report(report: Report, worst_blocks: Sequence[WorstBlock] = ()) -> Study:
    """Return the study of a report: one scheme, or one along each axis."""
    along = [axis for axis, _ in report.totals if axis is not None]
    sums = [totals.sum for _, totals in report.totals]
    return Study(
        verb="report",
        source=report.source,
        total=report.total,
        by_dtype=report.by_dtype,
        schemes=tuple(along) or (_scheme_name(report),),
        rules=(*map(scheme_line, report.schemes), policy_line(report.options), *sample_lines(report.sample)),
        measured=tuple(_reported(rows, along) for rows in _by_tensor(report.layers)),
        kept=tuple(_kept(layer) for layer in report.kept),
        sums=() if not any(sums) else tuple(each or _NOTHING for each in sums),
        by="role",
        groups=_groups(report),
        counts=report.counts,
        findings=tuple(sentences(report.findings)),
        notes=report.notes,
        unfinished=report.unfinished,
        worst_blocks=tuple(worst_blocks),
        series={series_name(*key): found for key, found in totals_over_steps(report.by_step).items()},
        scheme_noun="axis" if along else "recipe",
    )


def study_of_comparison(comparison: Comparison, worst_blocks: Sequence[WorstBlock] = ()) -> Study:
    """Return the study of a comparison, a scheme for each combination."""
    return Study(
        verb="compare",
        source=comparison.source,
        total=comparison.total,
        by_dtype=comparison.by_dtype,
        schemes=tuple(titles(comparison.combinations)),
        rules=(*rule_lines(comparison.combinations), policy_line(comparison.options), *sample_lines(comparison.sample)),
        measured=tuple(_compared(layer) for layer in comparison.layers),
        kept=tuple(_compared(layer) for layer in comparison.kept),
        sums=comparison.sums,
        by=comparison.by,
        groups=comparison.groups,
        counts=comparison.counts,
        findings=tuple(sentences(comparison.findings)),
        notes=comparison.notes,
        unfinished=comparison.unfinished,
        worst_blocks=tuple(worst_blocks),
        series=_compared_series(comparison),
    )


def _compared_series(comparison: Comparison) -> dict[str, list[TrainingStepTotal]]:
    """Return the series of each role, one scheme after the other."""
    named = list(zip(titles(comparison.combinations), map(totals_over_steps, comparison.by_step), strict=False))
    roles = dict.fromkeys(key for _, found in named for key in found)
    return {series_name(role, title): found[role, axis] for role, axis in roles for title, found in named}


def _scheme_name(report: Report) -> str:
    names = [f"{scheme.format.name} {scheme.scale_rule.name}" for scheme, _ in report.schemes]
    return ", ".join(names) or printable(report.options.format)


def _by_tensor(layers: Sequence[LayerReport]) -> Iterable[list[LayerReport]]:
    """Return the rows of each tensor: one for each axis."""
    found: dict[str, list[LayerReport]] = {}
    for layer in layers:
        found.setdefault(layer.name, []).append(layer)
    return found.values()


def _reported(rows: Sequence[LayerReport], along: Sequence[str]) -> Tensor:
    """Return a measured tensor, with metrics along each axis where both were measured."""
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
    """Return the totals of each role, along each axis."""
    parts = [totals.by_role for _, totals in report.totals]
    roles = dict.fromkeys(role for part in parts for role in part)
    return {role: tuple(part.get(role, _NOTHING) for part in parts) for role in roles}


def _compared(layer: Compared) -> Tensor:
    return _tensor(layer, layer.reason, layer.metrics, layer.best)


def _tensor(row: LayerReport | Compared, reason: str, metrics: tuple[Metrics, ...], best: int | None = None) -> Tensor:
    return Tensor(row.name, row.dtype, row.shape, row.role, row.decision, reason, metrics, best, row.layer)


RecipePass = tuple[str, str]
"""A training recipe (or the formats of `products`) and a pass."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a layer under a recipe, D [m, n] = A [m, k] B [n, k]^T, with its metrics and those of its quantized
    operands by the names of CSV columns. `high`: not quantized, so exact."""

    layer: str
    recipe: str
    product_pass: str
    sizes: tuple[int, int, int]
    metrics: Metrics
    high: bool = False
    formats: str = ""
    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class ProductStudy:
    """Finished products of captured layers (`training` and `products`).

    `recipes` names training recipes, or the formats of `products`. `totals` has the metrics of all products of a recipe
    and pass, `by_layer` and `by_step` their SQNR in dB at each layer and step (None: exact, or no signal).
    """

    verb: str
    source: str
    facts: str
    recipes: tuple[str, ...]
    rules: tuple[str, ...]
    products: tuple[Product, ...]
    totals: Mapping[RecipePass, Metrics]
    by_layer: Mapping[RecipePass, Mapping[str, float | None]]
    by_step: Mapping[RecipePass, Mapping[int, float | None]]
    findings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def compares(self) -> bool:
        """Return whether there are several recipes."""
        return len(self.recipes) > 1


def study_of_training(report: TrainingReport) -> ProductStudy:
    """Return the study of products under training recipes."""
    recipes = tuple(recipe.name for recipe in report.trial.recipes)
    layers, places = {each.layer for each in report.products}, {(p.layer, p.step, p.rank) for p in report.products}
    totals = _training_totals(report)
    by_layer: dict[RecipePass, dict[str, Energies]] = {line: {} for line in totals}
    for each in report.products:
        found = by_layer[each.recipe, each.passes]
        found[each.layer] = found[each.layer] + each.energies if each.layer in found else each.energies
    sqnrs = {line: {layer: _sqnr(energies) for layer, energies in found.items()} for line, found in by_layer.items()}
    by_step = {step: report.sums(step) for step in report.steps}
    return ProductStudy(
        verb="training",
        source=report.source,
        facts=f"{counted(len(report.products), 'product')} of {counted(len(layers), 'layer')}, "
        f"{counted(len(places), 'capture')} of {printable(report.captures)}",
        recipes=recipes,
        rules=tuple(
            f"{recipe.name}: {recipe.meaning.replace('`', '')}. {recipe.source}." for recipe in report.trial.recipes
        ),
        products=tuple(_trained(each, report.trial.draws) for each in report.products),
        totals=totals,
        by_layer=sqnrs,
        by_step={
            line: {step: _sqnr(sums[line].energies) for step, sums in by_step.items() if line in sums}
            for line in (totals if len(by_step) > 1 else ())
        },
        findings=tuple(_product_findings(recipes, totals, sqnrs)),
        notes=report.notes,
    )


def _training_totals(report: TrainingReport) -> dict[RecipePass, Metrics]:
    """Return the metrics of each recipe and pass; where layers stay high, also the SQNR of the others."""
    totals: dict[RecipePass, Metrics] = {}
    sums = report.sums()
    any_high = any(found.high for found in sums.values())
    for line, found in sums.items():
        others = {"quantized_sqnr_db": _sqnr(found.quantized) if found.quantized else None} if any_high else {}
        metrics = _product_metrics(found.energies, found.averaged if report.trial.draws > 1 else None)
        totals[line] = {**metrics, **others, **_operand_metrics(found.operands)}
    return totals


def _trained(each: TrainedProduct, draws: int) -> Product:
    metrics = _product_metrics(each.energies, each.averaged if draws > 1 else None)
    return Product(
        each.layer,
        each.recipe,
        each.passes,
        each.sizes,
        {**metrics, **_operand_metrics(each.operands)},
        high=each.high,
        step=each.step,
        rank=each.rank,
    )


def study_of_products(report: ProductReport) -> ProductStudy:
    """Return the study of products under one set of rules."""
    formats = dict.fromkeys(name for each in report.products for name in each.formats)
    recipe = ", ".join(formats)
    totals = {(recipe, name): _product_metrics(found) for name, found in report.by_pass.items()}
    sqnrs: dict[RecipePass, dict[str, float | None]] = {line: {} for line in totals}
    for each in report.products:
        sqnrs[recipe, each.passes][each.layer] = _sqnr(each.energies)
    layers = {each.layer for each in report.products}
    return ProductStudy(
        verb="products",
        source=report.source,
        facts=f"{counted(len(report.products), 'product')} of {counted(len(layers), 'layer')}, captured in "
        f"{printable(report.captures)}",
        recipes=(recipe,),
        rules=tuple(
            f"{letter}: {scheme.format.name}, {rules_words(scheme)}" for letter, scheme in report.recipes.items()
        ),
        products=tuple(
            Product(
                each.layer,
                recipe,
                each.passes,
                each.sizes,
                _product_metrics(each.energies),
                formats=", ".join(dict.fromkeys(each.formats)),
            )
            for each in report.products
        ),
        totals=totals,
        by_layer=sqnrs,
        by_step={},
        findings=tuple(_product_findings((recipe,), totals, sqnrs)),
        notes=report.notes,
    )


def _sqnr(energies: Energies) -> float | None:
    return energies.metrics["sqnr_db"]


def _product_metrics(energies: Energies, averaged: Energies | None = None) -> dict[str, Value]:
    """Return the metrics of products; with `averaged` also the SQNR of the mean of all draws."""
    found: dict[str, Value] = {**energies.metrics, "shrunk_percent": percent(0.0 - energies.cross, energies.signal)}
    return found if averaged is None else {**found, "averaged_sqnr_db": _sqnr(averaged)}


def _operand_metrics(operands: Mapping[str, Counts]) -> dict[str, Value]:
    """Return the metrics of quantized operands, such as `dy_saturated_percent`."""
    return {
        f"{letter.lower()}_{name}": value for letter, found in operands.items() for name, value in found.metrics.items()
    }


def _product_findings(
    recipes: Sequence[str],
    totals: Mapping[RecipePass, Metrics],
    by_layer: Mapping[RecipePass, Mapping[str, float | None]],
) -> Iterable[str]:
    """Yield a sentence on each pass: its SQNR, best and worst recipe, and worst layer."""
    for name, formula in PRODUCTS.items():
        known = [
            (sqnr, recipe)
            for recipe in recipes
            if isinstance(sqnr := totals.get((recipe, name), {}).get("sqnr_db"), float)
        ]
        layers = [
            (sqnr, layer, recipe)
            for recipe in recipes
            for layer, sqnr in by_layer.get((recipe, name), {}).items()
            if sqnr is not None
        ]
        if not known or not layers:
            continue
        (low, worst), (high, best) = min(known, key=lambda pair: pair[0]), max(known, key=lambda pair: pair[0])
        least, layer, recipe = min(layers, key=lambda found: found[0])
        where = f"{significant(least)} dB at {printable(layer)}"
        if len(known) == 1:
            yield f"{formula} ({name}): SQNR is {significant(low)} dB; the lowest of a layer is {where}."
        else:
            yield (
                f"{formula} ({name}): SQNR is highest under {best} ({significant(high)} dB) and lowest under {worst} "
                f"({significant(low)} dB); the lowest of a layer is {where} under {recipe}."
            )
