"""Which rows a sample has: by seed and name alone, spread over the tensor, in whole blocks."""

from __future__ import annotations

from collections import Counter

import pytest

from mxcli.errors import UsageError
from mxcli.numerics.formats import find_format
from mxcli.numerics.samples import GROUPS
from mxcli.numerics.streams import Draw, Rows, Run, Sampling, check_draws, check_seed, draw, stated_sampling, unit_rows

SQUARE = Rows(matrices=1, height=1024, row_bytes=100, unit=1)
"""1024 runs of a row, of which the sampling below takes an eighth: 8 from each of 16 strata of 64."""


def sampling(fraction: float = 0.125, seed: int = 0, run_bytes: int = 100) -> Sampling:
    return Sampling(fraction, seed, run_bytes, whole_bytes=0)


def drawn(rows: Rows, asked: Sampling, name: str = "a.weight") -> Draw:
    found = draw(asked, name, rows)
    assert found is not None
    return found


def runs(found: Draw) -> list[Run]:
    return [run for group in found for run in group]


def test_seed_and_name_decide() -> None:
    assert drawn(SQUARE, sampling()) == drawn(SQUARE, sampling())
    assert drawn(SQUARE, sampling()) != drawn(SQUARE, sampling(seed=1))
    assert drawn(SQUARE, sampling()) != drawn(SQUARE, sampling(), "b.weight")
    # These never change, so that an old report can be made again.
    assert [run.first for run in drawn(SQUARE, sampling(1 / 64))[0]] == [931]
    assert [run.first for run in drawn(SQUARE, sampling(1 / 64, seed=7), "\ud800\n")[1]] == [514]


def test_as_many_runs_as_requested_and_none_twice() -> None:
    found = drawn(SQUARE, sampling())
    assert [len(group) for group in found] == [8] * GROUPS
    assert len(set(runs(found))) == 128
    assert all(run.rows == 1 and 0 <= run.first < 1024 for run in runs(found))


def test_every_group_is_spread_over_the_tensor() -> None:
    """Of strata of 128 runs, no two neighbours of a group are more than two strata apart."""
    for seed in range(20):
        for group in drawn(SQUARE, sampling(seed=seed)):
            firsts = [run.first for run in group]
            gaps = [b - a for a, b in zip(firsts, [*firsts[1:], firsts[0] + 1024], strict=True)]
            assert max(gaps) < 256


def test_every_run_is_as_likely_as_any_other() -> None:
    rows = Rows(1, 50, 100, 1)
    times = Counter(run.first for seed in range(1500) for run in runs(drawn(rows, sampling(0.32, seed))))
    assert len(times) == 50
    assert sum(times.values()) == 1500 * 16
    assert max(abs(count - 480) for count in times.values()) < 5 * (1500 * 0.32 * 0.68) ** 0.5


def test_runs_are_long_enough_and_hold_whole_units() -> None:
    found = drawn(Rows(1, 10_000, 100, 16), sampling(run_bytes=2000))
    assert {run.rows for run in runs(found)} <= {32, 10_000 % 32}
    assert all(run.first % 16 == 0 for run in runs(found))


def test_units_start_again_in_every_matrix_that_they_do_not_fill() -> None:
    """Matrices of 40 rows: a run of 32 and one of 8."""
    found = runs(drawn(Rows(64, 40, 100, 32), sampling(0.5)))
    assert {(run.first % 40, run.rows) for run in found} == {(0, 32), (32, 8)}
    through = runs(drawn(Rows(64, 64, 100, 32), sampling(0.5, run_bytes=9600)))
    assert {(run.first % 96, run.rows) for run in through} <= {(0, 96), (0, 64)}


@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        (SQUARE, sampling(1.0)),
        (SQUARE, sampling(0.999)),
        (SQUARE, Sampling(0.01)),
        (Rows(1, 1024, 100, None), sampling()),
        (Rows(1, 16, 100, 1), sampling()),
        (Rows(1, 1024, 100, 128), sampling()),
    ],
    ids=["everything", "nearly everything", "small", "blocks run through it", "16 runs", "8 units"],
)
def test_what_is_read_whole(rows: Rows, asked: Sampling) -> None:
    assert draw(asked, "a.weight", rows) is None


@pytest.mark.parametrize(
    ("formats", "rows", "turned"),
    [
        (["mxfp8", "nvfp4"], 1, 32),
        (["nvfp4_2d", "fp8_e4m3_128x128"], 128, 128),
        (["e2m1:e8m0:6x32", "e2m1:e8m0:4x48"], 12, 96),
        (["fp8_e4m3_channel", "mxfp8"], 1, None),
        (["fp8_e4m3"], 1, 1),
        (["fp8_e4m3", "nvfp4_2d"], 16, 16),
    ],
)
def test_the_rows_in_which_blocks_are_whole(formats: list[str], rows: int, turned: int | None) -> None:
    found = list(map(find_format, formats))
    assert (unit_rows(found, turned=False), unit_rows(found, turned=True)) == (rows, turned)


def test_requests() -> None:
    assert stated_sampling(None, None) is None
    assert stated_sampling("0.01", None) == Sampling(0.01, 0)
    assert stated_sampling("1", 3) == Sampling(1.0, 3)
    for wrong in ("0", "1.5", "-1", "nan", "inf", "abc", "", "1%", "0,1"):
        with pytest.raises(UsageError, match="must be a fraction of a tensor"):
            stated_sampling(wrong, None)


def test_a_seed_needs_something_to_choose() -> None:
    check_seed(None, is_drawn=False)
    check_seed(3, is_drawn=True)
    with pytest.raises(UsageError, match="--seed 3 has no effect: nothing is random"):
        check_seed(3, is_drawn=False)


def test_every_draw_needs_a_seed() -> None:
    check_draws(4294967295)
    check_draws(4294967294, 2)
    for seed, draws, words in (
        (-1, 1, "--seed -1: a seed is an integer from 0 to 4294967295."),
        (4294967296, 1, "--seed 4294967296: a seed is an integer"),
        (
            4294967295,
            3,
            "--seed 4294967295 with --draws 3: the last draw has seed 4294967297, and a seed is an integer from 0 to "
            "4294967295.",
        ),
    ):
        with pytest.raises(UsageError) as error:
            check_draws(seed, draws)
        assert str(error.value).startswith(words)
