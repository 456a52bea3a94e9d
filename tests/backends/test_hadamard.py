"""Random Hadamard transforms on the CPU: orthogonal, inverted by dequantization, independent of a group's position.

tests/backends/test_golden.py has the vectors of an independent implementation.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_oracle import kernel, scheme_of, stats_of
from kernel_samples import normal
from oracle import hadamard_matrix

from mxcli.backends import cpu
from mxcli.errors import RefusedError
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.hadamard import SIZES, Hadamard, find_hadamard

FINE = "e4m3:e8m0:1x8"


def matrix(hadamard: Hadamard) -> np.ndarray:
    """Return diag(d) H / sqrt(size), by Sylvester's construction in binary64."""
    h = np.ones((1, 1))
    while len(h) < hadamard.size:
        h = np.block([[h, h], [h, -h]])
    return np.array(hadamard.signs)[:, None] * h / np.sqrt(hadamard.size)


def test_matrix_equals_the_oracles() -> None:
    np.testing.assert_array_equal(matrix(find_hadamard(16)), hadamard_matrix(find_hadamard(16).signs))


@pytest.mark.parametrize("size", SIZES)
def test_transform_of_the_identity(size: int) -> None:
    """The identity is transformed to the matrix."""
    hadamard = find_hadamard(size, 3)
    wanted = matrix(hadamard)
    q = kernel(
        np.eye(size, dtype=np.float32) * np.float32(np.sqrt(size)), scheme_of("int8:fp32:tensor", hadamard=hadamard)
    )
    signs = np.where(cpu.unpack(q) > 127, -1.0, 1.0)
    np.testing.assert_array_equal(signs, np.sign(wanted))
    assert stats_of(q).amax == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_orthogonal_and_inverted(size: int) -> None:
    """Energy is kept up to binary32 rounding; dequantized values have the error of the codes before the transform."""
    x = normal(40, 512)
    q = kernel(x, scheme_of(FINE, hadamard=find_hadamard(size, 1)))
    energy = float((x.astype(np.float64) ** 2).sum())
    assert stats_of(q).signal == pytest.approx(energy, rel=1e-6)
    error = float(((cpu.dequantize(q, "F64") - x) ** 2).sum())
    assert error == pytest.approx(stats_of(q).noise, rel=1e-5)
    assert error < energy * 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_exact_sums_are_inverted_exactly(size: int) -> None:
    """A single value per group is spread evenly; E8M0 scales with E4M3 codes represent powers of two exactly."""
    x = np.zeros((8, 4 * size), np.float32)
    x[:, ::size] = np.float32(2.0) ** np.arange(4) * np.float32(np.sqrt(size) if size in (16, 64) else 1)
    back = cpu.dequantize(kernel(x, scheme_of("mxfp8", hadamard=find_hadamard(size))))
    if size in (16, 64):  # all intermediate values are powers of two
        np.testing.assert_array_equal(back, x)
    else:
        np.testing.assert_allclose(back, x, rtol=0.07, atol=0.07 * x.max() / np.sqrt(size))


@pytest.mark.parametrize("name", [*FORMATS, "e4m3:e8m0:1x24", "e2m1:e8m0:1x12"])
def test_groups_across_stripes_and_chunks(name: str) -> None:
    """The transformed values, quantized without transform, have the same codes, also where a span starts in a group."""
    hadamard = find_hadamard(64, 2)
    x = np.rint(normal(5, 1344) * 8).astype(np.float32)  # sums of whole numbers are exact
    groups = x.reshape(-1, 64).astype(np.float64) @ (matrix(hadamard) * 8)
    y = (groups / 8).astype(np.float32).reshape(x.shape)
    ours, plain = kernel(x, scheme_of(name, hadamard=hadamard)), kernel(y, scheme_of(name))
    assert ours.packed.tobytes() == plain.packed.tobytes()
    assert ours.scales.tobytes() == plain.scales.tobytes()
    assert ours.tensor_scale == plain.tensor_scale
    for threads in (2, 5):
        assert kernel(x, ours.scheme, threads=threads).packed.tobytes() == ours.packed.tobytes()


def test_transform_cancels_in_products() -> None:
    """(X R)(W R)^T = X W^T up to rounding if both operands have the same signs."""
    x, w = normal(24, 256), normal(16, 256, seed=5)
    hadamard = find_hadamard(128, 7)
    r = np.kron(np.eye(2), matrix(hadamard))
    np.testing.assert_allclose((x @ r) @ (w @ r).T, x.astype(np.float64) @ w.T, atol=1e-6 * 256)


def test_outliers_are_spread() -> None:
    """If one of 16 elements is ten times the others, NVFP4 zeroes a third of the others, with the transform few.

    The total squared error is not smaller: the transform spreads the outlier's error over them too.
    """
    x = normal(2000, 16)
    x[:, 3] = 10.0
    plain, spread = (
        cpu.dequantize(kernel(x, scheme_of("nvfp4", hadamard=hadamard)), "F64")
        for hadamard in (None, find_hadamard(16))
    )
    others = np.arange(16) != 3
    assert (plain[:, others] == 0).mean() > 0.3
    assert (spread[:, others] == 0).mean() < 0.03
    assert ((spread - x) ** 2).sum() > ((plain - x) ** 2).sum()


def test_lengths_not_divisible_by_the_group_size() -> None:
    for size, length in ((16, 40), (128, 64)):
        with pytest.raises(RefusedError, match=rf"a length of {length} does not divide into groups of {size}"):
            kernel(normal(3, length), scheme_of("mxfp8", hadamard=find_hadamard(size)))


def test_intermediate_sums_do_not_overflow() -> None:
    """Two of 16 elements are near the binary32 maximum: their sum overflows, a quarter of it does not."""
    x = np.ones((1, 16), np.float32)
    x[0, :2] = 3e38
    q = kernel(x, scheme_of("mxfp8", hadamard=Hadamard(16, (1,) * 16)))
    assert stats_of(q).nan + stats_of(q).infinite == 0
    assert stats_of(q).amax == pytest.approx(1.5e38, rel=1e-6)
    np.testing.assert_allclose(cpu.dequantize(q)[0, :2], [3e38, 3e38], rtol=0.07)
