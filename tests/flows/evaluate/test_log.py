"""The scores that an interrupted run leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mxcli.errors import RefusedError
from mxcli.flows.evaluate.log import ScoreLog
from mxcli.flows.evaluate.scores import WindowScores

IDENTITY = {"model": "m", "context": 8}


def scores(seed: int, count: int = 5) -> WindowScores:
    random = np.random.default_rng(seed)
    columns = (random.standard_normal(count).astype(np.float32) for _ in range(3))
    nll, kl, change = columns
    return WindowScores(nll, kl, random.random(count) < 0.5, change)


def same(one: WindowScores, other: WindowScores) -> bool:
    names = ("nll", "kl", "agrees", "change")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def written(path: Path) -> Path:
    with ScoreLog(path, IDENTITY, resume=False) as log:
        log.add("a", 0, scores(0), 1.5)
        log.add("a", 1, scores(1), 2.5)
    return path


def test_scores_come_back_bit_for_bit(tmp_path: Path) -> None:
    with ScoreLog(written(tmp_path / "s"), IDENTITY, resume=True) as log:
        assert set(log.found) == {("a", 0), ("a", 1)}
        assert same(log.found["a", 0], scores(0))
        assert log.seconds == {("a", 0): 1.5, ("a", 1): 2.5}
        log.add("b", 0, scores(2), 1.0)
    with ScoreLog(tmp_path / "s", IDENTITY, resume=True) as log:
        assert set(log.found) == {("a", 0), ("a", 1), ("b", 0)}


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_line_that_was_cut_short_is_dropped(cut: int, tmp_path: Path) -> None:
    path = written(tmp_path / "s")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with ScoreLog(path, IDENTITY, resume=True) as log:
        assert set(log.found) == {("a", 0)}
        log.add("a", 1, scores(1), 2.5)
    assert path.read_bytes() == whole


def test_the_scores_of_another_run_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "s")
    before = path.read_bytes()
    with pytest.raises(RefusedError, match="has the scores of another run"):
        ScoreLog(path, {**IDENTITY, "context": 9}, resume=True)
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(RefusedError, match="is not a file of scores"):
        ScoreLog(tmp_path / "other", IDENTITY, resume=True)
    assert path.read_bytes() == before
    assert (tmp_path / "other").read_text() == "hello\n"


def test_lines_with_values_of_other_kinds_end_what_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "s")
    with path.open("a") as file:
        file.write(
            '{"candidate": "a", "window": "2", "seconds": 1.0, "nll": "", "kl": "", "agrees": "", "change": ""}\n'
        )
    with ScoreLog(path, IDENTITY, resume=True) as log:
        assert set(log.found) == {("a", 0), ("a", 1)}


def test_only_scores_give_way(tmp_path: Path) -> None:
    path = written(tmp_path / "s")
    with ScoreLog(path, {"model": "other"}, resume=False, replace=True) as log:
        assert log.found == {}
    path.write_text("a file of the user\n")
    with pytest.raises(RefusedError, match="is not a file of scores"):
        ScoreLog(path, IDENTITY, resume=False, replace=True)
    assert path.read_text() == "a file of the user\n"
