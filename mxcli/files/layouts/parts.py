"""The parts of a quantized weight, one per stored tensor: rows that store and load its bytes.

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

    `store(quantized, dtype)` returns its bytes, as many as the entry has; `load(array, format, shape)` the fields of
    `Quantized` that an array read from the file holds, for a weight of that shape. With `adjusts` it holds none of
    them, but numbers that change the decoded values (`mxcli/files/layouts/adjusted.py`).
    """

    name: str
    store: Callable[[Quantized, str], Array]
    load: Callable[[Array, BlockFormat, Shape], Mapping[str, Any]]
    adjusts: bool = False


def _store_codes(quantized: Quantized, dtype: str) -> Array:
    return np.asarray(quantized.packed)


def _load_codes(array: Array, fmt: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    packed = array.reshape(-1).view(np.uint8)
    return {"packed": packed.reshape(*shape[:-1], packed_columns(fmt, shape[-1]))}


def _store_sixes(quantized: Quantized, dtype: str) -> Array:
    return spread_sixes(np.asarray(quantized.packed))


def _load_sixes(array: Array, fmt: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    return {"packed": pack_sixes(array.reshape(shape).view(np.uint8) & 0b111111)}


def _store_scales(quantized: Quantized, dtype: str) -> Array:
    if dtype == "BF16":
        return bfloat16_bits(quantized.scales)
    scales = np.asarray(quantized.scales)
    return scales.astype(np.float16) if dtype == "F16" else scales


def _load_scales(array: Array, fmt: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    if fmt.scale.bits == 32 and array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif fmt.scale.bits == 32:
        array = array.astype(np.float32, copy=False)
    return {"scales": array.reshape(grid_shape(fmt, shape))}


def _store_swizzled(quantized: Quantized, dtype: str) -> Array:
    scales = np.asarray(quantized.scales)
    return swizzle(scales.reshape(-1, scales.shape[-1]))


def _load_swizzled(array: Array, fmt: BlockFormat, shape: Shape) -> Mapping[str, Any]:
    grid = grid_shape(fmt, shape)
    _, height, width = folded(grid)
    return {"scales": unswizzle(array, height * (np.prod(grid[:-2], dtype=int)), width).reshape(grid)}


def _store_encode(quantized: Quantized, dtype: str) -> Array:
    return np.full((), quantized.tensor_encode, np.float32)


def _store_decode(quantized: Quantized, dtype: str) -> Array:
    return np.full((), quantized.tensor_scale, np.float32)


CODES = Part("codes", _store_codes, _load_codes)
"""Codes packed row by row, element 0 in the low bits."""
SPREAD_SIXES = Part("codes", _store_sixes, _load_sixes)
"""6-bit codes, each in the low bits of its own byte, for whole groups of four."""
SCALES = Part("scales", _store_scales, _load_scales)
"""One scale per block in the order of the grid of blocks; a scale must be exact in the entry's dtype."""
SWIZZLED_SCALES = Part("scales", _store_swizzled, _load_swizzled)
"""Scales in the 128x4 order of block-scaled matrix products, padded with zeros to whole tiles."""
ENCODE = Part("encode", _store_encode, lambda array, fmt, shape: {"tensor_encode": float(array.reshape(()))})
"""The tensor scale that values were multiplied by (compressed-tensors' global scale)."""
DECODE = Part("decode", _store_decode, lambda array, fmt, shape: {"tensor_scale": float(array.reshape(()))})
"""The tensor scale that scales back."""


def constant(value: float) -> Part:
    """Return the part of a constant, independent of the codes; it must be exact in the entry's dtype."""

    def store(quantized: Quantized, dtype: str) -> Array:
        number = np.full((), value, np.float32)
        return bfloat16_bits(number) if dtype == "BF16" else number

    return Part("constant", store, lambda array, fmt, shape: {})


def bfloat16_bits(scales: Array) -> Array:
    """Return the upper halves of binary32 values that are bfloat16 values."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "scales of this scheme are bfloat16 values"
    return (bits >> 16).astype(np.uint16)
