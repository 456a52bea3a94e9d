"""The kernel's statistics against the oracle's, which sums in binary64 and counts by definition."""

from __future__ import annotations

import functools
import math
from dataclasses import fields
from typing import Any

import numpy as np
import oracle
import pytest
from kernel_oracle import CHANNELS, SPELLED, Array, expected, format_rules, kernel, scheme_of, statistics, stats_of
from kernel_samples import SAMPLES, log_uniform, nonfinite, normal

from mxcli.backends import cpu
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.metrics import measured
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import (
    RANGE_BINS,
    RANGE_BINS_PER_OCTAVE,
    SQNR_BINS,
    SQNR_BINS_PER_OCTAVE,
    SQNR_LOWEST_EXPONENT,
    WORST_BLOCKS,
    Stats,
)

SUM = 1e-5
"""Relative error of a sum: binary32 over at most 512 elements of one sign (512 * 2^-24 = 3e-5 at worst, 32 * 2^-24 =
2e-6 with 16 partial sums), of squares with three more roundings each; blocks are summed in binary64."""
ONE_ROUNDING = 2.0**-22
"""Relative error of a binary32 difference and a quotient."""

TENSORS: dict[str, Array] = {
    **{name: SAMPLES[name] for name in ("normal", "subnormal", "nonfinite", "ties", "zero")},
    "tiny": normal(5, 70) * np.float32(1e-30),
    "huge": normal(5, 70) * np.float32(1e30),
    "eight decades": log_uniform(-4, 4, 5, 70),
    "blocks of every size": normal(6, 128) * log_uniform(-6, 6, 6, 1),
    "an exact tensor": np.exp2(np.random.default_rng(0).integers(-1, 2, (4, 64))).astype(np.float32),
    "half zero": np.where(np.arange(96) < 40, np.float32(0), normal(4, 96)),
    "batch": normal(2, 17, 40),
    "wide": normal(3, 1100),
}
"""No block spans more than 2^75: the squares of errors that far below the amax underflow in binary32."""


@functools.cache
def case(name: str, rule: str | None, tensor: str) -> tuple[Array, Quantized, oracle.OracleResult, dict[str, Any]]:
    """Return a tensor, the kernel's result, the oracle's result and the oracle's statistics."""
    x, scheme = TENSORS[tensor], scheme_of(name, rule)
    result = expected(x, scheme)
    with np.errstate(all="ignore"):
        return x, kernel(x, scheme, per_block=True), result, statistics(x, scheme, result)


def metrics_of(q: Quantized) -> dict[str, Any]:
    """Return the metrics that a report shows for a tensor."""
    return dict(measured(stats_of(q), q.format, q.shape))


RULES = ("floor", "rceil", "te", "modelopt", "amax")
"""Representative rules, since counting does not depend on the rule: saturating or not, multiplying or dividing."""
CASES = [
    *((name, rule) for name, rule in format_rules(tuple(FORMATS)) if rule in RULES),
    *((name, None) for name in (*SPELLED, *CHANNELS)),
    ("mxfp4_e2m1", "best"),
    ("nvfp4", "torchao"),
    ("nvfp4", "vllm"),
    ("nvfp4", "ct"),
    ("fp8_e4m3_1x128", "amax-bf16-quotient"),
]


