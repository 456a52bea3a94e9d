"""Orders of bytes that consumers ask for."""

from __future__ import annotations

import numpy as np

from mxcli.errors import UsageError
from mxcli.files.tensors import Array

TILE_ROWS, TILE_COLUMNS = 128, 4


def swizzle(scales: Array) -> Array:
    """Scales [rows, blocks] of one byte each, in the 128x4 order that block-scaled matrix products read.

    Padded with zeros to whole tiles; a flat uint8 array. Byte (r, c) goes to
    `((r // 128) * ceil(blocks / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4` (cuBLAS,
    1D block scaling factors layout).
    """
    if scales.ndim != 2 or scales.dtype.itemsize != 1:
        raise UsageError(f"scales of shape {list(scales.shape)} and type {scales.dtype}: needs two dimensions of bytes")
    rows, columns = scales.shape
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    padded = np.zeros((down * TILE_ROWS, across * TILE_COLUMNS), np.uint8)
    padded[:rows, :columns] = scales.view(np.uint8)
    return padded.reshape(down, 4, 32, across, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(tiles: Array, rows: int, columns: int) -> Array:
    """The uint8 scales [rows, columns] of an array in the 128x4 order, without its padding."""
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    flat = np.ascontiguousarray(tiles).reshape(-1).view(np.uint8)
    plain = flat.reshape(down, across, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(plain.reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns])
