"""The record of an unfinished run, beside what it has written: what it makes, and which tensors are on the disk.

A header, and a line of JSON for everything done, each brought to the disk after what it speaks of. Whoever writes holds
a lock on it, so that no two runs write the same files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxcli.errors import EnvironmentFailure, RefusedError, printable
from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.shard_file import Shard

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


RECORDED, OWN = "record", "own"
MODIFIED, SHARDS, DOCUMENTS, CARRIED = "modified", "shards", "documents", "carried"
_DERIVED = ("tensors", "notes")
"""What of a record follows from the rest of it."""
UNCOMPARED = ("command",)
"""What of a record may be another when a run is gone on with; the first has its way."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Draft:
    """An output: its shards, its JSON files and the files copied into it by name, and what its record says before
    anything is measured.

    `modified` tells when each file of the source was last written, in nanoseconds. A `share` writes the shards `own` of
    it; without one all are.
    """

    shards: tuple[Shard, ...]
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    carried: Mapping[str, Path] = field(default_factory=dict)
    record: Mapping[str, object] = field(default_factory=dict)
    modified: Mapping[str, int] = field(default_factory=dict)
    share: Share | None = None
    own: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All files of the output, its record apart."""
        return (*(shard.name for shard in self.shards), *self.documents, *self.carried)

    @property
    def written(self) -> tuple[Shard, ...]:
        """The shards that are written."""
        return tuple(shard for shard in self.shards if self.share is None or shard.name in self.own)

    @property
    def copied(self) -> Mapping[str, Path]:
        """The files that are copied: of several shares the first does it."""
        return self.carried if self.share is None or self.share.number == 1 else {}

    @property
    def header(self) -> Line:
        """What is said of it in the record of progress, to be held in JSON."""
        return {
            "schema": SCHEMA,
            RECORDED: self.record,
            MODIFIED: self.modified,
            SHARDS: {shard.name: _outlined(shard) for shard in self.shards},
            DOCUMENTS: self.documents,
            CARRIED: list(self.carried),
            OWN: [shard.name for shard in self.written],
        }


def _outlined(shard: Shard) -> list[object]:
    """Bytes of the file and of its header, and what the header is."""
    return [shard.nbytes, len(shard.header), header_digest(shard.header)]


def header_digest(header: bytes) -> str:
    """What tells the header of a file from another."""
    return hashlib.sha256(header).hexdigest()


def names_in(header: Mapping[str, Any]) -> tuple[str, ...]:
    """All files of the output that a header speaks of, its record apart."""
    return (*header[SHARDS], *header[DOCUMENTS], *header[CARRIED])


def differences(earlier: Line, later: Line, *, moment: bool = True) -> list[str]:
    """How two headers differ in what decides the bytes of an output: at first in what was asked for and of what, and
    only where that is the same in what follows from it. With `moment` the source must also not have been written anew.
    """
    one, other = dict(earlier[RECORDED]), dict(later[RECORDED])
    for key in UNCOMPARED:
        one.pop(key, None), other.pop(key, None)
    derived = [(key, one.pop(key, None), other.pop(key, None)) for key in _DERIVED]
    found = list(_changes("", one, other))
    if moment and not found:
        found = [
            f"{printable(file)} of the source was written anew meanwhile"
            for file, nanoseconds in later[MODIFIED].items()
            if earlier[MODIFIED].get(file) != nanoseconds
        ]
    if not found:
        found = [change for key, was, now in derived for change in _changes(key, was, now)]
    if not found and list(earlier[SHARDS].items()) != list(later[SHARDS].items()):
        found = list(_shard_changes(earlier[SHARDS], later[SHARDS]))
    if not found:
        found = [change for key in (DOCUMENTS, CARRIED) for change in _changes(key, earlier[key], later[key])]
    return found


def _changes(where: str, was: object, now: object) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in _keys(was, now):
            yield from _changes(f"{where} {printable(key)}".strip(), was.get(key), now.get(key))
    elif was != now:
        yield f"{where} was {_shown(was)} and is {_shown(now)}"


def _shard_changes(was: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    if list(was) != list(now):
        yield f"it was divided into {len(was):,} files and is into {len(now):,} (--max-shard-size)"
    else:
        yield from (f"{printable(name)} holds other tensors" for name in was if was[name] != now[name])


def _keys(one: Iterable[str], other: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def _shown(value: object) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
