"""The tensors on which kernels are tested: small, deterministic, each with one kind of difficult values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> F32:
    """Return standard normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def log_uniform(low: float, high: float, *shape: int, seed: int = 0) -> F32:
    """Return magnitudes from 10^low to 10^high, uniform in the logarithm, with random signs."""
    rng = np.random.default_rng(seed)
    magnitudes = (10.0 ** rng.uniform(low, high, shape)).astype(np.float32)
    return np.where(rng.choice([True, False], shape), -magnitudes, magnitudes)


def nonfinite(rows: int, columns: int) -> F32:
    """Return normal values with NaN and infinities of both signs, alone, together and filling blocks."""
    x = normal(rows, columns, seed=1)
    x[1, 3], x[2, 40], x[3, columns - 2] = np.nan, np.inf, -np.inf
    x[4, :], x[5, 0], x[5, 1], x[6, :32] = np.inf, -np.nan, np.inf, np.nan
    return x


def ties(*shape: int) -> F32:
    """Return multiples of 1/8: codes of the small formats and midpoints between them."""
    return (np.random.default_rng(2).integers(-60, 61, shape) / 8).astype(np.float32)


def mostly_zero(rows: int, columns: int) -> F32:
    """Return zeros of both signs, a block with one normal element and one with the smallest binary32 subnormal."""
    x = np.zeros((rows, columns), np.float32)
    x[0, 1::2], x[1, columns - 1], x[2, 2], x[2, columns - 2] = -0.0, -3.5, 1e-45, 3e-39
    return x


SAMPLES: dict[str, F32] = {
    "normal": normal(5, 70),
    "wide range": log_uniform(-38, 38, 5, 70),
    "rows of every size": normal(5, 70, seed=3) * log_uniform(-36, 37, 5, 1),
    "subnormal": log_uniform(-45, -36.5, 5, 70),
    "nonfinite": nonfinite(7, 70),
    "ties": ties(5, 70),
    "mostly zero": mostly_zero(4, 70),
    "zero": np.float32(-0.0) * np.arange(40, dtype=np.float32).reshape(1, 40) + np.float32(0),
}
SAMPLES["zero"][0, ::3] = -0.0
