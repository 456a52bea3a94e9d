"""What is known of a quantized weight when all of it has been read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from mxcli.backends import unpacked
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import quantized_from
from mxcli.files.reading import release_pages
from mxcli.files.tensors import Array
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import Quantized, folded
from mxcli.numerics.floats import FP32, FloatFormat

SLAB_ELEMENTS = 1 << 22
"""Elements looked at together, about."""
NOT_FINITE = 255
"""The rank of codes that are NaN or infinite."""
_NARROW = 64
Block = tuple[int | None, int | None]


def scale_values(row: FloatFormat, scales: Array) -> Array:
    """Scale as binary64."""
    if row is FP32:
        return np.asarray(scales, np.float64)
    values: Array = _values(row)[scales]
    return values


@cache
def _values(row: FloatFormat) -> Array:
    """Return by code of 8 bits its value."""
    return np.asarray([row.value(code) for code in range(256)])


@cache
def magnitudes(element: FloatFormat) -> Array:
    """Return the finite magnitudes of an element format, rising."""
    values = [abs(element.value(code)) for code in range(1 << element.bits)]
    return np.asarray(sorted({value for value in values if math.isfinite(value)}))


@cache
def magnitude_ranks(element: FloatFormat) -> Array:
    """Return by stored code the place of its magnitude among the finite ones, or NOT_FINITE."""
    places = {value: place for place, value in enumerate(magnitudes(element).tolist())}
    used = (1 << element.bits) - 1
    return np.asarray([places.get(abs(element.value(code & used)), NOT_FINITE) for code in range(256)], np.uint8)


def slabs(q: Quantized) -> Iterator[tuple[Quantized, tuple[int, slice]]]:
    """Yield the weight in parts of whole blocks, each with where it lies in the folded grid: batch index and rows of
    blocks.

    Parts of a weight under one scale all lie at the same place.
    """
    batch, rows, columns = folded(q.shape)
    whole = q.format.block == (None, None)
    block = 1 if whole else min(q.format.block[0] or max(rows, 1), max(rows, 1))
    step = max(SLAB_ELEMENTS // max(columns * block, 1), 1) * block
    packed, scales = q.packed.reshape(batch, rows, q.packed.shape[-1]), grid_of(q)
    for index in range(batch):
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            place, at = (0, slice(0, 1)) if whole else (index, slice(begin // block, -(-end // block)))
            part = replace(q, shape=(end - begin, columns), packed=packed[index, begin:end], scales=scales[place, at])
            yield part, (place, at)


def grid_of(q: Quantized) -> Array:
    """Return the scales as [batch, blocks down, blocks across]."""
    scales: Array = q.scales.reshape(math.prod(q.scales.shape[:-2]), *q.scales.shape[-2:])
    return scales


def ranks_by_block(q: Quantized) -> tuple[Array, int]:
    """Return the rank of the largest finite magnitude of each block, in the folded grid, and how many codes are not
    finite."""
    ranks = np.zeros(grid_of(q).shape, np.uint8)
    with_nan, bad = bool((magnitude_ranks(q.format.element) == NOT_FINITE).any()), 0
    for part, (index, at) in slabs(q):
        units, across = _pairs_ranked(part)
        if with_nan:
            bad += int(np.count_nonzero(units == NOT_FINITE))
            units = np.where(units == NOT_FINITE, 0, units)
        np.maximum(ranks[index, at], _by_block(units, part.format.block, across), out=ranks[index, at])
    return ranks, bad


def between_by_block(q: Quantized) -> Array:
    """Return which blocks have a code that is finite, not zero, and not the largest, in the folded grid."""
    found = np.zeros(grid_of(q).shape, bool)
    top = len(magnitudes(q.format.element)) - 1
    for part, (index, at) in slabs(q):
        ranks = _ranked(part)
        found[index, at] |= blocks_of((ranks > 0) & (ranks < top), part.format.block)
    return found


def blocks_of(differing: Array, block: Block) -> Array:
    """Return which blocks of a tensor have an element that is marked, in the shape of its grid."""
    marks = np.ascontiguousarray(differing).view(np.uint8).reshape(folded(differing.shape))
    if block == (None, None):
        whole: Array = _by_block(marks.reshape(-1, marks.shape[-1]), block, marks.shape[-1]) > 0
        return whole
    grids = np.stack([_by_block(matrix, block, block[1] or marks.shape[-1]) for matrix in marks])
    found: Array = grids.reshape(*differing.shape[:-2], *grids.shape[1:]) > 0
    return found


@cache
def _pair_ranks(element: FloatFormat) -> Array:
    """Return by byte of two codes the larger of their ranks."""
    ranks = magnitude_ranks(element)
    pairs = np.arange(256)
    larger: Array = np.maximum(ranks[pairs & 15], ranks[pairs >> 4])
    return larger


def _pairs_ranked(part: Quantized) -> tuple[Array, int]:
    """Rank of the codes of a matrix, of 4-bit codes the larger of each pair, and how many a block has across."""
    row = part.format
    across = row.block[1] or part.shape[-1]
    if row.element.stored_bits == 4 and across % 2 == 0:
        pairs: Array = _pair_ranks(row.element)[part.packed]
        return pairs, across // 2
    return _ranked(part), across


def _ranked(part: Quantized) -> Array:
    ranks: Array = magnitude_ranks(part.format.element)[unpacked(part)]
    return ranks


def _by_block(units: Array, block: Block, across: int) -> Array:
    """Return the largest unit of each block of a matrix, edges completed with zeros."""
    rows, columns = units.shape
    across, down = max(across, 1), min(block[0] or rows, rows)
    short, narrow = -rows % max(down, 1), -columns % across
    if short or narrow:
        units = np.pad(units, ((0, short), (0, narrow)))
    if down > 1:
        units = units.reshape(-1, down, units.shape[1]).max(axis=1)
    parts = units.reshape(units.shape[0], -1, across)
    if across > _NARROW:
        widest: Array = parts.max(axis=-1)
        return widest
    # Narrow blocks: column by column is three times as fast as a reduction over them.
    largest: Array = parts[..., 0].copy()
    for at in range(1, across):
        np.maximum(largest, parts[..., at], out=largest)
    return largest


_LOOK = 1 << 12
"""Units of codes that are looked at before all are, to see whether they are one code."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A weight and, over the grid of its blocks, its scales as stored and by value and the largest finite code value.

    `lost` counts blocks with scale 0 whose codes are not all zero or the largest: a scale that rounded to zero leaves
    no others. `emptied` counts the other blocks with scale 0 that have a code. `code` is the one code that all elements
    have; None where they have several.
    """

    stored: StoredWeight
    scales: Array
    scale_values: Array
    code_max: Array
    not_finite_codes: int
    lost: int
    emptied: int
    code: int | None
    tensor_scale: float | None
    tensor_encode: float

    @property
    def name(self) -> str:
        """The plain name of the weight."""
        return self.stored.weight.name

    @property
    def decode(self) -> float:
        """The factor of the whole tensor that scales back; 1 where there is none."""
        return decode_scale(self.tensor_scale, self.tensor_encode)

    @property
    def amax(self) -> float:
        """The largest magnitude that codes and scales stand for, NaN scales left out."""
        return _largest(self.code_max * self.scale_values) * self.decode

    @property
    def amax_inverted(self) -> float:
        """The same with every scale that could be stored the other way round inverted: the tensor's, or each block's
        where it is binary32; that of other scales is `amax`."""
        if self.tensor_scale is not None or self.tensor_encode != 1.0:
            return self.amax / self.decode**2 if self.decode else math.inf
        if self.stored.weight.format.scale is not FP32:
            return self.amax
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return _largest(self.code_max / self.scale_values)


@dataclass(frozen=True, slots=True)
class Summary:
    """What is kept of the facts of a weight: the one `scale` of the whole tensor, its tensor scale or that of a format
    with a single scale (NaN: it has none), and the largest magnitude."""

    scale: float
    amax: float


def facts_of(checkpoint: Checkpoint, stored: StoredWeight) -> Facts:
    """Return the facts of a weight; reads all of it."""
    arrays = [read(checkpoint, checkpoint.tensors[content.entry.name]) for content in stored.contents]
    facts = _facts(stored, quantized_from(stored.weight, list(zip(stored.contents, arrays, strict=True))))
    for array in arrays:
        release_pages(array)
    return facts


def summary_of(facts: Facts) -> Summary:
    """Return what is kept of facts."""
    row = facts.stored.weight.format
    scale = math.nan
    if row.tensor_scale is not None:
        scale = facts.decode
    elif row.block == (None, None):
        scale = float(facts.scale_values.reshape(-1)[0])
    return Summary(scale, facts.amax)


def decode_scale(tensor_scale: float | None, tensor_encode: float) -> float:
    """Return the factor that scales a whole tensor back, from whichever of its two directions is known."""
    if tensor_scale is not None:
        return tensor_scale
    return 1.0 / tensor_encode if tensor_encode else math.inf


def _facts(stored: StoredWeight, q: Quantized) -> Facts:
    row = stored.weight.format
    values = scale_values(row.scale, q.scales)
    ranks, not_finite = ranks_by_block(q)
    zero = (values == 0).reshape(ranks.shape)
    mixed = between_by_block(q) if zero.any() else np.zeros_like(zero)
    return Facts(
        stored,
        q.scales,
        values,
        magnitudes(row.element)[ranks].reshape(values.shape),
        not_finite,
        lost=int(np.count_nonzero(zero & mixed)),
        emptied=int(np.count_nonzero(zero & ~mixed & (ranks > 0))),
        code=_only_code(q),
        tensor_scale=q.tensor_scale,
        tensor_encode=q.tensor_encode,
    )


def _largest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _only_code(q: Quantized) -> int | None:
    """Return the code that every element has; None where there are several, or fewer than two elements."""
    size = {4: 1, 6: 3, 8: 1}[q.format.element.stored_bits]
    if math.prod(q.shape) < 2 or q.packed.size % size:
        return None
    units = q.packed.reshape(-1, size)
    if not (units[:_LOOK] == units[0]).all() or not (units == units[0]).all():
        return None
    first = unpacked(replace(q, shape=(1, q.shape[-1]), packed=q.packed.reshape(-1, q.packed.shape[-1])[:1]))[0]
    return int(first[0]) if (first == first[0]).all() else None
