"""Every metric on statistics made by hand."""

from __future__ import annotations

import math

import pytest

from mxcli.numerics.formats import FORMATS, BlockFormat, find_format
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import METRICS, measured
from mxcli.numerics.stats import CODE_BINS, RANGE_BINS, SCALE_BINS, SQNR_BINS, SQNR_BINS_PER_OCTAVE, Histogram, Stats

MXFP4, NVFP4, FP8, MXINT8 = (FORMATS[name] for name in ("mxfp4_e2m1", "nvfp4", "fp8_e4m3", "mxint8"))


def bins(size: int, counts: dict[int, int]) -> Histogram:
    return Histogram(size, (counts.get(at, 0) for at in range(size)))


def codes(counts: dict[int, int]) -> Histogram:
    return bins(CODE_BINS, counts)


def value(name: str, stats: Stats, row: BlockFormat = MXFP4, shape: tuple[int, ...] | None = None) -> Value:
    return measured(stats, row, shape)[name]


SOME = Stats(
    elements=64,
    blocks=2,
    zero_blocks=1,
    nan_blocks=0,
    saturated=4,
    saturated_blocks=1,
    underflowed=8,
    scale_underflowed_blocks=1,
    nan=1,
    infinite=2,
    measured=50,
    signal=100.0,
    noise=1.0,
    cross=-0.5,
    error=-5.0,
    amax=7.0,
    max_abs_error=0.5,
    max_rel_error=1.0,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("elements", 64),
        ("blocks", 2),
        ("bits_per_element", 4.25),
        ("amax", 7.0),
        ("saturated", 4),
        ("saturated_percent", 6.25),
        ("saturated_blocks", 1),
        ("saturated_blocks_percent", 50.0),
        ("underflowed", 8),
        ("underflowed_percent", 12.5),
        ("scale_underflowed_blocks", 1),
        ("nonfinite", 3),
        ("nan_blocks", 0),
        ("zero_blocks", 1),
        ("mse", 0.02),
        ("rmse", math.sqrt(0.02)),
        ("sqnr_db", 20.0),
        ("relative_error", 0.1),
        ("cosine", 99.5 / math.sqrt(100 * 100)),
        ("max_abs_error", 0.5),
        ("max_rel_error", 1.0),
        ("bias", -0.1),
        ("shrunk_percent", 0.5),
        ("binades_available", math.log2(12)),
    ],
)
def test_a_metric_of_counts_and_sums(name: str, expected: float) -> None:
    assert value(name, SOME) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("name", "elements", "blocks", "bits"),
    [
        ("mxfp6", 32, 1, 6.25),
        ("nvfp4", 1024, 64, 4 + 64 * 8 / 1024 + 32 / 1024),
        ("fp8_e4m3", 100, 1, 8.32),
        ("fp8_e4m3_channel", 100, 10, 11.2),
        ("e3m1:e8m0:1x32", 32, 1, 6.25),
    ],
)
def test_bits_include_every_scale(name: str, elements: int, blocks: int, bits: float) -> None:
    assert value("bits_per_element", Stats(elements=elements, blocks=blocks), find_format(name)) == pytest.approx(bits)


def test_of_nothing_there_is_nothing() -> None:
    """Counts are 0, a quotient does not exist: an empty tensor is never divided by its number of elements."""
    values = measured(Stats(), MXFP4, (0, 32))
    zero = [name for name, value in values.items() if value == 0 and not isinstance(value, bool)]
    assert {"elements", "blocks", "saturated", "nonfinite", "max_abs_error"} <= set(zero)
    missing = {name for name, value in values.items() if value is None}
    assert missing == {
        "bits_per_element",
        "shrunk_percent",
        "saturated_percent",
        "saturated_blocks_percent",
        "underflowed_percent",
        "subnormal_percent",
        "mse",
        "rmse",
        "sqnr_db",
        "relative_error",
        "cosine",
        "bias",
        "binades_used",
        "scale_exponent_min",
        "scale_exponent_max",
        "code_use_percent",
    }
    assert values["worst_blocks"] == []
    assert values["block_sqnr_db"] == {"p0": None, "p1": None, "p50": None, "p99": None}


