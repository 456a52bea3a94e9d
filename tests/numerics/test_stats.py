"""Statistics that add up, and histograms that hold only what is not zero."""

from __future__ import annotations

import struct

import pytest

from mxcli.numerics.stats import CODE_BINS, RANGE_BINS, SCALE_BINS, SQNR_BINS, Histogram, Stats


def histogram(bins: int, **counts: int) -> Histogram:
    """A histogram with `_<bin>=count`."""
    return Histogram(bins, (counts.get(f"_{at}", 0) for at in range(bins)))


def raw(*counts: int) -> bytes:
    return struct.pack(f"={len(counts)}q", *counts)


# --- Histograms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts",
    [
        (0, 0, 3, 0, 256, 0),
        (1, 0, 0),
        (0, 0, 1),
        (0, 0, 0),
        (65536, 1 << 40, (1 << 62) + 1),
        (0, 256, 0),
        (256, 1),
        (0,) * 130 + (256, 1) + (0,) * 70,
        (0,) * 64 + (1,) + (0,) * 64,
        (0,) * 200,
        (5,) * 200,
    ],
)
def test_a_histogram_of_raw_counts(counts: tuple[int, ...]) -> None:
    found = Histogram.of(raw(*counts))
    assert list(found) == list(counts)
    assert len(found) == len(counts)
    assert [found[at] for at in range(len(counts))] == list(counts)
    assert (found[-1], found[1:]) == (counts[-1], list(counts[1:]))
    assert list(found.counted) == [(at, count) for at, count in enumerate(counts) if count]
    assert found == Histogram(len(counts), counts)


def test_a_bin_that_is_not_there() -> None:
    with pytest.raises(IndexError):
        Histogram.of(raw(1, 2))[2]


def test_histograms_add_bin_by_bin() -> None:
    total = Histogram.of(raw(0, 1, 2, 0)) + Histogram.of(raw(5, 0, 1, 0))
    assert list(total) == [5, 1, 3, 0]
    assert total == Histogram.of(raw(5, 1, 3, 0))
    assert Histogram(4) + Histogram(4) == Histogram(4)
    far, near = Histogram.of(raw(*(0,) * 100, 7, 0)), Histogram.of(raw(0, 3, *(0,) * 100))
    for one, other in ((far, near), (near, far), (far, Histogram(102)), (Histogram(102), near)):
        assert list(one + other) == [a + b for a, b in zip(one, other, strict=True)]
        assert ((one + other).total, (one + other).used) == (sum(one + other), sum(map(bool, one + other)))
    assert list(far) == [*(0,) * 100, 7, 0], "a sum leaves its parts alone"


def test_what_counts_stand_for_is_not_whole() -> None:
    tenth = Histogram.of(raw(0, 1, 2, 0)) * 0.5
    assert list(tenth) == [0, 0.5, 1.0, 0]
    assert tenth.total == 1.5
    for total in (tenth + Histogram.of(raw(5, 0, 1, 3)), Histogram.of(raw(5, 0, 1, 3)) + tenth):
        assert list(total) == [5, 0.5, 2.0, 3]
    assert list(tenth + tenth * -1) == [0, 0, 0, 0]


def test_equal_histograms_have_equal_bins() -> None:
    assert Histogram(3, (0, 1, 0)) == Histogram.of(raw(0, 1, 0))
    assert Histogram(3, (0, 1, 0)) != Histogram(4, (0, 1, 0, 0))
    assert Histogram(3, (0, 1, 0)) != Histogram(3, (1, 0, 0))
    assert Histogram(3) != [0, 0, 0]


# --- Sums --------------------------------------------------------------------------------------------------


def test_nothing() -> None:
    stats = Stats()
    assert (stats.elements, stats.noise, stats.min_block_sqnr, stats.min_block_range) == (0, 0, -1, -1)
    assert (stats.first_nonfinite, stats.worst) == (-1, ())
    sizes = [len(bins) for bins in (stats.scale_bins, stats.code_bins, stats.sqnr_bins, stats.range_bins)]
    assert sizes == [SCALE_BINS, CODE_BINS, SQNR_BINS, RANGE_BINS] == [257, 256, 1281, 512]
    assert stats + stats == stats


def test_counts_and_sums_add_and_extremes_stay_extremes() -> None:
    a = Stats(
        elements=10,
        blocks=2,
        saturated=1,
        nan=1,
        measured=9,
        signal=4.0,
        noise=0.5,
        cross=-0.25,
        error=-1.0,
        amax=3.0,
        max_abs_error=0.5,
        max_rel_error=1.0,
        min_block_sqnr=7.0,
        min_block_range=2.0,
        first_nonfinite=4,
        code_bins=histogram(CODE_BINS, _0=9, _7=1),
        worst=((0.5, 1),),
    )
    b = Stats(
        elements=6,
        blocks=1,
        underflowed=2,
        infinite=1,
        measured=6,
        signal=1.0,
        noise=0.25,
        cross=0.5,
        error=0.5,
        amax=5.0,
        max_abs_error=0.25,
        max_rel_error=0.5,
        min_block_sqnr=3.0,
        first_nonfinite=0,
        code_bins=histogram(CODE_BINS, _7=6),
        worst=((0.25, 0),),
    )
    assert a + b == Stats(
        elements=16,
        blocks=3,
        saturated=1,
        underflowed=2,
        nan=1,
        infinite=1,
        measured=15,
        signal=5.0,
        noise=0.75,
        cross=0.25,
        error=-0.5,
        amax=5.0,
        max_abs_error=0.5,
        max_rel_error=1.0,
        min_block_sqnr=3.0,
        min_block_range=2.0,
        first_nonfinite=4,
        code_bins=histogram(CODE_BINS, _0=9, _7=7),
    )


def test_an_extreme_that_nothing_set_does_not_count() -> None:
    unset, set_ = Stats(), Stats(min_block_sqnr=0.0, min_block_range=1.5)
    for total in (unset + set_, set_ + unset):
        assert (total.min_block_sqnr, total.min_block_range) == (0.0, 1.5)


def test_a_sum_has_no_places_of_its_own() -> None:
    """Block and element numbers are a tensor's own: the first part's elements keep their numbers, others do not."""
    first, second = Stats(first_nonfinite=3, worst=((1.0, 5),)), Stats(first_nonfinite=1, worst=((2.0, 6),))
    assert ((first + second).first_nonfinite, (first + second).worst) == (3, ())
    assert (Stats() + second).first_nonfinite == -1


def test_addition_changes_neither_part() -> None:
    a, b = Stats(elements=1, code_bins=histogram(CODE_BINS, _1=1)), Stats(elements=2)
    total = a + b
    assert (a.elements, b.elements, total.elements) == (1, 2, 3)
    assert list(a.code_bins.counted) == [(1, 1)]
