"""Conversion of GPU totals to Stats, on hand-made cases."""

from __future__ import annotations

import re

import numpy as np

from mxcli.backends.abi import kernel_folder
from mxcli.backends.pipeline import LEAST, TOTALS, merged, noisiest, stats_of
from mxcli.numerics.stats import Stats

UNSET = 2**64 - 1
NEGATIVE = int(np.float64(-1).view(np.uint64))
NAMES = (
    *("zero_blocks", "nan_blocks", "saturated", "saturated_blocks", "underflowed", "scale_underflowed_blocks"),
    *("nan", "infinite", "excluded", "first_nonfinite", "min_block_sqnr", "min_block_range"),
    *("amax", "max_abs_error", "max_rel_error"),
)
SCALE, CODE, BLOCK_CODE, SQNR, RANGE, END = 15, 272, 528, 784, 2065, 2577
"""Offsets of the histograms: after the 15 numbers, with 257, 256, 256, 1281 and 512 bins."""


def totals(bins: dict[int, int] | None = None, **numbers: int) -> np.ndarray:
    """Return a thread block's totals with only these counts."""
    made = np.zeros(TOTALS, np.uint64)
    made[slice(*LEAST)] = UNSET
    for name, number in numbers.items():
        made[NAMES.index(name)] = number
    for at, count in (bins or {}).items():
        made[at] = count
    return made


