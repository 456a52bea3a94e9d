"""What a sample says of the whole, on statistics made by hand."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from mxcli.numerics.estimates import is_estimated, keys_of, metrics_of
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.metrics import ESTIMATED, KNOWN, METRICS, NUMBERS, OF_SAMPLE, measured
from mxcli.numerics.samples import BLOCK_SUMS, ELEMENT_SUMS, GROUPS, combined, half_width, read_whole, sample_of
from mxcli.numerics.stats import CODE_BINS, SCALE_BINS, Histogram, Stats

MXFP4 = FORMATS["mxfp4_e2m1"]


def bins(size: int, counts: dict[int, int]) -> Histogram:
    return Histogram(size, (counts.get(at, 0) for at in range(size)))


def group(saturated: int, noise: float = 1.0, amax: float = 1.0) -> Stats:
    """Ten blocks of a sample."""
    return Stats(
        elements=320,
        blocks=10,
        saturated=saturated,
        saturated_blocks=min(saturated, 10),
        underflowed=4,
        measured=320,
        signal=100.0,
        noise=noise,
        cross=-0.5,
        error=0.25,
        amax=amax,
        scale_bins=bins(SCALE_BINS, {127: 10}),
        code_bins=bins(CODE_BINS, {0: 20, 1: 40, 9: 60, 2: 200}),
        block_code_bins=bins(CODE_BINS, {5: 4, 7: 6}),
    )


GROUPS_OF_ONE = [group(at % 4, noise=1.0 + at / 100, amax=float(at)) for at in range(GROUPS)]
SAMPLED = sample_of(sum(GROUPS_OF_ONE, Stats()), GROUPS_OF_ONE, elements=51_200, blocks=1600)
"""A tenth of a tensor."""


def test_half_width_is_that_of_a_mean() -> None:
    """Of a mean the jackknife is the usual: Student's t times the standard error."""
    values = [float(at * at % 7) for at in range(16)]
    mean = sum(values) / 16
    without = [(sum(values) - value) / 15 for value in values]
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 15 / 16)
    assert half_width(without) == pytest.approx(2.1314495 * error)
    assert half_width([3.0] * 16) is None
    assert half_width([3.0, 3.0 + 1e-15] * 8) is None


def test_means_and_ratios_stand_for_the_whole_and_the_rest_for_the_sample() -> None:
    found = metrics_of(SAMPLED, MXFP4)
    assert (found["sampled_elements"], found["sampled_blocks"]) == (5120, 160)
    assert (found["elements"], found["blocks"], found["bits_per_element"]) == (51_200, 1600, 4.25)
    assert (found["saturated"], found["underflowed"], found["amax"]) == (24, 64, 15.0)
    assert found["scale_exponent_histogram"] == {"0": 160}
    assert found["saturated_percent"] == pytest.approx(100 * 24 / 5120)
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(1600 / 17.2))
    assert found["mse"] == pytest.approx(17.2 / 5120)


def test_uncertainty_is_that_of_a_finite_tensor() -> None:
    """The standard error of 16 groups, times the root of the nine tenths that were not read."""
    found = metrics_of(SAMPLED, MXFP4)
    shares = [100 * (at % 4) / 320 for at in range(GROUPS)]
    mean = sum(shares) / GROUPS
    error = math.sqrt(sum((share - mean) ** 2 for share in shares) / 15 / 16)
    assert found["saturated_percent_uncertainty"] == pytest.approx(2.1314495 * error * math.sqrt(0.9))
    ratio = [1.0 + at / 100 for at in range(GROUPS)]
    spread = math.sqrt(sum((noise - 1.075) ** 2 for noise in ratio) / 15 / 16) / 1.075
    in_decibels = 2.1314495 * 10 / math.log(10) * spread * math.sqrt(0.9)
    assert found["sqnr_db_uncertainty"] == pytest.approx(in_decibels, rel=0.01)


def test_groups_that_do_not_differ_have_no_interval() -> None:
    found = metrics_of(SAMPLED, MXFP4)
    assert (found["underflowed_percent"], found["underflowed_percent_uncertainty"]) == (pytest.approx(1.25), None)
    alike = [group(0)] * GROUPS
    none = metrics_of(sample_of(sum(alike, Stats()), alike, 51_200, 1600), MXFP4)
    assert (none["saturated_percent"], none["saturated_percent_uncertainty"]) == (0.0, None)


