"""What training recipes do to products of layers, as tables, JSON and CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from mxcli.flows.products.operands import Energies
from mxcli.flows.products.shapes import DY, OPERANDS, W, X
from mxcli.flows.products.training import Counts, Sums, TrainedProduct, TrainingReport
from mxcli.numerics.measures import percent
from mxcli.numerics.training import Operand, TrainingRecipe, rules_of
from mxcli.output import products
from mxcli.output.export import csv_text, json_text
from mxcli.output.numbers import ABSENT, counted, significant
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

LETTERS = (X, W, DY)
_OPERAND_METRICS = ("saturated_percent", "underflowed_percent", "sqnr_db", "bias")
METRICS = (*products.METRICS, "shrunk_percent", "averaged_relative_error")
RECORD_NAMES = (
    "layer", "step", "rank", "recipe", "pass", "m", "n", "k", "high", *METRICS,
    *(f"{letter.lower()}_{name}" for letter in LETTERS for name in _OPERAND_METRICS),
)  # fmt: skip
SORTS = (*METRICS, "name")
_MOST_STEPS = 8

_NAMES = (Column("recipe", right=False), Column("product", right=False))
_ERRORS = (
    Column("SQNR\ndB"),
    Column("relative\nerror"),
    Column("bias", drop=6),
    Column("shrunk\n%", drop=4),
)
_COUNTS = tuple(
    Column(title, drop=drop, group=letter)
    for letter in LETTERS
    for title, drop in (("saturated\n%", 2), ("underflowed\n%", 3))
)
_QUANTIZED = Column("quantized\nSQNR dB", drop=1)
_AVERAGED = Column("averaged\nSQNR dB", drop=5)
_PLACE = (Column("layer", right=False), Column("step", drop=7))


def training_text(
    report: TrainingReport, screen: Screen, *, detailed: bool, sort: str = "sqnr_db", top: int | None = None
) -> str:
    """What was measured, sums by recipe and product, by step where there are several, and where `detailed` a row per
    layer, step, recipe and product, the worst first."""
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
    """The same as one object."""
    return json_text(
        "training",
        {
            "source": report.source,
            "captures": report.captures,
            "seed": report.trial.seed,
            "draws": report.trial.draws,
            "recipes": [_recipe_record(recipe, report.high[recipe.name]) for recipe in report.trial.recipes],
            "notes": list(report.notes),
            "sums": [_sums_record(key, sums) for key, sums in report.sums().items()],
            "by_step": [
                {"step": step, **_sums_record(key, sums)}
                for step in report.steps
                for key, sums in report.sums(step).items()
            ],
            "products": [product_record(product) for product in report.products],
        },
    )


def training_csv(report: TrainingReport) -> str:
    """One row per layer, step, rank, recipe and pass, with RECORD_NAMES for columns."""
    return csv_text(map(product_record, report.products), RECORD_NAMES)


def product_record(product: TrainedProduct) -> dict[str, object]:
    """One product under RECORD_NAMES; what an operand is not part of, or was not quantized for, is None."""
    m, n, k = product.sizes
    return {
        "layer": product.layer,
        "step": product.step,
        "rank": product.rank,
        "recipe": product.recipe,
        "pass": product.passes,
        "m": m,
        "n": n,
        "k": k,
        "high": product.high,
        **_metrics(product.energies, product.averaged),
        **_operand_metrics(product.operands),
    }


def _metrics(energies: Energies, averaged: Energies) -> dict[str, float | None]:
    """METRICS: those of products, by how much D is shorter along itself, and the error of the mean of all draws."""
    shrunk = percent(0.0 - energies.cross, energies.signal)
    return {
        **energies.metrics,
        "shrunk_percent": shrunk,
        "averaged_relative_error": averaged.metrics["relative_error"],
    }


def _operand_metrics(operands: Mapping[str, Counts]) -> dict[str, float | None]:
    none: dict[str, float | None] = dict.fromkeys(_OPERAND_METRICS)
    found = {letter: operands[letter].metrics if letter in operands else none for letter in LETTERS}
    return {f"{letter.lower()}_{name}": found[letter][name] for letter in LETTERS for name in _OPERAND_METRICS}


def _sums_record(key: tuple[str, str], sums: Sums) -> dict[str, object]:
    recipe, passes = key
    return {
        "recipe": recipe,
        "pass": passes,
        "products": sums.products,
        "high": sums.high,
        **_metrics(sums.energies, sums.averaged),
        "quantized_sqnr_db": sums.quantized.metrics["sqnr_db"] if sums.quantized else None,
        **_operand_metrics(sums.operands),
    }


def _recipe_record(recipe: TrainingRecipe, high: tuple[str, ...]) -> dict[str, object]:
    return {
        "name": recipe.name,
        "meaning": recipe.meaning,
        "source": recipe.source,
        "high_blocks": list(high),
        "operands": {
            passes: {
                letter: _operand_record(how)
                for (letter, _), how in zip(OPERANDS[passes], pair, strict=True)
            }
            for passes, pair in recipe.pairs.items()
        },
    }  # fmt: skip


def _operand_record(operand: Operand | None) -> dict[str, object] | None:
    if operand is None:
        return None
    rules = rules_of(operand)
    return {
        "format": rules.format.name,
        "scale_rounding": rules.scale_rule.name,
        "rounding": rules.rounding.name,
        "hadamard": operand.hadamard,
        "history": operand.history.length if operand.history else None,
    }


def _sums_table(report: TrainingReport, screen: Screen) -> list[str]:
    """A row per recipe and product; of several draws also how much is left when they are averaged."""
    all_sums = report.sums()
    drawn = (_AVERAGED,) if report.trial.draws > 1 else ()
    kept = (_QUANTIZED,) if any(sums.high for sums in all_sums.values()) else ()
    columns = (*_NAMES, *_ERRORS, *drawn, *kept, *_COUNTS)
    rows: list[Row] = []
    for (recipe, passes), sums in all_sums.items():
        averaged = [significant(sums.averaged.metrics["sqnr_db"])] if drawn else []
        quantized = [significant(sums.quantized.metrics["sqnr_db"]) if sums.quantized else ABSENT] if kept else []
        rows.append([recipe, passes, *_errors(sums.energies), *averaged, *quantized, *_counts(sums.operands)])
    return aligned(columns, rows, screen)


def _steps_table(report: TrainingReport, screen: Screen) -> list[str]:
    """The SQNR at each step, or at some of many."""
    steps = report.steps
    if len(steps) > _MOST_STEPS:
        last = len(steps) - 1
        steps = tuple(steps[at * last // (_MOST_STEPS - 1)] for at in range(_MOST_STEPS))
    by_step = {step: report.sums(step) for step in steps}
    columns = (*_NAMES, *(Column(f"{step}", group="SQNR in dB at step") for step in steps))
    rows: list[Row] = [
        [*key, *(_decibels(by_step[step].get(key)) for step in steps)] for key in report.sums()
    ]  # fmt: skip
    return aligned(columns, rows, screen)


def _decibels(sums: Sums | None) -> str:
    return ABSENT if sums is None else significant(sums.energies.metrics["sqnr_db"])


def _layers_table(report: TrainingReport, products: list[TrainedProduct], screen: Screen) -> list[str]:
    several = len(report.steps) > 1
    columns = (*(_PLACE if several else _PLACE[:1]), *_NAMES, *_ERRORS, *_COUNTS)
    rows: list[Row] = [
        [
            product.layer,
            *([ABSENT if product.step is None else f"{product.step}"] if several else []),
            product.recipe,
            product.passes,
            *_errors(product.energies),
            *_counts(product.operands),
        ]
        for product in products
    ]
    return aligned(columns, rows, screen)


def _errors(energies: Energies) -> Iterator[str]:
    metrics = _metrics(energies, energies)
    return (significant(metrics[name]) for name in ("sqnr_db", "relative_error", "bias", "shrunk_percent"))


def _counts(operands: Mapping[str, Counts]) -> Iterator[str]:
    for letter in LETTERS:
        metrics = operands[letter].metrics if letter in operands else {}
        yield significant(metrics.get("saturated_percent"))
        yield significant(metrics.get("underflowed_percent"))


def _ranked(products: tuple[TrainedProduct, ...], sort: str) -> list[TrainedProduct]:
    """Worst first; a product without a number, which has no error, comes last."""
    if sort == "name":
        return sorted(products, key=lambda product: product.layer)
    high_is_good = sort in ("sqnr_db", "cosine")

    def badness(product: TrainedProduct) -> float:
        value = _metrics(product.energies, product.averaged)[sort]
        if value is None:
            return math.inf
        return value if high_is_good else -abs(value)

    return sorted(products, key=badness)


PRODUCTS = {"fprop": "Y = X W^T", "dgrad": "dX = dY W", "wgrad": "dW = dY^T X"}

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


def training_facts(row: TrainingRecipe) -> dict[str, str]:
    """What each operand of each product becomes, which blocks stay high, and whose recipe it is."""
    facts = {
        f"{passes}, {PRODUCTS[passes]}": "; ".join(
            f"{letter}: {_operand_words(how)}" for (letter, _), how in zip(OPERANDS[passes], pair, strict=True)
        )
        for passes, pair in row.pairs.items()
    }
    return {**facts, "high blocks": row.high.words, "source": row.source}


def training_table(rows: Iterable[TrainingRecipe], screen: Screen) -> str:
    """One line per recipe: the formats of each operand, those of several products separated by commas."""
    cells: list[Row] = [_cells(row) for row in rows]
    return "\n".join(aligned(_COLUMNS, cells, screen))


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


def _cells(row: TrainingRecipe) -> list[str]:
    used = [
        (letter, how)
        for passes, pair in row.pairs.items()
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
        row.name,
        *(", ".join(names) or ABSENT for names in formats.values()),
        ", ".join(random) or ABSENT,
        f"{row.transform}" if row.transform > 1 else ABSENT,
        ", ".join(rules) + (f" of {row.history.length:,} steps" if row.history else ""),
        row.high.words,
    ]
