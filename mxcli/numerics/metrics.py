"""Metrics as rows: what each key of a report means, computed from `Stats` alone. `mxcli explain` prints these rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mxcli.numerics.floats import E4M3, FP32, FloatFormat
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.stats import (
    RANGE_BINS_PER_OCTAVE,
    SQNR_BINS_PER_OCTAVE,
    SQNR_LOWEST_EXPONENT,
    Stats,
)

Value = int | float | None | dict[str, int] | dict[str, float | None] | list[dict[str, object]]
QUANTILES = {"p0": 0.0, "p1": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Statistics with what they are statistics of. `shape` is None for a sum over several tensors."""

    stats: Stats
    format: BlockFormat
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """A key of a report: its unit, meaning and formula, how to compute it, and which direction is better.

    `of` returns None where the value does not exist (no elements, no signal, an exact result).
    """

    name: str
    unit: str
    meaning: str
    formula: str
    of: Callable[[Measurement], Value]
    better: str = "neither"
    source: str = "mxcli"


def _percent(part: float, whole: float) -> float | None:
    return 100.0 * part / whole if whole else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)


def _mse(m: Measurement) -> float | None:
    return m.stats.noise / m.stats.measured if m.stats.measured else None


def _sqnr_db(m: Measurement) -> float | None:
    s = m.stats
    # An output that overflows binary32 has infinite noise: no number of decibels.
    return 10.0 * math.log10(s.signal / s.noise) if 0 < s.noise < math.inf and s.signal > 0 else None


def _relative_error(m: Measurement) -> float | None:
    s = m.stats
    return math.sqrt(s.noise / s.signal) if s.signal > 0 else None


def _cosine(m: Measurement) -> float | None:
    s = m.stats
    output = s.signal + 2.0 * s.cross + s.noise
    if not (s.signal > 0 and 0 < output < math.inf):
        return None
    return min(1.0, (s.signal + s.cross) / math.sqrt(s.signal) / math.sqrt(output))


def _bits_per_element(m: Measurement) -> float | None:
    s, row = m.stats, m.format
    if not s.elements:
        return None
    tensor_scale = row.tensor_scale.bits if row.tensor_scale else 0
    return row.element.stored_bits + (s.blocks * row.scale.bits + tensor_scale) / s.elements


def _magnitudes(m: Measurement, bins: Sequence[int]) -> dict[int, int]:
    """Counts by magnitude code, signs folded; codes that are not finite values are left out."""
    element, counts = m.format.element, dict[int, int]()
    for code, count in enumerate(bins):
        if count and math.isfinite(value := element.value(code & ((1 << element.bits) - 1))):
            magnitude = round(math.ldexp(abs(value), element.mantissa_bits - element.emin))
            counts[magnitude] = counts.get(magnitude, 0) + count
    return counts


def _steps(element: FloatFormat, magnitude: int) -> float:
    return math.ldexp(magnitude, element.emin - element.mantissa_bits)


def _subnormal_percent(m: Measurement) -> float | None:
    element = m.format.element
    if element.twos_complement:
        return None
    lowest_normal = 1 << element.mantissa_bits
    subnormal = sum(n for steps, n in _magnitudes(m, m.stats.code_bins).items() if 0 < steps < lowest_normal)
    return _percent(subnormal, m.stats.elements)


def _binades_used(m: Measurement) -> float | None:
    counts = [(code, n) for code, n in enumerate(m.stats.block_code_bins) if code and n]
    total = sum(n for _, n in counts)
    element = m.format.element
    reach = sum(n * math.log2(element.magnitude(code) / element.min_positive) for code, n in counts)
    return reach / total if total else None


def _scale_exponents(m: Measurement) -> dict[int, int]:
    """Counts by exponent of the block scales; a zero or (FP32) subnormal scale is under the key of the lowest bin."""
    return {b - FP32.bias: n for b, n in enumerate(m.stats.scale_bins[:-1]) if n}


def _scale_exponent_histogram(m: Measurement) -> dict[str, int]:
    zero = "zero" if m.format.scale is E4M3 else str(-FP32.bias)
    return {zero if e == -FP32.bias else str(e): n for e, n in _scale_exponents(m).items()}


def _extreme_exponent(pick: Callable[[list[int]], int]) -> Callable[[Measurement], Value]:
    def of(m: Measurement) -> Value:
        exponents = [e for e in _scale_exponents(m) if e > -FP32.bias or m.format.has_power_of_two_scales]
        return pick(exponents) if exponents else None

    return of


