"""Statistics that the kernels count of one tensor; those of parts, or of several tensors, add up with `+`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, compress, repeat
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
_ZEROS = bytes(512)


class Histogram(Sequence[int]):
    """Counts of a fixed number of bins, of which those from the first to the last that is not zero are held.

    Multiplied by a factor they are what counts stand for, and no longer whole.
    """

    __slots__ = ("_bins", "_counts", "_first")

    def __init__(self, bins: int, counts: Iterable[int] = ()) -> None:
        self._bins, self._first = bins, 0
        self._counts: array[Any] = array("q", counts)

    @classmethod
    def of(cls, raw: bytes) -> Histogram:
        """Return the histogram stored as native 64-bit integers, one per bin."""
        begin, end, size = 0, len(raw), array("q").itemsize
        # Of a small tensor nearly all are zero: runs of them are skipped before single bytes are looked at.
        while raw.startswith(_ZEROS, begin):
            begin += len(_ZEROS)
        while raw.endswith(_ZEROS, begin, end):
            end -= len(_ZEROS)
        first = (end - len(raw[begin:end].lstrip(b"\0"))) // size
        last = -(-(begin + len(raw[begin:end].rstrip(b"\0"))) // size)
        return cls._held(len(raw) // size, first, array("q", raw[first * size : last * size]))

    @classmethod
    def _held(cls, bins: int, first: int, counts: array[Any]) -> Histogram:
        """Count of the bins from the `first` on; those of the others are zero."""
        held = cls(bins)
        held._first, held._counts = first, counts
        return held

    def __len__(self) -> int:
        return self._bins

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(self)[at]
        index = range(self._bins)[at] - self._first
        return self._counts[index] if 0 <= index < len(self._counts) else 0

    def __iter__(self) -> Iterator[int]:
        return self._between(0, self._bins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._bins == other._bins and dict(self.counted) == dict(other.counted)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Histogram) -> Histogram:
        if not self._counts or not other._counts:
            return self if self._counts else other
        first = min(self._first, other._first)
        last = max(each._first + len(each._counts) for each in (self, other))
        kind = max(self._counts.typecode, other._counts.typecode, key="qd".index)
        counts = array(kind, map(add, self._between(first, last), other._between(first, last)))
        return Histogram._held(self._bins, first, counts)

    def __mul__(self, factor: float) -> Histogram:
        return Histogram._held(self._bins, self._first, array("d", [count * factor for count in self._counts]))

    def _between(self, first: int, last: int) -> Iterator[int]:
        """Return the counts of bins from `first` up to `last`, which have all that are held among them."""
        after = last - self._first - len(self._counts)
        return chain(repeat(0, self._first - first), self._counts, repeat(0, after))

    @property
    def total(self) -> int:
        """The counts of all bins together."""
        return sum(self._counts)

    @property
    def used(self) -> int:
        """Number of bins that are not zero."""
        return len(self._counts) - self._counts.count(0)

    @property
    def counted(self) -> Iterator[tuple[int, int]]:
        """The bins that are not zero, with their counts."""
        return compress(enumerate(self._counts, self._first), self._counts)


@dataclass(frozen=True, slots=True)
class Amax:
    """The largest finite magnitude of a tensor, the number of its NaN and infinities, and the flat index of the first
    (-1:
    none)."""

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
        return Stats(
            **{name: combine(getattr(self, name), getattr(other, name)) for name, combine in _COMBINED_BY.items()}
        )


def _least_set(a: float, b: float) -> float:
    """Return the lesser; where nothing set one of them, the other."""
    return max(a, b) if min(a, b) < 0 else min(a, b)


_COMBINED_BY: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys((each.name for each in fields(Stats)), add),
    **dict.fromkeys(("amax", "max_abs_error", "max_rel_error"), max),
    **dict.fromkeys(("min_block_sqnr", "min_block_range"), _least_set),
    "first_nonfinite": lambda a, _: a if a >= 0 else -1,
    "worst": lambda _, __: (),
}
"""Operations that make each field of a sum from those of its parts."""


_EMPTY = Stats()


def stats_record(stats: Stats) -> dict[str, object]:
    """Return the fields by name; of a histogram its first bin in use, and the counts from it on."""
    return {each.name: _plain(getattr(stats, each.name)) for each in fields(Stats)}


def stats_of(record: Mapping[str, Any]) -> Stats:
    """Return the statistics that a record is of. Raises ValueError for one with a value of another type."""
    restored = {name: _restored(value, getattr(_EMPTY, name)) for name, value in record.items()}
    for name, value in restored.items():
        empty = getattr(_EMPTY, name)
        if type(value) is not type(empty) and not (isinstance(empty, float) and type(value) is int):
            raise ValueError(f"'{name}' cannot be {value!r}")
    return Stats(**restored)


def _plain(value: Any) -> object:
    if not isinstance(value, Histogram):
        return value
    used = [at for at, _ in value.counted] or [0]
    return [used[0], *value[used[0] : used[-1] + 1]]


def _restored(value: Any, empty: object) -> Any:
    if isinstance(empty, Histogram):
        first, *counts = value
        after = len(empty) - first - len(counts)
        if first < 0 or after < 0:
            raise ValueError(f"bins {first!r} to {first + len(counts)} of a histogram of {len(empty):,}")
        return Histogram.of(array("q", [0] * first + counts + [0] * after).tobytes())
    if not isinstance(empty, tuple):
        return value
    pairs = tuple(map(tuple, value))
    if any(list(map(type, pair)) != [float, int] for pair in pairs):
        raise ValueError(f"a worst block cannot be {value!r}")
    return pairs
