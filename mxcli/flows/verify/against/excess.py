"""The error of a stored weight compared with that of a rule, block by block, for codes and scales of any producer.

Three questions are answered by computation from the original. Is every code the nearest one for its scale? Is the error
of a place larger than the coarsest choice that makes sense: a scale twice that of the rule, every element rounded to
the worse of its two neighbours? Do the scales fit the codes, or would others leave much less of the error?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mxcli.backends import unpacked
from mxcli.files.tensors import Array
from mxcli.flows.verify.errors import widened
from mxcli.flows.verify.weight_summary import (
    NOT_FINITE,
    Block,
    decode_scale,
    magnitude_ranks,
    magnitudes,
    scale_values,
    slabs,
)
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import FloatFormat

REGION = 128
"""The columns of a row that codes are judged over together, where a block is wider."""
_COARSER = 4.0
"""Squared steps of a scale twice as large."""
_ARITHMETIC = 2.0**-6
"""Relative distance by which a code may miss the nearest: producers divide in bfloat16 with up to three roundings, each
of 2^-9 at both sides of the middle between two codes."""
_CHANCE = 1e-12
"""The probability that independent errors fit a scale that well at random."""
_FEW_OFF = 8
"""A scale is not wrong if fewer codes than one of this number are not the nearest for it."""
DEVIANT = 1 / 256
"""The share of a weight that may deviate where codes were searched: errors of GPTQ grow along a row."""
_FEWEST = 16
"""Where no more than one scale of this number is another than the rule's, and there are as many, the rule made them."""
_STEP = 2.0**-6
"""Relative distance of scales that arithmetic does not explain: the steps of E4M3 are at least four times as large."""
_SUNK, _MATTERS = 1 / 8, 1 / 64
"""Values of a block are far below those of the original if the largest is less than this part of it, and count where
their squares are more than this part of the mean."""
_KEPT = 0.9
"""The share of the error that other scales leave at least, relative to the rule, if the scales fit the codes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a weight as quantized: a row, and columns from `begin` to `end`."""

    row: int
    begin: int
    end: int


