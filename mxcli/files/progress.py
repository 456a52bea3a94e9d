"""The progress log of an unfinished run: a header, then a line of JSON per finished tensor.

A line is synced after the bytes it refers to. The writer holds a lock on the log, so that no two runs write the same
files. `entries_to_keep` decides what a resumed run keeps, `differences` whether it may resume at all.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from mxcli.errors import EnvironmentFailure, InputError, RefusedError, printable
from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.hashes import hash_of
from mxcli.files.model_files import CarriedFile
from mxcli.files.progress_lines import (
    CARRIED,
    DOCUMENTS,
    ENTRIES,
    NO_LOG,
    OWN_SHARDS,
    RECORDED,
    SAMPLED,
    SCHEMA,
    SHARD,
    SHARDS,
    JsonLine,
    ProgressLog,
    line_bytes,
    parse_log,
)
from mxcli.files.shard_file import Shard

PROGRESS = "mxcli.progress"
_NAME = re.compile(rf"{re.escape(PROGRESS)}(?:-(\d{{1,9}})-of-(\d{{1,9}}))?{re.escape(PARTIAL_SUFFIX)}")
_ATTEMPTS = 5
MOST_BYTES = 1 << 30
RESERVED_BYTES = 1 << 18
"""The most bytes reserved for the next lines, of a few kilobytes each."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an output that one of several machines writes: the `number`-th of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def progress_path(folder: Path, share: Share | None) -> Path:
    """Return the path of the log of a run, or of one share of it."""
    part = "" if share is None else f"-{share.number}-of-{share.of}"
    return folder / f"{PROGRESS}{part}{PARTIAL_SUFFIX}"


def progress_records(folder: Path) -> dict[Path, Share | None]:
    """Return the logs in a directory with the share of each (None: the whole output)."""
    found = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        match = _NAME.fullmatch(name)
        if match:
            found[folder / name] = Share(int(match[1]), int(match[2])) if match[1] else None
    return found


def read_progress(path: Path) -> ProgressLog:
    """Read a log, up to a line that a crash cut off; an empty log if there is none. Raises InputError for a log that
    mxcli did not write."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return NO_LOG
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return NO_LOG
    with open(descriptor, "rb") as file:
        return _parsed(path, file)


def _parsed(path: Path, file: IO[bytes]) -> ProgressLog:
    size = os.fstat(file.fileno()).st_size
    if size > MOST_BYTES:
        raise InputError(f"{printable(path)}: {size:,} bytes; a progress log has at most {MOST_BYTES:,}; move it away.")
    return parse_log(path, file.read())


class ProgressRecord:
    """A progress log whose lock this run holds."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.reserved_bytes = RESERVED_BYTES
        self._descriptor = descriptor
        os.lseek(descriptor, 0, os.SEEK_END)

    @cached_property
    def log(self) -> ProgressLog:
        """Return its content when it was first looked at. Raises InputError for one that mxcli did not write."""
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            found = _parsed(self.path, file)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        return found

    @classmethod
    def open(cls, path: Path) -> ProgressRecord:
        """Open the log at a path, or create it; a link there is never followed.

        Raises RefusedError if another run holds it, or if there is something else than a file of one name.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(_ATTEMPTS):
            try:
                descriptor = os.open(path, flags, 0o666)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EISDIR):
                    raise
                raise RefusedError(_not_a_log(path)) from error
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                os.close(descriptor)
                raise RefusedError(_not_a_log(path))
            if not _locked(descriptor):
                os.close(descriptor)
                raise RefusedError(_held(path))
            if _is(path, descriptor):
                return cls(path, descriptor)
            os.close(descriptor)
        raise EnvironmentFailure(f"{printable(path)}: keeps being removed; another run may be using the directory.")

    @property
    def is_readable(self) -> bool:
        """Return whether mxcli wrote its content, or it has none."""
        try:
            return self.log is not None
        except InputError:
            return False

    def begin(self, header: Mapping[str, object], *lines: Mapping[str, object]) -> None:
        """Start the log with this header and these lines, replacing its content; none of it is synced yet."""
        self._go_to(0)
        self._write([header, *lines])

    def resume(self) -> None:
        """Append after the last whole line."""
        self._go_to(self.log.nbytes)

    def add(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Append lines and sync them; the bytes they refer to must be synced already."""
        self._write(lines)
        os.fsync(self._descriptor)

    def remove(self) -> None:
        """Remove the log: nothing is unfinished."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        try:
            self.trim()
        finally:
            os.close(self._descriptor)

    def trim(self) -> None:
        """Give the reserved bytes back, and reserve no more."""
        self.reserved_bytes = 0
        with suppress(OSError):
            os.ftruncate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR))

    def _go_to(self, end: int) -> None:
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)

    def _write(self, lines: Iterable[Mapping[str, object]]) -> None:
        text = b"".join(map(line_bytes, lines))
        while text:
            text = text[os.write(self._descriptor, text) :]
        if not self.reserved_bytes:
            return
        with suppress(OSError):
            # A full disk must still take the lines of the tensors written before.
            os.posix_fallocate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR), self.reserved_bytes)


def refuse_other_runs(folder: Path, share: Share | None, discard: Callable[[Collection[str]], None] | None) -> None:
    """Refuse a directory with logs of runs divided in another way: into another number of shares, or none.

    With `discard`, which gets the names of their files, logs that no run holds are removed. Raises RefusedError.
    """
    for path, other in progress_records(folder).items():
        if (share and share.of) == (other and other.of):
            continue
        record = ProgressRecord.open(path)
        try:
            if discard is None:
                raise RefusedError(f"{printable(folder)}: {_left_by(other)} --force starts again.")
            if record.is_readable and record.log.header is not None:
                discard(names_in(record.log.header))
            record.remove()
        finally:
            record.close()


def refuse_unfinished(folder: Path, share: Share | None, log: ProgressLog) -> None:
    """Raise RefusedError if starting from scratch would discard finished work of an earlier run of the same share."""
    if not log.holds_work:
        return
    whose = "an unfinished run" if share is None else f"share {share}, of which something is finished"
    raise RefusedError(
        f"{printable(folder)}: holds {whose}: --resume continues it if the options are the same, --force starts again."
    )


def _left_by(other: Share | None) -> str:
    if other is None:
        return "holds an unfinished run of one machine; --resume without --shard-range continues it."
    return (
        f"holds share {other} of a run on {other.of} machines; finish those with --shard-range and `mxcli merge` them."
    )


def _not_a_log(path: Path) -> str:
    return f"{printable(path)}: a link, a folder, or a file with several names, where progress is logged; move it away."


def _held(path: Path) -> str:
    return (
        f"{printable(path.parent)}: another run is writing it and holds {printable(path.name)}; wait for that, or give "
        "another -o/--output."
    )


def _locked(descriptor: int) -> bool:
    """Take the lock; return whether it is ours. Without locks in the file system it always is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Return whether the path still leads to the file: its run may have removed it before it released the lock."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_DERIVED = ("tensors", "notes")
