"""What the kernels count about one tensor; parts of a tensor, or tensors, add up with `+`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import Any

SCALE_BINS = 257
"""By biased binary32 exponent of the scale; the last one counts NaN scales."""
CODE_BINS = 256
SQNR_BINS_PER_OCTAVE, SQNR_LOWEST_EXPONENT, SQNR_BINS = 16, -16, 1281
"""Bins of a block's signal / noise; the last one counts blocks without noise."""
RANGE_BINS_PER_OCTAVE, RANGE_BINS = 4, 512
"""Bins of a block's largest over smallest nonzero magnitude."""
WORST_BLOCKS = 16


def _bins(count: int) -> array[int]:
    return array("q", bytes(8 * count))


@dataclass(slots=True)
class Stats:
    """Counters, sums, extremes and histograms of one tensor under one recipe.

    Sums run over the `measured` elements: finite ones in blocks that are not NaN. `signal` is the sum of x^2, `noise`
    of (y-x)^2, `cross` of x(y-x), `error` of y-x. Extremes that nothing set are negative. `worst` holds (noise, block
    index) pairs, most noise first; a sum of several tensors has none, since block indices are a tensor's own.
    """

    elements: int = 0
    blocks: int = 0
    zero_blocks: int = 0
    nan_blocks: int = 0
    saturated: int = 0
    saturated_blocks: int = 0
    underflowed: int = 0
    scale_underflowed_blocks: int = 0
    nan: int = 0
    infinite: int = 0
    measured: int = 0
    signal: float = 0.0
    noise: float = 0.0
    cross: float = 0.0
    error: float = 0.0
    amax: float = 0.0
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    min_block_sqnr: float = -1.0
    min_block_range: float = -1.0
    first_nonfinite: int = -1
    scale_bins: array[int] = field(default_factory=lambda: _bins(SCALE_BINS))
    code_bins: array[int] = field(default_factory=lambda: _bins(CODE_BINS))
    block_code_bins: array[int] = field(default_factory=lambda: _bins(CODE_BINS))
    sqnr_bins: array[int] = field(default_factory=lambda: _bins(SQNR_BINS))
    range_bins: array[int] = field(default_factory=lambda: _bins(RANGE_BINS))
    worst: tuple[tuple[float, int], ...] = ()

    def __add__(self, other: Stats) -> Stats:
        both = {f.name: _combine(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return Stats(**both)


_LARGEST = {"amax", "max_abs_error", "max_rel_error"}
_LEAST_SET = {"min_block_sqnr", "min_block_range"}


def _combine(name: str, a: Any, b: Any) -> Any:
    if name == "worst":
        return ()
    if name == "first_nonfinite":
        return a if a >= 0 else -1
    if isinstance(a, array):
        return array("q", [i + j for i, j in zip(a, b, strict=True)])
    if name in _LARGEST:
        return max(a, b)
    if name in _LEAST_SET:
        return max(a, b) if min(a, b) < 0 else min(a, b)
    return a + b
