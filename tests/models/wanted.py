"""What a report should say of a tensor, from the oracle alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle
import pytest

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MX, WHOLE = (1, 32), (None, None)
FP8_BLOCKS: dict[str, oracle.Block] = {
    "": WHOLE,
    "_channel": (1, None),
    "_1x128": (1, 128),
    "_128x128": (128, 128),
}
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8_e4m3": {"element": "e4m3", "scale": "e8m0", "block": MX},
    "mxfp8_e5m2": {"element": "e5m2", "scale": "e8m0", "block": MX},
    "mxfp6_e2m3": {"element": "e2m3", "scale": "e8m0", "block": MX},
    "mxfp6_e3m2": {"element": "e3m2", "scale": "e8m0", "block": MX},
    "mxfp4_e2m1": {"element": "e2m1", "scale": "e8m0", "block": MX},
    "mxint8": {"element": "int8", "scale": "e8m0", "block": MX},
    "nvfp4": {"element": "e2m1", "scale": "e4m3", "block": (1, 16)},
    "nvfp4_2d": {"element": "e2m1", "scale": "e4m3", "block": (16, 16)},
    **{
        f"fp8_{element}{suffix}": {"element": element, "scale": "fp32", "block": block}
        for element in ("e4m3", "e5m2")
        for suffix, block in FP8_BLOCKS.items()
    },
}
"""The oracle's arguments for every format with a name; its default rules are `rceil`, `te` and `amax`."""

STORED_BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4, "int8": 8}
SCALE_BITS = {"e8m0": 8, "e4m3": 8, "fp32": 32}
PRECISION = 1e-6
"""Relative: block sums and single errors are binary32."""
SQNR_BIN_DB, RANGE_BIN_BINADES = 0.1337, 0.17
"""Half of the widest bin, at the start of an octave: 10 log10(1 + 1/32) dB and log2(1 + 1/8) binades."""
MOST = 100
SHARES = {"p1": 0.01, "p50": 0.5, "p99": 0.99}


def expected(x: Array, format: str, **rules: Any) -> oracle.OracleResult:
    """The oracle's result for a matrix; `rules` are its arguments, such as `rule` or `variant`, unless the default."""
    return oracle.quantize(x, **{**FORMATS[format], **rules})


def with_binary32_scales(result: oracle.OracleResult) -> oracle.OracleResult:
    """E8M0 scales stored in 32 bits."""
    values = np.ldexp(np.float32(1), result.scales.astype(np.int32) - 127)
    return replace(result, scale="fp32", scales=values)


def assert_metrics(metrics: Mapping[str, Any], x: Array, result: oracle.OracleResult) -> None:
    """A report has of a finite matrix what the oracle has: each key within its precision, and no other key."""
    worst = len(metrics["worst_blocks"])
    assert worst
    wanted = _metrics(x, result)
    assert dict(metrics) == {**wanted, "worst_blocks": wanted["worst_blocks"][:worst]}