"""Keys of a record that follow from its others."""
UNCOMPARED = ("command", "accounting")
"""Keys of a record that a resumed run may change; the first run's values are kept."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Draft:
    """An output before anything is measured: its shards, its JSON files and copied files by name, and its record.

    `sampled` has hashes of parts of the source, by file and tensor. A `share` writes only `own_shards`.
    `mode` has the permissions of all files but the copied ones, before the umask.
    """

    shards: tuple[Shard, ...]
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    carried: Mapping[str, CarriedFile] = field(default_factory=dict)
    record: Mapping[str, object] = field(default_factory=dict)
    sampled: Mapping[str, str] = field(default_factory=dict)
    share: Share | None = None
    own_shards: frozenset[str] = frozenset()
    mode: int = 0o666

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all files of the output except its record."""
        return (*(shard.name for shard in self.shards), *self.documents, *self.carried)

    @property
    def written(self) -> tuple[Shard, ...]:
        """Return the shards that this run writes."""
        return tuple(shard for shard in self.shards if self.share is None or shard.name in self.own_shards)

    @property
    def copied(self) -> Mapping[str, CarriedFile]:
        """Return the files to copy; with several shares, the first copies them."""
        return self.carried if self.share is None or self.share.number == 1 else {}

    @property
    def header(self) -> JsonLine:
        """Return the header of its progress log, JSON-safe."""
        return {
            "schema": SCHEMA,
            RECORDED: self.record,
            SAMPLED: self.sampled,
            SHARDS: {shard.name: _outlined(shard) for shard in self.shards},
            DOCUMENTS: self.documents,
            CARRIED: list(self.carried),
            OWN_SHARDS: [shard.name for shard in self.written],
        }


def _outlined(shard: Shard) -> list[object]:
    """Return the bytes of the file, the bytes of its header and the header's hash."""
    return [shard.nbytes, len(shard.header), header_hash(shard.header)]


def header_hash(header: bytes) -> str:
    """Return the content hash of a header."""
    return hash_of(np.frombuffer(header, np.uint8)).xxh3


def names_in(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all files of the output that a header lists, except its record."""
    return (*header[SHARDS], *header[DOCUMENTS], *header[CARRIED])


def differences(earlier: JsonLine, later: JsonLine) -> list[str]:
    """Return the differences of two headers that decide the bytes of an output: first those in options and source, and
    only if these agree those in what follows from them."""
    one, other = dict(earlier[RECORDED]), dict(later[RECORDED])
    for key in UNCOMPARED:
        one.pop(key, None), other.pop(key, None)
    derived = [(key, one.pop(key, None), other.pop(key, None)) for key in _DERIVED]
    found = list(changes("", one, other))
    if not found:
        found = [
            f"{printable(name)} of the source has other content"
            for name in _keys(earlier[SAMPLED], later[SAMPLED])
            if earlier[SAMPLED].get(name) != later[SAMPLED].get(name)
        ]
    if not found:
        found = [change for key, was, now in derived for change in changes(key, was, now)]
    if not found and list(earlier[SHARDS].items()) != list(later[SHARDS].items()):
        found = list(_shard_changes(earlier[SHARDS], later[SHARDS]))
    if not found:
        found = [change for key in (DOCUMENTS, CARRIED) for change in changes(key, earlier[key], later[key])]
    return found


def entries_to_keep(shard: Shard, finished: Mapping[str, JsonLine], written: Collection[str]) -> dict[str, JsonLine]:
    """Return the log lines of the shard's finished tensors whose entries are all in `written`, the entries that its
    partial file holds. A resumed run keeps these and writes the others again."""
    return {
        key: line
        for key, line in finished.items()
        if line[SHARD] == shard.name and set(written).issuperset(line[ENTRIES])
    }


def changes(where: str, was: object, now: object) -> Iterator[str]:
    """Yield the differences of two JSON values, each with its place."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in _keys(was, now):
            yield from changes(f"{where} {printable(key)}".strip(), was.get(key), now.get(key))
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
