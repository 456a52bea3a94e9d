"""What the kernels count about one tensor; parts of a tensor, or tensors, add up with `+`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, repeat
from operator import add
from typing import Any

SCALE_BINS = 257
"""By biased binary32 exponent of the scale; the last one counts NaN scales."""
CODE_BINS = 256
SQNR_BINS_PER_OCTAVE, SQNR_LOWEST_EXPONENT, SQNR_BINS = 16, -16, 1281
"""Bins of a block's signal / noise; the last one counts blocks without noise."""
RANGE_BINS_PER_OCTAVE, RANGE_BINS = 4, 512
"""Bins of a block's largest over smallest nonzero magnitude."""
WORST_BLOCKS = 8


class Histogram(Sequence[int]):
    """Counts of a fixed number of bins, of which those from the first to the last that is not zero are held."""

    __slots__ = ("_bins", "_counts", "_first")

    def __init__(self, bins: int, counts: Iterable[int] = ()) -> None:
        self._bins, self._first, self._counts = bins, 0, array("q", counts)

    @classmethod
    def of(cls, raw: bytes) -> Histogram:
        """From native 64-bit integers, one per bin."""
        size = array("q").itemsize
        held = cls(len(raw) // size)
        held._first = (len(raw) - len(raw.lstrip(b"\0"))) // size
        end = -(-len(raw.rstrip(b"\0")) // size)
        held._counts = array("q", raw[held._first * size : end * size])
        return held

    def __len__(self) -> int:
        return self._bins

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(self)[at]
        index = range(self._bins)[at] - self._first
        return self._counts[index] if 0 <= index < len(self._counts) else 0

    def __iter__(self) -> Iterator[int]:
        after = self._bins - self._first - len(self._counts)
        return chain(repeat(0, self._first), self._counts, repeat(0, after))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._bins == other._bins and dict(self.counted) == dict(other.counted)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self._bins, map(add, self, other))

    @property
    def counted(self) -> Iterator[tuple[int, int]]:
        """The bins that are not zero, with their counts."""
        return ((at, count) for at, count in enumerate(self._counts, self._first) if count)


@dataclass(frozen=True, slots=True)
class Amax:
    """Largest finite magnitude of a tensor; how many NaN and infinities it holds, and where the first lies (or -1)."""

    value: float
    nonfinite: int
    first_nonfinite: int


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
    scale_bins: Histogram = field(default_factory=lambda: Histogram(SCALE_BINS))
    code_bins: Histogram = field(default_factory=lambda: Histogram(CODE_BINS))
    block_code_bins: Histogram = field(default_factory=lambda: Histogram(CODE_BINS))
    sqnr_bins: Histogram = field(default_factory=lambda: Histogram(SQNR_BINS))
    range_bins: Histogram = field(default_factory=lambda: Histogram(RANGE_BINS))
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
    if name in _LARGEST:
        return max(a, b)
    if name in _LEAST_SET:
        return max(a, b) if min(a, b) < 0 else min(a, b)
    return a + b
