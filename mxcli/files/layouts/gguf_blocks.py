"""Blocks of GGUF: scales and codes of a few values side by side, as rows.

A block of MXFP4 is an E8M0 byte and 16 bytes of codes for 32 values, one of NVFP4 four E4M3 bytes and 32 bytes for 64:
within the values of one scale, byte j holds the first half's element j in the low bits and the second half's in the
high ones. Both decode as the formats do; but a NaN scale means a number to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxcli.files.layouts.parts import Part
from mxcli.files.packing import halves, neighbours
from mxcli.files.tensors import Array
from mxcli.numerics.blocks import Quantized, grid_shape, packed_columns
from mxcli.numerics.formats import BlockFormat, find_format

CHUNK_BLOCKS = 1 << 18
"""Blocks reordered at a time, so that it takes little memory of its own."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type: its name, its file type, our formats that it holds, scales of a block and values of a scale.

    `format` is taken where a tensor scale lies beside the tensor, `alone` where none does.
    """

    name: str
    file_type: int
    format: BlockFormat
    alone: BlockFormat
    scales: int
    values: int

    @property
    def elements(self) -> int:
        """Values of a block."""
        return self.scales * self.values

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.scales + self.elements // 2

    @property
    def part(self) -> Part:
        """Codes and scales of a weight as blocks."""
        return Part(self.name, self._store, self._load)

    def bytes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the bytes of a tensor."""
        return (*shape[:-1], shape[-1] // self.elements * self.nbytes)

    def _store(self, quantized: Quantized, dtype: str) -> Array:
        scales = np.asarray(quantized.scales).reshape(-1, self.scales)
        codes = np.asarray(quantized.packed).reshape(-1, self.scales, self.values // 2)
        blocks = np.empty((len(scales), self.nbytes), np.uint8)
        blocks[:, : self.scales] = scales
        for start in range(0, len(scales), CHUNK_BLOCKS):
            part = slice(start, start + CHUNK_BLOCKS)
            blocks[part, self.scales :] = halves(codes[part]).reshape(-1, self.elements // 2)
        return blocks

    def _load(self, array: Array, row: BlockFormat, shape: tuple[int, ...]) -> Mapping[str, Any]:
        blocks = array.reshape(-1, self.nbytes)
        codes = np.empty((len(blocks), self.elements // 2), np.uint8)
        for start in range(0, len(blocks), CHUNK_BLOCKS):
            part = slice(start, start + CHUNK_BLOCKS)
            paired = blocks[part, self.scales :].reshape(-1, self.scales, self.values // 2)
            codes[part] = neighbours(paired).reshape(-1, self.elements // 2)
        return {
            "packed": codes.reshape(*shape[:-1], packed_columns(row, shape[-1])),
            "scales": np.ascontiguousarray(blocks[:, : self.scales]).reshape(grid_shape(row, shape)),
        }


_MXFP4, _NVFP4 = find_format("mxfp4"), find_format("nvfp4")
BLOCK_TYPES: dict[str, BlockType] = {
    row.name: row
    for row in (
        BlockType("MXFP4", 38, _MXFP4, _MXFP4, scales=1, values=32),
        BlockType("NVFP4", 39, _NVFP4, find_format("e2m1:e4m3:1x16"), scales=4, values=16),
    )
}
BY_FORMAT = {row.format.name: row for row in BLOCK_TYPES.values()}