def test_an_exact_tensor_has_no_decibels_and_a_zero_tensor_no_ratio() -> None:
    exact = Stats(elements=32, blocks=1, measured=32, signal=10.0)
    assert [value(name, exact) for name in ("sqnr_db", "relative_error", "mse")] == [None, 0.0, 0.0]
    assert value("cosine", exact) == pytest.approx(1.0, abs=1e-15)
    zero = Stats(elements=32, blocks=1, measured=32)
    assert [value(name, zero) for name in ("sqnr_db", "relative_error", "cosine", "mse")] == [None, None, None, 0.0]


def test_an_output_that_overflowed_has_no_number() -> None:
    stats = Stats(elements=32, blocks=1, measured=32, signal=10.0, noise=math.inf, cross=math.inf, error=math.nan)
    for name in ("mse", "rmse", "sqnr_db", "relative_error", "cosine", "bias"):
        assert value(name, stats) is None, name


def test_everything_lost_is_0_dB() -> None:  # noqa: N802 - the unit
    lost = Stats(elements=32, blocks=1, measured=32, signal=10.0, noise=10.0, cross=-10.0)
    assert (value("sqnr_db", lost), value("relative_error", lost), value("cosine", lost)) == (0.0, 1.0, None)


def test_subnormals_are_codes_below_the_smallest_normal_of_both_signs() -> None:
    stats = Stats(elements=100, code_bins=codes({0: 50, 8: 10, 1: 6, 9: 4, 2: 20, 15: 10}))
    assert value("subnormal_percent", stats) == 10.0
    assert value("subnormal_percent", Stats(elements=100, code_bins=codes({1: 50, 0xFF: 50})), MXINT8) is None
    e4m3 = Stats(elements=10, code_bins=codes({1: 1, 7: 1, 8: 1, 0x87: 1, 0x88: 1, 0x7F: 5}))
    assert value("subnormal_percent", e4m3, FP8) == 30.0


def test_binades_used_are_averaged_over_blocks_with_a_nonzero_code() -> None:
    """The NVFP4 paper's example: a block whose largest code is 3 reaches log2(3 / 0.5) binades, not log2(6 / 0.5)."""
    stats = Stats(blocks=4, block_code_bins=codes({0: 1, 5: 1, 7: 2}))
    expected = (math.log2(6) + 2 * math.log2(12)) / 3
    assert value("binades_used", stats) == pytest.approx(expected, rel=1e-15)
    assert value("binades_used", Stats(blocks=1, block_code_bins=codes({0: 1}))) is None


def test_scale_exponents() -> None:
    stats = Stats(blocks=10, scale_bins=bins(SCALE_BINS, {0: 1, 127: 4, 130: 3, 256: 2}))
    assert value("scale_exponent_histogram", stats) == {"-127": 1, "0": 4, "3": 3}
    assert (value("scale_exponent_min", stats), value("scale_exponent_max", stats)) == (-127, 3)
    assert value("scale_exponent_histogram", stats, NVFP4) == {"zero": 1, "0": 4, "3": 3}
    assert (value("scale_exponent_min", stats, NVFP4), value("scale_exponent_max", stats, NVFP4)) == (0, 3)
    assert value("scale_exponent_histogram", stats, FP8) == {"-127": 1, "0": 4, "3": 3}


def test_element_exponents() -> None:
    stats = Stats(code_bins=codes({0: 5, 8: 1, 1: 2, 9: 1, 2: 3, 3: 1, 4: 1, 15: 4}))
    expected = {"zero": 6, "-1": 3, "0": 4, "1": 1, "2": 4}
    assert value("element_exponent_histogram", stats) == expected
    integers = Stats(code_bins=codes({0: 1, 1: 1, 0xFF: 1, 0x40: 1, 0x7F: 1, 0x81: 1}))
    assert value("element_exponent_histogram", integers, MXINT8) == {"zero": 1, "-6": 2, "0": 3}


