"""Properties of the CPU kernel for all formats and rules, independent of the values."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from kernel_oracle import Array, format_rules, kernel, power_of_two_rules, scheme_of, stats_of
from kernel_samples import log_uniform, nonfinite, normal, ties

from mxcli.backends import cpu
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.formats import FORMATS, find_format
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.stats import Stats

NAMED = format_rules(tuple(FORMATS))
POWER_OF_TWO = power_of_two_rules("floor", "ceil", "rceil", "even", "nearest", "ct-even1", "best")


def bytes_of(q: Quantized) -> tuple[bytes, bytes, float | None]:
    """Return the parts of a quantized tensor that are written to disk."""
    return q.packed.tobytes(), q.scales.tobytes(), q.tensor_scale


def assert_same_statistics(a: Quantized, b: Quantized) -> None:
    """Compare all statistics exactly; NaN equals NaN."""
    for field in fields(Stats):
        left, right = getattr(stats_of(a), field.name), getattr(stats_of(b), field.name)
        assert left == right or (left != left and right != right), field.name


def assert_identical(a: Quantized, b: Quantized) -> None:
    """Compare codes, scales, all statistics and all per-block arrays."""
    assert bytes_of(a) == bytes_of(b)
    assert_same_statistics(a, b)
    assert a.per_block is not None
    assert b.per_block is not None
    for name in a.per_block.__slots__:
        assert getattr(a.per_block, name).tobytes() == getattr(b.per_block, name).tobytes(), name


@pytest.mark.parametrize(("name", "rule"), power_of_two_rules("rceil", "ceil"))
def test_nothing_saturates(name: str, rule: str) -> None:
    for rounding in ELEMENT_ROUNDINGS:
        for x in (normal(40, 96), log_uniform(-40, 38, 40, 96), ties(40, 96)):
            stats = stats_of(kernel(x, scheme_of(name, rule, rounding=rounding)))
            assert (stats.saturated, stats.saturated_blocks) == (0, 0)


@pytest.mark.parametrize(("name", "rule"), POWER_OF_TWO)
def test_powers_of_two_shift_the_scales_and_keep_the_codes(name: str, rule: str) -> None:
    x = log_uniform(-3, 3, 20, 96)
    scheme = scheme_of(name, rule)
    base = kernel(x, scheme)
    for shift in (-70, -1, 1, 13, 90):
        moved = kernel(np.ldexp(x, shift).astype(np.float32), scheme)
        assert moved.packed.tobytes() == base.packed.tobytes()
        np.testing.assert_array_equal(moved.scales.astype(int), base.scales.astype(int) + shift)


@pytest.mark.parametrize(("name", "rule"), NAMED)
def test_negation_flips_signs_only(name: str, rule: str) -> None:
    scheme = scheme_of(name, rule)
    element = scheme.format.element
    for x in (normal(20, 96), log_uniform(-20, 20, 20, 96)):
        plus, minus = kernel(x, scheme), kernel(-x, scheme)
        assert minus.scales.tobytes() == plus.scales.tobytes()
        np.testing.assert_array_equal(cpu.dequantize(minus), -cpu.dequantize(plus))
        codes, mirrored = cpu.unpack(plus).astype(int), cpu.unpack(minus).astype(int)
        if element.twos_complement:
            np.testing.assert_array_equal(mirrored, -codes % 2**element.bits)
        else:
            np.testing.assert_array_equal(mirrored, codes ^ (1 << (element.bits - 1)))


@pytest.mark.parametrize(("name", "rule"), power_of_two_rules("floor", "ceil", "rceil", "even", "best"))
def test_quantizing_again_changes_nothing(name: str, rule: str) -> None:
    """`nearest` and `ct-even1` may clip their own results: their threshold is below the element maximum."""
    scheme = scheme_of(name, rule)
    for x in (normal(40, 96), log_uniform(-36, 36, 40, 96), ties(40, 96)):
        once = cpu.dequantize(kernel(x, scheme))
        again = kernel(once, scheme)
        np.testing.assert_array_equal(cpu.dequantize(again), once)
        assert stats_of(again).noise == 0


@pytest.mark.parametrize(("name", "rule"), NAMED)
def test_parts_equal_the_whole(name: str, rule: str) -> None:
    """Split between block rows, and between blocks of a row, with the tensor's amax given for each part."""
    scheme = scheme_of(name, rule)
    rows, columns = scheme.format.block
    if rows is None:
        return
    x = normal(2 * rows + 3, 4 * (columns or 32) + 5)
    amax = float(np.abs(x).max())
    whole = kernel(x, scheme, tensor_amax=amax)
    parts = [kernel(part, scheme, tensor_amax=amax) for part in (x[:rows], x[rows:])]
    assert np.concatenate([part.scales for part in parts]).tobytes() == whole.scales.tobytes()
    assert np.concatenate([part.packed for part in parts]).tobytes() == whole.packed.tobytes()
    if columns is not None:
        parts = [kernel(part, scheme, tensor_amax=amax) for part in (x[:, : 2 * columns], x[:, 2 * columns :])]
        np.testing.assert_array_equal(np.concatenate([part.scales for part in parts], axis=1), whole.scales)
        codes = np.concatenate([cpu.unpack(part) for part in parts], axis=1)
        np.testing.assert_array_equal(codes, cpu.unpack(whole))


