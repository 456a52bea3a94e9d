"""The record of an unfinished run, beside what it has written: what it makes, and which tensors are on the disk.

A header, and a line of JSON for everything done, each brought to the disk after what it speaks of. Whoever writes holds
a lock on it, so that no two runs write the same files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.errors import EnvironmentFailure, RefusedError, printable
from mxcli.files.directory import PARTIAL_SUFFIX

SCHEMA = "mxcli.progress/1"
PROGRESS = "mxcli.progress"
PUBLISHING, EARLIER, COMPLETE, ENTRIES = "publishing", "earlier", "complete", "entries"
MEMO = "memo"
_NAME = re.compile(rf"{re.escape(PROGRESS)}(?:-(\d+)-of-(\d+))?{re.escape(PARTIAL_SUFFIX)}")
_ATTEMPTS = 5
RESERVED_BYTES = 1 << 18
"""Kept for the next lines, which say of a tensor a few kilobytes each."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an output that one of several machines writes: the `number`-th of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True, slots=True)
class Told:
    """What a record of progress tells: its header (None: no run of ours), the lines after it, and where they end."""

    header: Line | None
    lines: tuple[Line, ...]
    nbytes: int

    def latest(self, key: str) -> Any:
        """The value of the last line that has such a key; None without one."""
        return next((line[key] for line in reversed(self.lines) if key in line), None)

    @property
    def done(self) -> dict[str, Line]:
        """The lines of finished tensors by the name of the first that was written of each."""
        return {line[ENTRIES][0]: line for line in self.lines if line.get(ENTRIES)}

    @property
    def holds_work(self) -> bool:
        """Whether anything is finished that a run which begins anew would throw away."""
        return bool(self.done or self.latest(COMPLETE) or self.latest(PUBLISHING))


def progress_path(folder: Path, share: Share | None) -> Path:
    """Where the record of a run lies, or of one share of it."""
    part = "" if share is None else f"-{share.number}-of-{share.of}"
    return folder / f"{PROGRESS}{part}{PARTIAL_SUFFIX}"


def progress_records(folder: Path) -> dict[Path, Share | None]:
    """The records in a directory, each with the share that it is of; None is all of an output."""
    found = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        match = _NAME.fullmatch(name)
        if match:
            found[folder / name] = Share(int(match[1]), int(match[2])) if match[1] else None
    return found


def read_progress(path: Path) -> Told:
    """What a record tells, up to a line that a crash cut off; nothing where there is no record of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return Told(None, (), 0)
    with open(descriptor, "rb") as file:
        return _told(file.read())


class ProgressRecord:
    """A record that this run holds the lock of. `told` is what it said when it was opened."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        with open(os.dup(descriptor), "rb") as file:
            self.told = _told(file.read())
        os.lseek(descriptor, 0, os.SEEK_END)

    @classmethod
    def open(cls, path: Path) -> ProgressRecord:
        """The record at a path, made if there is none; a link there is replaced, never followed.

        Raises RefusedError where another run holds it.
        """
        for _ in range(_ATTEMPTS):
            if path.is_symlink():
                path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            if not _locked(descriptor):
                os.close(descriptor)
                raise RefusedError(_held(path))
            if _is(path, descriptor):
                return cls(path, descriptor)
            os.close(descriptor)
        raise EnvironmentFailure(f"{printable(path)}: is removed again and again; another run may be at work there.")

    def begin(self, header: Mapping[str, object], *lines: Mapping[str, object]) -> None:
        """Say what is made, in place of whatever was said before; nothing of it need be on the disk yet."""
        self._go_to(0)
        self._write([header, *lines])

    def resume(self) -> None:
        """Go on after the last whole line."""
        self._go_to(self.told.nbytes)

    def add(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Bring lines to the disk; what they speak of must be there already."""
        self._write(lines)
        os.fsync(self._descriptor)

    def remove(self) -> None:
        """Nothing is unfinished any more."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the lock back."""
        try:
            with suppress(OSError):
                os.ftruncate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR))
        finally:
            os.close(self._descriptor)

    def _go_to(self, end: int) -> None:
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)

    def _write(self, lines: Iterable[Mapping[str, object]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        while text:
            text = text[os.write(self._descriptor, text) :]
        with suppress(OSError):
            # A disk that is full must still take what is said of the tensors before.
            os.posix_fallocate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR), RESERVED_BYTES)


def refuse_other_runs(folder: Path, share: Share | None, *, force: bool) -> None:
    """Raises RefusedError for records of runs that are divided otherwise than this one: not at all, or among as many
    machines.

    With `force` those that no run holds are removed.
    """
    for path, other in progress_records(folder).items():
        if (share and share.of) == (other and other.of):
            continue
        record = ProgressRecord.open(path)
        try:
            if not force:
                raise RefusedError(f"{printable(folder)}: {_left_by(other)} --force begins anew.")
            record.remove()
        finally:
            record.close()


def refuse_unfinished(folder: Path, share: Share | None, told: Told) -> None:
    """Raises RefusedError where a run that begins anew would throw away what an earlier one of the same share finished,
    as its record `told`."""
    if not told.holds_work:
        return
    whose = "an unfinished run" if share is None else f"share {share}, of which something is finished"
    raise RefusedError(
        f"{printable(folder)}: holds {whose}: --resume goes on with it if the options are the same, --force "
        "begins anew."
    )


def _left_by(other: Share | None) -> str:
    if other is None:
        return "holds an unfinished run of one machine; --resume without --shard-range goes on with it."
    return (
        f"holds share {other} of a run on {other.of} machines; finish those with --shard-range and `mxcli merge` them."
    )


def _held(path: Path) -> str:
    return (
        f"{printable(path.parent)}: another run is writing it and holds {printable(path.name)}; wait for that, or give "
        "another -o/--output."
    )


def _locked(descriptor: int) -> bool:
    """Whether the lock is ours now; where the file system knows no locks there is none to wait for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the file: its run may have removed it before it gave the lock back."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _told(content: bytes) -> Told:
    found: list[Line] = []
    nbytes = 0
    for raw in content.splitlines(keepends=True):
        try:
            line = json.loads(raw) if raw.endswith(b"\n") else None
        except ValueError:
            line = None
        if not isinstance(line, dict) or (not found and line.get("schema") != SCHEMA):
            break
        found.append(line)
        nbytes += len(raw)
    return Told(found[0], tuple(found[1:]), nbytes) if found else Told(None, (), 0)