def _element_exponent_histogram(m: Measurement) -> dict[str, int]:
    element, histogram = m.format.element, dict[str, int]()
    for magnitude, count in sorted(_magnitudes(m, m.stats.code_bins).items()):
        key = str(math.frexp(_steps(element, magnitude))[1] - 1) if magnitude else "zero"
        histogram[key] = histogram.get(key, 0) + count
    return histogram


def _code_use_percent(m: Measurement) -> float | None:
    element = m.format.element
    finite = 2 * element.max_code + (1 if element.twos_complement else 2)
    used = sum(1 for count in m.stats.code_bins if count)
    return _percent(used, finite) if m.stats.measured else None


def _quantiles(bins: Sequence[int], value: Callable[[int], float | None]) -> dict[str, float | None]:
    """The value of the bin in which each quantile falls (nearest rank)."""
    total, found = sum(bins), dict[str, float | None]()
    for name, share in QUANTILES.items():
        rank, seen = max(1, math.ceil(share * total)), 0
        for at, count in enumerate(bins):
            seen += count
            if count and seen >= rank:
                found[name] = value(at)
                break
        else:
            found[name] = None
    return found


def _bin_middle(at: int, per_octave: int, lowest_exponent: int) -> float:
    """log2 of the middle of a bin whose octave is cut into equal linear parts."""
    octave, part = divmod(at, per_octave)
    return octave + lowest_exponent + math.log2(1.0 + (part + 0.5) / per_octave)


def _block_sqnr_db(m: Measurement) -> dict[str, float | None]:
    bins, s = m.stats.sqnr_bins, m.stats

    def decibels(at: int) -> float | None:
        exact = at == len(bins) - 1
        return None if exact else 10.0 * math.log10(2.0) * _bin_middle(at, SQNR_BINS_PER_OCTAVE, SQNR_LOWEST_EXPONENT)

    quantiles = _quantiles(bins, decibels)
    if s.min_block_sqnr > 0:
        quantiles["p0"] = 10.0 * math.log10(s.min_block_sqnr)
    return quantiles


def _block_dynamic_range(m: Measurement) -> dict[str, float | None]:
    quantiles = _quantiles(m.stats.range_bins, lambda at: _bin_middle(at, RANGE_BINS_PER_OCTAVE, 0))
    if m.stats.min_block_range > 0:
        quantiles["p0"] = math.log2(m.stats.min_block_range)
    return quantiles


def _worst_blocks(m: Measurement) -> list[dict[str, object]]:
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
            "noise_percent": _percent(noise, m.stats.noise),
        }
        for noise, block in m.stats.worst
        if math.isfinite(noise)
    ]


_B4 = "Pretraining Large Language Models with NVFP4, appendix B.4"