def of_blocks(x: Array, result: oracle.OracleResult, scheme: Scheme) -> tuple[Array, Array, Array]:
    """Return x, scaled elements and codes as [blocks, elements of a block], padded with zeros."""
    flat = scheme.format.block == (None, None)
    grids = []
    for values in (x.astype(np.float64), result.arguments, result.codes):
        matrix = values.reshape(1, -1) if flat else oracle._matrix(values)
        tiles = oracle._split(matrix, result.block)
        grids.append(tiles.reshape(-1, result.block[0] * result.block[1]))
    return grids[0], grids[1], grids[2]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_counts_equal_the_oracles(name: str, rule: str | None) -> None:
    for tensor in TENSORS:
        x, q, result, counts = case(name, rule, tensor)
        stats = stats_of(q)
        wanted = {
            key: counts[key]
            for key in (
                "elements",
                "blocks",
                "saturated",
                "saturated_blocks",
                "underflowed",
                "scale_underflowed_blocks",
                "nan_blocks",
                "amax",
            )
        }
        assert {key: getattr(stats, key) for key in wanted} == wanted, tensor
        finite = np.isfinite(x.ravel())
        assert (stats.nan, stats.infinite) == (np.isnan(x).sum(), np.isinf(x).sum()), tensor
        assert stats.first_nonfinite == (-1 if finite.all() else int(np.argmin(finite))), tensor
        values, _, _ = of_blocks(x, result, q.scheme)
        assert stats.zero_blocks == int((values == 0).all(1).sum()), tensor
        assert stats.measured == signal_and_error(x, result)[0].size, tensor


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_histograms_equal_the_oracles(name: str, rule: str | None) -> None:
    for tensor in TENSORS:
        _, q, _, counts = case(name, rule, tensor)
        stats, element = stats_of(q), q.format.element
        assert list(stats.code_bins)[: 2**element.bits] == counts["code_histogram"].tolist(), tensor
        assert sum(stats.code_bins) == counts["code_histogram"].sum(), tensor
        metrics = metrics_of(q)
        scales = {int(e): n for e, n in metrics["scale_exponent_histogram"].items() if e not in ("zero", "-127")}
        wanted = {max(e, -127): n for e, n in counts["scale_exponent_histogram"].items() if e >= -126}
        assert scales == wanted, tensor
        assert stats.scale_bins[-1] == counts["nan_blocks"], tensor
        assert sum(stats.scale_bins) == stats.blocks, tensor
        assert (metrics["binades_used"] or 0) == pytest.approx(counts["binades_used"], rel=1e-12), tensor
        if element.twos_complement:
            continue
        elements = stats.elements
        assert metrics["subnormal_percent"] == pytest.approx(100 * counts["subnormal"] / elements), tensor


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_errors_equal_the_oracles(name: str, rule: str | None) -> None:
    for tensor in TENSORS:
        x, q, result, wanted = case(name, rule, tensor)
        stats = stats_of(q)
        metrics = metrics_of(q)
        for key in ("mse", "rmse", "relative_error"):
            assert (metrics[key] or 0) == pytest.approx(wanted[key], rel=SUM), (tensor, key)
        sqnr_db = math.inf if metrics["sqnr_db"] is None else metrics["sqnr_db"]
        assert sqnr_db == pytest.approx(wanted["sqnr_db"], abs=20 * SUM), tensor
        for key in ("max_abs_error", "max_rel_error"):
            assert metrics[key] == pytest.approx(wanted[key], rel=ONE_ROUNDING), (tensor, key)
        if metrics["cosine"] is not None:  # signal + 2 cross + noise cancels if the result is near zero
            tolerance = SUM if wanted["cosine"] > 0.1 else 1e-3
            assert metrics["cosine"] == pytest.approx(wanted["cosine"], abs=tolerance), tensor
        values, error = signal_and_error(x, result)
        terms = np.abs(error).sum(), np.abs(values * error).sum()
        assert stats.error == pytest.approx(error.sum(), abs=SUM * terms[0]), tensor
        assert stats.cross == pytest.approx((values * error).sum(), abs=SUM * terms[1]), tensor


def signal_and_error(x: Array, result: oracle.OracleResult) -> tuple[Array, Array]:
    """Return x and y - x in binary64 for the finite elements of blocks that are not NaN."""
    measured_elements = np.isfinite(x) & ~np.isnan(result.dequantized)
    values = x[measured_elements].astype(np.float64)
    return values, result.dequantized[measured_elements] - values


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_per_block_arrays_equal_the_oracles(name: str, rule: str | None) -> None:
    for tensor in TENSORS:
        x, q, result, wanted = case(name, rule, tensor)
        blocks, element = q.per_block, q.format.element
        assert blocks is not None
        values, arguments, codes = of_blocks(x, result, q.scheme)
        shape = q.scales.shape
        dead = np.isnan(wanted["block_error_energy"]).ravel()
        amax = np.abs(values).max(1).astype(np.float32)
        np.testing.assert_array_equal(blocks.amax, amax.reshape(shape), err_msg=tensor)
        live = np.isfinite(values) & ~dead[:, None]
        saturated = (live & (np.abs(arguments) > element.max)).sum(1)
        np.testing.assert_array_equal(blocks.saturated.ravel(), saturated, err_msg=tensor)
        magnitudes = np.abs(oracle.decode(codes, result.element))
        underflowed = (live & (values != 0) & (magnitudes == 0)).sum(1)
        np.testing.assert_array_equal(blocks.underflowed.ravel(), underflowed, err_msg=tensor)
        noise = np.where(dead, 0, wanted["block_error_energy"].ravel())
        np.testing.assert_allclose(blocks.noise.ravel(), noise, rtol=SUM, err_msg=tensor)
        assert_decodes(q, result)


