"""Formulas of metrics that are more than a field of `Stats`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.stats import (
    CODE_BINS,
    RANGE_BINS_PER_OCTAVE,
    SQNR_BINS,
    SQNR_BINS_PER_OCTAVE,
    SQNR_LOWEST_EXPONENT,
    Histogram,
    Stats,
)

Value = int | float | None | dict[str, int] | dict[str, float | None] | list[dict[str, object]]
QUANTILES = {"p0": 0.0, "p1": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class Measurement:
    """Statistics, and the format and shape they belong to; `shape` is None for a sum over several `tensors`."""

    stats: Stats
    format: BlockFormat
    shape: tuple[int, ...] | None = None
    tensors: int = 1

    @cached_property
    def element_exponents(self) -> dict[float, int]:
        """Elements by the exponent of their code's value, -inf for zero; codes that are not finite are left out."""
        exponents, counts = _exponents(self.format.element), dict[float, int]()
        for code, count in self.stats.code_bins.counted:
            exponent = exponents[code]
            if exponent is not None:
                counts[exponent] = counts.get(exponent, 0) + count
        return counts

    @cached_property
    def scale_exponents(self) -> dict[int, int]:
        """Blocks by the exponent of their scale; a zero or (FP32) subnormal scale has that of the lowest bin."""
        nan = len(self.stats.scale_bins) - 1
        return {b - FP32.bias: n for b, n in self.stats.scale_bins.counted if b != nan}


def percent(part: float, whole: float) -> float | None:
    """Return 100 * part / whole; None if whole is 0."""
    return 100.0 * part / whole if whole else None


def root(value: float | None) -> float | None:
    """Return the square root; None for None."""
    return None if value is None else math.sqrt(value)


def mse(m: Measurement) -> float | None:
    """Return the mean squared error over measured elements."""
    return m.stats.noise / m.stats.measured if m.stats.measured else None


def decibels(signal: float, noise: float) -> float | None:
    """Return the signal over noise, as sums of squares, in dB; None without noise or without signal."""
    # An output that overflows binary32 has infinite noise: no number of decibels.
    return 10.0 * math.log10(signal / noise) if 0 < noise < math.inf and signal > 0 else None


def relative(signal: float, noise: float) -> float | None:
    """Return the norm of the error over norm of the input, from their squares; None without input."""
    return math.sqrt(noise / signal) if signal > 0 else None


def cosine_between(signal: float, noise: float, cross: float) -> float | None:
    """Return the cosine between input x and output y from sums of x^2, (y - x)^2 and x (y - x); None where either is
    nothing."""
    output = signal + 2.0 * cross + noise
    if not (signal > 0 and 0 < output < math.inf):
        return None
    return min(1.0, (signal + cross) / math.sqrt(signal) / math.sqrt(output))


def sqnr_db(m: Measurement) -> float | None:
    """Return the signal over noise in dB; None without noise or without signal."""
    return decibels(m.stats.signal, m.stats.noise)


def relative_error(m: Measurement) -> float | None:
    """Return the norm of the error over norm of the input."""
    return relative(m.stats.signal, m.stats.noise)


def cosine(m: Measurement) -> float | None:
    """Return the cosine between input and output."""
    return cosine_between(m.stats.signal, m.stats.noise, m.stats.cross)


def bits_per_element(m: Measurement) -> float | None:
    """Return the stored bits per element, including its share of all scales, the tensor scale among them."""
    s, row = m.stats, m.format
    if not s.elements:
        return None
    tensor_scales = m.tensors * row.tensor_scale.bits if row.tensor_scale else 0
    return row.element.stored_bits + (s.blocks * row.scale.bits + tensor_scales) / s.elements


@cache
def _exponents(element: FloatFormat) -> tuple[float | None, ...]:
    """Return the exponent of the value of each code: -inf for zero, None if the value is not finite."""
    values = (element.value(code & ((1 << element.bits) - 1)) for code in range(CODE_BINS))
    return tuple(
        (math.frexp(value)[1] - 1 if value else -math.inf) if math.isfinite(value) else None for value in values
    )


def subnormal_percent(m: Measurement) -> float | None:
    """Return the percent of elements on subnormal codes; None for integer elements, which have none."""
    element = m.format.element
    if element.twos_complement:
        return None
    subnormal = sum(n for exponent, n in m.element_exponents.items() if -math.inf < exponent < element.emin)
    return percent(subnormal, m.stats.elements)


def binades_used(m: Measurement) -> float | None:
    """Return the mean over blocks with a nonzero code of log2(value of their largest code / smallest positive
    value)."""
    counts = [(code, n) for code, n in m.stats.block_code_bins.counted if code]
    total = sum(n for _, n in counts)
    element = m.format.element
    least = element.min_positive
    reach = sum(n * math.log2(element.magnitude(code) / least) for code, n in counts)
    return reach / total if total else None


