"""Element roundings and recipes of two forms of a weight, named by how their codes and tensor scales differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np

from mxcli.backends import unpacked
from mxcli.files.tensors import Array
from mxcli.flows.verify.diff_blocks import RECIPROCAL, signed_ranks
from mxcli.flows.verify.weight_summary import slabs
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES, TensorScaleFormula
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, ElementRounding
from mxcli.numerics.scheme import mantissa_rules

ENOUGH = 32
"""Differing codes from which on every kind of difference that two roundings have is expected to be among them."""
_TIES = 0.1
"""The largest share of codes that roundings which only treat ties differently may differ in."""

Kind = tuple[int, int]
"""A step from A's to B's magnitude (1 or -1), and the parity of the lower one of both."""
NamePair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CodeSteps:
    """Elements of the blocks with equal scales, of them those one code apart by kind, and those farther apart."""

    elements: int
    kinds: Counter[Kind]
    farther: int

    def __add__(self, other: CodeSteps) -> CodeSteps:
        return CodeSteps(self.elements + other.elements, self.kinds + other.kinds, self.farther + other.farther)

    @property
    def differing(self) -> int:
        """The number of codes that are one step apart."""
        return self.kinds.total()

    @property
    def pairs(self) -> list[NamePair]:
        """The roundings of A and B that explain all differences; none where some codes are farther apart."""
        if self.farther or not self.kinds:
            return []
        is_common, seen = self.differing > _TIES * self.elements, set(self.kinds)
        found = []
        for one, other in product(ELEMENT_ROUNDINGS.values(), repeat=2):
            kinds, at_ties = _differences(one, other)
            complete = seen == kinds if self.differing >= ENOUGH else seen <= kinds
            if kinds and complete and is_common != at_ties:
                found.append((one.name, other.name))
        return found


NO_STEPS = CodeSteps(0, Counter(), 0)


def _differences(one: ElementRounding, other: ElementRounding) -> tuple[set[Kind], bool]:
    """Return the kinds of differences of two roundings, and whether only ties differ."""
    if one.is_random or other.is_random:
        return ({(step, parity) for step in (-1, 1) for parity in (0, 1)} if one != other else set()), False
    kinds = set()
    for fraction, parity in product((0.25, 0.5, 0.75), (0, 1)):
        step = _goes_up(other, fraction, parity) - _goes_up(one, fraction, parity)
        kinds |= {(step, parity)} if step else set()
    return kinds, one.above == other.above


def _goes_up(rounding: ElementRounding, fraction: float, parity: int) -> bool:
    at_tie = fraction == 0.5 and bool((parity & rounding.half_if) or rounding.half_always)
    return fraction > rounding.above or at_tie


def code_steps(a: Quantized, b: Quantized) -> CodeSteps:
    """Return how codes differ in the blocks of two forms that have equal scales."""
    ranks, steps = signed_ranks(a), NO_STEPS
    for (one, _), (other, _) in zip(slabs(a), slabs(b), strict=True):
        x, y = ranks[unpacked(one)], ranks[unpacked(other)]
        same = _spread(one.scales == other.scales, a.format, x.shape)
        x, y = x[same], y[same]
        differing = x != y
        low, high = np.abs(x[differing]), np.abs(y[differing])
        apart = (np.abs(high - low) == 1) & (x[differing] * y[differing] >= 0)
        pairs = zip((high - low)[apart].tolist(), (np.minimum(low, high)[apart] & 1).tolist(), strict=True)
        steps += CodeSteps(x.size, Counter(pairs), int(np.count_nonzero(~apart)))
    return steps


def _spread(grid: Array, fmt: BlockFormat, shape: tuple[int, ...]) -> Array:
    """Return a value per element of one per block."""
    height, width = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    rows, columns = fmt.block
    tall = np.repeat(grid.reshape(*shape[:-2], *grid.shape[-2:]), rows or max(height, 1), -2)[..., :height, :]
    wide: Array = np.repeat(tall, columns or max(width, 1), -1)[..., :width].reshape(shape)
    return wide


def recipes_of(name: str, scales: Iterable[tuple[float, float]]) -> list[tuple[list[str], list[str]]]:
    """Return the recipes of A and B, for a format's name, whose tensor scales have the ratio that all pairs of decode
    scales have; nothing if these have several ratios or one that no recipes have."""
    ratios = [b / a for a, b in scales if 0 < a < math.inf and 0 < b < math.inf]
    if not ratios or max(ratios) > min(ratios) * (1 + RECIPROCAL):
        return []
    fmt = find_format(name)
    by_limit: dict[float, list[str]] = {}
    for rule in mantissa_rules(fmt):
        row = MANTISSA_SCALE_RULES[rule]
        if row.tensor_step not in (TensorScaleFormula.NONE, TensorScaleFormula.ENCODE_BF16):
            by_limit.setdefault(math.prod(row.reach(fmt.element, fmt.scale)), []).append(rule)
    return [
        (one, other)
        for (first, one), (second, other) in product(by_limit.items(), repeat=2)
        if first != second and math.isclose(first / second, ratios[0], rel_tol=4 * RECIPROCAL)
    ]
