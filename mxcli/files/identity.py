"""Identities of files while they are in use: a file that has changed since it was opened is never read on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mxcli.errors import InputError, printable

_SECOND = 10**9


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Device, inode and size of a file, and when its content and anything of it changed last, in nanoseconds.

    Tools that put the modification time back (`cp -p`, `rsync -t`, `tar`) cannot put back the other one. `status` has
    permissions, owner, group and number of names: what also sets that time, though the content stays. That does
    not count as a change where hashes prove the content (`is_hashed`).
    """

    device: int
    inode: int
    size: int
    modified: int
    changed: int
    status: tuple[int, ...] = ()
    is_hashed: bool = field(default=False, compare=False)

    @property
    def record(self) -> list[int]:
        """Return it as JSON has it."""
        return [self.device, self.inode, self.size, self.modified, self.changed]

    def change_to(self, now: FileIdentity) -> str | None:
        """Return what is different now, as the end of a sentence; None if nothing is."""
        if (now.device, now.inode) != (self.device, self.inode):
            return f"replaced by another file, which was modified at {_time(now.modified)}"
        if now.size != self.size:
            return f"it had {self.size:,} bytes and now has {now.size:,}, modified at {_time(now.modified)}"
        if now.modified != self.modified:
            return f"modified at {_time(now.modified)}"
        if now.changed == self.changed or (self.is_hashed and now.status != self.status):
            return None
        return f"changed at {_time(now.changed)}, though its time of modification is the same"


def of_status(status: os.stat_result) -> FileIdentity:
    """Return the identity that a status shows."""
    other = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink)
    return FileIdentity(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status=other
    )


def identity(path: Path) -> FileIdentity:
    """Return the identity of a file, links followed. Raises OSError."""
    return of_status(os.stat(path))


def changed(path: Path, what: str, tensor: str = "") -> str:
    """Return the sentence on a file that changed: `what` is different, seen when a tensor was read."""
    where = f" (reading tensor '{printable(tensor)}')" if tensor else ""
    return f"{printable(path)}: changed while in use: {what}{where}; run again once nothing writes it."


def check_unchanged(path: Path, known: FileIdentity, now: os.stat_result, tensor: str = "") -> None:
    """Raise InputError if a file is not the known one any more, seen when a tensor was read."""
    same_file = (now.st_dev, now.st_ino, now.st_size) == (known.device, known.inode, known.size)
    if same_file and (now.st_mtime_ns, now.st_ctime_ns) == (known.modified, known.changed):
        return
    change = known.change_to(of_status(now))
    if change is not None:
        raise InputError(changed(path, change, tensor))


def changes(identities: Mapping[Path, FileIdentity], paths: Iterable[Path] | None = None) -> list[str]:
    """Return a sentence for every file (None: all) that is not what it was."""
    found = []
    for path in identities if paths is None else paths:
        try:
            change = identities[path].change_to(identity(path))
        except OSError as error:
            change = f"it cannot be found any more ({printable(error.strerror)})"
        if change is not None:
            found.append(changed(path, change))
    return found


def _time(nanoseconds: int) -> str:
    """Return a time as text; a file system may hold one beyond the calendar."""
    try:
        moment = datetime.fromtimestamp(nanoseconds // _SECOND, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{nanoseconds // _SECOND:,} seconds after 1970"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{nanoseconds % _SECOND:09d} UTC"
