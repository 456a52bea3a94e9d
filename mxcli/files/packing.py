"""Byte orders of codes and scales that consumers require."""

from __future__ import annotations

import numpy as np

from mxcli.errors import UsageError
from mxcli.files.tensors import Array

TILE_ROWS, TILE_COLUMNS = 128, 4


def swizzle(scales: Array) -> Array:
    """Reorder one-byte scales [rows, blocks] into the 128x4 order that block-scaled matrix products read.

    The result is padded with zeros to whole tiles: a flat uint8 array. Byte (r, c) goes to `((r // 128) * ceil(blocks /
    4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4` (cuBLAS, 1D block scaling factors layout).
    """
    if scales.ndim != 2 or scales.dtype.itemsize != 1:
        raise UsageError(f"scales of shape {list(scales.shape)} and type {scales.dtype}: needs two dimensions of bytes")
    rows, columns = scales.shape
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    padded = np.zeros((down * TILE_ROWS, across * TILE_COLUMNS), np.uint8)
    padded[:rows, :columns] = scales.view(np.uint8)
    return padded.reshape(down, 4, 32, across, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(tiles: Array, rows: int, columns: int) -> Array:
    """Return the uint8 scales [rows, columns] of an array in the 128x4 order, without its padding."""
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    flat = np.ascontiguousarray(tiles).reshape(-1).view(np.uint8)
    plain = flat.reshape(down, across, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(plain.reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns])


def spread_sixes(packed: Array) -> Array:
    """Unpack 6-bit codes, four in three bytes [..., 3n], to one per byte, uint8 [..., 4n]; the first code is in the low
    bits."""
    first, second, third = (packed[..., at::3] for at in range(3))
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] // 3, 4), np.uint8)
    codes[..., 0] = first & 0b111111
    codes[..., 1] = first >> 6 | (second & 0b1111) << 2
    codes[..., 2] = second >> 4 | (third & 0b11) << 4
    codes[..., 3] = third >> 2
    return codes.reshape(*packed.shape[:-1], -1)


def pack_sixes(codes: Array) -> Array:
    """Invert `spread_sixes`; the two upper bits of each byte must be zero."""
    first, second, third, fourth = (codes[..., at::4] for at in range(4))
    packed = np.empty((*codes.shape[:-1], codes.shape[-1] // 4, 3), np.uint8)
    packed[..., 0] = first | second << 6
    packed[..., 1] = second >> 2 | third << 4
    packed[..., 2] = third >> 4 | fourth << 2
    return packed.reshape(*codes.shape[:-1], -1)


def halves(neighbours: Array) -> Array:
    """Pack 4-bit codes differently along the last dimension: byte j goes from elements 2j and 2j + 1 to elements j and
    j + n of 2n, the lower-numbered one in the low bits both times."""
    first, second = np.split(neighbours, 2, axis=-1)
    paired = np.empty_like(neighbours)
    paired[..., 0::2] = first & 0b1111 | second << 4
    paired[..., 1::2] = first >> 4 | second & 0b1111_0000
    return paired


def neighbours(halves: Array) -> Array:
    """Invert `halves`."""
    even, odd = halves[..., 0::2], halves[..., 1::2]
    return np.concatenate([even & 0b1111 | odd << 4, even >> 4 | odd & 0b1111_0000], axis=-1)
