"""The original's predictions on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mxcli.errors import EnvironmentFailure, InputError, RefusedError
from mxcli.flows.evaluate.predictions import check_space, created, opened, size_of, temporary

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
IDENTITY = {"model": {"a": 1}, "text": "x", "context": 8}


def made(path: Path) -> Path:
    with created(path, IDENTITY, 3, replace=False) as predictions:
        predictions.write(0, ROWS[:1])
        predictions.write(1, ROWS[1:])
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with opened(made(tmp_path / "p"), IDENTITY, 4, 3) as predictions:
        assert predictions.read(1, 2).tolist() == ROWS[1:3].tolist()
        assert predictions.read(0, 4).dtype == np.float32
    with temporary(3) as predictions:
        predictions.write(2, ROWS[2:])
        assert predictions.read(2, 2).tolist() == ROWS[2:].tolist()


def test_nothing_is_left_of_an_interrupted_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), created(tmp_path / "p", IDENTITY, 3, replace=False):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_predictions_of_another_run_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "p")
    with (
        pytest.raises(RefusedError, match="p: has predictions of another run: context was 8 and is 16"),
        opened(path, {**IDENTITY, "context": 16}, 4, 3),
    ):
        pass


@pytest.mark.parametrize("damage", [b"", b"text", b"mxcli predictions 1\n[]\n", b"mxcli predictions 1\n" + b"x" * 99])
def test_other_files_are_refused(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(damage)
    with pytest.raises(InputError, match="is not a file of predictions"), opened(path, IDENTITY, 4, 3):
        pass


@pytest.mark.parametrize("size", [-1, 1])
def test_a_file_of_another_size_is_refused(size: int, tmp_path: Path) -> None:
    path = made(tmp_path / "p")
    whole = path.read_bytes()
    path.write_bytes(whole[:size] if size < 0 else whole + b"x")
    with pytest.raises(InputError, match="ends before its last prediction"), opened(path, IDENTITY, 4, 3):
        pass


def test_a_full_disk_is_seen_beforehand(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(EnvironmentFailure, match="the original's predictions take 4,611,686,018,427,387,904 bytes"):
        check_space(tmp_path, 1 << 62)
    assert size_of(16_368, 49_152) == 3_218_079_744
