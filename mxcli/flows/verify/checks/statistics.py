"""The check of weights against the statistics that the record of mxcli has of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mxcli.files.model_files import RECORD
from mxcli.files.tensors import Array
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding
from mxcli.flows.verify.weight_summary import WeightSummary
from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.formats import BlockFormat

_WIDER, _OF_AMAX = 1.01, 2.0**-8
"""What dialects may add to the recorded error: a part of it, and one of the amax."""
_SMALLEST = str(-FP32.bias)
ZERO = "zero"


@dataclass(frozen=True, slots=True)
class Measured:
    """A weight with the statistics recorded of its tensor; None if the record has none of this shape."""

    summary: WeightSummary
    statistics: Mapping[str, object] | None

    @staticmethod
    def of(summary: WeightSummary, recorded: Mapping[str, Mapping[str, object]]) -> Measured:
        """Return a weight with its own of the records of tensors."""
        record = recorded.get(summary.name, {})
        statistics, shape = record.get("statistics"), record.get("shape")
        fits = isinstance(statistics, Mapping) and shape == list(summary.stored.plain.shape)
        transformed = record.get("hadamard") is not None
        return Measured(summary, statistics if fits and isinstance(statistics, Mapping) and not transformed else None)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _differing(measured: Measured) -> Iterator[Finding]:
    summary, statistics = measured.summary, measured.statistics
    if statistics is None:
        return
    amax, error = _number(statistics.get("amax")), _number(statistics.get("max_abs_error"))
    # An infinity is stored as a value above the largest finite one.
    has_infinity = _number(statistics.get("nonfinite")) > 0
    if not has_infinity and abs(summary.amax - amax) > error * _WIDER + amax * _OF_AMAX:
        yield _finding(
            summary.name,
            f"its largest value is {summary.amax:.6g}",
            f"{amax:.6g}, which {RECORD} states, within the error of {error:.3g} that it states",
        )
    if summary.profile is None:
        return
    scales = _counts(statistics.get("scale_exponent_histogram"), summary.scales.size)
    found = _exponents_of_scales(summary.scale_values, summary.format)
    if scales is not None and scales != found:
        yield _finding(summary.scales_name, *_unlike(found, scales, "scales"))
    counted = _exponents_of_codes(summary)
    codes = None if counted is None else _counts(statistics.get("element_exponent_histogram"), sum(counted.values()))
    if counted is not None and codes is not None and codes != counted:
        yield _finding(summary.codes_name, *_unlike(counted, codes, "codes"))


def _finding(where: str, value: str, need: str) -> Finding:
    return Finding(where, value, need, "Restore it: mxcli verify … --against SOURCE --repair.")


def _counts(histogram: object, total: int) -> dict[str, int] | None:
    """Return a recorded histogram if it counts as many."""
    if not isinstance(histogram, Mapping) or not all(type(count) is int for count in histogram.values()):
        return None
    counts = {str(key): count for key, count in histogram.items() if count}
    return counts if sum(counts.values()) == total else None


def _unlike(found: Mapping[str, int], recorded: Mapping[str, int], what: str) -> tuple[str, str]:
    key = next(key for key in {**recorded, **found} if recorded.get(key) != found.get(key))
    which = "that are 0" if key == ZERO else f"from 2^{key} up to 2^{int(key) + 1}" if _is_exponent(key) else key
    return f"has {found.get(key, 0):,} {what} {which}", f"{recorded.get(key, 0):,}, as {RECORD} states"


def _is_exponent(key: str) -> bool:
    return key.removeprefix("-").isdigit()


def _exponents_of_scales(values: Array, fmt: BlockFormat) -> dict[str, int]:
    """Return the number of scales by exponent."""
    finite = values[np.isfinite(values)]
    exponents = np.maximum(np.frexp(finite)[1] - 1, -FP32.bias)
    exponents = np.where(finite == 0, -FP32.bias, exponents)
    keys, counts = np.unique(exponents, return_counts=True)
    holds_zero = fmt.scale is not FP32 and not fmt.has_power_of_two_scales
    named = {str(int(key)): int(count) for key, count in zip(keys, counts, strict=True)}
    return {ZERO if key == _SMALLEST and holds_zero else key: count for key, count in named.items()}


def _exponents_of_codes(summary: WeightSummary) -> dict[str, int] | None:
    """Return the number of finite codes by exponent of their value; None for codes that are not whole or half bytes."""
    element, shape = summary.format.element, summary.stored.weight.shape
    if summary.profile is None or element.stored_bits not in (4, 8):
        return None
    per_byte = 8 // element.stored_bits
    bytes_of = math.prod(shape[:-1]) * -(-shape[-1] // per_byte)
    if bytes_of * per_byte != math.prod(shape):
        return None
    counts: dict[str, int] = {}
    for byte, share in enumerate(summary.profile.codes.tolist()):
        for code in (byte & 15, byte >> 4) if per_byte == 2 else (byte,):
            key, count = _exponent(element, code), round(share * bytes_of)
            if key is not None and count:
                counts[key] = counts.get(key, 0) + count
    return counts


def _exponent(element: FloatFormat, code: int) -> str | None:
    value = abs(element.value(code))
    if not math.isfinite(value):
        return None
    return ZERO if value == 0 else str(math.frexp(value)[1] - 1)


STATISTICS_CHECKS: tuple[Check[Measured], ...] = (
    Check(
        "recorded_statistics",
        PROBLEM,
        "weights that have other values than the record counted when they were written",
        "the largest value within the recorded error; without a recorded hash also scales and codes by exponent",
        _differing,
    ),
)
