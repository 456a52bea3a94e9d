"""Grids of blocks over tensors, and the record of a quantized tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Stats

ROW, COLUMN, BOTH = "row", "column", "both"
"""Axes that blocks run along: the last dimension; the one before it (as rows of the tensor with both exchanged); or,
for
two results, each of them."""


def axes_of(axis: str | None) -> tuple[str | None, ...]:
    """Return the axes that a name stands for; None is the dimension that each layer sums over."""
    return (ROW, COLUMN) if axis == BOTH else (axis,)


def folded(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (batch, rows, columns): leading dimensions folded together, a vector as one row."""
    if len(shape) < 2:
        return 1, 1, shape[0] if shape else 1
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def grid_shape(row: BlockFormat, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor: its leading dimensions, then blocks down and blocks across, edges
    rounded
    up.

    A block that is the whole tensor has the grid (1, 1) for any shape.
    """
    rows, columns = row.block
    if rows is None and columns is None:
        return (1, 1)
    _, height, width = folded(shape)
    down = -(-height // (rows or max(height, 1)))
    across = -(-width // (columns or max(width, 1)))
    return (*shape[:-2], down, across)


def packed_columns(row: BlockFormat, columns: int) -> int:
    """Return the bytes of a packed row: whole bytes for 4-bit codes, groups of 3 bytes for 6-bit codes."""
    bits = row.element.stored_bits
    return {4: -(-columns // 2), 6: -(-columns // 4) * 3, 8: columns}[bits]


def stored_bytes(row: BlockFormat, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor's codes and scales."""
    codes = math.prod(shape[:-1]) * packed_columns(row, shape[-1] if shape else 1)
    scales = math.prod(grid_shape(row, shape)) * row.scale.bits // 8
    return codes + scales + (0 if row.tensor_scale is None else row.tensor_scale.bits // 8)


def divides(row: BlockFormat, shape: tuple[int, ...]) -> bool:
    """Return whether every block along the last dimension is whole. 2-D blocks of FP32 scales, or of codes of 8 bits,
    may have partial edges."""
    rows, columns = row.block
    if columns is None or ((rows or 1) > 1 and (row.scale.bits == 32 or row.element.stored_bits == 8)):
        return True
    _, height, width = folded(shape)
    return width % columns == 0 and height % (rows or 1) == 0


@dataclass(frozen=True, slots=True)
class PerBlock:
    """Arrays in the shape of the scale grid: amax (float32), decode (float32, what scales back), saturated and
    underflowed (int32 element counts), noise (float64 sum of squared errors)."""

    amax: Any
    decode: Any
    saturated: Any
    underflowed: Any
    noise: Any


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized tensor. Codes are packed row by row, element 0 in the low bits; scales are decode scales.

    packed: uint8 [..., packed columns]; scales: uint8 codes or float32, shape `grid_shape`; x ~ code value * scale *
    tensor_scale. `tensor_encode` is the producer's encode scale (1 without a tensor scale), which some recipes
    divide by instead. `stats` and `per_block` are None unless requested.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    packed: Any
    scales: Any
    tensor_scale: float | None
    tensor_encode: float
    stats: Stats | None
    per_block: PerBlock | None

    @property
    def format(self) -> BlockFormat:
        """The block format of the codes."""
        return self.scheme.format
