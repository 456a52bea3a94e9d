"""Combinations to compare: formats, scale rules, element roundings and transforms by name, as schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from mxcli.errors import UsageError, did_you_mean, printable, together
from mxcli.numerics.dialects import find_dialect
from mxcli.numerics.formats import FORMATS, BlockFormat, find_format
from mxcli.numerics.hadamard import SIZES, Hadamard, find_hadamard
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.scheme import Rules, Scheme, find_rounding, find_scale_rule, mantissa_rules, resolve, scale_rules

NO_TRANSFORM = "none"
COMMON_RULES = ("floor", "ceil", "rceil", "even")
"""Rules that one format with power-of-two scales is compared under when no rules are named."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Combinations:
    """Schemes to compare, the first one being the baseline, and notes on how they were chosen.

    `names` hold the format and scale rule of each, and the element rounding, transform and axis where these differ.
    `axes` has the axis of each (None: the dimension that a layer sums over).
    """

    schemes: tuple[Scheme, ...]
    names: tuple[str, ...]
    notes: tuple[str, ...]
    axes: tuple[str | None, ...]

    @property
    def without_axes(self) -> tuple[str, ...]:
        """The names without the axis: what is compared along several has the same along each."""
        return tuple(_names([(scheme, None) for scheme in self.schemes]))

    @property
    def varies(self) -> bool:
        """True if more is compared than formats and scale rules: element roundings, transforms or axes."""
        ways = zip(self.schemes, self.axes, strict=True)
        return len({(scheme.rounding.name, scheme.hadamard, axis) for scheme, axis in ways}) > 1


def combine(
    formats: Sequence[str],
    scale_roundings: Sequence[str] = (),
    roundings: Sequence[str] = (),
    hadamards: Sequence[str] = (),
    *,
    axes: Sequence[str | None] = (None,),
    rules: Rules = Rules(),
    hadamard_seed: int | None = None,
) -> Combinations:
    """Return every format under every rule that serves it, every rounding and transform, along every axis, in the order
    named. `hadamards` are sizes, or NO_TRANSFORM. What no list names is that of `rules`.

    Without a scale rule a format is compared under the dialect's rule for it; where that would leave one
    combination only, under the common rules, or the rules for its kind of scale. A format that no named rule
    serves has the dialect's rule too. Raises UsageError for unknown names, all of them at once, for rules that serve
    no named format, and for fewer than two combinations.
    """
    notes, problems = list[str](), list[str]()
    rows = _meant(formats, find_format, problems)
    scale_names = _meant(scale_roundings or _one(rules.scale_rounding), lambda name: _rule_name(name, rows), problems)
    named = _meant(roundings or _one(rules.rounding), lambda name: find_rounding(name).name, problems)
    transforms = _meant(hadamards, lambda name: _transform(name, hadamard_seed), problems)
    _meant(_one(rules.dialect), find_dialect, problems)
    if problems:
        raise together(UsageError, "Names that mean nothing", problems)
    rows = _distinct("--formats", rows, lambda row: row.name, notes)
    scale_names = _distinct("--scale-roundings", scale_names, str, notes)
    chosen: list[str | None] = [*_distinct("--roundings", named, str, notes)] or [None]
    applied = _distinct("--hadamards", transforms, _transform_name, notes) or [rules.hadamard]
    alone = len(rows) == len(chosen) == len(applied) == len(axes) == 1 and not scale_names
    _refuse_rules_without_format(scale_names, rows)
    found, left_out = list[tuple[Scheme, str | None]](), []
    for row in rows:
        wanted = _usual(row) if alone else scale_names
        if not wanted and (unserved := _unserved(row, rules.dialect)):
            problems.append(unserved)
            continue
        serving = [rule for rule in wanted if rule in scale_rules(row)]
        if serving:
            left_out += [f"{row.name} {rule}" for rule in wanted if rule not in serving]
        elif wanted:
            own = resolve(row, Rules(dialect=rules.dialect)).scale_rule.name
            notes.append(f"{row.name} takes none of {', '.join(scale_names)}: it is compared under {own}, its own.")
        found += [
            (resolve(row, replace(rules, scale_rounding=rule, rounding=rounding, hadamard=hadamard)), axis)
            for rule, rounding, hadamard, axis in product(serving or (None,), chosen, applied, axes)
        ]
    if problems:
        raise together(UsageError, f"Formats that --as {rules.dialect} has no rule for", problems)
    if left_out:
        notes.append(f"Left out, since the rule does not serve the format: {', '.join(left_out)}.")
    if len(found) < 2:
        raise UsageError(_one_only(found[0][0]))
    return Combinations(
        tuple(scheme for scheme, _ in found), tuple(_names(found)), tuple(notes), tuple(axis for _, axis in found)
    )


