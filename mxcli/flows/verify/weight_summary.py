"""Summaries of quantized weights over the grids of their blocks, and the ranks of codes that they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter

import numpy as np

from mxcli.backends import unpacked
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import quantized_from
from mxcli.files.tensors import Array
from mxcli.flows.verify.profile import Profile, profile_of
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import Quantized, folded
from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.formats import BlockFormat

SLAB_ELEMENTS = 1 << 22
"""Approximate number of elements processed at a time."""
_CACHED_ELEMENTS = 1 << 17
"""The number of elements whose ranks the memory next to a processor holds."""
NOT_FINITE = 255
"""The rank of codes that are NaN or infinite."""
_NARROW = 64
Block = tuple[int | None, int | None]


def scale_values(fmt: FloatFormat, scales: Array) -> Array:
    """Return scales as binary64."""
    if fmt is FP32:
        return np.asarray(scales, np.float64)
    values: Array = _values(fmt).take(scales)
    return values


def scales_that(are: Callable[[Array], Array], fmt: FloatFormat, scales: Array) -> Array:
    """Return which scales have values of a kind: mostly none, as the least and the largest code show."""
    if fmt is FP32:
        return are(scale_values(fmt, scales))
    codes = are(_values(fmt))
    if not scales.size or not codes[scales.min() : int(scales.max()) + 1].any():
        return np.zeros(scales.shape, bool)
    marked: Array = codes.take(scales)
    return marked


@cache
def _values(fmt: FloatFormat) -> Array:
    """Return the value of each 8-bit code."""
    return np.asarray([fmt.value(code) for code in range(256)])


@cache
def magnitudes(element: FloatFormat) -> Array:
    """Return the finite magnitudes of an element format, ascending."""
    values = [abs(element.value(code)) for code in range(1 << element.bits)]
    return np.asarray(sorted({value for value in values if math.isfinite(value)}))


@cache
def magnitude_ranks(element: FloatFormat) -> Array:
    """Return the rank of each stored code's magnitude among the finite ones, or NOT_FINITE."""
    places = {value: place for place, value in enumerate(magnitudes(element).tolist())}
    used = (1 << element.bits) - 1
    return np.asarray([places.get(abs(element.value(code & used)), NOT_FINITE) for code in range(256)], np.uint8)