def assert_decodes(q: Quantized, result: oracle.OracleResult) -> None:
    """Check that a block's factor times a code's value is the dequantized value, and NaN where the scale is NaN."""
    assert q.per_block is not None
    rows, columns = result.block
    if q.format.block == (None, None):
        factor = np.broadcast_to(q.per_block.decode.reshape(()), result.codes.shape)
    else:
        spread = q.per_block.decode.repeat(rows, -2).repeat(columns, -1)
        height, width = oracle._matrix(result.codes).shape[-2:]
        factor = spread[..., :height, :width].reshape(result.codes.shape)
    with np.errstate(all="ignore"):
        values = oracle.decode(result.codes, result.element).astype(np.float32) * factor
    np.testing.assert_array_equal(values, result.dequantized)


def bins_of(ratios: Array, per_octave: int, lowest: int, bins: int) -> Array:
    """Return the bin of each ratio: octaves from 2^lowest, each split into equal linear parts."""
    mantissa, exponent = np.frexp(ratios)
    within = np.floor((2 * mantissa - 1) * per_octave)
    found: Array = np.clip((exponent - 1 - lowest) * per_octave + within, 0, bins - 1).astype(int)
    return found


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_block_histograms_equal_the_oracles(name: str, rule: str | None) -> None:
    """Ranges exactly; SQNR within the tolerance of sums, which moves a block across at most one bin edge."""
    for tensor in TENSORS:
        x, q, result, wanted = case(name, rule, tensor)
        stats = stats_of(q)
        values, _, _ = of_blocks(x, result, q.scheme)
        dead = np.isnan(wanted["block_error_energy"]).ravel()
        finite = np.where(np.isfinite(values) & ~dead[:, None], np.abs(values), 0)
        least = np.where(finite > 0, finite, np.inf).min(1)
        nonzero = finite.max(1) > 0
        ranges = finite.max(1)[nonzero] / least[nonzero]
        histogram = np.bincount(bins_of(ranges, RANGE_BINS_PER_OCTAVE, 0, RANGE_BINS), minlength=RANGE_BINS)
        assert list(stats.range_bins) == histogram.tolist(), tensor
        assert stats.min_block_range == (ranges.min() if ranges.size else -1), tensor

        noise = wanted["block_error_energy"].ravel()[nonzero]
        ratios = (finite**2).sum(1)[nonzero][noise > 0] / noise[noise > 0]
        assert stats.sqnr_bins[-1] == (noise == 0).sum(), tensor
        assert sum(stats.sqnr_bins) == nonzero.sum(), tensor
        if not ratios.size:
            assert stats.min_block_sqnr == -1, tensor
            continue
        assert stats.min_block_sqnr == pytest.approx(ratios.min(), rel=2 * SUM), tensor
        seen = np.cumsum(stats.sqnr_bins[:-1])
        bounds = [
            np.cumsum(
                np.bincount(
                    bins_of(ratios * slack, SQNR_BINS_PER_OCTAVE, SQNR_LOWEST_EXPONENT, SQNR_BINS - 1),
                    minlength=SQNR_BINS - 1,
                )
            )
            for slack in (1 + 2 * SUM, 1 - 2 * SUM)
        ]
        assert (bounds[0] <= seen).all(), tensor
        assert (seen <= bounds[1]).all(), tensor
        quantiles = metrics_of(q)["block_sqnr_db"]
        if ratios.min() > 0:
            assert quantiles["p0"] == pytest.approx(10 * math.log10(ratios.min()), abs=20 * SUM), tensor


@pytest.mark.parametrize("name", [*FORMATS, *SPELLED])
def test_worst_blocks_have_the_most_noise(name: str) -> None:
    x = normal(40, 160) * log_uniform(-3, 3, 40, 1)
    q = kernel(x, scheme_of(name), per_block=True)
    assert q.per_block is not None
    noise = q.per_block.noise.ravel()
    order = np.lexsort((np.arange(noise.size), -noise))[:WORST_BLOCKS]
    assert stats_of(q).worst == tuple((noise[block], int(block)) for block in order if noise[block] > 0)


