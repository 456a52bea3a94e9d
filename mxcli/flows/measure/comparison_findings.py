"""Findings on a comparison: what each rule and format changes against a baseline, and which combination is best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxcli.flows.measure.findings import (
    EQUAL_BITS,
    EQUAL_DB,
    RELATIVE_CHANGE,
    UNDERFLOW_PERCENT,
    Finding,
    axis_effects,
    best,
    comparison_steps,
    estimated,
    is_as_good,
    sqnr_or_infinity,
)
from mxcli.flows.measure.totals import Metrics, Totals
from mxcli.numerics.metrics import number_of

if TYPE_CHECKING:
    from mxcli.flows.measure.compare import Comparison


@dataclass(frozen=True, slots=True)
class Standing:
    """Results of one combination on the tensors compared.

    `rule` is all of its name but the format. Percentages are of all blocks and elements; `overall_db` is the SQNR of
    everything, `sqnr_db` that of each tensor, in the same order for all combinations (infinite: exact, None: there is
    none). `wins` is the number of tensors on which it is best. `is_random`: elements are rounded stochastically, so
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


@dataclass(frozen=True, slots=True)
class Change:
    """A percentage under the baseline, and under the other combination."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Effect(Finding):
    """Changes that a combination makes compared with a baseline.

    `changes_db` are those of the SQNR of each tensor that has one under both (infinite: one result is exact, 0: both
    are). `format` is that of both, where several formats are compared (else empty). `bits` is how many bits per element
    more it takes (None: they have one format). `saturated_blocks` and `underflowed` are None where the change is not
    worth reporting. `stochastic`: only one of the two rounds stochastically, and some of its blocks saturate if
    `stochastic_saturates`.
    """

    baseline: str
    other: str
    changes_db: tuple[float, ...]
    format: str = ""
    bits: float | None = None
    saturated_blocks: Change | None = None
    underflowed: Change | None = None
    stochastic: bool = False
    stochastic_saturates: bool = False
    equal_db: float = EQUAL_DB

    @property
    def gains_db(self) -> tuple[float, ...]:
        """The increases of SQNR of at least `equal_db`."""
        return tuple(change for change in self.changes_db if change >= self.equal_db)

    @property
    def costs_db(self) -> tuple[float, ...]:
        """The decreases of SQNR of at least `equal_db`, as positive numbers."""
        return tuple(-change for change in self.changes_db if change <= -self.equal_db)


@dataclass(frozen=True, slots=True)
class Winner(Finding):
    """The combination with the best SQNR over all tensors (None: there is no SQNR, infinite: exact).

    `equals` are as good to within EQUAL_DB. It is best on `wins` of `tensors`, and others with some on as many as
    `others` says, the most first.
    """

    name: str
    sqnr_db: float | None
    equals: tuple[str, ...]
    tensors: int
    wins: int
    others: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Bias:
    """A mean error, and how many times RMS error / sqrt(elements) it is: about once for independent random errors."""

    mean: float
    standard_errors: float


@dataclass(frozen=True, slots=True)
class BiasChange:
    """The bias of stochastic rounding, and of the same combination without it, by role or of everything."""

    name: str
    baseline: str
    groups: tuple[tuple[str, Bias, Bias], ...]


@dataclass(frozen=True, slots=True)
class Biases(Finding):
    """The biases of all combinations that round stochastically."""

    changes: tuple[BiasChange, ...]


def comparison_conclusion(comparison: Comparison) -> tuple[Finding, ...]:
    """Return the findings on a comparison; none if nothing was measured."""
    if not comparison.sums:
        return ()
    effects = conclusion(list(_standings(comparison)))
    return (*estimated(comparison.sample), *effects, *_biases(comparison), *_axes(comparison))


def comparison_findings(comparison: Comparison) -> tuple[Finding, ...]:
    """Return the conclusion, and the combinations that are best at training steps."""
    return (*comparison_conclusion(comparison), *comparison_steps(comparison))


def conclusion(standings: Sequence[Standing]) -> list[Finding]:
    """Return the effects of each rule against the first of its format, and of each format against the first at its
    best, and of more than two combinations the winner."""
    formats = list(dict.fromkeys(each.format for each in standings))
    of_format = [[each for each in standings if each.format == name] for name in formats]
    found = list[Finding]()
    for first, *others in of_format:
        found += [_rule_effect(first, each, first.format if len(formats) > 1 else "") for each in others]
    first, *others = [_best(each) for each in of_format]
    found += [_format_effect(first, each) for each in others]
    if len(standings) > 2 and any(each.wins for each in standings):
        found.append(_winner(standings, alone=len(formats) == 1))
    return found


def _best(standings: Sequence[Standing]) -> Standing:
    """Return the best overall; the first where nothing has an SQNR."""
    return standings[best([(each.overall_db, each.bits) for each in standings]) or 0]


def _rule_effect(first: Standing, other: Standing, format: str) -> Effect:
    return Effect(
        first.rule,
        other.rule,
        _changes(first, other),
        format,
        saturated_blocks=_saturation(first.saturated_blocks_percent, other.saturated_blocks_percent),
        underflowed=_underflow(first.underflowed_percent, other.underflowed_percent),
        stochastic=first.is_random != other.is_random,
        stochastic_saturates=_saturates(first, other),
    )


def _format_effect(first: Standing, other: Standing) -> Effect:
    bits = other.bits - first.bits
    return Effect(
        first.name,
        other.name,
        _changes(first, other),
        bits=0.0 if abs(bits) < EQUAL_BITS else bits,
        stochastic=first.is_random != other.is_random,
        stochastic_saturates=_saturates(first, other),
    )


def _saturates(first: Standing, other: Standing) -> bool:
    """Return whether the stochastic one saturates; clamping biases the mean."""
    return (first if first.is_random else other).saturated_blocks_percent > 0


def _changes(first: Standing, other: Standing) -> tuple[float, ...]:
    pairs = zip(first.sqnr_db, other.sqnr_db, strict=True)
    return tuple(0.0 if a == b else b - a for a, b in pairs if a is not None and b is not None)


def _saturation(before: float, after: float) -> Change | None:
    appears = (before > 0) != (after > 0)
    return Change(before, after) if appears or _differ(before, after) else None


def _underflow(before: float, after: float) -> Change | None:
    return Change(before, after) if max(before, after) >= UNDERFLOW_PERCENT and _differ(before, after) else None


def _differ(before: float, after: float) -> bool:
    return abs(after - before) > RELATIVE_CHANGE * max(before, after)


def _winner(standings: Sequence[Standing], *, alone: bool) -> Winner:
    """Return the winner; formats are not named where there is one `alone`."""
    chosen = _best(standings)
    others = [each for each in standings if each is not chosen]

    def called(each: Standing) -> str:
        return each.rule if alone else each.name

    return Winner(
        called(chosen),
        chosen.overall_db,
        tuple(called(each) for each in others if _is_equal(each.overall_db, chosen.overall_db)),
        sum(each.wins for each in standings),
        chosen.wins,
        tuple((called(each), each.wins) for each in sorted(others, key=lambda each: -each.wins) if each.wins),
    )


def _is_equal(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and is_as_good(min(one, other), max(one, other))


def _standings(comparison: Comparison) -> Iterator[Standing]:
    combinations = comparison.combinations
    for at, (name, scheme, total, won) in enumerate(
        zip(combinations.names, combinations.schemes, comparison.sums, comparison.wins, strict=True)
    ):
        yield Standing(
            format=scheme.format.name,
            rule=name.removeprefix(f"{scheme.format.name} "),
            bits=number_of(total, "bits_per_element") or 0.0,
            saturated_blocks_percent=number_of(total, "saturated_blocks_percent") or 0.0,
            underflowed_percent=number_of(total, "underflowed_percent") or 0.0,
            overall_db=sqnr_or_infinity(total),
            sqnr_db=tuple(sqnr_or_infinity(layer.metrics[at]) for layer in comparison.layers),
            wins=won,
            is_random=scheme.rounding.is_random,
        )


def _biases(comparison: Comparison) -> Iterator[Biases]:
    """Yield the biases of stochastic rounding, if there are any: not those of transformed values, since the mean of
    transformed errors is not that of the values' errors."""
    combinations = comparison.combinations
    keys = [
        (scheme.format, scheme.scale_rule, scheme.hadamard, axis)
        for scheme, axis in zip(combinations.schemes, combinations.axes, strict=True)
    ]
    plain = {keys[at]: at for at in reversed(range(len(keys))) if not combinations.schemes[at].rounding.is_random}
    groups = comparison.groups if comparison.by == "role" else {"everything": comparison.sums}
    changes = list[BiasChange]()
    for at, scheme in enumerate(combinations.schemes):
        baseline = plain.get(keys[at])
        if not scheme.rounding.is_random or baseline is None or scheme.hadamard is not None:
            continue
        biases = [(label, _bias(group[at]), _bias(group[baseline])) for label, group in groups.items()]
        known = tuple((label, own, other) for label, own, other in biases if own is not None and other is not None)
        if known:
            changes.append(BiasChange(combinations.names[at], combinations.names[baseline], known))
    if changes:
        yield Biases(tuple(changes))


def _bias(metrics: Metrics) -> Bias | None:
    counted = "sampled_elements" if "sampled_elements" in metrics else "elements"
    bias, rmse, elements = (number_of(metrics, name) for name in ("bias", "rmse", counted))
    if bias is None or not rmse or not elements:
        return None
    return Bias(bias, abs(bias) * math.sqrt(elements) / rmse)


def _axes(comparison: Comparison) -> Iterator[Finding]:
    """Yield the effects of the axis on each role under each scheme; nothing where roles or axes are not separate."""
    combinations = comparison.combinations
    schemes = list(dict.fromkeys(combinations.schemes))
    if len(set(combinations.axes)) < 2 or comparison.by != "role":
        return
    for scheme in schemes:
        places = [at for at, each in enumerate(combinations.schemes) if each == scheme]
        by_axis = {
            str(combinations.axes[at]): Totals(
                comparison.sums[at], {role: group[at] for role, group in comparison.groups.items()}
            )
            for at in places
        }
        yield from axis_effects(by_axis, "" if len(schemes) == 1 else combinations.without_axes[places[0]])
