"""What a comparison compares: formats, scale rules and element roundings by name become recipes side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mxcli.errors import UsageError, together
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.recipe import Recipe, find_scale_rule, resolve, scale_kind, scale_rules
from mxcli.numerics.rounding import ELEMENT_ROUNDINGS, SCALE_RECIPES

COMMON_RULES = ("floor", "ceil", "rceil", "even")
"""What one format with power-of-two scales is compared under when no rules are named."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Combinations:
    """Recipes to compare, the first being what the others are held against, and what is to be said about the choice.

    `names` tell them apart: format, scale rule, and the element rounding where that is not the same for all.
    """

    recipes: tuple[Recipe, ...]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def combine(
    formats: Sequence[str],
    scale_roundings: Sequence[str] = (),
    roundings: Sequence[str] = (),
    *,
    dialect: str | None = None,
    nonfinite: str = "saturate",
) -> Combinations:
    """Every format under every rule that serves it and every rounding, in the order named.

    Without `scale_roundings` a format is compared under the dialect's rule for it; where that would leave one
    combination only, under the common rules, or the recipes for its kind of scale. A format that no named rule
    serves has the dialect's rule too. Raises UsageError for an unknown name, a rule that serves no named format,
    and for fewer than two combinations.
    """
    notes: list[str] = []
    rows = _distinct("--formats", formats, find_format, lambda row: row.name, notes)
    rules = _distinct("--scale-roundings", scale_roundings, lambda name: _rule_name(name, rows), str, notes)
    chosen: list[str | None] = [*_distinct("--roundings", roundings, str, str, notes)] or [None]
    alone = len(rows) == len(chosen) == 1 and not rules
    _refuse_rules_without_format(rules, rows)
    recipes, left_out = [], []
    for row in rows:
        wanted = _usual(row) if alone else rules
        serving = [rule for rule in wanted if rule in scale_rules(row)]
        if serving:
            left_out += [f"{row.name} {rule}" for rule in wanted if rule not in serving]
        elif wanted:
            own = resolve(row, dialect=dialect).scale_rule.name
            notes.append(f"{row.name} takes none of {', '.join(rules)}: it is compared under {own}, its own.")
        recipes += [
            resolve(row, scale_rounding=rule, rounding=rounding, dialect=dialect, nonfinite=nonfinite)
            for rule in serving or (None,)
            for rounding in chosen
        ]
    if left_out:
        notes.append(f"Left out, since the rule does not serve the format: {', '.join(left_out)}.")
    if len(recipes) < 2:
        raise UsageError(_one_only(recipes[0]))
    return Combinations(tuple(recipes), tuple(_names(recipes)), tuple(notes))


def _usual(row: BlockFormat) -> list[str]:
    """The rules that a format is compared under by itself."""
    if row.has_power_of_two_scales:
        return list(COMMON_RULES)
    return [recipe.name for recipe in SCALE_RECIPES.values() if recipe.scale == scale_kind(row)]


def _distinct(
    option: str, names: Iterable[str], find: Callable[[str], T], called: Callable[[T], str], notes: list[str]
) -> list[T]:
    """What the names mean, each once; a note says what was named twice."""
    found: dict[str, T] = {}
    for name in names:
        thing = find(name.strip())
        if called(thing) in found:
            notes.append(f"{option} names {called(thing)} twice; it is compared once.")
        found.setdefault(called(thing), thing)
    return list(found.values())


def _rule_name(name: str, rows: Sequence[BlockFormat]) -> str:
    rule = find_scale_rule(name)
    return resolve(rows[0], scale_rounding=name).scale_rule.name if rule is None else rule.name


def _refuse_rules_without_format(rules: Sequence[str], rows: Sequence[BlockFormat]) -> None:
    takes = "; ".join(f"{row.name} takes {', '.join(scale_rules(row))}" for row in rows)
    problems = [
        f"--scale-roundings: {rule} serves none of the formats named: {takes}."
        for rule in rules
        if not any(rule in scale_rules(row) for row in rows)
    ]
    if problems:
        raise together(UsageError, "Rules that serve no format", problems)


def _names(recipes: Sequence[Recipe]) -> list[str]:
    differ = len({recipe.rounding.name for recipe in recipes}) > 1
    return [
        " ".join([recipe.format.name, recipe.scale_rule.name, *([recipe.rounding.name] if differ else [])])
        for recipe in recipes
    ]


def _one_only(recipe: Recipe) -> str:
    return (
        f"nothing to compare: {recipe.format.name} under {recipe.scale_rule.name} is one combination. Name another "
        f"format, a rule with --scale-roundings ({', '.join(scale_rules(recipe.format))}) or a rounding with "
        f"--roundings ({', '.join(ELEMENT_ROUNDINGS)}), or use `mxcli report`."
    )
