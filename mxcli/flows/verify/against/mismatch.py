"""The place and bytes in which a stored weight differs from what a rule makes of its source."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.tensors import Array
from mxcli.flows.verify.against.provenance import differing_blocks, same_scales, stored_codes
from mxcli.flows.verify.weight_summary import blocks_of
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import Quantized, folded
from mxcli.numerics.floats import FP32

_PARTS = {"encode": "tensor scale", "decode": "tensor scale"}
"""The words for parts of a weight, where they are not their names."""
_SHOWN = 8
"""Bytes shown of a difference."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The tensor where a weight first differs from its rule, the difference in words, the first bytes expected, and
    whether codes that only fill up the bytes of a row differ."""

    where: str
    found: str
    expected: str
    has_padding: bool


def mismatch_of(checkpoint: Checkpoint, stored: StoredWeight, q: Quantized, rule: Quantized) -> Mismatch:
    """Return how the stored bytes of a weight differ from those of a rule."""
    where, parts, first, expected = stored.contents[0].entry.name, [], "", "the same"
    dtypes = {content.holds.name: content.entry.dtype for content in stored.contents}
    rule = _storable(rule, dtypes.get("scales", ""))
    repaired, block = _with_first(q, rule)
    for content in (each for each in stored.contents if not each.holds.adjusts):
        ours = _bytes(read(checkpoint, checkpoint.tensors[content.entry.name]))
        theirs = _bytes(content.of(rule))
        if ours.size != theirs.size or np.array_equal(ours, theirs):
            continue
        differing = np.flatnonzero(ours != theirs)
        parts.append(f"{_PARTS.get(content.holds.name, content.holds.name)} {len(differing):,} of {ours.size:,} bytes")
        if block is not None:
            differing = np.flatnonzero(ours != _bytes(content.of(repaired)))
        if not first and differing.size:
            where, begin = content.entry.name, int(differing[0])
            end = min(begin + _SHOWN, ours.size)
            first = f"; bytes {begin:,} to {end - 1:,} are {ours[begin:end].tobytes().hex()}"
            expected = theirs[begin:end].tobytes().hex()
    blocks, place = differing_blocks(q, rule), ""
    if block is not None:
        place = f"; {np.count_nonzero(blocks):,} of {blocks.size:,} blocks, the first {_block_place(block, q)}"
    columns = q.shape[-1] if q.shape else 1
    padding = stored_codes(q)[..., columns:] != stored_codes(rule)[..., columns:]
    filling = "; codes that fill up the bytes of a row are not 0" if padding.any() else ""
    return Mismatch(where, f"{', '.join(parts)}{place}{filling}{first}", expected, bool(padding.any()))


def _with_first(q: Quantized, rule: Quantized) -> tuple[Quantized, Array | None]:
    """Return a weight with the first differing byte of its codes (else scale of a block) as by the rule, and the grid
    with the block of it marked; None if only the tensor scale differs."""
    codes = stored_codes(q) != stored_codes(rule)
    if codes.any():
        first = np.zeros_like(codes)
        first.reshape(-1)[int(np.argmax(codes))] = True
        return replace(q, packed=_first_of(q.packed, rule.packed)), blocks_of(first, q.format.block)
    scales = _first_of(q.scales, rule.scales)
    if same_scales(scales, q.scales):
        return q, None
    marked = differing_blocks(q, replace(q, scales=scales))
    return replace(q, scales=scales), marked


def _first_of(ours: Array, theirs: Array) -> Array:
    """Return an array with its first differing value from the other."""
    mixed, bits = np.array(ours, order="C"), np.dtype(f"u{ours.dtype.itemsize}")
    one, other = (np.ascontiguousarray(each).reshape(-1).view(bits) for each in (mixed, theirs))
    differing = np.flatnonzero(one != other)[:1]
    one[differing] = other[differing]
    return mixed


def _storable(rule: Quantized, dtype: str) -> Quantized:
    """Return a weight whose scales are values of the dtype that they are stored in."""
    if dtype != "BF16" or rule.format.scale is not FP32:
        return rule
    bits = np.ascontiguousarray(rule.scales).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return replace(rule, scales=rounded.astype(np.uint32).view(np.float32))


def _bytes(array: Array) -> Array:
    flat: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat


def _block_place(blocks: Array, q: Quantized) -> str:
    """Return the place of the first marked block in words, in rows and columns of the weight as quantized."""
    height, width = q.format.block
    _, rows, columns = folded(q.shape)
    at = np.unravel_index(int(np.argmax(blocks)), blocks.shape)
    row, column = int(at[-2]) * (height or rows), int(at[-1]) * (width or columns)
    index = f" of [{', '.join(str(int(part)) for part in at[:-2])}]" if len(at) > 2 else ""
    down = f"row {row:,}" if (height or rows) == 1 else f"rows {row:,} to {min(row + (height or rows), rows) - 1:,}"
    return f"{down}, columns {column:,} to {min(column + (width or columns), columns) - 1:,}{index}"