def slabs(q: Quantized, elements: int = SLAB_ELEMENTS) -> Iterator[tuple[Quantized, tuple[int, slice]]]:
    """Yield a weight in parts of whole blocks with about that number of elements, each with its place in the folded
    grid: batch index and rows of blocks.

    Parts of a weight with one scale all have the same place.
    """
    batch, rows, columns = folded(q.shape)
    whole = q.format.block == (None, None)
    block = 1 if whole else min(q.format.block[0] or max(rows, 1), max(rows, 1))
    height = max(elements // max(columns * block, 1), 1) * block
    packed, scales = q.packed.reshape(batch, rows, q.packed.shape[-1]), grid_of(q)
    for index in range(batch):
        for begin in range(0, rows, height):
            end = min(begin + height, rows)
            place, at = (0, slice(0, 1)) if whole else (index, slice(begin // block, -(-end // block)))
            part = replace(q, shape=(end - begin, columns), packed=packed[index, begin:end], scales=scales[place, at])
            yield part, (place, at)


def grid_of(q: Quantized) -> Array:
    """Return the scales as [batch, blocks down, blocks across]."""
    scales: Array = q.scales.reshape(math.prod(q.scales.shape[:-2]), *q.scales.shape[-2:])
    return scales


def ranks_by_block(q: Quantized) -> tuple[Array, int]:
    """Return the rank of each block's largest finite magnitude, in the folded grid, and the number of codes that are
    not finite."""
    ranks = np.zeros(grid_of(q).shape, np.uint8)
    with_nan, bad = bool((magnitude_ranks(q.format.element) == NOT_FINITE).any()), 0
    for part, (index, at) in slabs(q, _CACHED_ELEMENTS):
        units, across = _pairs_ranked(part)
        if with_nan:
            bad += int(np.count_nonzero(units == NOT_FINITE))
            units = np.where(units == NOT_FINITE, 0, units)
        np.maximum(ranks[index, at], _by_block(units, part.format.block, across), out=ranks[index, at])
    return ranks, bad


def between_by_block(q: Quantized) -> Array:
    """Return the blocks, in the folded grid, with a code that is finite, not zero, and not the largest."""
    found = np.zeros(grid_of(q).shape, bool)
    top = len(magnitudes(q.format.element)) - 1
    for part, (index, at) in slabs(q, _CACHED_ELEMENTS):
        ranks = _ranked(part)
        found[index, at] |= blocks_of((ranks > 0) & (ranks < top), part.format.block)
    return found


def blocks_of(differing: Array, block: Block) -> Array:
    """Return the blocks of a tensor with a marked element, in the shape of its grid."""
    marks = np.ascontiguousarray(differing).view(np.uint8).reshape(folded(differing.shape))
    if block == (None, None):
        whole: Array = _by_block(marks.reshape(-1, marks.shape[-1]), block, marks.shape[-1]) > 0
        return whole
    grids = np.stack([_by_block(matrix, block, block[1] or marks.shape[-1]) for matrix in marks])
    found: Array = grids.reshape(*differing.shape[:-2], *grids.shape[1:]) > 0
    return found


@cache
def _pair_ranks(element: FloatFormat) -> Array:
    """Return the larger rank of the two codes in each byte."""
    ranks = magnitude_ranks(element)
    pairs = np.arange(256)
    larger: Array = np.maximum(ranks[pairs & 15], ranks[pairs >> 4])
    return larger


@cache
def _ranks_are_codes(element: FloatFormat) -> bool:
    """Return whether the rank of a code is the code without its sign bit, as in E2M1; larger ones are not finite."""
    ranks, codes = magnitude_ranks(element), np.arange(256) & _without_sign(element)
    return bool((ranks == np.where(codes < len(magnitudes(element)), codes, NOT_FINITE)).all())


def _without_sign(element: FloatFormat) -> int:
    return (1 << (element.bits - 1)) - 1


def _pairs_ranked(part: Quantized) -> tuple[Array, int]:
    """Return the ranks of the codes of a matrix, the larger of each pair for 4-bit codes, and their number across a
    block."""
    fmt = part.format
    across = fmt.block[1] or part.shape[-1]
    if fmt.element.stored_bits == 4 and across % 2 == 0:
        if _ranks_are_codes(fmt.element):
            without_sign = _without_sign(fmt.element)
            return np.maximum(part.packed & without_sign, (part.packed >> 4) & without_sign), across // 2
        pairs: Array = _pair_ranks(fmt.element).take(part.packed)
        return pairs, across // 2
    return _ranked(part), across


def _ranked(part: Quantized) -> Array:
    element, codes = part.format.element, unpacked(part)
    if _ranks_are_codes(element):
        codes = codes & _without_sign(element)
        return np.where(codes < len(magnitudes(element)), codes, NOT_FINITE).astype(np.uint8)
    ranks: Array = magnitude_ranks(element)[codes]
    return ranks


def _by_block(units: Array, block: Block, across: int) -> Array:
    """Return the largest unit of each block of a matrix; edges are padded with zeros."""
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
    if across & (across - 1) == 0:
        # Each unit becomes the largest of those that follow it within a block, which is right for the first of each.
        flat = np.ascontiguousarray(units).reshape(-1)
        while across > 1:
            across //= 2
            flat = np.maximum(flat[:-across], flat[across:])
        firsts: Array = flat[:: parts.shape[-1]].reshape(parts.shape[:-1])
        return firsts
    # Other narrow blocks: column by column is three times as fast as a reduction.
    largest: Array = parts[..., 0].copy()
    for at in range(1, across):
        np.maximum(largest, parts[..., at], out=largest)
    return largest


_FIRST_UNITS = 1 << 12
"""Units of codes compared first in the test for a single code."""


@dataclass(frozen=True, slots=True)
class WeightSummary:
    """A weight and, over the grid of its blocks, its scales as stored and the rank of the largest finite code.

    `lost` counts blocks with scale 0 that have other codes than 0 and the largest, which an underflowed scale cannot
    leave. `emptied` counts the other blocks with scale 0 and a code that is not 0. `code` is the single code of all
    elements (None: several). `reach` is the largest magnitude before the tensor scale, `profile` None if it was not
    requested.
    """

    stored: StoredWeight
    scales: Array
    ranks: Array
    not_finite_codes: int
    lost: int
    emptied: int
    code: int | None
    tensor_scale: float | None
    tensor_encode: float
    reach: float
    profile: Profile | None

    @property
    def name(self) -> str:
        """The plain name of the weight."""
        return self.stored.weight.name

    @property
    def format(self) -> BlockFormat:
        """The format of the weight."""
        return self.stored.weight.format

    @property
    def scales_name(self) -> str:
        """The tensor that holds the scales of the blocks, alone or with the codes."""
        contents = self.stored.contents
        return next((part.entry.name for part in contents if part.holds.name == "scales"), self.codes_name)

    @property
    def codes_name(self) -> str:
        """The tensor that holds the codes."""
        return self.stored.contents[0].entry.name

    @property
    def scale_values(self) -> Array:
        """The scales of the blocks as binary64."""
        return scale_values(self.format.scale, self.scales)

    @property
    def code_max(self) -> Array:
        """The largest finite code value of each block."""
        return _code_max(self.format.element, self.ranks)

    @property
    def decode(self) -> float:
        """The decode scale of the tensor; 1 if it has none."""
        return decode_scale(self.tensor_scale, self.tensor_encode)

    @property
    def amax(self) -> float:
        """The largest dequantized magnitude, without blocks whose scale is NaN."""
        return self.reach * self.decode

    @property
    def amax_inverted(self) -> float:
        """The amax with inverted scales: the tensor's, or each block's if it is binary32; `amax` for other scales."""
        if self.tensor_scale is not None or self.tensor_encode != 1.0:
            return self.amax / self.decode**2 if self.decode else math.inf
        if self.format.scale is not FP32:
            return self.amax
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return _largest(self.code_max / self.scale_values)

    @property
    def tensor_level(self) -> TensorSummary:
        """The numbers of the whole tensor."""
        scale = math.nan
        if self.format.tensor_scale is not None:
            scale = self.decode
        elif self.format.block == (None, None):
            scale = float(self.scale_values.reshape(-1)[0])
        return TensorSummary(scale, self.amax, self.profile)


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """The numbers kept of a weight: its `scale`, which is the tensor scale or that of a format with a single scale
    (NaN: none), its amax, and its profile if there is one."""

    scale: float
    amax: float
    profile: Profile | None = None


def summarize(checkpoint: Checkpoint, stored: StoredWeight, *, profiled: bool = False) -> WeightSummary:
    """Read a weight and return its summary, with a profile if it is to be `profiled`."""
    arrays = [read(checkpoint, checkpoint.tensors[content.entry.name]) for content in stored.contents]
    q = quantized_from(stored.weight, list(zip(stored.contents, arrays, strict=True)))
    return summary_of(stored, q, profiled=profiled)


def decode_scale(tensor_scale: float | None, tensor_encode: float) -> float:
    """Return the decode scale of a tensor from the direction that is stored."""
    if tensor_scale is not None:
        return tensor_scale
    return 1.0 / tensor_encode if tensor_encode else math.inf


def summary_of(stored: StoredWeight, q: Quantized, *, profiled: bool) -> WeightSummary:
    """Return the summary of a weight whose codes and scales were read, with a profile if it is to be `profiled`."""
    ranks, not_finite = ranks_by_block(q)
    zero = scales_that(_are_zero, stored.weight.format.scale, q.scales).reshape(ranks.shape)
    mixed = between_by_block(q) if zero.any() else np.zeros_like(zero)
    ranks = ranks.reshape(q.scales.shape)
    reach, decode = _reach(q, ranks), decode_scale(q.tensor_scale, q.tensor_encode)
    return WeightSummary(
        stored,
        q.scales,
        ranks,
        not_finite,
        lost=int(np.count_nonzero(zero & mixed)),
        emptied=int(np.count_nonzero(zero & ~mixed & (ranks.reshape(zero.shape) > 0))),
        code=_only_code(q),
        tensor_scale=q.tensor_scale,
        tensor_encode=q.tensor_encode,
        reach=reach,
        profile=_profile(q, ranks, reach * decode, decode) if profiled else None,
    )


def _profile(q: Quantized, ranks: Array, amax: float, decode: float) -> Profile:
    return profile_of(q, scale_values(q.format.scale, q.scales), _code_max(q.format.element, ranks), amax, decode)


def _code_max(element: FloatFormat, ranks: Array) -> Array:
    values: Array = magnitudes(element).take(ranks)
    return values


def _are_zero(values: Array) -> Array:
    return np.asarray(values == 0)


def _reach(q: Quantized, ranks: Array) -> float:
    """Return the largest finite magnitude of a weight before its tensor scale."""
    largest, scale = magnitudes(q.format.element), q.format.scale
    if scale is FP32:
        return _largest(largest.take(ranks) * scale_values(scale, q.scales))
    found, top = 0.0, int(q.scales.max()) if q.scales.size else 0
    for code, value in _falling(scale):
        # Blocks with smaller scales do not reach further.
        if value * largest[-1] <= found:
            break
        if code <= top and (here := ranks[q.scales == code]).size:
            found = max(found, value * float(largest[here.max()]))
    return found


@cache
def _falling(fmt: FloatFormat) -> Sequence[tuple[int, float]]:
    """Return the codes of an 8-bit format with their finite magnitudes, the largest first."""
    values = {code: abs(value) for code, value in enumerate(_values(fmt).tolist()) if math.isfinite(value)}
    return sorted(values.items(), key=itemgetter(1), reverse=True)


def _largest(values: Array) -> float:
    if values.size and math.isfinite(top := max(float(values.max()), -float(values.min()))):
        return top
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _only_code(q: Quantized) -> int | None:
    """Return the single code of all elements; None if there are several codes, or fewer than two elements."""
    size = {4: 1, 6: 3, 8: 1}[q.format.element.stored_bits]
    if math.prod(q.shape) < 2 or q.packed.size % size:
        return None
    units = q.packed.reshape(-1, size)
    if not (units[:_FIRST_UNITS] == units[0]).all() or not (units == units[0]).all():
        return None
    first = unpacked(replace(q, shape=(1, q.shape[-1]), packed=q.packed.reshape(-1, q.packed.shape[-1])[:1]))[0]
    return int(first[0]) if (first == first[0]).all() else None