def f32(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def f64(x: float) -> int:
    return int(np.float64(x).view(np.uint64))


def record(made: np.ndarray, sums: np.ndarray | None = None) -> Stats:
    return stats_of(made, np.zeros((1, 4)) if sums is None else sums, elements=100, blocks=4, worst=())


def test_size_of_totals() -> None:
    assert (TOTALS, LEAST) == (END, (9, 12))


def test_order_of_kernel_totals() -> None:
    text = (kernel_folder() / "measure.h").read_text(encoding="utf-8")
    names = re.search(r"enum MxTotal \{([^}]*)\}", text)
    assert names
    assert [name.strip() for name in names[1].split(",")] == [
        *("MX_ZERO_BLOCKS", "MX_NAN_BLOCKS", "MX_SATURATED", "MX_SATURATED_BLOCKS", "MX_UNDERFLOWED", "MX_LOST"),
        *("MX_NAN", "MX_INFINITE", "MX_EXCLUDED", "MX_FIRST", "MX_MIN_SQNR", "MX_MIN_RANGE"),
        *("MX_AMAX", "MX_MAX_ABS", "MX_MAX_REL", "MX_TOTALS"),
    ]
    text = (kernel_folder() / "numerics.h").read_text(encoding="utf-8")
    for name, bins in (("SCALE", 257), ("CODE", 256), ("SQNR", 1281), ("RANGE", 512)):
        assert f"#define MX_{name}_BINS {bins}\n" in text


# --- Parts -------------------------------------------------------------------------------------------------


def test_parts_add_up() -> None:
    one = totals({SCALE: 3, RANGE + 511: 1}, saturated=2, nan=1, excluded=40)
    other = totals({SCALE: 4, CODE + 255: 7}, saturated=5, zero_blocks=2**40)
    assert merged([one, other]).tolist() == totals(
        {SCALE: 7, CODE + 255: 7, RANGE + 511: 1}, saturated=7, nan=1, excluded=40, zero_blocks=2**40
    ).tolist()  # fmt: skip


def test_extremes_of_parts() -> None:
    one = totals(first_nonfinite=70, min_block_sqnr=f64(2.5), amax=f32(3), max_rel_error=f32(0.5))
    other = totals(first_nonfinite=9, min_block_range=f64(1.0), amax=f32(7), max_rel_error=f32(0.25))
    both = merged([one, other])
    wanted = totals(
        first_nonfinite=9,
        min_block_sqnr=f64(2.5),
        min_block_range=f64(1.0),
        amax=f32(7),
        max_rel_error=f32(0.5),
    )
    assert both.tolist() == wanted.tolist()
    assert merged([other, one]).tolist() == wanted.tolist()


def test_single_part() -> None:
    one = totals({SQNR + 1280: 4}, amax=f32(1), first_nonfinite=0)
    assert merged([one]).tolist() == one.tolist()


# --- The record --------------------------------------------------------------------------------------------


def test_no_counts() -> None:
    assert record(totals()) == Stats(elements=100, blocks=4, measured=100)
    unset = record(totals())
    assert (unset.first_nonfinite, unset.min_block_sqnr, unset.min_block_range) == (-1, -1.0, -1.0)


def test_unset_extremes() -> None:
    """The bits of a thread's -1.0 are above those of all nonnegative numbers and below all ones."""
    stats = record(merged([totals(min_block_sqnr=NEGATIVE), totals(min_block_range=NEGATIVE)]))
    assert (stats.min_block_sqnr, stats.min_block_range) == (-1.0, -1.0)
    stats = record(merged([totals(min_block_sqnr=NEGATIVE), totals(min_block_sqnr=f64(0.0))]))
    assert (stats.min_block_sqnr, stats.min_block_range) == (0.0, -1.0)
    assert record(totals(min_block_sqnr=f64(np.inf))).min_block_sqnr == np.inf


def test_names_of_all_numbers() -> None:
    counts = dict(zip(NAMES[:9], range(1, 10), strict=True))
    stats = record(
        totals(
            {SCALE + 256: 11, CODE + 1: 12, BLOCK_CODE + 2: 13, SQNR + 3: 14, RANGE + 4: 15},
            **counts,
            first_nonfinite=33,
            min_block_sqnr=f64(1.5),
            min_block_range=f64(2.0),
            amax=f32(448),
            max_abs_error=f32(0.75),
            max_rel_error=f32(1),
        )
    )
    for name, count in counts.items():
        if name != "excluded":
            assert getattr(stats, name) == count
    assert (stats.elements, stats.blocks, stats.measured) == (100, 4, 91)
    assert (stats.first_nonfinite, stats.min_block_sqnr, stats.min_block_range) == (33, 1.5, 2.0)
    assert (stats.amax, stats.max_abs_error, stats.max_rel_error) == (448.0, 0.75, 1.0)
    histograms = ("scale_bins", "code_bins", "block_code_bins", "sqnr_bins", "range_bins")
    assert [dict(getattr(stats, name).counted) for name in histograms] == [
        {256: 11},
        {1: 12},
        {2: 13},
        {3: 14},
        {4: 15},
    ]
    assert [len(getattr(stats, name)) for name in histograms] == [257, 256, 256, 1281, 512]
    assert {type(getattr(stats, name)) for name in ("saturated", "first_nonfinite", "measured")} == {int}


def test_chunks_are_added_in_order() -> None:
    """In binary64, 2^53 + 1 + 1 loses both ones; 1 + 1 + 2^53 does not."""
    first = np.array([[2.0**53, 1, 0, -0.5], [1, 1, 2, 0.25], [1, 2.0**53, 3, 0.5]])
    stats = record(totals(), first)
    assert (stats.signal, stats.noise, stats.cross, stats.error) == (2.0**53, 2.0**53 + 2, 5.0, 0.25)
    assert sum(first[::-1, 0].tolist()) == 2.0**53 + 2
    assert record(totals(), np.zeros((0, 4))).signal == 0.0


# --- The noisiest blocks -----------------------------------------------------------------------------------


def blocks(*pairs: tuple[float, int]) -> tuple[np.ndarray, np.ndarray]:
    noise, place = zip(*pairs, strict=True)
    return np.array(noise, np.float64), np.array(place, np.int64)


def test_noisiest_blocks_come_first_and_ties_by_position() -> None:
    one, other = blocks((4.0, 17), (2.0, 5), (0.5, 6)), blocks((4.0, 3), (2.0, 4), (9.0, 40))
    wanted = ((9.0, 40), (4.0, 3), (4.0, 17), (2.0, 4), (2.0, 5), (0.5, 6))
    assert noisiest([one, other]) == wanted
    assert noisiest([other, one]) == wanted


def test_blocks_without_noise_are_excluded() -> None:
    assert noisiest([]) == ()
    assert noisiest([blocks((0.0, 0), (0.0, 1))]) == ()
    assert noisiest([blocks((0.0, 0), (5e-324, 1), (0.0, 0))]) == ((5e-324, 1),)


def test_at_most_eight() -> None:
    assert noisiest([blocks(*((1.0, place) for place in range(20, 0, -1)))]) == tuple((1.0, n) for n in range(1, 9))