def _metrics(x: Array, result: oracle.OracleResult) -> dict[str, Any]:
    found, fmt = oracle.statistics(x, result), result.element
    elements, blocks = x.size, found["blocks"]
    tensor_scale_bits = 32 if result.tensor_encode is not None or result.tensor_decode is not None else 0
    finite_codes = 2 * len(fmt.magnitudes) - (0 if fmt.sign_bit else 1)
    return {
        "elements": elements,
        "blocks": blocks,
        "bits_per_element": STORED_BITS[fmt.name] + (blocks * SCALE_BITS[result.scale] + tensor_scale_bits) / elements,
        "amax": found["amax"],
        "saturated": found["saturated"],
        "saturated_percent": 100 * found["saturated"] / elements,
        "saturated_blocks": found["saturated_blocks"],
        "saturated_blocks_percent": 100 * found["saturated_blocks"] / blocks,
        "underflowed": found["underflowed"],
        "underflowed_percent": 100 * found["underflowed"] / elements,
        "scale_underflowed_blocks": found["scale_underflowed_blocks"],
        "subnormal_percent": 100 * found["subnormal"] / elements if fmt.sign_bit else None,
        "nonfinite": 0,
        "nan_blocks": 0,
        "zero_blocks": int(np.isnan(found["block_dynamic_range"]).sum()),
        "mse": _about(found["mse"]),
        "rmse": _about(found["rmse"]),
        "sqnr_db": _about(found["sqnr_db"]),
        "relative_error": _about(found["relative_error"]),
        "cosine": pytest.approx(found["cosine"], rel=1e-9, abs=0),
        "max_abs_error": _about(found["max_abs_error"]),
        "max_rel_error": _about(found["max_rel_error"]),
        "bias": pytest.approx(found["bias"], rel=0, abs=PRECISION * found["rmse"]),
        "shrunk_percent": pytest.approx(found["shrunk_percent"], rel=0, abs=100 * PRECISION * found["relative_error"]),
        "binades_available": _about(found["binades_available"]),
        "binades_used": _about(found["binades_used"]),
        **_scale_exponents(found["scale_exponent_histogram"], blocks),
        "element_exponent_histogram": _element_exponents(found["code_histogram"], fmt),
        "code_use_percent": 100 * np.count_nonzero(found["code_histogram"]) / finite_codes,
        "block_sqnr_db": _quantiles(found["block_sqnr_db"], SQNR_BIN_DB),
        "block_sqnr_histogram": _WholeDecibels(found["block_sqnr_db"]),
        "block_dynamic_range": _quantiles(found["block_dynamic_range"], RANGE_BIN_BINADES),
        "worst_blocks": _worst_blocks(found["block_error_energy"], result.block),
    }


class _WholeDecibels:
    """Equal to a histogram by whole dB in which each block may be off by half a bin; blocks without signal (NaN)
    are not counted."""

    def __init__(self, values: F64) -> None:
        self._finite = np.sort(values[np.isfinite(values)])
        self._exact = int(np.isposinf(values).sum())

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, dict)
        counts = {int(key): count for key, count in other.items() if key != "exact"}
        below = [(sum(n for at, n in counts.items() if at < edge), edge) for edge in range(-60, 350)]
        return (
            other.get("exact", 0) == self._exact
            and sum(counts.values()) == self._finite.size
            and all(
                np.searchsorted(self._finite, edge - SQNR_BIN_DB)
                <= count
                <= np.searchsorted(self._finite, edge + SQNR_BIN_DB, side="right")
                for count, edge in below
            )
        )

    __hash__ = None  # type: ignore[assignment]


def _about(value: float) -> Any:
    return pytest.approx(value, rel=PRECISION, abs=0)


def _scale_exponents(counts: dict[int, int], blocks: int) -> dict[str, Any]:
    zeros = blocks - sum(counts.values())
    histogram = {str(exponent): count for exponent, count in counts.items()}
    return {
        "scale_exponent_min": min(counts),
        "scale_exponent_max": max(counts),
        "scale_exponent_histogram": {"zero": zeros, **histogram} if zeros else histogram,
    }


def _element_exponents(codes: I64, fmt: oracle.Element) -> dict[str, int]:
    histogram: dict[str, int] = {}
    for value, count in zip(fmt.values, codes, strict=True):
        if count:
            key = str(math.frexp(value)[1] - 1) if value else "zero"
            histogram[key] = histogram.get(key, 0) + int(count)
    return histogram


def _quantiles(values: F64, precision: float) -> dict[str, Any]:
    """The least value, and by nearest rank the others to within a bin; None where a block is exact."""
    ranked = np.sort(values[~np.isnan(values)])
    at = {name: ranked[max(math.ceil(share * ranked.size), 1) - 1] for name, share in SHARES.items()}
    found = {name: pytest.approx(value, abs=precision) if np.isfinite(value) else None for name, value in at.items()}
    return {"p0": _about(ranked[0]), **found}


def _worst_blocks(noise: F64, block: tuple[int, int]) -> list[dict[str, Any]]:
    worst = np.argsort(-noise, axis=None, kind="stable")[:MOST]
    return [
        {
            "index": 0,
            "row": int(row) * block[0],
            "column": int(column) * block[1],
            "noise": _about(noise[row, column]),
            "noise_percent": _about(100 * noise[row, column] / noise.sum()),
        }
        for row, column in zip(*np.unravel_index(worst, noise.shape), strict=True)
        if noise[row, column]
    ]
