"""What one stored tensor holds of a quantized weight, in which order of bytes: rows that store it and load it.

Bytes are only renamed and reordered here; no value is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxcli.files.packing import pack_sixes, spread_sixes, swizzle, unswizzle
from mxcli.files.tensors import Array
from mxcli.numerics.blocks import Quantized, folded, grid_shape, packed_columns
from mxcli.numerics.formats import BlockFormat

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a quantized weight as one tensor.

    `store(quantized, dtype)` gives its bytes, an array of as many bytes as the entry has; `load(array, format, shape)`
    the fields of `Quantized` that an array read from the file says, for a weight of that shape.
    """

    name: str
    store: Callable[[Quantized, str], Array]
    load: Callable[[Array, BlockFormat, Shape], Mapping[str, Any]]


def _codes(quantized: Quantized, dtype: str) -> Array:
    return np.asarray(quantized.packed)


def _packed(array: Array, row: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    packed = array.reshape(-1).view(np.uint8)
    return {"packed": packed.reshape(*shape[:-1], packed_columns(row, shape[-1]))}


def _spread(quantized: Quantized, dtype: str) -> Array:
    return spread_sixes(np.asarray(quantized.packed))


def _gathered(array: Array, row: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    return {"packed": pack_sixes(array.reshape(shape).view(np.uint8) & 0b111111)}


def _scales(quantized: Quantized, dtype: str) -> Array:
    return bfloat16_bits(quantized.scales) if dtype == "BF16" else np.asarray(quantized.scales)


def _grid(array: Array, row: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    if row.scale.bits == 32 and array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return {"scales": array.reshape(grid_shape(row, shape))}


def _swizzled(quantized: Quantized, dtype: str) -> Array:
    scales = np.asarray(quantized.scales)
    return swizzle(scales.reshape(-1, scales.shape[-1]))


def _unswizzled(array: Array, row: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    grid = grid_shape(row, shape)
    _, height, width = folded(grid)
    return {"scales": unswizzle(array, height * (np.prod(grid[:-2], dtype=int)), width).reshape(grid)}


def _encode(quantized: Quantized, dtype: str) -> Array:
    return np.full((), quantized.tensor_encode, np.float32)


def _decode(quantized: Quantized, dtype: str) -> Array:
    return np.full((), quantized.tensor_scale, np.float32)


CODES = Part("codes", _codes, _packed)
"""Codes packed row by row, element 0 in the low bits."""
SPREAD_SIXES = Part("codes", _spread, _gathered)
"""Codes of 6 bits, each in the low bits of a byte of its own, for whole groups of four."""
SCALES = Part("scales", _scales, _grid)
"""One scale per block in the order of the grid of blocks; a scale must be exact in the entry's dtype."""
SWIZZLED_SCALES = Part("scales", _swizzled, _unswizzled)
"""The same in the 128x4 order of block-scaled matrix products, padded with zeros to whole tiles."""
ENCODE = Part("encode", _encode, lambda array, row, shape: {"tensor_encode": float(array.reshape(()))})
"""The tensor scale that was multiplied by (compressed-tensors' global scale)."""
DECODE = Part("decode", _decode, lambda array, row, shape: {"tensor_scale": float(array.reshape(()))})
"""The tensor scale that scales back."""


def constant(value: float) -> Part:
    """A number known beforehand, which says nothing of the codes; it must be exact in the entry's dtype."""

    def store(quantized: Quantized, dtype: str) -> Array:
        number = np.full((), value, np.float32)
        return bfloat16_bits(number) if dtype == "BF16" else number

    return Part("constant", store, lambda array, row, shape: {})


def bfloat16_bits(scales: Array) -> Array:
    """The upper halves of binary32 values that are bfloat16 values."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "scales of this recipe are bfloat16 values"
    return (bits >> 16).astype(np.uint16)
