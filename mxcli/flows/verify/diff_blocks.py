"""Differences of two quantized forms of a weight: in codes, in scales, in the tensor scale."""

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
from mxcli.numerics.blocks import Quantized, grid_shape
from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scale_rules import FRACTION_BITS, POWER_OF_TWO_SCALE_RULES, PowerOfTwoScaleRule

RECIPROCAL = 2.0**-20
"""Relative tolerance of equal tensor scales: one may be stored as the inverse of the other."""


@dataclass(frozen=True, slots=True)
class BlockDifference:
    """Counts of differences of a weight in one format.

    `codes` differ, `zero_signs` of them only in the sign of a zero and `one_step` by one code; `blocks_in_codes` have a
    code that differs; `scales` differ. `steps` counts the differing scales by second minus first: in exponents, for
    8-bit scales with a mantissa in codes. `nan_scales`, of which one is NaN, have no such step. `tensor_scales` are
    both decode scales if they differ.
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
    """Return the differences of two weights of the same format and shape."""
    ranks = signed_ranks(a)
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


def no_difference(fmt: BlockFormat, shape: tuple[int, ...]) -> BlockDifference:
    """Return the counts of a weight that is the same in both."""
    elements, blocks = math.prod(shape), math.prod(grid_shape(fmt, shape))
    return BlockDifference(elements, blocks, 0, 0, 0, 0, 0, {}, None)


def signed_ranks(q: Quantized) -> Array:
    """Return the rank of each code's value among those of its sign, negative below zero; both zeros are 0."""
    element = q.format.element
    ranks = magnitude_ranks(element).astype(np.int64)
    values = np.asarray([element.value(code & ((1 << element.bits) - 1)) for code in range(256)])
    return np.where(values < 0, -ranks, ranks)


def _scale_steps(a: Quantized, b: Quantized) -> tuple[dict[int, int], int]:
    """Return the counts of differing scales by step, and the number of those of which one is NaN."""
    fmt = a.format.scale
    one, other = a.scales.reshape(-1), b.scales.reshape(-1)
    bits = np.uint32 if fmt is FP32 else one.dtype
    differing = one.view(bits) != other.view(bits)
    one, other = one[differing], other[differing]
    values = scale_values(fmt, one), scale_values(fmt, other)
    known = ~(np.isnan(values[0]) | np.isnan(values[1]))
    if fmt is not FP32:
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
"""The largest number of blocks of a weight that rules are tried on."""
_LOWEST = 2
"""Scale bytes below this are clamped or those of a zero block: they do not identify a rule."""
_SLACK = 2.0**-21
"""Relative error of the bounds of rules that use a quotient rounded to binary32."""

RulePair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The number of `blocks` that pairs of rules were tried on, the number that each pair explains, and the number that
    cannot come from one source with rounding to nearest."""

    blocks: int
    explained: Counter[RulePair]
    contradictory: int

    def __add__(self, other: Explanation) -> Explanation:
        return Explanation(
            self.blocks + other.blocks, self.explained + other.explained, self.contradictory + other.contradictory
        )

    @property
    def pairs(self) -> list[RulePair]:
        """The pairs that explain every block."""
        return [pair for pair, count in self.explained.items() if count == self.blocks] if self.blocks else []

    @property
    def best(self) -> tuple[RulePair, int] | None:
        """The pair that explains most blocks, and their number."""
        return self.explained.most_common(1)[0] if self.explained else None


NOTHING = Explanation(0, Counter(), 0)


def explanation(a: Quantized, b: Quantized) -> Explanation:
    """Return the rules that explain two forms of a weight in one format; NOTHING unless scales are powers of two."""
    fmt = a.format
    if not fmt.has_power_of_two_scales:
        return NOTHING
    nan = fmt.scale.nan_code
    known = ((a.scales != nan) & (b.scales != nan) & (a.scales >= _LOWEST) & (b.scales >= _LOWEST)).reshape(-1)
    bounds = [_bounds(q, fmt.element) for q in (a, b)]
    known &= bounds[0][2] & bounds[1][2]
    chosen = np.flatnonzero(known)
    chosen = chosen[:: max(1, -(-len(chosen) // MOST_BLOCKS))]
    if not len(chosen):
        return NOTHING
    low = np.maximum(bounds[0][0][chosen], bounds[1][0][chosen])
    high = np.minimum(bounds[0][1][chosen], bounds[1][1][chosen])
    exponents = [q.scales.reshape(-1)[chosen].astype(np.int64) - fmt.scale.bias for q in (a, b)]
    rules = _rules(fmt.element)
    chosen_by = [[_chosen_by(rule, fmt.element, each) for rule in rules] for each in exponents]
    explained: Counter[RulePair] = Counter()
    for (first, second), (one, other) in zip(product(rules, rules), product(chosen_by[0], chosen_by[1]), strict=True):
        lowest, highest = np.maximum(one[0], other[0]), np.minimum(one[1], other[1])
        fits = np.maximum(low, lowest) <= np.minimum(high, highest)
        explained[first.name, second.name] = int(np.count_nonzero(fits))
    return Explanation(len(chosen), explained, int(np.count_nonzero(low > high)))


def _bounds(q: Quantized, element: FloatFormat) -> tuple[Array, Array, Array]:
    """Return the bounds of each block's amax if elements are rounded to nearest, and where they are known: not for
    blocks of zeros."""
    values = magnitudes(element)
    middles = (values[1:] + values[:-1]) / 2
    ranks = ranks_by_block(q)[0].reshape(-1).astype(np.int64)
    scales = np.ldexp(1.0, q.scales.reshape(-1).astype(np.int64) - q.format.scale.bias)
    low = np.concatenate(([0.0], middles))[ranks] * scales
    high = np.concatenate((middles, [math.inf]))[ranks] * scales
    return low, high, ranks > 0


def _chosen_by(rule: PowerOfTwoScaleRule, element: FloatFormat, exponents: Array) -> tuple[Array, Array]:
    """Return the smallest and the largest amax for which a rule chooses scales of these exponents."""
    unit = 1 << FRACTION_BITS
    above = rule.carry_above(element)
    factor = element.max if rule.of_ratio else 2.0**element.emax
    slack = _SLACK if rule.of_ratio else 0.0
    low, high = (unit + above + 1) / unit / 2 * (1 - slack), (unit + above) / unit * (1 + slack)
    return np.ldexp(low * factor, exponents), np.ldexp(high * factor, exponents)


def _rules(element: FloatFormat) -> list[PowerOfTwoScaleRule]:
    """Return the rules that depend on the amax, without those equal to another for an element."""
    serving = (rule for rule in POWER_OF_TWO_SCALE_RULES.values() if not rule.candidates and rule.serves(element))
    unique: dict[tuple[bool, int], PowerOfTwoScaleRule] = {}
    for rule in serving:
        unique.setdefault((rule.of_ratio, rule.carry_above(element)), rule)
    return list(unique.values())


def rules_of(pairs: Sequence[RulePair], at: int) -> list[str]:
    """Return the rules of pairs for the first form (`at` 0) or the second, in table order."""
    return [name for name in POWER_OF_TWO_SCALE_RULES if name in {pair[at] for pair in pairs}]