def scale_exponent_histogram(m: Measurement) -> dict[str, int]:
    """Return the blocks by exponent of their scale; scales of zero under `zero`."""
    holds_zero = m.format.scale is not FP32 and not m.format.has_power_of_two_scales
    zero = "zero" if holds_zero else str(-FP32.bias)
    return {zero if e == -FP32.bias else str(e): n for e, n in m.scale_exponents.items()}


def extreme_exponent(pick: Callable[[list[int]], int]) -> Callable[[Measurement], Value]:
    """Return the smallest or largest exponent of the scales in use, zero scales left out."""

    def of(m: Measurement) -> Value:
        exponents = [e for e in m.scale_exponents if e > -FP32.bias or m.format.has_power_of_two_scales]
        return pick(exponents) if exponents else None

    return of


def element_exponent_histogram(m: Measurement) -> dict[str, int]:
    """Return the elements by the binade of their code's value; zeros under `zero`."""
    counts = sorted(m.element_exponents.items())
    return {"zero" if exponent == -math.inf else str(exponent): count for exponent, count in counts}


def code_use_percent(m: Measurement) -> float | None:
    """Return the percent of the format's finite codes that occur."""
    element = m.format.element
    finite = 2 * element.max_code + (1 if element.twos_complement else 2)
    return percent(m.stats.code_bins.used, finite) if m.stats.measured else None


def _quantiles(bins: Histogram, value: Callable[[int], float | None]) -> dict[str, float | None]:
    """Return the value of the bin in which each quantile falls (nearest rank)."""
    counted = list(bins.counted)
    total, seen = bins.total, list(accumulate(count for _, count in counted))
    places = {name: bisect_left(seen, max(1, math.ceil(part * total))) for name, part in QUANTILES.items()}
    return {name: value(counted[place][0]) if place < len(counted) else None for name, place in places.items()}


def _rising(quantiles: dict[str, float | None]) -> dict[str, float | None]:
    """Raise quantiles below the exact p0 to it (the middle of a bin can be lower)."""
    least = quantiles["p0"]
    if least is None:
        return quantiles
    return {name: None if value is None else max(least, value) for name, value in quantiles.items()}


@cache
def _bin_middle(at: int, per_octave: int, lowest_exponent: int) -> float:
    """Return log2 of the middle of a bin; an octave is cut into equal linear parts."""
    octave, part = divmod(at, per_octave)
    return octave + lowest_exponent + math.log2(1.0 + (part + 0.5) / per_octave)


@cache
def _decibels(at: int) -> float | None:
    """Return the middle of a bin of signal / noise in dB; None for that of blocks without noise."""
    exact = at == SQNR_BINS - 1
    return None if exact else 10.0 * math.log10(2.0) * _bin_middle(at, SQNR_BINS_PER_OCTAVE, SQNR_LOWEST_EXPONENT)


def block_sqnr_db(m: Measurement) -> dict[str, float | None]:
    """Return the quantiles over blocks in dB: the middle of a bin, p0 exactly; None is a block without noise."""
    s = m.stats
    quantiles = _quantiles(s.sqnr_bins, _decibels)
    if s.min_block_sqnr > 0:
        quantiles["p0"] = 10.0 * math.log10(s.min_block_sqnr)
    return _rising(quantiles)


def block_sqnr_histogram(m: Measurement) -> dict[str, int]:
    """Return the blocks by the whole dB below the middle of their bin; those without noise under `exact`."""
    histogram, keys = dict[str, int](), _whole_decibels()
    for at, count in m.stats.sqnr_bins.counted:
        key = keys[at]
        histogram[key] = histogram.get(key, 0) + count
    return histogram


@cache
def _whole_decibels() -> list[str]:
    """Return the key of each bin."""
    middles = map(_decibels, range(SQNR_BINS))
    return ["exact" if decibels is None else str(math.floor(decibels)) for decibels in middles]


def block_dynamic_range(m: Measurement) -> dict[str, float | None]:
    """Return the quantiles over blocks in binades: the middle of a bin, p0 exactly."""
    quantiles = _quantiles(m.stats.range_bins, lambda at: _bin_middle(at, RANGE_BINS_PER_OCTAVE, 0))
    if m.stats.min_block_range > 0:
        quantiles["p0"] = math.log2(m.stats.min_block_range)
    return _rising(quantiles)


def worst_blocks(m: Measurement) -> list[dict[str, object]]:
    """Return the blocks with most noise: batch index, first row and column, noise, and its share of the tensor's."""
    if m.shape is None:
        return []
    height, width = (m.shape[-2] if len(m.shape) > 1 else 1), m.shape[-1]
    rows, columns = m.format.block[0] or max(height, 1), m.format.block[1] or max(width, 1)
    down, across = -(-height // rows), -(-width // columns)
    return [
        {
            "index": block // (down * across),
            "row": block // across % down * rows,
            "column": block % across * columns,
            "noise": noise,
            "noise_percent": percent(noise, m.stats.noise),
        }
        for noise, block in m.stats.worst
        if math.isfinite(noise)
    ]