@dataclass(slots=True)
class Excess:
    """Sums over a weight: squared errors as stored (`found`) and by the rule (`rule`), both again with the best scale
    for the codes of each block (`fitted`, `rule_fitted`); `deviant` is what that gains in the DEVIANT share of the
    blocks with the most.

    `off` codes of `elements` are not the nearest, the first one at `first_off`. In `beyond` of `regions` the error is
    larger than any choice explains, the first one at `first_beyond`. `unfit` of `blocks` have a scale that does not fit
    their codes, the first one at `first_unfit`; `stepped` have another scale than the rule's, of which
    `wide` are more than twice or less than half of it, and `loose` have a code that is not the nearest. The values of
    `sunk` are far below the original's.
    """

    elements: int = 0
    found: float = 0.0
    rule: float = 0.0
    fitted: float = 0.0
    deviant: float = 0.0
    rule_fitted: float = 0.0
    off: int = 0
    first_off: Place | None = None
    regions: int = 0
    beyond: int = 0
    first_beyond: Place | None = None
    blocks: int = 0
    unfit: int = 0
    first_unfit: Place | None = None
    stepped: int = 0
    wide: int = 0
    loose: int = 0
    first_stepped: Place | None = None
    sunk: int = 0
    first_sunk: Place | None = None

    @property
    def mostly_rule(self) -> bool:
        """True if nearly all scales are those of the rule."""
        return self.blocks >= _FEWEST and self.stepped * _FEWEST <= self.blocks

    @property
    def ratio(self) -> float:
        """The squared error in multiples of the rule's."""
        return self.found / self.rule if self.rule else float("inf") if self.found else 1.0

    @property
    def scales_fit(self) -> bool:
        """False if other scales would leave much less of the error, beyond what they do for the rule's own codes."""
        if self.found <= self.rule or not self.rule:
            return True
        return (self.fitted + self.deviant) / self.found >= _KEPT * self.rule_fitted / self.rule


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums per block: squares of the original, of the decoded values, and of the error, products of both, and how many
    codes are not the nearest."""

    xx: Array
    yy: Array
    xy: Array
    error: Array
    off: Array

    @property
    def fitted(self) -> Array:
        """The squared error with the best scale of each block."""
        with np.errstate(divide="ignore", invalid="ignore"):
            gained = np.where(self.yy > 0, self.xy**2 / self.yy, 0.0)
        left: Array = np.clip(self.xx - gained, 0.0, self.error)
        return left


def excess(x: Array, dtype: str, q: Quantized, rule: Quantized) -> Excess:
    """Return the excess of a weight over a rule: its original `x`, oriented, as stored, and quantized by the rule. Both
    forms have the same format and no transform."""
    found, element = Excess(), q.format.element
    rows, begin = x.reshape(-1, x.shape[-1] if x.ndim else 1), 0
    totals: tuple[_Sums, _Sums] | None = None
    gained: list[Array] = []
    for (part, _), (other, _) in zip(_pieces(q), _pieces(rule), strict=True):
        height = part.shape[0]
        values = widened(rows[begin : begin + height], dtype)
        values = np.where(np.isfinite(values), values, 0.0)
        scale = _by_element(part, values.shape)
        ours = _decoded(part) * scale
        theirs = _decoded(other) * _by_element(other, values.shape)
        error = np.abs(values - ours)
        off = error > _nearest_error(element, values, scale) + _ARITHMETIC * np.abs(values)
        found.elements += values.size
        found.off += int(np.count_nonzero(off))
        if found.first_off is None and off.any():
            row, column = np.unravel_index(int(np.argmax(off)), off.shape)
            found.first_off = Place(begin + int(row), int(column), int(column) + 1)
        _judge_regions(found, part, error, _worst_error(other, values, theirs), begin)
        sums = _sums(values, ours, off, part.format.block), _sums(values, theirs, off, part.format.block)
        if q.format.block == (None, None):
            totals = sums if totals is None else (_added(totals[0], sums[0]), _added(totals[1], sums[1]))
        else:
            _judge_scales(found, part, *sums, begin)
            _judge_steps(found, part, other, values, ours, off, begin)
            gained.append((sums[0].error - sums[0].fitted).reshape(-1))
        begin += height
    found.deviant = _largest(gained)
    if totals is not None:
        _add(found, *totals, found.elements)
    return found


def _largest(gained: list[Array]) -> float:
    """Return the sum of the DEVIANT share of the values with the largest."""
    values = np.concatenate(gained) if gained else np.zeros(0)
    count = int(DEVIANT * values.size)
    return (
        float(np.partition(values, values.size - count)[values.size - count :].sum(dtype=np.float64)) if count else 0.0
    )


def _pieces(q: Quantized) -> Iterator[tuple[Quantized, object]]:
    """Yield a weight in parts of whole blocks that take little memory."""
    return slabs(q, REGION * REGION * 16)


def _decoded(part: Quantized) -> Array:
    """Return the value of every code."""
    values: Array = _code_values(part.format.element)[unpacked(part)]
    return values


def _code_values(element: FloatFormat) -> Array:
    values = np.asarray([element.value(code & ((1 << element.bits) - 1)) for code in range(256)])
    found: Array = np.where(np.isfinite(values), values, 0.0)
    return found


def _by_element(part: Quantized, shape: tuple[int, int]) -> Array:
    """Return the decode scale of every element; 0 where it is not finite."""
    scales = scale_values(part.format.scale, part.scales).reshape(part.scales.shape[-2:])
    scales = scales * decode_scale(part.tensor_scale, part.tensor_encode)
    scales = np.where(np.isfinite(scales), scales, 0.0)
    down, across = part.format.block
    scales = np.repeat(scales, shape[0] if down is None else down, axis=0)[: shape[0]]
    found: Array = np.repeat(scales, shape[1] if across is None else across, axis=1)[:, : shape[1]]
    return found


def _nearest_error(element: FloatFormat, values: Array, scale: Array) -> Array:
    """Return the error of the nearest element for the stored scale."""
    known = magnitudes(element)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = np.where(scale > 0, np.abs(values) / scale, 0.0)
    nearest = known[np.searchsorted((known[1:] + known[:-1]) / 2, scaled)]
    error: Array = np.abs(np.abs(values) - nearest * scale)
    return error


def _worst_error(rule: Quantized, values: Array, decoded: Array) -> Array:
    """Return the error of each element rounded to the worse neighbour of the rule's code, or the rule's own if that is
    larger."""
    known = magnitudes(rule.format.element)
    gaps = np.maximum(np.diff(known, prepend=known[0]), np.diff(known, append=known[-1]))
    ranks = magnitude_ranks(rule.format.element)[unpacked(rule)]
    steps = gaps[np.where(ranks == NOT_FINITE, 0, ranks)] * _by_element(rule, (values.shape[0], values.shape[1]))
    worst: Array = np.maximum(steps, np.abs(values - decoded))
    return worst


def _judge_regions(found: Excess, part: Quantized, error: Array, worst: Array, begin: int) -> None:
    """Count the regions of rows whose error no choice explains."""
    width = min(part.format.block[1] or error.shape[1], REGION)
    ours, most = (_reduced(each**2, (1, width)) for each in (error, worst))
    beyond = ours > _COARSER * most
    found.regions += beyond.size
    found.beyond += int(np.count_nonzero(beyond))
    if found.first_beyond is None and beyond.any():
        row, at = np.unravel_index(int(np.argmax(beyond)), beyond.shape)
        first = int(at) * width
        found.first_beyond = Place(begin + int(row), first, min(first + width, error.shape[1]))


def _judge_scales(found: Excess, part: Quantized, ours: _Sums, rule: _Sums, begin: int) -> None:
    """Add a part, and count the blocks whose scale does not fit their codes."""
    height, width = (size or length for size, length in zip(part.format.block, part.shape, strict=True))
    unfit = _add(found, ours, rule, min(height, part.shape[0]) * min(width, part.shape[1]))
    found.first_unfit = found.first_unfit or _block_at(unfit, part, begin)


def _judge_steps(
    found: Excess, part: Quantized, rule: Quantized, values: Array, decoded: Array, off: Array, begin: int
) -> None:
    """Count the blocks whose scale is another than the rule's, and those whose values are far below the original's."""
    block = part.format.block
    ours, theirs = (
        scale_values(each.format.scale, each.scales).reshape(each.scales.shape[-2:])
        * decode_scale(each.tensor_scale, each.tensor_encode)
        for each in (part, rule)
    )
    amax, there, signal = (
        _reduced(each, block, ufunc)
        for each, ufunc in ((np.abs(values), np.maximum), (np.abs(decoded), np.maximum), (values**2, np.add))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(np.log2(ours / theirs))
    # Scales of blocks of zeros are anything.
    stepped = (ratio > np.log2(1 + _STEP)) & (there > 0)
    wide, loose = stepped & (ratio > 1), stepped & (_reduced(off, block, np.maximum) > 0)
    sunk = (there > 0) & (there < _SUNK * amax) & (signal > _MATTERS * signal.mean())
    found.stepped += int(np.count_nonzero(stepped))
    found.wide += int(np.count_nonzero(wide))
    found.loose += int(np.count_nonzero(loose))
    found.sunk += int(np.count_nonzero(sunk))
    found.first_stepped = found.first_stepped or _block_at(stepped, part, begin)
    found.first_sunk = found.first_sunk or _block_at(sunk, part, begin)


def _block_at(marked: Array, part: Quantized, begin: int) -> Place | None:
    """Return the place of the first marked block of a part."""
    if not marked.any():
        return None
    height, width = (size or length for size, length in zip(part.format.block, part.shape, strict=True))
    row, at = (int(each) for each in np.unravel_index(int(np.argmax(marked)), marked.shape))
    return Place(begin + row * height, at * width, min((at + 1) * width, part.shape[1]))


def _add(found: Excess, ours: _Sums, rule: _Sums, elements: int) -> Array:
    """Add sums of blocks of that number of elements; return which have a scale that does not fit."""
    fitted, rule_fitted = ours.fitted, rule.fitted
    found.found += float(ours.error.sum())
    found.rule += float(rule.error.sum())
    found.fitted += float(fitted.sum())
    found.rule_fitted += float(rule_fitted.sum())
    least = _KEPT ** (1 / 8) * _CHANCE ** (2 / max(elements - 1, 1))
    unfit = (fitted * rule.error < least * ours.error * rule_fitted) & (ours.error > rule.error)
    marked: Array = unfit & (ours.off > elements / _FEW_OFF)
    found.blocks += marked.size
    found.unfit += int(np.count_nonzero(marked))
    return marked


def _sums(x: Array, y: Array, off: Array, block: Block) -> _Sums:
    return _Sums(*(_reduced(each, block) for each in (x * x, y * y, x * y, (x - y) ** 2, off.astype(np.float64))))


def _added(one: _Sums, other: _Sums) -> _Sums:
    return _Sums(*(getattr(one, name) + getattr(other, name) for name in _Sums.__slots__))


def _reduced(values: Array, block: Block, ufunc: np.ufunc = np.add) -> Array:
    """Return the sum over each block of a matrix, or what another function reduces it to."""
    for axis in (0, 1):
        size = min(block[axis] or values.shape[axis], values.shape[axis])
        values = ufunc.reduceat(values, np.arange(0, values.shape[axis], max(size, 1)), axis=axis)
    return values
