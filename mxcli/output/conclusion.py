"""A comparison in words: what each rule does against the first of its format, each format against the first, and
which combination is best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mxcli.flows.measure.compare import EQUAL_DB, Comparison, best, is_as_good, sqnr_or_infinity
from mxcli.flows.measure.totals import Metrics, Totals
from mxcli.numerics.metrics import number_of
from mxcli.output.both_axes import axis_sentences
from mxcli.output.comparison_totals import wins
from mxcli.output.numbers import significant, trimmed
from mxcli.output.report import estimate_sentences

SPOKEN_UNDERFLOW, SPOKEN_CHANGE = 0.1, 0.05
"""Percent of elements from which underflow is spoken of, and the share of the larger by which that and saturation must
differ."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What one combination did to the tensors compared.

    `rule` is all of its name but the format. Percentages are of all blocks and elements; `overall_db` is the SQNR of
    everything, `sqnr_db` that of each tensor, in the same order for all combinations (infinite: exact, None: there is
    none). `wins` is the number of tensors on which it is best. `is_random` says that elements are rounded by chance, so
    that errors have no bias.
    """

    format: str
    rule: str
    bits: float
    saturated_blocks_percent: float
    underflowed_percent: float
    overall_db: float | None
    sqnr_db: tuple[float | None, ...]
    wins: int = 0
    is_random: bool = False

    @property
    def name(self) -> str:
        """The whole name."""
        return f"{self.format} {self.rule}"


def conclusion(standings: Sequence[Standing]) -> list[str]:
    """Sentences on two combinations or more, the first being what the others are held against."""
    formats = list(dict.fromkeys(each.format for each in standings))
    of_format = [[each for each in standings if each.format == name] for name in formats]
    sentences = []
    for first, *others in of_format:
        context = f"{first.format}: against" if len(formats) > 1 else "Against"
        sentences += [
            f"{context} {first.rule}, {each.rule} {_joined(_rule_clauses(first, each))}{_meant_for(first, each)}."
            for each in others
        ]
    first, *others = [_best(each) for each in of_format]
    for each in others:
        clauses = [_bits(first, each), *(_decibels(first, each) or [_unchanged(first, each)])]
        sentences.append(f"Against {first.name}, {each.name} {_joined(clauses)}{_meant_for(first, each)}.")
    if len(standings) > 2 and any(each.wins for each in standings):
        sentences.append(_winner(standings, alone=len(formats) == 1))
    return sentences


def _best(standings: Sequence[Standing]) -> Standing:
    """The best overall; the first where nothing has an SQNR."""
    return standings[best([(each.overall_db, each.bits) for each in standings]) or 0]


def _winner(standings: Sequence[Standing], *, alone: bool) -> str:
    """Which combination is best overall, which are as good, and on how many tensors which one is best."""
    chosen = _best(standings)
    called = {id(each): each.rule if alone else each.name for each in standings}
    tensors = sum(each.wins for each in standings)
    equals = [called[id(each)] for each in standings if each is not chosen and not _differ(each, chosen)]
    beside = f", with {_joined(equals)} as good" if equals else ""
    others = sorted((each for each in standings if each.wins and each is not chosen), key=lambda each: -each.wins)
    listed = "".join(f", {called[id(each)]} on {each.wins:,}" for each in others)
    on = _of_all(chosen.wins, tensors, last=True) if chosen.wins else "none"
    return f"Best SQNR overall: {called[id(chosen)]}{_db(chosen)}{beside}; best on {on}{listed}."


def _differ(one: Standing, other: Standing) -> bool:
    both = (one.overall_db, other.overall_db)
    return None in both or not is_as_good(min(both), max(both))  # type: ignore[type-var,arg-type]


def _db(standing: Standing) -> str:
    if standing.overall_db is None:
        return ""
    return " (exact)" if math.isinf(standing.overall_db) else f" ({significant(standing.overall_db)} dB)"


def _meant_for(first: Standing, other: Standing) -> str:
    """What an SQNR does not say where only one of them rounds by chance: what saturates is beyond chance's help."""
    if first.is_random == other.is_random:
        return ""
    random = first if first.is_random else other
    clipped = " but for what saturates" if random.saturated_blocks_percent else ""
    return (
        f" (stochastic rounding is for sums: its errors have no bias{clipped} and cancel there, which an SQNR does not "
        "count)"
    )


def _rule_clauses(first: Standing, other: Standing) -> list[str]:
    aside = [*_saturation(first, other), *_underflow(first, other)]
    return [*aside, *(_decibels(first, other) or [_unchanged(first, other)])]


def _saturation(first: Standing, other: Standing) -> Iterator[str]:
    before, after = first.saturated_blocks_percent, other.saturated_blocks_percent
    if before and not after:
        yield f"removes all saturation ({trimmed(before)} % of blocks)"
    elif after and not before:
        yield f"saturates {trimmed(after)} % of blocks"
    elif abs(after - before) > SPOKEN_CHANGE * max(before, after):
        yield f"{_way(before, after)} saturation from {trimmed(before)} % to {trimmed(after)} % of blocks"


def _underflow(first: Standing, other: Standing) -> Iterator[str]:
    before, after = first.underflowed_percent, other.underflowed_percent
    larger = max(before, after)
    if larger >= SPOKEN_UNDERFLOW and abs(after - before) > SPOKEN_CHANGE * larger:
        yield f"{_way(before, after)} underflow from {trimmed(before)} % to {trimmed(after)} % of elements"


def _way(before: float, after: float) -> str:
    return "lowers" if after < before else "raises"


def _bits(first: Standing, other: Standing) -> str:
    difference = other.bits - first.bits
    if abs(difference) < 0.001:
        return "takes as many bits per element"
    return f"takes {trimmed(abs(difference))} bits {'more' if difference > 0 else 'fewer'} per element"