def test_what_is_absent_has_no_uncertainty() -> None:
    exact = [replace(each, noise=0.0) for each in GROUPS_OF_ONE]
    found = metrics_of(sample_of(sum(exact, Stats()), exact, 51_200, 1600), MXFP4)
    assert (found["sqnr_db"], found["sqnr_db_uncertainty"]) == (None, None)
    lost = [replace(GROUPS_OF_ONE[0], noise=math.inf), *GROUPS_OF_ONE[1:]]
    found = metrics_of(sample_of(sum(lost, Stats()), lost, 51_200, 1600), MXFP4)
    assert (found["mse"], found["mse_uncertainty"]) == (None, None)


def test_what_was_read_whole_is_sure() -> None:
    found = metrics_of(read_whole(GROUPS_OF_ONE[1]), MXFP4)
    plain = measured(GROUPS_OF_ONE[1], MXFP4)
    assert {name: found[name] for name in METRICS} == plain
    assert found["sampled_elements"] == found["elements"] == 320
    assert found["sqnr_db_uncertainty"] == found["saturated_percent_uncertainty"] == 0.0


def test_a_total_weighs_tensors_by_their_size_not_by_what_was_read() -> None:
    """A tenth of 51,200 elements of which 24 / 5120 saturate, and all of 3200 without: not 24 / 8320."""
    clean = [group(0) for _ in range(10)]
    total = SAMPLED + read_whole(sum(clean, Stats()))
    found = metrics_of(total, MXFP4, tensors=2)
    assert found["saturated_percent"] == pytest.approx(100 * 240 / 54_400)
    assert (found["saturated"], found["elements"], found["sampled_elements"]) == (24, 54_400, 8320)
    alone = metrics_of(SAMPLED, MXFP4)["saturated_percent_uncertainty"]
    assert isinstance(alone, float)
    assert found["saturated_percent_uncertainty"] == pytest.approx(alone * 51_200 / 54_400)
    turned = metrics_of(read_whole(sum(clean, Stats())) + SAMPLED, MXFP4, tensors=2)
    assert turned["saturated_percent_uncertainty"] == pytest.approx(found["saturated_percent_uncertainty"])


def test_whole_tensors_add_up_like_their_statistics() -> None:
    a, b = GROUPS_OF_ONE[:2]
    total = read_whole(a) + read_whole(b)
    assert total.estimate == total.counted == a + b
    assert not total.deviations


def test_a_tensor_that_is_one_block_has_one() -> None:
    """What is counted by block is that of the sample as one block, and no group has a say in it."""
    counted = replace(sum(GROUPS_OF_ONE, Stats()), blocks=1, saturated_blocks=1)
    found = metrics_of(sample_of(counted, GROUPS_OF_ONE, 51_200, 1), FORMATS["fp8_e4m3"])
    assert (found["saturated_blocks_percent"], found["saturated_blocks_percent_uncertainty"]) == (100.0, None)
    assert found["saturated_percent"] == pytest.approx(100 * 24 / 5120)
    assert found["saturated_percent_uncertainty"] is not None


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.sampled == ESTIMATED])
def test_estimates_are_made_of_sums(name: str) -> None:
    """What `combined` leaves out has no part in them."""
    whole = GROUPS_OF_ONE[3]
    kept = combined([(whole, 1, 1)])
    assert {field.name for field in fields(Stats) if getattr(kept, field.name) != getattr(Stats(), field.name)} <= {
        *ELEMENT_SUMS, *BLOCK_SUMS
    }  # fmt: skip
    one = {name: METRICS[name]}
    assert measured(kept, MXFP4, metrics=one) == measured(whole, MXFP4, metrics=one)
    # A mean or a ratio is that of twice as much, too.
    assert measured(combined([(whole, 2, 2)]), MXFP4, metrics=one)[name] == pytest.approx(
        measured(whole, MXFP4, metrics=one)[name]
    )


def test_every_metric_says_what_it_is_of_a_sample() -> None:
    assert {metric.sampled for metric in METRICS.values()} == {KNOWN, ESTIMATED, OF_SAMPLE}
    estimated = {name for name, metric in METRICS.items() if is_estimated(metric)}
    assert {name for name in METRICS if name.endswith("_percent")} - estimated == {"code_use_percent"}
    assert {"sqnr_db", "mse", "bias", "relative_error"} <= estimated
    for chosen in (METRICS, NUMBERS):
        assert keys_of(chosen, sampled=True) == list(metrics_of(SAMPLED, MXFP4, metrics=chosen))
        assert keys_of(chosen, sampled=False) == list(chosen)
