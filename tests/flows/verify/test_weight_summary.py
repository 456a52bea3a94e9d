"""Summaries of weights: ranks of codes, kinds of scales, and the largest magnitude."""

import math

import numpy as np
import pytest

from mxcli.files.layouts import Weight
from mxcli.files.tensors import Array
from mxcli.flows.verify.weight_summary import (
    NOT_FINITE,
    WeightSummary,
    magnitude_ranks,
    ranks_by_block,
    scales_that,
    summary_of,
)
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import Quantized, grid_shape
from mxcli.numerics.floats import E2M1, E4M3, E5M2, E8M0, FP32, INT8, FloatFormat
from mxcli.numerics.scheme import Rules, resolve

ONE_E4M3, LARGEST_E4M3 = 0x38, 0x7E


def _quantized(format: str, packed: Array, scales: Array, tensor_scale: float | None = None) -> Quantized:
    scheme = resolve(format, Rules())
    shape = (packed.shape[0], packed.shape[1] * 8 // scheme.format.element.stored_bits)
    grid = np.ascontiguousarray(np.broadcast_to(scales, grid_shape(scheme.format, shape)))
    return Quantized(scheme, shape, packed, grid, tensor_scale, 1.0, None, None)


def _summary(q: Quantized) -> WeightSummary:
    return summary_of(StoredWeight(Weight("w", q.shape, q.scheme, "F32"), ()), q, profiled=False)


def _nvfp4(codes: list[int], scales: list[int]) -> Quantized:
    """Return rows of one block, each of a single code."""
    packed = np.asarray([[code * 17] * 8 for code in codes], np.uint8)
    return _quantized("nvfp4", packed, np.asarray(scales, np.uint8).reshape(-1, 1), 1.0)


@pytest.mark.parametrize(
    ("element", "ranks"),
    [
        (E2M1, {0: 0, 7: 7, 8: 0, 15: 7}),
        (E4M3, {0: 0, 0x7E: 0x7E, 0x7F: NOT_FINITE, 0x80: 0, 0xFE: 0x7E, 0xFF: NOT_FINITE}),
        (E5M2, {0x7B: 0x7B, 0x7C: NOT_FINITE, 0xFC: NOT_FINITE, 0xFD: NOT_FINITE}),
        (INT8, {0: 0, 1: 1, 127: 127, 128: 128, 255: 1}),
    ],
)
def test_ranks_of_codes(element: FloatFormat, ranks: dict[int, int]) -> None:
    assert {code: int(magnitude_ranks(element)[code]) for code in ranks} == ranks


@pytest.mark.parametrize(
    ("format", "codes", "largest", "not_finite"),
    [
        ("mxfp8_e4m3", [0x80, 0x01, 0xFE, 0x3F], 0x7E, 0),
        ("mxfp8_e4m3", [0x7F, 0xFF, 0x30, 0xB1], 0x31, 2),
        ("mxfp8_e5m2", [0x7C, 0xFD, 0x7B, 0x00], 0x7B, 2),
        ("mxint8", [0x80, 0x7F, 0xFF, 0x00], 128, 0),
        ("mxfp4", [0x70, 0x0C, 0x81, 0x00], 7, 0),
    ],
)
def test_the_largest_code_of_a_block(format: str, codes: list[int], largest: int, not_finite: int) -> None:
    size = 16 if format == "mxfp4" else 32
    packed = np.zeros((3, size), np.uint8)
    packed[1, 5 : 5 + len(codes)] = codes
    ranks, bad = ranks_by_block(_quantized(format, packed, np.asarray(127, np.uint8)))
    assert (ranks.reshape(-1).tolist(), bad) == ([0, largest, 0], not_finite)


def test_rows_of_several_pieces() -> None:
    """More elements than are ranked at a time; each row has its own largest code."""
    packed = np.zeros((400, 256), np.uint8)
    packed[np.arange(400), np.arange(400) % 256] = np.arange(400) % 8
    ranks, _ = ranks_by_block(_quantized("nvfp4", packed, np.asarray(ONE_E4M3, np.uint8), 1.0))
    assert ranks.max(axis=-1).reshape(-1).tolist() == [at % 8 for at in range(400)]


@pytest.mark.parametrize(
    ("scale", "stored", "negative", "not_finite"),
    [
        (E4M3, [1, ONE_E4M3, LARGEST_E4M3], [], []),
        (E4M3, [0, 0x80, 0x81, 0x7F, 0xFF, 2], [2], [3, 4]),
        (E8M0, [0, 127, 0xFE], [], []),
        (E8M0, [0, 0xFF, 0x80], [], [1]),
        (E5M2, [0x7B, 0x7C, 0xFC, 0xFD, 0x81], [2, 4], [1, 2, 3]),
        (FP32, [1.0, -1.0, math.nan, math.inf, -0.0], [1], [2, 3]),
        (E4M3, [], [], []),
    ],
)
def test_kinds_of_scales(scale: FloatFormat, stored: list[float], negative: list[int], not_finite: list[int]) -> None:
    scales = np.asarray(stored, np.float32 if scale is FP32 else np.uint8)
    assert np.flatnonzero(scales_that(lambda values: values < 0, scale, scales)).tolist() == negative
    assert np.flatnonzero(scales_that(lambda values: ~np.isfinite(values), scale, scales)).tolist() == not_finite


@pytest.mark.parametrize(
    ("codes", "scales", "reach"),
    [
        ([7, 7], [ONE_E4M3, 0x30], 6.0),
        # A smaller scale with a larger code reaches further.
        ([4, 7], [ONE_E4M3, 0x34], 4.5),
        ([1, 7], [LARGEST_E4M3, 0x78], 1536.0),
        ([0, 1], [LARGEST_E4M3, 1], 2.0**-10),
        ([0, 0], [LARGEST_E4M3, LARGEST_E4M3], 0.0),
        # The sign of a scale does not count, and NaN is not a magnitude.
        ([7, 7], [0xB8, 0x30], 6.0),
        ([7, 2], [0x7F, ONE_E4M3], 1.0),
        ([7, 7], [0, 0x80], 0.0),
    ],
)
def test_the_largest_magnitude(codes: list[int], scales: list[int], reach: float) -> None:
    assert _summary(_nvfp4(codes, scales)).reach == reach


@pytest.mark.parametrize(
    ("scales", "reach"), [([1.0, 0.5], 448.0), ([math.nan, 0.5], 224.0), ([-2.0, 1.0], 896.0), ([math.inf, 1.0], 448.0)]
)
def test_the_largest_magnitude_under_binary32_scales(scales: list[float], reach: float) -> None:
    packed = np.full((2, 16), LARGEST_E4M3, np.uint8)
    q = _quantized("fp8_e4m3_channel", packed, np.asarray(scales, np.float32).reshape(-1, 1))
    assert _summary(q).reach == reach


def test_blocks_of_scale_zero() -> None:
    """A code between 0 and the largest was lost; blocks of the largest alone are emptied."""
    summary = _summary(_nvfp4([3, 7, 0, 3], [0, 0x80, 0, ONE_E4M3]))
    assert (summary.lost, summary.emptied) == (1, 1)


def test_scales_and_codes_by_value() -> None:
    summary = _summary(_nvfp4([7, 1], [ONE_E4M3, 0x30]))
    assert summary.scale_values.reshape(-1).tolist() == [1.0, 0.5]
    assert summary.code_max.reshape(-1).tolist() == [6.0, 0.5]
