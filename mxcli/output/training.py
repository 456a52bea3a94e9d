"""Errors of the products of layers under training recipes, as tables, JSON and CSV; training recipes in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from mxcli.flows.products.shapes import DY, OPERANDS, PASSES, W, X
from mxcli.numerics.metric_formulas import percent
from mxcli.numerics.training import Operand, TrainingRecipe, rules_of
from mxcli.output import products
from mxcli.output.export import csv_text, json_text
from mxcli.output.fields import (
    COUNT,
    FLAG,
    METRIC,
    NUMBER,
    POSITIVE,
    TEXT,
    Field,
    Fields,
    Schema,
    array,
    attributes,
    choice,
    mapping,
    or_null,
    records,
)
from mxcli.output.numbers import ABSENT, counted, significant
from mxcli.output.report import NOTES
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

if TYPE_CHECKING:
    from mxcli.flows.products.operands import Energies
    from mxcli.flows.products.training import Counts, Sums, TrainedProduct, TrainingReport

LETTERS = (X, W, DY)
PRODUCTS = products.FORMULAS
METRICS = (*products.METRICS, "shrunk_percent", "averaged_relative_error")
SORTS = (*METRICS, "name")
_MOST_STEPS = 8
_COUNT_OR_NULL: Schema = {"type": ["integer", "null"], "minimum": 0}

_Draws = tuple["Energies", "Energies"]
"""Energies of one draw, on average, and of the mean of all draws."""


def _shrunk_percent(draws: _Draws) -> float | None:
    return percent(0.0 - draws[0].cross, draws[0].signal)


_ERRORS: Fields[_Draws] = Fields(
    Fields(
        METRIC["sqnr_db"].at(cell=None),
        METRIC["relative_error"].at(cell=None),
        METRIC["cosine"].at(title=None),
        METRIC["bias"].at(cell=None, drop=6),
    ).through(lambda draws: draws[0].metrics),
    Field("shrunk_percent", _shrunk_percent, NUMBER, "shrunk\n%", drop=4,
          meaning="100 * -sum of D * error / sum of D^2: relative shrinkage along D"),
    Field("averaged_relative_error", lambda draws: draws[1].metrics["relative_error"], NUMBER,
          meaning="of the mean of all draws"),
)  # fmt: skip
"""METRICS."""


def _operand_value(letter: str, name: str, operands: Mapping[str, Counts]) -> float | None:
    return operands[letter].metrics[name] if letter in operands else None


def _operand_field(letter: str, name: str, title: str | None = None, drop: int = 0) -> Field[Mapping[str, Counts]]:
    metric, of = METRIC[name], partial(_operand_value, letter, name)
    return Field(
        f"{letter.lower()}_{name}", of, metric.schema, title, meaning=metric.meaning, drop=drop, group=letter
    )  # fmt: skip


_OPERANDS: Fields[Mapping[str, Counts]] = Fields(
    *(
        _operand_field(letter, *column)
        for letter in LETTERS
        for column in (
            ("saturated_percent", "saturated\n%", 2), ("underflowed_percent", "underflowed\n%", 3),
            ("sqnr_db",), ("bias",),
        )
    )
)  # fmt: skip
_RECIPE: Fields[tuple[str, str]] = Fields(
    Field("recipe", lambda key: key[0], TEXT, "recipe", right=False),
    Field("pass", lambda key: key[1], choice(PASSES), "product", right=False),
)
_SUMS: Fields[tuple[tuple[str, str], Sums]] = Fields(
    _RECIPE.through(lambda row: row[0]),
    Fields(
        attributes(COUNT, "products", "high"),
        _ERRORS.through(lambda sums: (sums.energies, sums.averaged)),
        Field("averaged", lambda sums: sums.averaged.metrics["sqnr_db"], title="averaged\nSQNR dB", drop=5),
        Field("quantized_sqnr_db", lambda sums: sums.quantized.metrics["sqnr_db"] if sums.quantized else None, NUMBER,
              "quantized\nSQNR dB", drop=1),
        _OPERANDS.through(lambda sums: sums.operands),
    ).through(lambda row: row[1]),
)  # fmt: skip
_PRODUCT: Fields[TrainedProduct] = Fields(
    Field("layer", lambda product: product.layer, TEXT, "layer", right=False),
    Field("step", lambda product: product.step, _COUNT_OR_NULL, "step", drop=7,
          cell=lambda product: ABSENT if product.step is None else f"{product.step}"),
    Field("rank", lambda product: product.rank, _COUNT_OR_NULL),
    _RECIPE.through(lambda product: (product.recipe, product.passes)),
    products.SIZES,
    Field("high", lambda product: product.high, FLAG, meaning="its operands are not quantized"),
    _ERRORS.through(lambda product: (product.energies, product.averaged)),
    _OPERANDS.through(lambda product: product.operands),
)  # fmt: skip
RECORD_NAMES = tuple(_PRODUCT.names)
"""The columns of CSV; the keys of an operand that is not part of a product, or not quantized, are null."""

_OPERAND: Fields[Operand] = Fields(
    Field("format", lambda operand: rules_of(operand).format.name, TEXT),
    Field("scale_rounding", lambda operand: rules_of(operand).scale_rule.name, TEXT),
    Field("rounding", lambda operand: rules_of(operand).rounding.name, TEXT),
    Field("hadamard", lambda operand: operand.hadamard, _COUNT_OR_NULL, meaning="size of the transform before"),
    Field("history", lambda operand: operand.history.length if operand.history else None, _COUNT_OR_NULL,
          meaning="steps that a delayed scale looks back"),
)  # fmt: skip
_TRIED: Fields[tuple[TrainingRecipe, tuple[str, ...]]] = Fields(
    attributes(TEXT, "name", "meaning", "source").through(lambda tried: tried[0]),
    Field("high_blocks", lambda tried: list(tried[1]), array(TEXT)),
    Field("operands", lambda tried: _operand_records(tried[0]), mapping(mapping(or_null(_OPERAND.object_schema())))),
)
TRAINING: Fields[TrainingReport] = Fields(
    attributes(TEXT, "source", "captures"),
    Field("seed", lambda report: report.trial.seed, COUNT),
    Field("draws", lambda report: report.trial.draws, POSITIVE),
    records("recipes", lambda report: [(each, report.high[each.name]) for each in report.trial.recipes], _TRIED),
    NOTES,
    records("sums", lambda report: report.sums().items(), _SUMS),
    records(
        "by_step",
        lambda report: [(step, row) for step in report.steps for row in report.sums(step).items()],
        Fields(Field("step", lambda of: of[0], COUNT), _SUMS.through(lambda of: of[1])),
    ),
    records("products", lambda report: report.products, _PRODUCT),
)
"""The JSON of `mxcli training`."""


def training_text(
    report: TrainingReport, screen: Screen, *, detailed: bool, sort: str = "sqnr_db", top: int | None = None
) -> str:
    """Return totals by recipe and product, by step if there are several, and if `detailed` a row per layer, step,
    recipe and product, the worst first."""
    places = {(product.layer, product.step, product.rank) for product in report.products}
    layers = {product.layer for product in report.products}
    head = (
        f"{report.source} with {report.captures}: {counted(len(report.products), 'product')} of "
        f"{counted(len(layers), 'layer')}, {counted(len(places), 'capture')}, under "
        f"{counted(len(report.trial.recipes), 'training recipe')}"
    )
    first, *more = folded_lines(head, screen)
    lines = [bold(first, screen), *more, "", *_sums_table(report, screen)]
    if len(report.steps) > 1:
        lines += ["", *_steps_table(report, screen)]
    if detailed:
        ranked = _ranked(report.products, sort)
        shown = ranked if top is None else ranked[:top]
        lines += ["", *_layers_table(report, shown, screen)]
        if len(shown) < len(ranked):
            lines += ["", f"{len(shown):,} of {counted(len(ranked), 'product')} shown, worst {sort} first"]
    return "\n".join(lines)


def training_json(report: TrainingReport) -> str:
    """Return the report as JSON."""
    return json_text("training", TRAINING.record(report))


def training_csv(report: TrainingReport) -> str:
    """Return a row per layer, step, rank, recipe and pass."""
    return csv_text(map(_PRODUCT.record, report.products), RECORD_NAMES)


def _operand_records(recipe: TrainingRecipe) -> dict[str, dict[str, object]]:
    return {
        passes: {
            letter: None if operand is None else _OPERAND.record(operand)
            for (letter, _), operand in zip(OPERANDS[passes], pair, strict=True)
        }
        for passes, pair in recipe.pairs.items()
    }


def _sums_table(report: TrainingReport, screen: Screen) -> list[str]:
    """Return a row per recipe and product; with several draws also the SQNR of their mean."""
    all_sums = report.sums()
    hidden = [] if report.trial.draws > 1 else ["averaged"]
    hidden += [] if any(sums.high for sums in all_sums.values()) else ["quantized_sqnr_db"]
    fields = _SUMS.without(*hidden)
    return aligned(fields.columns(), [fields.cells(row) for row in all_sums.items()], screen)


def _steps_table(report: TrainingReport, screen: Screen) -> list[str]:
    """Return the SQNR at each step, or at _MOST_STEPS of them."""
    steps = report.steps
    if len(steps) > _MOST_STEPS:
        last = len(steps) - 1
        steps = tuple(steps[at * last // (_MOST_STEPS - 1)] for at in range(_MOST_STEPS))
    by_step = {step: report.sums(step) for step in steps}
    columns = (*_RECIPE.columns(), *(Column(f"{step}", group="SQNR in dB at step") for step in steps))
    rows: list[Row] = [
        [*key, *(_decibels(by_step[step].get(key)) for step in steps)] for key in report.sums()
    ]  # fmt: skip
    return aligned(columns, rows, screen)


def _decibels(sums: Sums | None) -> str:
    return ABSENT if sums is None else significant(sums.energies.metrics["sqnr_db"])


def _layers_table(report: TrainingReport, shown: list[TrainedProduct], screen: Screen) -> list[str]:
    fields = _PRODUCT if len(report.steps) > 1 else _PRODUCT.without("step")
    return aligned(fields.columns(), [fields.cells(product) for product in shown], screen)


def _ranked(trained: tuple[TrainedProduct, ...], sort: str) -> list[TrainedProduct]:
    """Return products with the worst first and exact ones last."""
    if sort == "name":
        return sorted(trained, key=lambda product: product.layer)
    high_is_good, metric = sort in ("sqnr_db", "cosine"), _PRODUCT[sort]

    def badness(product: TrainedProduct) -> float:
        value = metric.of(product)
        if not isinstance(value, float):
            return math.inf
        return value if high_is_good else -abs(value)

    return sorted(trained, key=badness)


_COLUMNS = (
    Column("recipe", right=False),
    Column("X", right=False),
    Column("W", right=False),
    Column("dY", right=False),
    Column("stochastic", right=False, drop=2),
    Column("transform\nin wgrad", drop=3),
    Column("scale", right=False, drop=4),
    Column("high blocks", right=False, drop=1),
)


def training_facts(recipe: TrainingRecipe) -> dict[str, str]:
    """Return the quantization of each operand of each product, the blocks that stay high, and the source."""
    facts = {
        f"{passes}, {PRODUCTS[passes]}": "; ".join(
            f"{letter}: {_operand_words(how)}" for (letter, _), how in zip(OPERANDS[passes], pair, strict=True)
        )
        for passes, pair in recipe.pairs.items()
    }
    return {**facts, "high blocks": recipe.high.words, "source": recipe.source}


def training_table(recipes: Iterable[TrainingRecipe], screen: Screen) -> str:
    """Return a line per recipe: the formats of each operand, those of several products separated by commas."""
    return "\n".join(aligned(_COLUMNS, [_cells(recipe) for recipe in recipes], screen))


def _operand_words(operand: Operand | None) -> str:
    if operand is None:
        return "as it is"
    rules = rules_of(operand)
    words = [rules.format.name, rules.scale_rule.name, rules.rounding.name]
    if operand.hadamard:
        words.append(f"after a Hadamard transform of {operand.hadamard}")
    if operand.history:
        words.append(f"scale from {operand.history.length:,} steps before")
    return ", ".join(words)


def _cells(recipe: TrainingRecipe) -> list[str]:
    used = [
        (letter, how)
        for passes, pair in recipe.pairs.items()
        for (letter, _), how in zip(OPERANDS[passes], pair, strict=True)
        if how is not None
    ]
    formats = {
        letter: dict.fromkeys(rules_of(how).format.name for name, how in used if name == letter)
        for letter in (X, W, DY)
    }
    rules = dict.fromkeys(rules_of(how).scale_rule.name for _, how in used)
    random = dict.fromkeys(letter for letter, how in used if how.is_random)
    return [
        recipe.name,
        *(", ".join(names) or ABSENT for names in formats.values()),
        ", ".join(random) or ABSENT,
        f"{recipe.transform}" if recipe.transform > 1 else ABSENT,
        ", ".join(rules) + (f" of {recipe.history.length:,} steps" if recipe.history else ""),
        recipe.high.words,
    ]
