"""How two quantized forms of one weight differ: in codes, in scales, in the tensor scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mxcli.backends import unpacked
from mxcli.files.tensors import Array
from mxcli.flows.verify.weight_summary import (
    blocks_of,
    decode_scale,
    magnitude_ranks,
    magnitudes,
    ranks_by_block,
    scale_values,
    slabs,
)
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.scale_rules import FRACTION_BITS, POWER_OF_TWO_SCALE_RULES, PowerOfTwoScaleRule

RECIPROCAL = 2.0**-20
"""Tensor scales are the same if they are equal to this: the one may be stored as the inverse of the other."""


@dataclass(frozen=True, slots=True)
class BlockDifference:
    """Counts of one weight in one format.

    `codes` differ, of which `zero_signs` in the sign of a zero only and `one_step` by one code; `blocks_in_codes` have
    a code that differs, `scales` differ. `steps` counts these by how much further the second is than the first: in
    exponents, for 8-bit scales with a mantissa in codes; `nan_scales`, where one is NaN, are no steps from another.
    `tensor_scales` are both decode scales where they differ.
    """

    elements: int
    blocks: int
    codes: int
    zero_signs: int
    one_step: int
    blocks_in_codes: int
    scales: int
    steps: Mapping[int, int]
    tensor_scales: tuple[float, float] | None
    nan_scales: int = 0

    @property
    def is_none(self) -> bool:
        """True if nothing differs."""
        return not self.codes and not self.scales and self.tensor_scales is None


def block_difference(a: Quantized, b: Quantized) -> BlockDifference:
    """Return what differs between two weights of one format and shape."""
    ranks = _signed_ranks(a)
    codes = zero_signs = one_step = 0
    blocks_in_codes = 0
    whole = a.format.block == (None, None)
    for (part_a, _), (part_b, _) in zip(slabs(a), slabs(b), strict=True):
        if np.array_equal(part_a.packed, part_b.packed):
            continue
        one, other = unpacked(part_a), unpacked(part_b)
        differing = one != other
        if not differing.any():
            continue
        steps = np.abs(ranks[one[differing]] - ranks[other[differing]])
        codes += int(np.count_nonzero(differing))
        zero_signs += int(np.count_nonzero(steps == 0))
        one_step += int(np.count_nonzero(steps == 1))
        found = blocks_of(differing, a.format.block)
        blocks_in_codes = 1 if whole else blocks_in_codes + int(np.count_nonzero(found))
    steps_of_scales, nan_scales = _scale_steps(a, b)
    return BlockDifference(
        elements=int(np.prod(a.shape, dtype=np.int64)),
        blocks=a.scales.size,
        codes=codes,
        zero_signs=zero_signs,
        one_step=one_step,
        blocks_in_codes=blocks_in_codes,
        scales=sum(steps_of_scales.values()) + nan_scales,
        steps=steps_of_scales,
        tensor_scales=_tensor_scales(a, b),
        nan_scales=nan_scales,
    )


def _signed_ranks(q: Quantized) -> Array:
    """Return by code the place of its value among those of its sign, negative below zero; both zeros are 0."""
    element = q.format.element
    ranks = magnitude_ranks(element).astype(np.int64)
    values = np.asarray([element.value(code & ((1 << element.bits) - 1)) for code in range(256)])
    return np.where(values < 0, -ranks, ranks)


def _scale_steps(a: Quantized, b: Quantized) -> tuple[dict[int, int], int]:
    """Scale that differ by the steps they do so, and how many of which one is NaN."""
    row = a.format.scale
    one, other = a.scales.reshape(-1), b.scales.reshape(-1)
    bits = np.uint32 if row is FP32 else one.dtype
    differing = one.view(bits) != other.view(bits)
    one, other = one[differing], other[differing]
    values = scale_values(row, one), scale_values(row, other)
    known = ~(np.isnan(values[0]) | np.isnan(values[1]))
    if row is not FP32:
        steps = other[known].astype(np.int64) - one[known].astype(np.int64)
    else:
        exponents = [np.frexp(each[known])[1].astype(np.int64) for each in values]
        steps = exponents[1] - exponents[0]
    return dict(sorted(Counter(steps.tolist()).items())), int(np.count_nonzero(~known))


def _tensor_scales(a: Quantized, b: Quantized) -> tuple[float, float] | None:
    if a.format.tensor_scale is None:
        return None
    one, other = (decode_scale(q.tensor_scale, q.tensor_encode) for q in (a, b))
    same = one == other or abs(one / other - 1) <= RECIPROCAL if other else one == other
    return None if same else (one, other)


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
    """Return what explains two forms of a weight in one format; NOTHING for scales that are no powers of two."""
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
    """Return between which magnitudes the largest of each block was, if elements are rounded to nearest, and where that
    is known: blocks of zeros are left out."""
    values = magnitudes(element)
    middles = (values[1:] + values[:-1]) / 2
    ranks = ranks_by_block(q)[0].reshape(-1).astype(np.int64)
    scales = np.ldexp(1.0, q.scales.reshape(-1).astype(np.int64) - q.format.scale.bias)
    low = np.concatenate(([0.0], middles))[ranks] * scales
    high = np.concatenate((middles, [math.inf]))[ranks] * scales
    return low, high, ranks > 0


def _chosen_by(rule: PowerOfTwoScaleRule, element: FloatFormat, exponents: Array) -> tuple[Array, Array]:
    """Return the smallest and the largest magnitude for which a rule chooses scales of these exponents."""
    unit = 1 << FRACTION_BITS
    above = rule.carry_above(element)
    factor = element.max if rule.of_ratio else 2.0**element.emax
    slack = _SLACK if rule.of_ratio else 0.0
    low, high = (unit + above + 1) / unit / 2 * (1 - slack), (unit + above) / unit * (1 + slack)
    return np.ldexp(low * factor, exponents), np.ldexp(high * factor, exponents)


def _rules(element: FloatFormat) -> list[PowerOfTwoScaleRule]:
    """Return the rules that choose by the largest magnitude, one of those that are the same for an element."""
    serving = (rule for rule in POWER_OF_TWO_SCALE_RULES.values() if not rule.candidates and rule.serves(element))
    unique: dict[tuple[bool, int], PowerOfTwoScaleRule] = {}
    for rule in serving:
        unique.setdefault((rule.of_ratio, rule.carry_above(element)), rule)
    return list(unique.values())


def rules_of(pairs: Sequence[Pair], at: int) -> list[str]:
    """Return the rules that pairs have for the first form (`at` 0) or the second, in the order of the table."""
    return [name for name in POWER_OF_TWO_SCALE_RULES if name in {pair[at] for pair in pairs}]
