"""Stochastic rounding: random numbers depend only on seed, stream and element index; unbiased and uncorrelated.

tests/backends/test_golden.py has the specified statistics of single values.
"""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from kernel_oracle import assert_equals_oracle, kernel, scheme_of, stats_of
from kernel_samples import normal

from mxcli.backends import cpu
from mxcli.errors import UsageError
from mxcli.numerics.formats import FORMATS, find_format
from mxcli.numerics.scheme import Rules, resolve
from mxcli.numerics.streams import stream_of

COUNT = 200_000
BOUND = 4.5 / COUNT**0.5
"""Bound of the correlation of that many independent pairs."""


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_oracles_generator_is_philox(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    """Known answers of Random123 1.14."""
    assert " ".join(f"{word:08x}" for word in oracle.philox(counter, key)) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3_128x128", "int8:e8m0:1x32", "e4m3:e8m0:1x7"])
def test_kernel_draws_equal_the_oracles(name: str) -> None:
    for shape in ((3, 70), (2, 5, 513), (1, 3)):
        assert_equals_oracle(normal(*shape), scheme_of(name, rounding="stochastic", seed=2**32 - 1))


def test_largest_code_of_a_block_is_the_drawn_one() -> None:
    """Under a scale of 1, 4.5 and 4.4 may both become 6 or 4: the count follows the codes, not the amax."""
    x = np.tile(np.array([[4.5, 4.4] + [0.0] * 30], np.float32), (400, 1))
    q = kernel(x, scheme_of("mxfp4", "floor", rounding="stochastic"))
    top = cpu.unpack(q).max(1)
    assert set(top) == {6, 7}
    assert dict(stats_of(q).block_code_bins.counted) == {6: (top == 6).sum(), 7: (top == 7).sum()}


@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_representable_values_are_not_random(name: str) -> None:
    x = normal(40, 256)
    nearest = kernel(x, scheme_of(name))
    drawn = [kernel(x, scheme_of(name, rounding="stochastic", seed=seed)) for seed in range(3)]
    assert len({q.packed.tobytes() for q in drawn}) == 3
    values = cpu.dequantize(nearest)
    for q in drawn:
        assert q.scales.tobytes() == nearest.scales.tobytes()
        if FORMATS[name].has_power_of_two_scales:  # with other scales, dequantized values are not exact in binary32
            assert kernel(values, q.scheme).packed.tobytes() == kernel(values, nearest.scheme).packed.tobytes()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128"])
def test_draws_are_independent_of_threads_and_chunks(name: str) -> None:
    scheme = scheme_of(name, rounding="stochastic", seed=11)
    x = normal(300, 1000)
    one = kernel(x, scheme, threads=1, stream=5)
    for threads in (2, 3, 7):
        other = kernel(x, scheme, threads=threads, stream=5)
        assert other.packed.tobytes() == one.packed.tobytes()
        assert other.stats == one.stats
    if name == "mxfp8":  # the first rows alone: the same element indices
        assert kernel(x[:7], scheme, stream=5).packed.tobytes() == one.packed[:7].tobytes()


def drawn(seed: int, stream: int) -> np.ndarray:
    """Return 1 (rounded up) or -1 for each of COUNT elements halfway between two codes."""
    scheme = scheme_of("e2m1:fp32:tensor", rounding="stochastic", seed=seed)
    q = cpu.quantize(np.full((1, COUNT), 2.5, np.float32), "F32", scheme, tensor_amax=6.0, stream=stream)
    return np.where(cpu.dequantize(q)[0] > 2.5, 1.0, -1.0)


def test_neighbors_streams_and_seeds_are_uncorrelated() -> None:
    sign = drawn(0, 0)
    assert abs(sign.mean()) <= BOUND
    for apart in (1, 2, 3, 4, 8, 16, 32, 64, 128, 4096):
        assert abs((sign[apart:] * sign[:-apart]).mean()) <= BOUND, apart
    for seed, stream in ((1, 0), (0, 1), (2**31, 0), (0, 2**31), (1, 1)):
        assert abs((sign * drawn(seed, stream)).mean()) <= BOUND, (seed, stream)


def test_draws_are_independent_of_the_sign() -> None:
    x = normal(30, 320)
    scheme = scheme_of("nvfp4", rounding="stochastic", seed=4)
    np.testing.assert_array_equal(cpu.dequantize(kernel(-x, scheme)), -cpu.dequantize(kernel(x, scheme)))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8", "fp8_e4m3_1x128"])
def test_unbiased(name: str) -> None:
    """Values are a quarter of a step above a code: nearest loses the quarter, stochastic keeps it on average."""
    x = np.full((200, 1024), 2.25 if "fp4" in name else 1.03125, np.float32)
    largest = find_format(name).element.max
    x[:, ::16] = largest
    inside = x != largest
    nearest = cpu.dequantize(kernel(x, scheme_of(name)))[inside].astype(np.float64) - x[inside]
    chance = cpu.dequantize(kernel(x, scheme_of(name, rounding="stochastic")))[inside].astype(np.float64) - x[inside]
    step = 1.0 if "fp4" in name else 0.125
    assert nearest.mean() == pytest.approx(-step / 4, rel=1e-3)
    assert abs(chance.mean()) <= 4.5 * np.sqrt(3 / 16 / inside.sum()) * step + step * 2.0**-16


def test_seeds_and_streams() -> None:
    assert scheme_of("mxfp8", rounding="stochastic", seed=5).seed == 5
    assert scheme_of("mxfp8", seed=5).seed == 0  # without effect: equivalent schemes are equal
    for seed in (-1, 2**32):
        with pytest.raises(UsageError, match=f"--seed {seed}: a seed is an integer from 0 to 4294967295"):
            resolve("mxfp8", Rules(rounding="stochastic", seed=seed))
    assert stream_of("model.layers.0.mlp.down_proj.weight") == 0x2A88A1D2
    assert stream_of("") == 0x42C4B0E3
