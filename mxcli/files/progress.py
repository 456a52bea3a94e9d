"""The progress log of an unfinished run: a header, then a line of JSON per finished tensor.

A line is synced after the bytes it refers to. The writer holds a lock on the log, so that no two runs write the same
files. `entries_to_keep` decides what a resumed run keeps, `differences` whether it may resume at all.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
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
"""Bytes reserved for the next lines, of a few kilobytes each."""

JsonLine = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an output that one of several machines writes: the `number`-th of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True, slots=True)
class ProgressLog:
    """The content of a progress log: its header (None: not a log of ours), the lines after it, and where they end."""

    header: JsonLine | None
    lines: tuple[JsonLine, ...]
    nbytes: int

    def latest(self, key: str) -> Any:
        """Return the value of the last line with this key; None without one."""
        return next((line[key] for line in reversed(self.lines) if key in line), None)

    @property
    def done(self) -> dict[str, JsonLine]:
        """Return the lines of finished tensors, by the name of each one's first entry."""
        return {line[ENTRIES][0]: line for line in self.lines if line.get(ENTRIES)}

    @property
    def holds_work(self) -> bool:
        """Return whether anything is finished that a run starting from scratch would discard."""
        return bool(self.done or self.latest(COMPLETE) or self.latest(PUBLISHING))


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
    """Read a log, up to a line that a crash cut off; an empty log if there is none of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return ProgressLog(None, (), 0)
    with open(descriptor, "rb") as file:
        return _parsed(file.read())


class ProgressRecord:
    """A progress log whose lock this run holds. `log` is its content when it was opened."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        with open(os.dup(descriptor), "rb") as file:
            self.log = _parsed(file.read())
        os.lseek(descriptor, 0, os.SEEK_END)

    @classmethod
    def open(cls, path: Path) -> ProgressRecord:
        """Open the log at a path, or create it; a link there is replaced, never followed.

        Raises RefusedError if another run holds it.
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
        raise EnvironmentFailure(f"{printable(path)}: keeps being removed; another run may be using the directory.")

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
            # A full disk must still take the lines of the tensors written before.
            os.posix_fallocate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR), RESERVED_BYTES)


def refuse_other_runs(folder: Path, share: Share | None, *, force: bool) -> None:
    """Refuse a directory with logs of runs divided in another way: into another number of shares, or none.

    With `force`, logs that no run holds are removed. Raises RefusedError.
    """
    for path, other in progress_records(folder).items():
        if (share and share.of) == (other and other.of):
            continue
        record = ProgressRecord.open(path)
        try:
            if not force:
                raise RefusedError(f"{printable(folder)}: {_left_by(other)} --force starts again.")
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


def _parsed(content: bytes) -> ProgressLog:
    found: list[JsonLine] = []
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
    return ProgressLog(found[0], tuple(found[1:]), nbytes) if found else ProgressLog(None, (), 0)


RECORDED, OWN_SHARDS = "record", "own"
MODIFIED, SHARDS, DOCUMENTS, CARRIED = "modified", "shards", "documents", "carried"
_DERIVED = ("tensors", "notes")
"""Keys of a record that follow from its others."""
UNCOMPARED = ("command",)
"""Keys of a record that a resumed run may change; the first run's values are kept."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Draft:
    """An output before anything is measured: its shards, its JSON files and copied files by name, and its record.

    `modified` is the modification time of each source file in nanoseconds. A `share` writes only `own_shards`.
    """

    shards: tuple[Shard, ...]
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    carried: Mapping[str, Path] = field(default_factory=dict)
    record: Mapping[str, object] = field(default_factory=dict)
    modified: Mapping[str, int] = field(default_factory=dict)
    share: Share | None = None
    own_shards: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all files of the output except its record."""
        return (*(shard.name for shard in self.shards), *self.documents, *self.carried)

    @property
    def written(self) -> tuple[Shard, ...]:
        """Return the shards that this run writes."""
        return tuple(shard for shard in self.shards if self.share is None or shard.name in self.own_shards)

    @property
    def copied(self) -> Mapping[str, Path]:
        """Return the files to copy; with several shares, the first copies them."""
        return self.carried if self.share is None or self.share.number == 1 else {}

    @property
    def header(self) -> JsonLine:
        """Return the header of its progress log, JSON-safe."""
        return {
            "schema": SCHEMA,
            RECORDED: self.record,
            MODIFIED: self.modified,
            SHARDS: {shard.name: _outlined(shard) for shard in self.shards},
            DOCUMENTS: self.documents,
            CARRIED: list(self.carried),
            OWN_SHARDS: [shard.name for shard in self.written],
        }


def _outlined(shard: Shard) -> list[object]:
    """Return the bytes of the file, the bytes of its header and the header's digest."""
    return [shard.nbytes, len(shard.header), header_digest(shard.header)]


def header_digest(header: bytes) -> str:
    """Return the SHA-256 of a header."""
    return hashlib.sha256(header).hexdigest()


def names_in(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all files of the output that a header lists, except its record."""
    return (*header[SHARDS], *header[DOCUMENTS], *header[CARRIED])


def differences(earlier: JsonLine, later: JsonLine, *, moment: bool = True) -> list[str]:
    """Return the differences of two headers that decide the bytes of an output: first those in options and source, and
    only if these agree those in what follows from them. With `moment`, modification times of the source are compared
    too."""
    one, other = dict(earlier[RECORDED]), dict(later[RECORDED])
    for key in UNCOMPARED:
        one.pop(key, None), other.pop(key, None)
    derived = [(key, one.pop(key, None), other.pop(key, None)) for key in _DERIVED]
    found = list(_changes("", one, other))
    if moment and not found:
        found = [
            f"{printable(file)} of the source was modified meanwhile"
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


def entries_to_keep(shard: Shard, finished: Mapping[str, JsonLine], written: Collection[str]) -> dict[str, JsonLine]:
    """Return the log lines of the shard's finished tensors whose entries are all in `written`, the entries that its
    partial file is long enough to hold. A resumed run keeps these and writes the others again."""
    return {
        key: line
        for key, line in finished.items()
        if line["shard"] == shard.name and set(written).issuperset(line[ENTRIES])
    }


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