def test_worst_blocks_of_equal_noise_are_in_order() -> None:
    x = np.tile(normal(1, 32), (100, 1))
    stats = stats_of(kernel(x, scheme_of("mxfp4"), threads=2))
    assert [block for _, block in stats.worst] == list(range(WORST_BLOCKS))


@pytest.mark.parametrize(("name", "rule"), format_rules(tuple(FORMATS)))
def test_statistics_of_parts_add_up(name: str, rule: str) -> None:
    scheme = scheme_of(name, rule)
    rows, _ = scheme.format.block
    if rows is None:
        return
    x = np.concatenate([normal(2 * rows, 96), nonfinite(max(rows, 7), 96), SAMPLES["wide range"].repeat(2, 1)[:, :96]])
    amax = float(np.abs(x[np.isfinite(x)]).max())
    whole = stats_of(kernel(x, scheme, tensor_amax=amax))
    parts = [stats_of(kernel(part, scheme, tensor_amax=amax)) for part in (x[: 2 * rows], x[2 * rows :])]
    total = parts[0] + parts[1]
    for field in fields(Stats):
        if field.name in ("worst", "first_nonfinite"):
            continue
        actual, wanted = getattr(total, field.name), getattr(whole, field.name)
        if field.name in ("signal", "noise", "cross", "error"):
            assert actual == pytest.approx(wanted, rel=1e-12), field.name
        else:
            assert actual == wanted, field.name


# --- Special tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_an_exact_tensor_has_no_noise(name: str) -> None:
    x = np.exp2(np.random.default_rng(0).integers(-1, 2, (4, 64))).astype(np.float32)
    x[:, 0], x[:, 1::5] = 1, 0
    q = kernel(x, scheme_of(name, "rceil" if not name.startswith("nvfp4") else None))
    stats = stats_of(q)
    if name.startswith("nvfp4"):
        assert stats.noise <= SUM * stats.signal
        return
    assert (stats.noise, stats.cross, stats.error, stats.max_abs_error, stats.max_rel_error) == (0,) * 5
    assert stats.worst == ()
    assert stats.sqnr_bins[-1] == stats.blocks
    metrics = metrics_of(q)
    assert (metrics["sqnr_db"], metrics["relative_error"]) == (None, 0.0)
    assert metrics["cosine"] == pytest.approx(1.0, abs=1e-15)
    assert metrics["block_sqnr_db"] == {"p0": None, "p1": None, "p50": None, "p99": None}


@pytest.mark.parametrize("shift", [-100, -30, 30, 95])
def test_statistics_scale_with_the_tensor(shift: int) -> None:
    """Sums are exact multiples, ratios are equal, for tensors from 1e-30 to 1e+28."""
    x = normal(20, 96)
    for name in ("mxfp8_e4m3", "mxfp4_e2m1", "fp8_e4m3_channel"):
        scheme = scheme_of(name, "rceil")
        base, moved = (stats_of(kernel(y, scheme)) for y in (x, np.ldexp(x, shift).astype(np.float32)))
        for key in ("signal", "noise", "cross"):
            assert getattr(moved, key) == math.ldexp(getattr(base, key), 2 * shift), key
        for key in ("error", "amax", "max_abs_error"):
            assert getattr(moved, key) == math.ldexp(getattr(base, key), shift), key
        for key in ("max_rel_error", "min_block_sqnr", "min_block_range", "sqnr_bins", "range_bins", "code_bins"):
            assert getattr(moved, key) == getattr(base, key), key


def test_nan_blocks_are_only_counted() -> None:
    """Their finite elements add no signal, no error and no relative error of 1."""
    x = np.ones((1, 64), np.float32)
    x[0, 0], x[0, 32:], x[0, 40] = np.nan, 3.0, 3.1
    q = kernel(x, scheme_of("mxfp8_e4m3"))
    stats = stats_of(q)
    assert (stats.nan_blocks, stats.measured, stats.underflowed, stats.saturated) == (1, 32, 0, 0)
    assert stats.max_rel_error == pytest.approx(0.1 / 3.1, rel=1e-6)
    assert stats.signal == pytest.approx(31 * 9 + 3.1**2, rel=SUM)


