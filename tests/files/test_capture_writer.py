"""Capture files: written in any order behind a reserved header, complete under their names or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from mxcli.errors import EnvironmentFailure, InputError, RefusedError
from mxcli.files.capture_writer import CapturedTensor, CaptureFile, StepName, capture_metadata, step_files
from mxcli.files.checkpoint import open_checkpoint, read

WEIGHT = CapturedTensor("a", "weight", "BF16", (2, 3))
INPUT = CapturedTensor("a", "activation", "F32", (5, 3), 5, 9)


def opened(folder: Path, name: StepName = StepName(7)) -> CaptureFile:  # noqa: B008 - frozen
    return CaptureFile(folder, name, [INPUT, WEIGHT], {"model": "m"})


def test_what_was_added_is_read(tmp_path: Path) -> None:
    file = opened(tmp_path / "out")
    file.add(WEIGHT, np.arange(6, dtype=np.uint16).reshape(2, 3))
    rows = CapturedTensor("a", "activation", "F32", (2, 3), 2, 9)
    file.add(rows, np.arange(6, dtype=np.float32).reshape(2, 3))
    assert step_files(tmp_path / "out") == []
    size = file.finish({"loss": 1.5}, force=False)
    path = tmp_path / "out" / "step-000007.safetensors"
    assert step_files(tmp_path / "out") == [path.name]
    assert path.stat().st_size == size
    assert capture_metadata(path)["loss"] == 1.5
    checkpoint = open_checkpoint(path)
    assert {name: read(checkpoint, info).tolist() for name, info in checkpoint.tensors.items()} == {
        "a.weight": [[0, 1, 2], [3, 4, 5]],
        "a.activation": [[0, 1, 2], [3, 4, 5]],
    }
    assert checkpoint.captures["a.activation"] == {
        "role": "activation",
        "layer": "a",
        "step": 7,
        "rank": 0,
        "axis": "row",
        "tokens": 2,
        "tokens_seen": 9,
        "xxh3_128": xxhash.xxh3_128_hexdigest(np.arange(6, dtype=np.float32).tobytes()),
    }


@pytest.mark.parametrize("limit", [1 << 10, 32 << 10])
def test_a_limit_of_files_that_shows_only_at_the_end(tmp_path: Path, limit: int) -> None:
    """Whether the limit is below what the header needs, or among the rows; what is in a buffer cannot be written."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    rows = CapturedTensor("a", "activation", "F32", (5000, 3), 5000, 9000)
    file = opened(tmp_path / "out")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(EnvironmentFailure) as raised:  # noqa: PT012 - either may fail
            file.add(rows, np.zeros((5000, 3), np.float32))
            file.finish({}, force=False)
        file.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(raised.value) == (
        f"{tmp_path / 'out' / 'step-000007.safetensors'}: exceeds the limit on file sizes; record less of a step, "
        "or raise the limit (ulimit -f)."
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (StepName(0), "step-000000.safetensors"),
        (StepName(1_234_567), "step-1234567.safetensors"),
        (StepName(3, 2), "step-000003-rank-2.safetensors"),
        (StepName(3, 0, alone=False), "step-000003-rank-0.safetensors"),
    ],
)
def test_names(tmp_path: Path, name: StepName, text: str) -> None:
    assert str(name) == text
    (tmp_path / text).touch()
    (tmp_path / f"{text}.partial").touch()
    (tmp_path / "model.safetensors").touch()
    assert step_files(tmp_path) == [text]


def test_what_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    opened(tmp_path / "new" / "out").discard()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_meanwhile(tmp_path: Path) -> None:
    file = opened(tmp_path)
    (tmp_path / "step-000007.safetensors").write_bytes(b"precious")
    with pytest.raises(RefusedError, match=r"step-000007\.safetensors: exists; give another directory"):
        file.finish({}, force=False)
    assert (tmp_path / "step-000007.safetensors").read_bytes() == b"precious"


def test_a_name_that_is_taken_between_look_and_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path)
    (tmp_path / "step-000007.safetensors").write_bytes(b"precious")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(RefusedError, match=r"step-000007\.safetensors: exists; give another directory"):
        file.finish({}, force=False)
    assert (tmp_path / "step-000007.safetensors").read_bytes() == b"precious"
    file.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007.safetensors"]


def test_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert opened(tmp_path).finish({}, force=False) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007.safetensors"]
    with pytest.raises(RefusedError, match=r"step-000007\.safetensors: exists"):
        opened(tmp_path).finish({}, force=False)
    assert opened(tmp_path).finish({}, force=True) > 0


def test_two_runs_at_one_file(tmp_path: Path) -> None:
    file = opened(tmp_path)
    other = opened(tmp_path)
    with pytest.raises(EnvironmentFailure, match="was replaced; another run is using the directory"):
        file.finish({}, force=False)
    file.discard()
    assert other.finish({}, force=False) > 0


def test_too_much_to_say(tmp_path: Path) -> None:
    file = opened(tmp_path)
    with pytest.raises(RefusedError, match="the metadata of the step takes more than 4,096 bytes"):
        file.finish({"story": "x" * 10_000}, force=False)


def test_bytes_must_be_those_described(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.weight: 8 bytes given, 12 described"):
        opened(tmp_path).add(WEIGHT, np.zeros(4, np.uint16))


def test_another_file_is_not_a_capture(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"x\.safetensors: not a capture file; move it away"):
        capture_metadata(tmp_path / "x.safetensors")