def _decibels(first: Standing, other: Standing) -> list[str]:
    """What is gained and lost on how many tensors; nothing where no difference is worth a word."""
    changes = _changes(first, other)
    gains = [change for change in changes if change >= EQUAL_DB]
    losses = [-change for change in changes if change <= -EQUAL_DB]
    clauses = [(verb, found) for verb, found in (("gains", gains), ("costs", losses)) if found]
    tensors = [_of_all(len(found), len(changes), last=at == len(clauses) - 1) for at, (_, found) in enumerate(clauses)]
    return [f"{verb} {_range(found)} on {on}" for (verb, found), on in zip(clauses, tensors, strict=True)]


def _changes(first: Standing, other: Standing) -> list[float]:
    """Differences in dB on the tensors that have an SQNR under both; of two exact results none."""
    pairs = zip(first.sqnr_db, other.sqnr_db, strict=True)
    return [0.0 if a == b else b - a for a, b in pairs if a is not None and b is not None]


def _of_all(count: int, tensors: int, *, last: bool) -> str:
    if count == tensors:
        return {1: "the only tensor", 2: "both tensors"}.get(tensors, f"all {tensors:,} tensors")
    return f"{count:,} of {tensors:,} tensors" if last else f"{count:,}"


def _range(values: Sequence[float]) -> str:
    low, high = (trimmed(value) for value in (min(values), max(values)))
    if high == "inf":
        return "an exact result" if low == high else f"{low} dB to an exact result"
    return f"{low} dB" if low == high else f"{low} to {high} dB"


def _unchanged(first: Standing, other: Standing) -> str:
    changes = _changes(first, other)
    if not changes:
        return "has no SQNR to compare"
    if not any(changes):
        return f"gives the same SQNR on {_of_all(len(changes), len(changes), last=True)}"
    return f"changes the SQNR of no tensor by {EQUAL_DB} dB"


def _joined(clauses: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *before, last = clauses
    return f"{', '.join(before)} and {last}" if before else last


def concluded(comparison: Comparison) -> list[str]:
    """The comparison in words; nothing was said of nothing."""
    if not comparison.sums:
        return []
    sentences = conclusion(list(_standings(comparison)))
    return [*estimate_sentences(comparison.sample), *sentences, *_of_draws(comparison), *_of_axes(comparison)]


def _standings(comparison: Comparison) -> Iterator[Standing]:
    combinations = comparison.combinations
    for at, (name, recipe, total, won) in enumerate(
        zip(combinations.names, combinations.schemes, comparison.sums, wins(comparison), strict=True)
    ):
        yield Standing(
            format=recipe.format.name,
            rule=name.removeprefix(f"{recipe.format.name} "),
            bits=number_of(total, "bits_per_element") or 0.0,
            saturated_blocks_percent=number_of(total, "saturated_blocks_percent") or 0.0,
            underflowed_percent=number_of(total, "underflowed_percent") or 0.0,
            overall_db=sqnr_or_infinity(total),
            sqnr_db=tuple(sqnr_or_infinity(layer.metrics[at]) for layer in comparison.layers),
            wins=won,
            is_random=recipe.rounding.is_random,
        )


def _of_draws(comparison: Comparison) -> Iterator[str]:
    """The bias of what is rounded by chance, beside that of the same without it."""
    combinations = comparison.combinations
    ways = list(zip(combinations.schemes, combinations.axes, strict=True))
    groups = comparison.groups if comparison.by == "role" else {"everything": comparison.sums}
    pairs = []
    for at, (recipe, axis) in enumerate(ways):
        same = (recipe.format, recipe.scale_rule, recipe.hadamard, axis)
        plain = [
            place
            for place, (other, along) in enumerate(ways)
            if not other.rounding.is_random and (other.format, other.scale_rule, other.hadamard, along) == same
        ]
        # A mean of transformed errors is not that of the values' errors.
        if not (recipe.rounding.is_random and plain) or recipe.hadamard is not None:
            continue
        told = [
            f"{label} {bias} against {other}"
            for label, group in groups.items()
            if (bias := _bias(group[at])) is not None and (other := _bias(group[plain[0]])) is not None
        ]
        if told:
            pairs.append(f"of {combinations.names[at]} against {combinations.names[plain[0]]}: {', '.join(told)}")
    if pairs:
        measured = "Bias (mean error, and how many times RMS error / sqrt(elements), which chance alone has about once)"
        yield f"{measured} {'; '.join(pairs)}."


def _bias(metrics: Metrics) -> str | None:
    """The mean error, and how many times the standard error of a mean of errors that are independent."""
    counted = "sampled_elements" if "sampled_elements" in metrics else "elements"
    bias, rmse, elements = (number_of(metrics, name) for name in ("bias", "rmse", counted))
    if bias is None or not rmse or not elements:
        return None
    return f"{significant(bias)} ({abs(bias) * math.sqrt(elements) / rmse:.1f})"


def _of_axes(comparison: Comparison) -> Iterator[str]:
    """What the axis changes for each role under each recipe; nothing where roles or axes are not told apart."""
    combinations = comparison.combinations
    recipes = list(dict.fromkeys(combinations.schemes))
    if len(set(combinations.axes)) < 2 or comparison.by != "role":
        return
    for recipe in recipes:
        places = [at for at, each in enumerate(combinations.schemes) if each == recipe]
        by_axis = {
            str(combinations.axes[at]): Totals(
                comparison.sums[at], {role: group[at] for role, group in comparison.groups.items()}
            )
            for at in places
        }
        called = combinations.without_axes[places[0]]
        for sentence in axis_sentences(by_axis):
            yield sentence if len(recipes) == 1 else f"{called}: {sentence}"