METRICS: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric("elements", "elements", "elements of the tensor", "n", lambda m: m.stats.elements),
        Metric("blocks", "blocks", "blocks that share a scale", "number of scales", lambda m: m.stats.blocks),
        Metric(
            "bits_per_element",
            "bits",
            "stored bits of an element, scales included",
            "code bits + (blocks * scale bits + tensor scale bits) / elements",
            _bits_per_element,
            "low",
        ),
        Metric("amax", "", "largest finite magnitude", "max |x|", lambda m: m.stats.amax),
        Metric(
            "saturated",
            "elements",
            "finite elements whose scaled magnitude exceeded the element's largest value and was clamped",
            "count(|x / scale| > element max)",
            lambda m: m.stats.saturated,
            "low",
        ),
        Metric(
            "saturated_percent",
            "% of elements",
            "share of saturated elements",
            "100 * saturated / elements",
            lambda m: _percent(m.stats.saturated, m.stats.elements),
            "low",
        ),
        Metric(
            "saturated_blocks",
            "blocks",
            "blocks with at least one saturated element",
            "count of blocks",
            lambda m: m.stats.saturated_blocks,
            "low",
        ),
        Metric(
            "saturated_blocks_percent",
            "% of blocks",
            "share of blocks with a saturated element",
            "100 * saturated_blocks / blocks",
            lambda m: _percent(m.stats.saturated_blocks, m.stats.blocks),
            "low",
        ),
        Metric(
            "underflowed",
            "elements",
            "elements that are not zero but whose code is",
            "count(x != 0 and code magnitude = 0)",
            lambda m: m.stats.underflowed,
            "low",
        ),
        Metric(
            "underflowed_percent",
            "% of elements",
            "share of underflowed elements",
            "100 * underflowed / elements",
            lambda m: _percent(m.stats.underflowed, m.stats.elements),
            "low",
        ),
        Metric(
            "scale_underflowed_blocks",
            "blocks",
            "blocks lost because the scale itself became zero or was clamped at its format's largest value",
            "count(amax > 0 and (scale = 0 or scale argument > scale max))",
            lambda m: m.stats.scale_underflowed_blocks,
            "low",
        ),
        Metric(
            "subnormal_percent",
            "% of elements",
            "share of elements on the element format's subnormals (none in integer formats)",
            "100 * count(0 < |code value| < smallest normal) / elements",
            _subnormal_percent,
            "low",
        ),
        Metric(
            "nonfinite",
            "elements",
            "NaN and infinities met in the input",
            "count(NaN) + count(infinite)",
            lambda m: m.stats.nan + m.stats.infinite,
            "low",
        ),
        Metric(
            "nan_blocks", "blocks", "blocks that became NaN", "count(scale is NaN)", lambda m: m.stats.nan_blocks, "low"
        ),
        Metric("zero_blocks", "blocks", "blocks of zeros only", "count(amax = 0)", lambda m: m.stats.zero_blocks),
        Metric("mse", "", "mean squared error", "mean((y - x)^2)", _mse, "low"),
        Metric("rmse", "", "root of the mean squared error", "sqrt(mse)", lambda m: _root(_mse(m)), "low"),
        Metric(
            "sqnr_db",
            "dB",
            "signal to quantization noise; absent when there is no noise (exact) or no signal",
            "10 log10(sum x^2 / sum (y - x)^2)",
            _sqnr_db,
            "high",
        ),
        Metric("relative_error", "", "error norm over signal norm", "||y - x|| / ||x||", _relative_error, "low"),
        Metric("cosine", "", "cosine between input and output", "x . y / (||x|| ||y||)", _cosine, "high"),
        Metric(
            "max_abs_error", "", "largest error of an element", "max |y - x|", lambda m: m.stats.max_abs_error, "low"
        ),
        Metric(
            "max_rel_error",
            "",
            "largest error of a nonzero element relative to it (1 where one underflowed)",
            "max |y - x| / |x|",
            lambda m: m.stats.max_rel_error,
            "low",
        ),
        Metric(
            "bias",
            "",
            "mean error",
            "mean(y - x)",
            lambda m: m.stats.error / m.stats.measured if m.stats.measured else None,
        ),
        Metric(
            "binades_available",
            "binades",
            "binades the element format can represent",
            "log2(element max / smallest positive)",
            lambda m: m.format.element.binades,
            source="Recipes for Pre-training LLMs with MXFP8, table 1",
        ),
        Metric(
            "binades_used",
            "binades",
            "binades the chosen scales leave reachable: from the largest code of a block down to the smallest positive "
            "value, averaged over blocks that have a nonzero code",
            "mean over blocks of log2(value of the largest code / smallest positive)",
            _binades_used,
            "high",
            _B4,
        ),
        Metric(
            "scale_exponent_min",
            "exponent",
            "smallest exponent of the block scales in use (zero scales left out)",
            "min floor(log2 scale)",
            _extreme_exponent(min),
        ),
        Metric(
            "scale_exponent_max",
            "exponent",
            "largest exponent of the block scales in use",
            "max floor(log2 scale)",
            _extreme_exponent(max),
        ),
        Metric(
            "scale_exponent_histogram",
            "blocks",
            "blocks by exponent of their scale",
            "count by floor(log2 scale)",
            _scale_exponent_histogram,
        ),
        Metric(
            "element_exponent_histogram",
            "elements",
            "elements by binade of their code's value",
            "count by floor(log2 |code value|)",
            _element_exponent_histogram,
        ),
        Metric(
            "code_use_percent",
            "% of codes",
            "share of the format's finite codes that occur",
            "100 * distinct codes / finite codes",
            _code_use_percent,
            "high",
        ),
        Metric(
            "block_sqnr_db",
            "dB",
            "quantiles over blocks of a block's SQNR, to within 0.13 dB (p0 exactly); absent: exact",
            "quantiles of 10 log10(sum x^2 / sum (y - x)^2)",
            _block_sqnr_db,
            "high",
        ),
        Metric(
            "block_dynamic_range",
            "binades",
            "quantiles over blocks of largest over smallest nonzero magnitude, to within 0.17 binades (p0 exactly)",
            "quantiles of log2(amax / smallest nonzero)",
            _block_dynamic_range,
        ),
        Metric(
            "worst_blocks",
            "",
            "the blocks with most error: batch index, first row and column, sum of squared errors, share of the total",
            "largest sum (y - x)^2",
            _worst_blocks,
        ),
    )
}


def measured(stats: Stats, row: BlockFormat, shape: tuple[int, ...] | None = None) -> dict[str, Value]:
    """Every metric of one tensor, or of a sum of tensors (`shape` None); None where a value does not exist or is not
    finite."""
    m = Measurement(stats, row, shape)
    values = {name: metric.of(m) for name, metric in METRICS.items()}
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