def _usual(row: BlockFormat) -> list[str]:
    """Return the rules that a format is compared under by itself."""
    if row.has_power_of_two_scales:
        return list(COMMON_RULES)
    return mantissa_rules(row)


def _one(name: str | None) -> list[str]:
    return [] if name is None else [name]


def _meant(names: Iterable[str], find: Callable[[str], T], problems: list[str]) -> list[T]:
    """Return the rows that the names select, and add unknown names to `problems`."""
    found = list[T]()
    for name in names:
        try:
            found.append(find(name.strip()))
        except UsageError as error:
            problems += error.reasons
    return found


def _distinct(option: str, things: Iterable[T], called: Callable[[T], str], notes: list[str]) -> list[T]:
    """Return each value once, with a note on those named twice."""
    found: dict[str, T] = {}
    for thing in things:
        if called(thing) in found:
            notes.append(f"{option} names {called(thing)} twice; it is compared once.")
        found.setdefault(called(thing), thing)
    return list(found.values())


def _rule_name(name: str, rows: Sequence[BlockFormat]) -> str:
    rule = find_scale_rule(name)
    if rule is not None:
        return rule
    known = list(dict.fromkeys(rule for row in rows or FORMATS.values() for rule in scale_rules(row)))
    raise UsageError(
        f"unknown scale rounding '{printable(name)}': known are {', '.join(known)}.{did_you_mean(name, known)}"
    )


def _transform(name: str, seed: int | None) -> Hadamard | None:
    """Return the transform of a size; None: none is applied."""
    if name.lower() == NO_TRANSFORM:
        return None
    # Of thousands of digits Python makes no number.
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        known = ", ".join(map(str, SIZES))
        raise UsageError(f"unknown transform '{printable(name)}': --hadamards takes {NO_TRANSFORM}, {known}.")
    return find_hadamard(int(name), seed)


def _transform_name(hadamard: Hadamard | None) -> str:
    return "no-hadamard" if hadamard is None else hadamard.name


def _unserved(row: BlockFormat, dialect: str | None) -> str | None:
    """Return why a dialect cannot quantize to a format for which no rule is named, or None."""
    try:
        resolve(row, Rules(dialect=dialect))
    except UsageError as error:
        return error.message
    return None


def _refuse_rules_without_format(rules: Sequence[str], rows: Sequence[BlockFormat]) -> None:
    takes = "; ".join(f"{row.name} takes {', '.join(scale_rules(row))}" for row in rows)
    problems = [
        f"--scale-roundings: {rule} serves none of the formats named: {takes}."
        for rule in rules
        if not any(rule in scale_rules(row) for row in rows)
    ]
    if problems:
        raise together(UsageError, "Rules that serve no format", problems)


def _names(found: Sequence[tuple[Scheme, str | None]]) -> list[str]:
    """Format and scale rule of each, and what else is not the same for all."""
    parts = [(scheme.rounding.name, _transform_name(scheme.hadamard), axis or "usual") for scheme, axis in found]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return [
        " ".join(
            [
                scheme.format.name,
                scheme.scale_rule.name,
                *(part for part, differs in zip(each, differ, strict=True) if differs),
            ]
        )
        for (scheme, _), each in zip(found, parts, strict=True)
    ]


def _one_only(scheme: Scheme) -> str:
    return (
        f"nothing to compare: {scheme.format.name} under {scheme.scale_rule.name} is one combination. Name another "
        f"format, a rule with --scale-roundings ({', '.join(scale_rules(scheme.format))}) a rounding with "
        f"--roundings ({', '.join(ELEMENT_ROUNDINGS)}), --hadamards none,16 or --axis both, or use `mxcli report`."
    )
