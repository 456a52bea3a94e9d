"""A progress log is a file: anything else in its place is no log, and is not held open."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mxcli.errors import InputError
from mxcli.files.progress import ProgressRecord, read_progress
from mxcli.files.progress_lines import NO_LOG


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("elsewhere"),
        lambda path: path.symlink_to(os.devnull),
        os.mkfifo,
        _socket,
        lambda path: None,
        lambda path: path.write_bytes(b""),
    ],
    ids=["folder", "broken link", "link", "pipe", "socket", "nothing", "empty file"],
)
def test_what_is_no_file_is_no_log(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    log = Path("log.partial")
    make(log)
    held = len(os.listdir("/dev/fd"))
    for _ in range(3):
        assert read_progress(log) == NO_LOG
    assert len(os.listdir("/dev/fd")) == held


def test_a_file_that_is_no_log_is_not_held_open(tmp_path: Path) -> None:
    log = tmp_path / "log.partial"
    log.write_bytes(b"[]\n")
    held = len(os.listdir("/dev/fd"))
    with pytest.raises(InputError, match="line 1"):
        read_progress(log)
    assert len(os.listdir("/dev/fd")) == held


@pytest.mark.parametrize("begin", [b"", b'{"schema":"mxcli.progress/2"'])
def test_a_log_of_any_size_is_not_read_into_memory(tmp_path: Path, begin: bytes) -> None:
    log = tmp_path / "mxcli.progress.partial"
    log.write_bytes(begin)
    os.truncate(log, 100 << 30)
    needed = (
        r"mxcli\.progress\.partial: 107,374,182,400 bytes; a progress log has at most 1,073,741,824; move it away\."
    )
    with pytest.raises(InputError, match=needed):
        read_progress(log)
    record = ProgressRecord.open(log)
    with pytest.raises(InputError, match=needed):
        _ = record.log
    record.close()