def test_finite_elements_of_an_infinite_block_are_measured() -> None:
    """They underflow under the scale of an infinity: the noise equals the signal."""
    x = np.full((1, 32), 2.0, np.float32)
    x[0, 7] = -np.inf
    q = kernel(x, scheme_of("mxfp8_e4m3"), per_block=True)
    stats = stats_of(q)
    assert (stats.infinite, stats.measured, stats.underflowed, stats.nan_blocks) == (1, 31, 31, 0)
    assert (stats.signal, stats.noise, stats.cross, stats.error) == (124, 124, -124, -62)
    assert (stats.max_abs_error, stats.max_rel_error) == (2, 1)
    assert (stats.min_block_sqnr, stats.min_block_range) == (1, 1)
    assert stats.block_code_bins[0x7E] == 1
    assert stats.worst == ((124, 0),)


def test_infinite_blocks_do_not_affect_other_blocks() -> None:
    x = normal(1, 64)
    alone = stats_of(kernel(x[:, 32:], scheme_of("mxfp4_e2m1")))
    x[0, :32] = np.inf
    both = stats_of(kernel(x, scheme_of("mxfp4_e2m1")))
    for key in ("signal", "noise", "cross", "error", "max_abs_error", "max_rel_error", "measured"):
        assert getattr(both, key) == pytest.approx(getattr(alone, key), rel=SUM), key


def test_flushed_blocks_count_as_underflow() -> None:
    """microxcaling zeroes elements that were nonzero."""
    x = np.full((1, 32), 1e-39, np.float32)
    q = kernel(x, scheme_of("mxfp8_e4m3", dialect="microxcaling"))
    stats = stats_of(q)
    assert (stats.underflowed, stats.amax, stats.zero_blocks) == (32, float(np.float32(1e-39)), 0)
    assert stats.noise == stats.signal == pytest.approx(32 * 1e-78, rel=1e-4)


def test_overflowing_dequantization_has_infinite_error() -> None:
    x = np.full((1, 32), np.finfo(np.float32).max)
    q = kernel(x, scheme_of("mxfp4_e2m1", "rceil"))
    stats = stats_of(q)
    assert (stats.noise, stats.max_abs_error, stats.min_block_sqnr) == (math.inf, math.inf, 0)
    assert math.isfinite(stats.signal)


def test_scale_underflow_and_element_underflow() -> None:
    """The second block's scale is 0 in E4M3; the third block's is not, but its 1e-4 is far below its 1."""
    x = np.ones((1, 48), np.float32)
    x[0, 16:32], x[0, 33:] = 1e-7, 1e-4
    stats = stats_of(kernel(x, scheme_of("nvfp4")))
    assert (stats.scale_underflowed_blocks, stats.underflowed, stats.saturated) == (1, 15, 16)
    for rule, lost in (("ct", 0), ("torchao", 0), ("paper", 1), ("vllm", 1)):
        stats = stats_of(kernel(x, scheme_of("nvfp4", rule)))
        assert stats.scale_underflowed_blocks == lost, rule


def test_binary32_scale_underflow_is_counted_before_its_replacement() -> None:
    stats = stats_of(kernel(np.full((1, 32), 1e-45, np.float32), scheme_of("e4m3:fp32:1x32")))
    assert (stats.scale_underflowed_blocks, stats.underflowed, stats.zero_blocks) == (1, 32, 0)


def test_outlier_blocks_in_the_quantiles() -> None:
    """A block in a hundred has an outlier: it sets p0 and p1, the others set p50."""
    x = normal(100, 64)
    x[::50, 3] = 1e4
    q = kernel(x, scheme_of("mxfp4"))
    metrics, clean = metrics_of(q), kernel(normal(100, 64), scheme_of("mxfp4"))
    assert metrics["block_dynamic_range"]["p99"] > 12
    assert metrics["block_sqnr_db"]["p0"] > 0
    p50 = metrics_of(clean)["block_sqnr_db"]["p50"]
    assert metrics["block_sqnr_db"]["p50"] == pytest.approx(p50, abs=0.5)
    assert stats_of(q).underflowed > stats_of(clean).underflowed


def test_relative_errors_of_subnormal_tensors() -> None:
    """Tensors where the product of an element and the largest error so far may round above a larger error."""
    for name in ("fp8_e4m3", "fp8_e4m3_channel", "mxfp8_e5m2", "e7m0:e8m0:1x32"):
        for seed in range(60):
            x = normal(8, 64, seed=seed) * np.float32(10.0 ** -(38 + seed % 7))
            q = kernel(x, scheme_of(name))
            with np.errstate(all="ignore"):
                errors = np.abs(cpu.dequantize(q) - x) / np.abs(x)
            assert stats_of(q).max_rel_error == np.nanmax(errors), (name, seed)
