"""Which rules for power-of-two scales explain two quantized forms of the same weights.

The source is not needed. Codes and scale of a block tell between which bounds its largest magnitude was, twice; a rule
tells for which magnitudes it chooses a scale. A pair of rules explains a block if some magnitude is within all four.
Rules that search (`best`) choose by more than the largest magnitude and are not among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mxcli.files.tensors import Array
from mxcli.flows.soundness.blocks import magnitudes, ranks_by_block
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import FloatFormat
from mxcli.numerics.rounding import FRACTION_BITS, POWER_OF_TWO_ROUNDINGS, ScaleRounding

MOST_BLOCKS = 1 << 16
"""Blocks of a weight that rules are held against."""
_LOWEST = 2
"""Scale bytes below this are clamped, or of a zero block: they tell nothing of a rule."""
_SLACK = 2.0**-21
"""Relative error of the bounds of rules that go by a quotient rounded to binary32."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How many `blocks` were held against pairs of rules, how many each pair explains, and how many are the form of no
    single source under rounding to nearest."""

    blocks: int
    explained: Counter[Pair]
    contradictory: int

    def __add__(self, other: Explanation) -> Explanation:
        return Explanation(
            self.blocks + other.blocks, self.explained + other.explained, self.contradictory + other.contradictory
        )

    @property
    def pairs(self) -> list[Pair]:
        """The pairs that explain every block."""
        return [pair for pair, count in self.explained.items() if count == self.blocks] if self.blocks else []

    @property
    def best(self) -> tuple[Pair, int] | None:
        """The pair that explains most, and how many blocks."""
        return self.explained.most_common(1)[0] if self.explained else None


NOTHING = Explanation(0, Counter(), 0)


def explanation(a: Quantized, b: Quantized) -> Explanation:
    """What explains two forms of a weight in one format; NOTHING for scales that are no powers of two."""
    row = a.format
    if not row.has_power_of_two_scales:
        return NOTHING
    nan = row.scale.nan_code
    known = ((a.scales != nan) & (b.scales != nan) & (a.scales >= _LOWEST) & (b.scales >= _LOWEST)).reshape(-1)
    bounds = [_bounds(q, row.element) for q in (a, b)]
    known &= bounds[0][2] & bounds[1][2]
    chosen = np.flatnonzero(known)
    chosen = chosen[:: max(1, -(-len(chosen) // MOST_BLOCKS))]
    if not len(chosen):
        return NOTHING
    low = np.maximum(bounds[0][0][chosen], bounds[1][0][chosen])
    high = np.minimum(bounds[0][1][chosen], bounds[1][1][chosen])
    exponents = [q.scales.reshape(-1)[chosen].astype(np.int64) - row.scale.bias for q in (a, b)]
    rules = _rules(row.element)
    chosen_by = [[_chosen_by(rule, row.element, each) for rule in rules] for each in exponents]
    explained: Counter[Pair] = Counter()
    for (first, second), (one, other) in zip(product(rules, rules), product(chosen_by[0], chosen_by[1]), strict=True):
        lowest, highest = np.maximum(one[0], other[0]), np.minimum(one[1], other[1])
        fits = np.maximum(low, lowest) <= np.minimum(high, highest)
        explained[first.name, second.name] = int(np.count_nonzero(fits))
    return Explanation(len(chosen), explained, int(np.count_nonzero(low > high)))


def _bounds(q: Quantized, element: FloatFormat) -> tuple[Array, Array, Array]:
    """Between which magnitudes the largest of each block was, if elements are rounded to nearest, and where that is
    known: blocks of zeros are left out."""
    values = magnitudes(element)
    middles = (values[1:] + values[:-1]) / 2
    ranks = ranks_by_block(q)[0].reshape(-1).astype(np.int64)
    scales = np.ldexp(1.0, q.scales.reshape(-1).astype(np.int64) - q.format.scale.bias)
    low = np.concatenate(([0.0], middles))[ranks] * scales
    high = np.concatenate((middles, [math.inf]))[ranks] * scales
    return low, high, ranks > 0


def _chosen_by(rule: ScaleRounding, element: FloatFormat, exponents: Array) -> tuple[Array, Array]:
    """The smallest and the largest magnitude for which a rule chooses scales of these exponents."""
    unit = 1 << FRACTION_BITS
    above = rule.carry_above(element)
    factor = element.max if rule.of_ratio else 2.0**element.emax
    slack = _SLACK if rule.of_ratio else 0.0
    low, high = (unit + above + 1) / unit / 2 * (1 - slack), (unit + above) / unit * (1 + slack)
    return np.ldexp(low * factor, exponents), np.ldexp(high * factor, exponents)


def _rules(element: FloatFormat) -> list[ScaleRounding]:
    """The rules that choose by the largest magnitude, one of those that are the same for an element."""
    serving = (rule for rule in POWER_OF_TWO_ROUNDINGS.values() if not rule.candidates and rule.serves(element))
    unique: dict[tuple[bool, int], ScaleRounding] = {}
    for rule in serving:
        unique.setdefault((rule.of_ratio, rule.carry_above(element)), rule)
    return list(unique.values())


def rules_of(pairs: Sequence[Pair], at: int) -> list[str]:
    """The rules that pairs have for the first form (`at` 0) or the second, in the order of the table."""
    return [name for name in POWER_OF_TWO_ROUNDINGS if name in {pair[at] for pair in pairs}]
