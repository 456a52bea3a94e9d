"""Numbers of a quantized weight that are alike in the layers of one model, and that damage changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mxcli.files.hashes import hash_of
from mxcli.files.tensors import Array
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import E8M0, FP32

WEAK = 0.3
"""Every rule scales a block so that its largest code is above this part of the largest of its format."""
_SMALLEST_GRID = 256
_NARROWEST_GRID = 8
_TINY = 2.0**-6
"""Blocks whose scale is smaller than this part of the median scale may be clamped, or hold nothing."""
RUN_BYTES = 512
"""Equal bytes of codes are looked for in runs of this size."""
_PIECE = 1 << 16
_USUAL_SCALE = 2.0**-60


@dataclass(frozen=True, slots=True)
class Profile:
    """Logarithms to base 2 of the `amax` and of the `level`, the median scale of blocks; the share of each byte among
    the `codes`; and how much more the scales vary between rows, and between columns of the grid, than they would in a
    random order (None: the grid is too small, or has one scale). `noise` is how far the latter strays there.

    `emptied` and `weak` count blocks that have a usual scale and only zeros, or only small codes, among `blocks`;
    `vanished` counts blocks of the smallest E8M0 scale with large codes, `scales` different scales, `spread` the
    octaves from the median to the largest one; `constant` counts runs of RUN_BYTES with a single byte that is not 0,
    unless most are so. `digest` is a hash of the codes.
    """

    amax: float
    level: float
    codes: Array
    row_effect: float | None
    column_effect: float | None
    noise: float
    emptied: int
    weak: int
    blocks: int
    constant: int
    vanished: int
    spread: float
    scales: int
    digest: str


def profile_of(q: Quantized, values: Array, code_max: Array, amax: float, decode: float) -> Profile:
    """Return the profile of a weight; `values` and `code_max` are the scales and the largest code of every block."""
    scales = np.abs(values.reshape(-1))
    usable = scales[np.isfinite(scales) & (scales > 0)]
    median = float(np.median(usable)) if usable.size else 0.0
    rows, columns = _effects(values)
    emptied, weak = _lost(q, scales, code_max.reshape(-1), median)
    return Profile(
        amax=_log2(amax),
        level=_log2(median * decode),
        codes=_shares(q.packed.reshape(-1)),
        row_effect=rows,
        column_effect=columns,
        noise=4 * math.sqrt(2 / max(values.shape[-1], 1)),
        emptied=emptied,
        weak=weak,
        blocks=scales.size,
        constant=_constant(q),
        vanished=_vanished(q, scales, code_max.reshape(-1), median),
        spread=_log2(float(usable.max()) / median) if median else 0.0,
        scales=len(np.unique(scales)),
        digest=hash_of(q.packed).xxh3,
    )


def _vanished(q: Quantized, scales: Array, code_max: Array, median: float) -> int:
    """Return the number of blocks that have the smallest E8M0 scale and large codes, though the others are usual."""
    if q.format.scale is not E8M0 or median < _USUAL_SCALE:
        return 0
    return int(np.count_nonzero((scales == E8M0.min_positive) & (code_max >= WEAK * q.format.element.max)))


def _constant(q: Quantized) -> int:
    """Return the number of runs of RUN_BYTES with a single byte that is not 0; 0 if most runs are so."""
    codes = np.ascontiguousarray(q.packed).reshape(-1)
    runs = codes[: codes.size // RUN_BYTES * RUN_BYTES].reshape(-1, RUN_BYTES)
    # Most runs differ in these bytes already.
    some = runs[(runs[:, 0] != 0) & (runs[:, 0] == runs[:, 1]) & (runs[:, 0] == runs[:, -1])]
    # With the sign bits set, zeros of either sign.
    signs = 0x88 if q.format.element.stored_bits == 4 else 0x80
    equal = (some == some[:, :1]).all(axis=1) & (some[:, 0] != signs)
    count = int(np.count_nonzero(equal))
    return 0 if count * 2 > len(runs) else count


def _log2(value: float) -> float:
    return math.log2(value) if 0 < value < math.inf else math.nan


def _shares(codes: Array) -> Array:
    counts = np.zeros(256, np.int64)
    for at in range(0, codes.size, _PIECE):
        counts += np.bincount(codes[at : at + _PIECE], minlength=256)
    return counts / max(codes.size, 1)


def _effects(values: Array) -> tuple[float | None, float | None]:
    """Return the variance of the means of rows, and of columns, over that of a random order."""
    grid = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    if grid.size < _SMALLEST_GRID or min(grid.shape) < _NARROWEST_GRID or not (grid > 0).all():
        return None, None
    logarithms = np.log2(grid)
    variance = float(logarithms.var())
    if not variance or not math.isfinite(variance):
        return None, None
    rows, columns = logarithms.mean(axis=1).var() * grid.shape[1], logarithms.mean(axis=0).var() * grid.shape[0]
    return float(rows) / variance, float(columns) / variance


def _lost(q: Quantized, scales: Array, code_max: Array, median: float) -> tuple[int, int]:
    """Return the numbers of blocks with a usual scale and only zeros, and with only small codes."""
    if q.format.scale is FP32 or not median:
        # Producers give an empty row any scale that binary32 holds.
        return 0, 0
    # Others give an empty block the smallest scale, or 1, or (auto-round) 2^-bias of the element.
    usual = (scales > max(median * _TINY, q.format.scale.min_normal)) & np.isfinite(scales)
    low = usual & (code_max < WEAK * q.format.element.max)
    empty = low & (code_max == 0) & (scales != 1) & (scales != 2.0**-q.format.element.bias)
    return int(np.count_nonzero(empty)), int(np.count_nonzero(low & (code_max > 0)))
