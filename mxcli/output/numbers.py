"""Numbers as text: three significant digits, units, powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mxcli.numerics.estimates import uncertainty_of
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import number_of

ABSENT = "-"


def significant(value: float | None) -> str:
    """Return three significant digits; a nonzero value never reads as zero."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    if value == 0 or (isinstance(value, int) and abs(value) < 1_000_000):
        return f"{value:,}" if isinstance(value, int) else "0"
    exponent = math.floor(math.log10(abs(value)))
    rounded = float(f"{value:.2e}")
    if not -4 <= exponent < 6:
        return f"{value:.2e}"
    return f"{rounded:,.{max(2 - math.floor(math.log10(abs(rounded))), 0)}f}"


def trimmed(value: float) -> str:
    """Return three significant digits without trailing zeros, as in a sentence: `0.2`, `1.35`, `12`."""
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def power_of_two(value: float) -> str:
    """Return `2^-6` for an exact power of two other than 1, else the shortest decimal."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 and value != 1 else decimal(value)


def decimal(value: float) -> str:
    """Return at most seven significant digits without trailing zeros: enough for every element value up to FP8."""
    return f"{value:.7g}"


def byte_size(count: float) -> str:
    """Return bytes in the decimal unit that keeps one to three digits before the point."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" else f"{significant(float(count))} {unit}"


def quantity(count: int) -> str:
    """Return a number of elements: `853 k`, `1.24 B`; exact below ten thousand."""
    if count < 10_000:
        return f"{count:,}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)):
        if count < 999.5 * size or unit == "T":
            break
    return f"{significant(count / size)} {unit}"


def counted(count: int, noun: str) -> str:
    """Return `1 tensor`, `28 tensors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shape_text(shape: tuple[int, ...]) -> str:
    """Return `128x384`; `scalar` for a tensor without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def duration(seconds: float) -> str:
    """Return `42 s`, `3 min 10 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 12


def sparkline(counts: Mapping[int, int]) -> str:
    """Return bars for counts by consecutive numbers, a space for a number without; the highest is full.

    More than twelve numbers share bars.
    """
    known = {number: count for number, count in counts.items() if count}
    if not known:
        return ""
    first, last = min(known), max(known)
    each = -(-(last - first + 1) // MOST_BARS)
    sums = [0] * (-(-(last - first + 1) // each))
    for number, count in known.items():
        sums[(number - first) // each] += count
    highest = max(sums)
    return "".join(BARS[-(-count * len(BARS) // highest) - 1] if count else " " for count in sums)


EXACT = "exact"

Metrics = Mapping[str, Value]


def noise_cell(metrics: Metrics, name: str) -> str:
    """Return a measure of noise; `exact` where there is none."""
    return EXACT if metrics["mse"] == 0 else number_cell(metrics, name)


def number_cell(metrics: Metrics, name: str) -> str:
    """Return three significant digits of a metric, and two of the uncertainty of an estimate."""
    unsure = uncertainty_of(metrics, name)
    return significant(number_of(metrics, name)) + ("" if unsure is None else f" ±{unsure:#.2g}".rstrip("."))