def test_code_use_is_of_the_finite_codes() -> None:
    """16 of E2M1, 254 of E4M3 (two are NaN), 255 of INT8 (-2 is never written)."""
    everything = dict.fromkeys(range(256), 1)
    stats = Stats(measured=1, code_bins=codes(dict.fromkeys(range(16), 1)))
    assert value("code_use_percent", stats) == 100.0
    assert value("code_use_percent", Stats(measured=1, code_bins=codes({0: 9, 1: 1}))) == 12.5
    finite = {code: n for code, n in everything.items() if code & 0x7F != 0x7F}
    assert value("code_use_percent", Stats(measured=1, code_bins=codes(finite)), FP8) == 100.0
    del everything[0x80]
    assert value("code_use_percent", Stats(measured=1, code_bins=codes(everything)), MXINT8) == 100.0


def test_quantiles_of_block_sqnr() -> None:
    """Bin 16 * 16 starts at a ratio of 1: its middle is 1 + 1/32. The last bin is of blocks without noise."""
    middle = 10 * math.log10(1 + 1 / 32)
    one = Stats(blocks=4, sqnr_bins=bins(SQNR_BINS, {256: 4}))
    assert value("block_sqnr_db", one) == pytest.approx({"p0": middle, "p1": middle, "p50": middle, "p99": middle})
    spread = Stats(blocks=100, min_block_sqnr=0.5, sqnr_bins=bins(SQNR_BINS, {240: 1, 256: 97, 1280: 2}))
    quantiles = value("block_sqnr_db", spread)
    assert isinstance(quantiles, dict)
    assert quantiles == {
        "p0": pytest.approx(10 * math.log10(0.5)),
        "p1": pytest.approx(10 * math.log10(0.5) + middle),
        "p50": pytest.approx(middle),
        "p99": None,
    }


def test_quantiles_of_the_range_in_a_block() -> None:
    """4 bins per octave from 1: bin 40 starts at 2^10."""
    stats = Stats(blocks=2, min_block_range=4.0, range_bins=bins(RANGE_BINS, {8: 1, 40: 1}))
    quantiles = value("block_dynamic_range", stats)
    two, ten = 2 + math.log2(1.125), 10 + math.log2(1.125)
    assert quantiles == {
        "p0": 2.0,
        "p1": pytest.approx(two),
        "p50": pytest.approx(two),
        "p99": pytest.approx(ten),
    }


def test_blocks_are_counted_by_whole_decibels() -> None:
    at_one = 16 * SQNR_BINS_PER_OCTAVE  # signal / noise from 1 to 1 + 1/16: 0.13 dB
    counts = {0: 1, at_one - 1: 2, at_one: 3, at_one + 4 * SQNR_BINS_PER_OCTAVE: 4, SQNR_BINS - 1: 5}
    assert value("block_sqnr_histogram", Stats(sqnr_bins=bins(SQNR_BINS, counts))) == {
        "-49": 1, "-1": 2, "0": 3, "12": 4, "exact": 5,
    }  # fmt: skip
    assert value("block_sqnr_histogram", Stats()) == {}


def test_worst_blocks_are_placed_in_the_tensor() -> None:
    stats = Stats(noise=4.0, worst=((2.0, 0), (1.0, 13)))
    found = value("worst_blocks", stats, NVFP4, (2, 3, 64))
    assert found == [
        {"index": 0, "row": 0, "column": 0, "noise": 2.0, "noise_percent": 50.0},
        {"index": 1, "row": 0, "column": 16, "noise": 1.0, "noise_percent": 25.0},
    ]
    tiles = value("worst_blocks", Stats(noise=1.0, worst=((1.0, 5),)), FORMATS["nvfp4_2d"], (40, 40))
    assert tiles == [{"index": 0, "row": 16, "column": 32, "noise": 1.0, "noise_percent": 100.0}]
    whole = value("worst_blocks", Stats(noise=1.0, worst=((1.0, 0),)), FP8, (40,))
    assert whole == [{"index": 0, "row": 0, "column": 0, "noise": 1.0, "noise_percent": 100.0}]
    assert value("worst_blocks", stats, NVFP4) == []


def test_every_metric_explains_itself() -> None:
    for name, row in METRICS.items():
        assert row.name == name
        assert row.meaning
        assert row.formula
        assert row.better in ("low", "high", "neither")
    assert list(measured(SOME, MXFP4)) == list(METRICS)
