"""How two quantized forms of one weight differ: in codes, in scales, in the tensor scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mxcli.backends import unpacked
from mxcli.files.tensors import Array
from mxcli.flows.soundness.blocks import blocks_of, magnitude_ranks, scale_values, slabs
from mxcli.flows.soundness.facts import decode_scale
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import FP32

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
        """Whether nothing differs."""
        return not self.codes and not self.scales and self.tensor_scales is None


def block_difference(a: Quantized, b: Quantized) -> BlockDifference:
    """What differs between two weights of one format and shape."""
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
    """By code the place of its value among those of its sign, negative below zero; both zeros are 0."""
    element = q.format.element
    ranks = magnitude_ranks(element).astype(np.int64)
    values = np.asarray([element.value(code & ((1 << element.bits) - 1)) for code in range(256)])
    return np.where(values < 0, -ranks, ranks)


def _scale_steps(a: Quantized, b: Quantized) -> tuple[dict[int, int], int]:
    """Scales that differ by the steps they do so, and how many of which one is NaN."""
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
