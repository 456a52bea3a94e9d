"""The watch on a source: what changes its status only is proven by hashes, anything else ends the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_checkpoint import safetensors_bytes

from mxcli.errors import InputError
from mxcli.files.checkpoint import check_source, open_checkpoint, read
from mxcli.files.source_watch import watching

A, STACK = np.arange(24, dtype=np.float32), np.arange(48, dtype=np.float32)
SETTLED = 0.15
"""Seconds after which a file counts as not just written."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    tensors: dict[str, Any] = {"a": ("F32", [4, 6], A.tobytes()), "stack": ("F32", [2, 4, 6], STACK.tobytes())}
    path.write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    time.sleep(SETTLED)
    return path


def _written_with_its_time_put_back(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


STATUS: dict[str, Callable[[Path], object]] = {
    "chmod": lambda path: path.chmod(0o444),
    "a new link": lambda path: os.link(path, path.with_name("linked")),
    "chmod, and a new link": lambda path: (path.chmod(0o440), os.link(path, path.with_name("linked"))),
}


@pytest.mark.parametrize("change", STATUS)
def test_a_change_of_the_status_alone_does_not_end_a_run(change: str, path: Path) -> None:
    checkpoint = open_checkpoint(path)
    with watching(checkpoint) as watch:
        read(checkpoint, checkpoint.tensors["a"])
        STATUS[change](path)
        assert read(checkpoint, checkpoint.tensors["stack"], 1).tolist() == STACK[24:].reshape(4, 6).tolist()
        watch.finish()
        assert set(watch.hashes) == {"a", "stack"}
    with pytest.raises(InputError, match="changed at 20"):  # without hashes it is not known what changed
        check_source(checkpoint)


def test_bytes_that_change_while_the_time_of_modification_does_not_are_found_at_the_end(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    with watching(checkpoint) as watch:
        for info in checkpoint.tensors.values():
            read(checkpoint, info)
        path.chmod(0o600)
        _written_with_its_time_put_back(path)
        with pytest.raises(InputError, match=r"tensor 'stack' of the source is not what it was"):
            watch.finish()


CONTENT: dict[str, tuple[Callable[[Path], object], str]] = {
    "written, its time put back": (_written_with_its_time_put_back, "changed at 20.*though its time of modification"),
    "another name and back": (lambda path: path.rename(path.with_name("b")).rename(path), "changed at 20"),
    "touched": (lambda path: path.touch(), "modified at 20"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 1), "it had 448 bytes and now has 447"),
    "removed": (lambda path: path.unlink(), "it cannot be found any more"),
    "replaced": (
        lambda path: path.with_name("b").write_bytes(path.read_bytes()) and path.with_name("b").rename(path),
        "replaced by another file",
    ),
}


@pytest.mark.parametrize("change", CONTENT)
def test_any_other_change_ends_a_run(change: str, path: Path) -> None:
    checkpoint = open_checkpoint(path)
    apply, words = CONTENT[change]
    with watching(checkpoint) as watch:
        read(checkpoint, checkpoint.tensors["a"])
        apply(path)
        with pytest.raises(InputError, match=words):
            watch.finish()
