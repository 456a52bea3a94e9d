"""The CPU kernel on all shapes: ragged blocks, packed rows and empty tensors."""

from __future__ import annotations

import ctypes

import numpy as np
import oracle
import pytest
from kernel_oracle import (
    CHANNELS,
    SPELLED,
    assert_equals_oracle,
    assert_same_bits,
    expected,
    kernel,
    scheme_of,
    stats_of,
)
from kernel_samples import nonfinite, normal

from mxcli.backends import cpu
from mxcli.backends.abi import Result, kernel_scheme, load
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import FORMATS, find_format

EVERY = (*FORMATS, *SPELLED, *CHANNELS)
SHAPES = [(1, 32), (1, 1), (3, 31), (3, 33), (17, 130), (45,), (1,), (2, 3, 50), (2, 1, 3, 40), (2, 130, 1)]
STRIPE = 512
"""Elements of a row that the kernel processes at once."""


@pytest.mark.parametrize("name", EVERY)
def test_every_shape(name: str) -> None:
    for shape in SHAPES:
        q = assert_equals_oracle(normal(*shape), scheme_of(name))
        assert q.shape == shape
        assert q.scales.shape == grid_shape(q.format, shape)
        assert q.packed.shape == (*shape[:-1], packed_columns(q.format, shape[-1]))


@pytest.mark.parametrize("name", EVERY)
def test_scalars_equal_rows_of_one(name: str) -> None:
    number, row = np.full((), -3.25, np.float32), np.full((1, 1), -3.25, np.float32)
    q, same = kernel(number, scheme_of(name)), kernel(row, scheme_of(name))
    assert cpu.dequantize(q).shape == cpu.unpack(q).shape == ()
    assert (q.packed.tobytes(), q.scales.tobytes()) == (same.packed.tobytes(), same.scales.tobytes())
    assert q.stats == same.stats


@pytest.mark.parametrize("name", EVERY)
def test_empty_tensors(name: str) -> None:
    for shape in ((0,), (0, 32), (5, 0), (2, 0, 32), (0, 3, 32)):
        q = kernel(np.zeros(shape, np.float32), scheme_of(name), per_block=True)
        assert q.scales.shape == grid_shape(q.format, shape)
        assert q.packed.size == 0
        assert cpu.unpack(q).shape == cpu.dequantize(q).shape == shape
        assert (stats_of(q).elements, stats_of(q).measured, stats_of(q).signal, stats_of(q).noise) == (0, 0, 0, 0)
        assert (stats_of(q).min_block_sqnr, stats_of(q).first_nonfinite, stats_of(q).worst) == (-1, -1, ())


@pytest.mark.parametrize("name", EVERY)
def test_rows_longer_than_a_stripe(name: str) -> None:
    for columns in (STRIPE - 1, STRIPE, STRIPE + 1, 2 * STRIPE + 40, 2051):
        x = normal(3, columns)
        x[1, columns - 5], x[0, 2] = 300, -70
        assert_equals_oracle(x, scheme_of(name))


@pytest.mark.parametrize(
    "name",
    ["mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e5m2_channel", "e2m1:e8m0:1x1024", "e2m1:e8m0:channel"],
)
def test_rows_longer_than_a_chunk(name: str) -> None:
    """More columns than a thread processes at once, and than 16 bits count."""
    x = normal(2, 70_003)
    x[1, 66_000], x[0, 69_999] = 900, -77
    assert_equals_oracle(x, scheme_of(name))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_128x128", "e4m3:fp32:8x24"])
def test_more_rows_than_a_chunk(name: str) -> None:
    x = normal(5_000, 33)
    x[4_097, 30] = 500
    assert_equals_oracle(x, scheme_of(name))


@pytest.mark.parametrize("block", ["3x7", "1x511", "2x1", "5x520", "600x1", "1x2000", "tensor", "channel"])
def test_block_shapes(block: str) -> None:
    for x in (normal(9, 1100, seed=4), nonfinite(9, 1100)):
        for rule in ("floor", "amax"):
            assert_equals_oracle(x, scheme_of(f"e4m3:fp32:{block}", rule))
    if block != "600x1":  # mostly padding: the oracle's exact fractions take half a minute
        assert_equals_oracle(normal(9, 600, seed=4), scheme_of(f"e4m3:fp32:{block}", "best"))


@pytest.mark.parametrize("name", EVERY)
def test_per_tensor_blocks_include_leading_dimensions(name: str) -> None:
    if find_format(name).block != (None, None):
        return
    x = normal(3, 4, 40)
    x[2, 3, 39] = 50
    q, flat = kernel(x, scheme_of(name)), kernel(x.reshape(1, -1), scheme_of(name))
    assert q.scales.shape == (1, 1)
    assert_same_bits(cpu.unpack(q).reshape(1, -1), cpu.unpack(flat), name)


@pytest.mark.parametrize("name", EVERY)
def test_codes_are_packed_with_element_0_in_the_low_bits(name: str) -> None:
    for columns in (64, 37, 38, 39, 1025):
        x = normal(3, columns)
        q, codes = kernel(x, scheme_of(name)), expected(x, scheme_of(name)).codes
        packed = {4: oracle.pack4(codes), 6: oracle.pack6(codes), 8: codes}[q.format.element.stored_bits]
        np.testing.assert_array_equal(q.packed, packed, strict=True)


@pytest.mark.parametrize("name", EVERY)
def test_memory_after_the_tensor_is_not_read(name: str) -> None:
    """Ragged edges are padded with zeros, not with the memory after them."""
    scheme = scheme_of(name)
    for shape in ((3, 37), (1, 1), (5, 514)):
        size = int(np.prod(shape))
        for poison in (np.nan, np.inf, 3e38):
            memory = np.full(size + 4096, poison, np.float32)
            memory[:size] = normal(size)
            x = memory[:size].reshape(shape)
            q, clean = kernel(x, scheme), kernel(x.copy(), scheme)
            assert (q.packed.tobytes(), q.scales.tobytes()) == (clean.packed.tobytes(), clean.scales.tobytes())
            assert q.stats == clean.stats


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_written_after_the_results(name: str) -> None:
    scheme, library = scheme_of(name), load()
    for shape in ((3, 37), (5, 514), (129, 33)):
        x = normal(*shape)
        q = kernel(x, scheme)
        tensor, _ = cpu._tensor(x, "F32")
        codes, scales = (np.full(a.nbytes + 256, 0xA5, np.uint8) for a in (q.packed, q.scales))
        result = Result(codes=codes.ctypes.data, scales=scales.ctypes.data)
        amax = float(np.abs(x).max())
        scheme_at, tensor_at = ctypes.byref(kernel_scheme(scheme)), ctypes.byref(tensor)
        library.mx_quantize(scheme_at, tensor_at, amax, 0, 0, 2, ctypes.byref(result))
        for written, guarded in ((q.packed, codes), (q.scales, scales)):
            assert guarded[: written.nbytes].tobytes() == written.tobytes()
            assert (guarded[written.nbytes :] == 0xA5).all()


def test_strided_arrays() -> None:
    x = normal(64, 96)
    for view in (x.T, x[::2], x[:, ::3], x[::-1]):
        assert_same_bits(
            cpu.unpack(kernel(view, scheme_of("mxfp4"))), cpu.unpack(kernel(view.copy(), scheme_of("mxfp4"))), "strides"
        )
