"""The training recipes in words: the facts of one, and a table of all."""

from __future__ import annotations

from collections.abc import Iterable

from mxcli.flows.gemm_shapes import DY, OPERANDS, W, X
from mxcli.numerics.training import Operand, TrainingRecipe, rules_of
from mxcli.output.numbers import ABSENT
from mxcli.output.screen import Screen
from mxcli.output.table import Column, Row, aligned

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
