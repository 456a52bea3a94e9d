"""GGUF, as llama.cpp and transformers' loader of GGUF files read it.

Blocks hold codes and scales together; NVFP4's tensor scale is a separate tensor, `x.scale`. Names are those of the
file. Tensors of block types that are not among our formats (Q4_0, Q6_K, …) are decoded by the package gguf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxcli.errors import printable, together
from mxcli.files.directory import GGUF as KIND
from mxcli.files.gguf import SCALE, decode_blocks, is_decoded, shape_of_blocks
from mxcli.files.layouts.layout import (
    WEIGHT,
    Content,
    Entry,
    ForeignWeight,
    Layout,
    OnDisk,
    Unread,
    Weight,
    check_fit,
    matrix_refusal,
    weights_of,
)
from mxcli.files.layouts.parts import DECODE, Part
from mxcli.files.packing import halves, neighbours
from mxcli.files.tensors import Array, TensorInfo
from mxcli.numerics.blocks import Quantized, grid_shape, packed_columns
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.scheme import Rules, resolve

CHUNK_BLOCKS = 1 << 18
"""Blocks reordered at a time, to bound the memory for it."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type: its name, its file type, our formats for it, scales per block and values per scale.

    `format` is used if the file holds a tensor scale for the tensor, `alone` if not.
    """

    name: str
    file_type: int
    format: BlockFormat
    alone: BlockFormat
    scales: int
    values: int

    @property
    def elements(self) -> int:
        """Return the values of a block."""
        return self.scales * self.values

    @property
    def nbytes(self) -> int:
        """Return the bytes of a block."""
        return self.scales + self.elements // 2

    @property
    def part(self) -> Part:
        """Return the part that stores codes and scales of a weight as blocks."""
        return Part(self.name, self._store, self._load)

    def bytes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the bytes of a tensor."""
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

    def _load(self, array: Array, fmt: BlockFormat, shape: tuple[int, ...]) -> Mapping[str, Any]:
        blocks = array.reshape(-1, self.nbytes)
        codes = np.empty((len(blocks), self.elements // 2), np.uint8)
        for start in range(0, len(blocks), CHUNK_BLOCKS):
            part = slice(start, start + CHUNK_BLOCKS)
            paired = blocks[part, self.scales :].reshape(-1, self.scales, self.values // 2)
            codes[part] = neighbours(paired).reshape(-1, self.elements // 2)
        return {
            "packed": codes.reshape(*shape[:-1], packed_columns(fmt, shape[-1])),
            "scales": np.ascontiguousarray(blocks[:, : self.scales]).reshape(grid_shape(fmt, shape)),
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


_BY_NAME = {format.name: row for row in BLOCK_TYPES.values() for format in (row.format, row.alone)}


def _refusal(weight: Weight) -> str | None:
    row = BY_FORMAT.get(weight.format.name)
    if row is None:
        return f"it has no {weight.format.name}"
    if weight.scheme.nonfinite != "error":
        return "its readers read NaN scales as numbers; --nonfinite error excludes them"
    refusal = matrix_refusal(weight)
    if refusal is None and weight.shape[-1] % row.elements:
        return (
            f"it stores no padding, and {weight.shape[-1]} is not a multiple of {row.elements}, a block of {row.name}"
        )
    return refusal


def _contents(weight: Weight) -> tuple[Content, ...]:
    row = _BY_NAME[weight.format.name]
    blocks = Content(Entry(weight.name, "U8", row.bytes_shape(weight.shape), row.name), row.part)
    if weight.format.tensor_scale is None:
        return (blocks,)
    return (blocks, Content(Entry(_scale_name(weight.name), "F32", (1,)), DECODE))


def _scale_name(name: str) -> str:
    return name.removesuffix(WEIGHT) + SCALE


def _weights(disk: OnDisk) -> list[Weight]:
    def weight_of(name: str) -> Weight:
        info = disk.tensors[name]
        row = BLOCK_TYPES[info.block_type]
        format = row.format if _scale_name(name) in disk.tensors else row.alone
        shape = shape_of_blocks(info.block_type, info.shape)
        weight = Weight(name, shape, resolve(format, Rules(dialect=_DECODING[row.name])), _dtype(disk))
        check_fit(_contents(weight), disk.tensors, row.name)
        return weight

    return weights_of((name for name, info in disk.tensors.items() if info.block_type in BLOCK_TYPES), weight_of)


_DECODING = {"MXFP4": "gguf", "NVFP4": "modelopt"}
"""Dialects that scale back by `codes * (scale * tensor scale)`."""


def _foreign(disk: OnDisk) -> list[ForeignWeight]:
    """Return every tensor of a block type that the package decodes. Raises Unread for types that it does not."""
    others = {name: info for name, info in disk.tensors.items() if info.block_type not in ("", *BLOCK_TYPES)}
    unknown = sorted(kind for kind in {info.block_type for info in others.values()} if not is_decoded(kind))
    if unknown:
        problems = [
            f"{printable(name)}: the installed package gguf does not decode {info.block_type}."
            for name, info in others.items()
            if info.block_type in unknown
        ]
        raise together(Unread, "Tensors of GGUF types that cannot be decoded", problems)
    return [_decoded(info, _dtype(disk)) for info in others.values()]


def _decoded(info: TensorInfo, dtype: str) -> ForeignWeight:
    plain = Entry(info.name, dtype, shape_of_blocks(info.block_type, info.shape))
    return ForeignWeight(plain, lambda blocks, dtype: decode_blocks(blocks, info.block_type, dtype))


def _dtype(disk: OnDisk) -> str:
    """Return the dtype in config.json, else the one GGUF decodes to."""
    return disk.stated_dtype or "F32"


GGUF = Layout(
    name="gguf",
    meaning="one GGUF file for llama.cpp: codes and scales in blocks, the model's settings and tokenizer in its header",
    source="gguf 0.19, transformers 5.24, llama.cpp b11549 (run)",
    formats=tuple(BY_FORMAT),
    refusal=_refusal,
    contents=_contents,
    settings=lambda weights, ignored: {},
    weights=_weights,
    foreign=_foreign,
    dialects=("gguf",),
    stack_names=lambda config: "{module}.experts.{part}",
    kind=KIND,
)


def file_type(weights: Sequence[Weight]) -> int:
    """Return the file type number for the format of most of the weights."""
    formats: list[BlockFormat] = [weight.format for weight in weights]
    return max(BY_FORMAT.values(), key=lambda row: formats.count(row.format)).file_type