@pytest.mark.parametrize("element", ["e4m3", "e2m3", "e2m1", "int8"])
@pytest.mark.parametrize("scale", ["e8m0", "e4m3", "fp32"])
def test_column_blocks_equal_row_blocks_of_the_transpose(element: str, scale: str) -> None:
    x = normal(64, 48)
    along = kernel(np.ascontiguousarray(x.T), scheme_of(f"{element}:{scale}:4x32"))
    down = kernel(x, scheme_of(f"{element}:{scale}:32x4"))
    np.testing.assert_array_equal(down.scales, along.scales.T)
    np.testing.assert_array_equal(cpu.unpack(down), cpu.unpack(along).T)


def large(columns: int) -> Array:
    """Return a tensor of several chunks, with zeros, NaN, infinities and blocks of very different magnitudes."""
    rows = max(4, 300_000 // columns)
    x = normal(rows, columns) * log_uniform(-8, 8, rows, 1)
    x[-1, 5], x[1, 6], x[2, 3] = np.nan, np.inf, -np.inf
    x[0] = 0
    return x


THREADED = [
    ("mxfp8_e4m3", "rceil", 1000),
    ("mxfp6_e3m2", "best", 1000),
    ("mxfp4_e2m1", "floor", 100_000),
    ("mxint8", "nearest", 500),
    ("nvfp4", "te", 1000),
    ("nvfp4", "ct", 33),
    ("nvfp4_2d", "modelopt", 1000),
    ("fp8_e4m3", "amax", 1000),
    ("fp8_e5m2", "rceil", 7),
    ("fp8_e4m3_channel", "vllm-min", 100_000),
    ("fp8_e4m3_128x128", "amax-bf16", 1000),
    ("e2m1:e8m0:1x1024", "even", 3000),
    ("e4m3:fp32:8x24", "amax", 1000),
]


@pytest.mark.parametrize(("name", "rule", "columns"), THREADED)
def test_results_are_independent_of_the_thread_count(name: str, rule: str, columns: int) -> None:
    for x in (large(columns), np.nan_to_num(large(columns), nan=0, posinf=1, neginf=-1)):
        scheme = scheme_of(name, rule)
        one = kernel(x, scheme, per_block=True, threads=1)
        values = cpu.dequantize(one, threads=1)
        for threads in (2, 3, 8):
            assert_identical(kernel(x, scheme, per_block=True, threads=threads), one)
        assert cpu.dequantize(one, threads=3).tobytes() == values.tobytes()


@pytest.mark.parametrize(("name", "rule"), NAMED)
def test_only_statistics_or_only_codes(name: str, rule: str) -> None:
    x, scheme = nonfinite(9, 96), scheme_of(name, rule)
    whole = kernel(x, scheme)
    bare, measured_only = kernel(x, scheme, stats=False), kernel(x, scheme, codes=False)
    assert bare.stats is None
    assert bytes_of(bare) == bytes_of(whole)
    assert measured_only.packed.size == measured_only.scales.size == 0
    assert_same_statistics(measured_only, whole)
    assert_same_statistics(kernel(x, scheme, per_block=True), whole)


def test_amax_is_the_largest_finite_magnitude() -> None:
    x = large(1000)
    for threads in (1, 2, 5):
        found = cpu.amax(x, "F32", threads)
        assert found.value == np.abs(x[np.isfinite(x)]).max()
        assert (found.nonfinite, found.first_nonfinite) == (3, 1006)
    nothing = cpu.amax(np.zeros((0, 32), np.float32), "F32")
    assert (nothing.value, nothing.nonfinite, nothing.first_nonfinite) == (0, 0, -1)
    halves = np.array([0x7F80, 0xC040, 0x4000], np.uint16)  # bfloat16: infinity, -3, 2
    assert cpu.amax(halves, "BF16").value == 3


def test_spelled_format_is_the_named_one() -> None:
    assert kernel(normal(1, 32), scheme_of("e4m3:e8m0:1x32")).format is find_format("mxfp8")
