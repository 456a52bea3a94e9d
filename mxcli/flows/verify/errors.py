"""The distance of dequantized weights from their originals: sums in binary64, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mxcli.files.reading import as_floats, from_floats
from mxcli.files.tensors import Array
from mxcli.numerics.metric_formulas import decibels, relative

PIECE = 1 << 17
"""Elements converted to binary64 at a time."""
RUN, FAR = 256, 0.75
"""The values of a row that are judged together where their blocks are not known, and the relative error from which on
they are other values: that of two bits per value is below half of it."""
_TINY = 2.0**-12
"""The part of the mean square below which values may be rounded to 0."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Sums over the elements that are finite in both: squares of the original, squares of the error, and products of
    original and decoded; `unmatched` counts elements that are finite in only one of the two."""

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    max_abs_error: float = 0.0
    amax: float = 0.0
    unmatched: int = 0

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.elements + other.elements,
            self.signal + other.signal,
            self.noise + other.noise,
            self.product + other.product,
            max(self.max_abs_error, other.max_abs_error),
            max(self.amax, other.amax),
            self.unmatched + other.unmatched,
        )

    @property
    def relative_error(self) -> float | None:
        """Norm of the error over norm of the original; None without signal."""
        return relative(self.signal, self.noise)

    @property
    def sqnr_db(self) -> float | None:
        """Signal over noise in dB; None without noise or without signal."""
        return decibels(self.signal, self.noise)

    @property
    def mse(self) -> float | None:
        """Mean squared error; None without elements."""
        return self.noise / self.elements if self.elements else None

    @property
    def gain(self) -> float | None:
        """Least-squares factor from the original to the decoded weight; None without signal."""
        return self.product / self.signal if self.signal > 0 else None


def widened(x: Array, dtype: str) -> Array:
    """Return values of a safetensors type as binary64."""
    return np.asarray(as_floats(x, dtype), np.float64)


def converted(x: Array, dtype: str, to: str) -> Array:
    """Return values of a safetensors type as another one, each rounded to the nearest, ties to even; of the same type
    unchanged."""
    return x if dtype == to else from_floats(np.asarray(as_floats(x, dtype)), to)


def distance(original: Array, original_dtype: str, decoded: Array, decoded_dtype: str = "F32") -> Distance:
    """Return the distance between two arrays of the same shape."""
    x, y = original.reshape(-1), decoded.reshape(-1)
    total = Distance()
    for begin in range(0, x.size, PIECE):
        total += _distance(
            widened(x[begin : begin + PIECE], original_dtype), widened(y[begin : begin + PIECE], decoded_dtype)
        )
    return total


def far_rows(original: Array, original_dtype: str, decoded: Array, decoded_dtype: str) -> str:
    """Return in words where decoded values are other ones than the original's: runs of RUN values of a row with an
    error of at least FAR times their norm, or values finite in only one of the two; empty if nowhere."""
    columns = original.shape[-1]
    x, y = original.reshape(-1, columns), decoded.reshape(-1, columns)
    starts, far, runs, first = np.arange(0, columns, RUN), 0, 0, ""
    for begin in range(0, len(x), max(1, PIECE // columns)):
        rows = slice(begin, begin + max(1, PIECE // columns))
        one, other = widened(x[rows], original_dtype), widened(y[rows], decoded_dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            noise, signal = (np.add.reduceat(part**2, starts, axis=1) for part in (one - other, one))
        # Next to larger values, runs of tiny ones are rounded to 0.
        wrong = ~(noise <= FAR**2 * np.maximum(signal, _TINY * signal.mean()))
        runs, far = runs + wrong.size, far + int(np.count_nonzero(wrong))
        if not first and wrong.any():
            row, at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            end = min(int(starts[at]) + RUN, columns)
            first = f"row {begin + int(row):,}, columns {int(starts[at]):,} to {end - 1:,}"
    return f"in {far:,} of {runs:,} places the error is as large as the values, the first at {first}" if far else ""


def same_bytes(one: Array, other: Array) -> bool:
    """Return whether two arrays have the same bytes."""
    x, y = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other))
    size = PIECE << 3
    pieces = range(0, x.size, size)
    return x.size == y.size and all(np.array_equal(x[at : at + size], y[at : at + size]) for at in pieces)


def _distance(x: Array, y: Array) -> Distance:
    finite_x, finite_y = np.isfinite(x), np.isfinite(y)
    unmatched = int(np.count_nonzero(finite_x != finite_y))
    both = finite_x & finite_y
    if not both.all():
        x, y = x[both], y[both]
    error = y - x
    with np.errstate(over="ignore"):
        return Distance(
            x.size,
            _product(x, x),
            _product(error, error),
            _product(x, y),
            float(np.abs(error).max(initial=0.0)),
            float(np.abs(x).max(initial=0.0)),
            unmatched,
        )


def _product(x: Array, y: Array) -> float:
    """Return the sum of products in one thread: BLAS divides sums by the threads of the machine, and waits for them."""
    return float(np.einsum("i,i->", x, y))
