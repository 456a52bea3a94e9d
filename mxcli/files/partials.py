"""The files of an output under their partial names, and the step that gives all of them their final names."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mxcli.atomic import create_new, name_new, sync_folder
from mxcli.errors import EnvironmentFailure, InputError, MxcliError, RefusedError, printable, together
from mxcli.files.hashes import sha256_of
from mxcli.files.model_files import RECORD, CarriedFile, permissions
from mxcli.files.output_folder import OutputFolder, existing_parent, folders_of, free_inodes, stays_inside
from mxcli.files.progress import ProgressRecord
from mxcli.files.progress_lines import EARLIER, PUBLISHING, SHA256
from mxcli.files.shard_file import partial_path

FILE_BYTES = 1 << 12
"""Bytes on disk of a file besides its content, at most."""
BLOCK_BYTES = 512
"""The unit of st_blocks on every file system."""
JSON_PART = 1 << 20
DOCUMENT_LEVELS, RECORD_LEVELS = 99, 2
"""How deep JSON text is indented: all of a configuration; a record has a line for each tensor, since it can have tens
of thousands of them."""
_ON_ONE_LINE = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
_FULL = {errno.ENOSPC, errno.EDQUOT}


def json_bytes(content: object, levels: int = DOCUMENT_LEVELS) -> bytes:
    """Return JSON text as all files of mxcli have it: sorted keys, two spaces, a final newline; what is nested deeper
    than `levels` stands on one line."""
    return b"".join(json_parts(content, levels))


def json_parts(content: object, levels: int = DOCUMENT_LEVELS) -> Iterator[bytes]:
    """Yield the same in parts of about `JSON_PART` bytes."""
    waiting, size = list[str](), 0
    for text in _json_texts(content, levels, "\n"):
        waiting.append(text)
        size += len(text)
        if size >= JSON_PART:
            yield "".join(waiting).encode()
            waiting, size = [], 0
    yield f"{''.join(waiting)}\n".encode()


def _json_texts(value: Any, levels: int, line: str) -> Iterator[str]:
    """Yield the text of a value that begins on a line with the indentation of `line`."""
    if not (levels and value and isinstance(value, dict | list | tuple)):
        yield _ON_ONE_LINE(value)
        return
    keyed = isinstance(value, dict)
    before, after = "{}" if keyed else "[]"
    for at in sorted(value) if keyed else range(len(value)):
        yield f"{before}{line}  {_ON_ONE_LINE(at)}: " if keyed else f"{before}{line}  "
        yield from _json_texts(value[at], levels - 1, line + "  ")
        before = ","
    yield line + after


class Partials:
    """The files `names` of a directory, each as `NAME.partial`; OSError becomes EnvironmentFailure everywhere.

    `needed_bytes` is about what they take on disk. The record, `mxcli.json`, is one file more. `replace` allows files
    that have their final names to be replaced. `mode` has the permissions of new files, before the umask.
    """

    def __init__(
        self, folder: OutputFolder, names: Sequence[str], needed_bytes: int, *, replace: bool = True, mode: int = 0o666
    ) -> None:
        self.folder = folder.path
        self.names = tuple(names)
        self.needed_bytes = needed_bytes
        self._earlier = dict(folder.earlier)
        self._replace = replace
        self.mode = mode
        self._ours: set[str] = set()
        self._made: list[Path] = []
        self._folder_status: os.stat_result | None = None
        self.stayed: list[str] = []
        """Files of the output before this one that were changed since, and so were not removed."""

    @property
    def is_in_place(self) -> bool:
        """Return whether the directory is still the one that was found or made."""
        try:
            return self._folder_status is not None and os.path.samestat(self.folder.stat(), self._folder_status)
        except OSError:
            return False

    @property
    def publishing_line(self) -> dict[str, object]:
        """Return the progress line that lists the files of the output before this one."""
        return {
            PUBLISHING: False,
            EARLIER: {name: sorted(self._earlier[name]) for name in sorted(self._earlier)},
            SHA256: {},
        }

    def own(self, names: Iterable[str], listed: Collection[str]) -> None:
        """Take over partial files of an earlier run: those whose names its progress log lists.

        Raises RefusedError for every other file, link or folder that has the partial name of one of `names`.
        """
        problems = []
        for name in names:
            path = partial_path(self.folder / name)
            with suppress(FileNotFoundError), self.on_disk(but=(FileNotFoundError, NotADirectoryError)):
                status = path.lstat()
                if name in listed and (_is_plain(status) or self._is_half_named(name)):
                    self._ours.add(name)
                else:
                    what = "a link" if stat.S_ISLNK(status.st_mode) else "not of an unfinished run here"
                    problems.append(f"{printable(path)}: {what}, and is left as it is; move it away.")
        if problems:
            raise together(RefusedError, printable(self.folder), problems)

    def make_folders(self) -> None:
        """Create the directory and the folders in it that the names need."""
        with self.on_disk():
            for folder in folders_of(self.folder, self.names):
                missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
                for parent in reversed(missing):
                    parent.mkdir(exist_ok=True)  # another process may make it at the same time
                    self._made.append(parent)
            self._folder_status = self.folder.stat()

    def check_space(self, partial: Iterable[str] = (), *others: Path) -> None:
        """Raise EnvironmentFailure if the disk cannot hold the files, less what the `partial` ones, and others, occupy
        already."""
        with self.on_disk():
            held = 0
            for path in (*(partial_path(self.folder / name) for name in partial), *others):
                with suppress(FileNotFoundError):
                    held += path.lstat().st_blocks * BLOCK_BYTES
            available = shutil.disk_usage(self.folder).free
        if available + held < self.needed_bytes:
            raise self._full(available, self.needed_bytes - held, os.strerror(errno.ENOSPC))

    def create(self, name: str, mode: int | None = None) -> BinaryIO:
        """Create a file under the partial name; one of an earlier run is replaced, anything else is not. `mode` has
        its permissions before the umask (None: those of all files)."""
        path = partial_path(self.folder / name)
        with self.on_disk():
            if name in self._ours and _is_plain_file(path):
                path.unlink()
            file = create_new(path, self.mode if mode is None else mode)
        self._ours.add(name)
        return file

    def reopen(self, name: str) -> BinaryIO | None:
        """Open what an earlier run left under the partial name; None unless it is a regular file with a single name."""
        path = partial_path(self.folder / name)
        with self.on_disk():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                    return None
                raise
            if name not in self._ours or not _is_plain(os.fstat(descriptor)):
                os.close(descriptor)
                return None
            return open(descriptor, "r+b")

    def write_json(self, name: str, content: object) -> str:
        """Write a JSON file and return its SHA-256."""
        return self._write_whole(name, json_parts(content, RECORD_LEVELS if name == RECORD else DOCUMENT_LEVELS))

    def copy(self, source: CarriedFile, name: str) -> str:
        """Copy content and permissions of a file, and return its SHA-256; a link is followed, not copied as a link.
        Raises InputError if it is not the file that it was."""
        return self._write_whole(name, source.chunks(), permissions([source.target]))

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of a file under its partial name. Raises InputError if it cannot be read."""
        return sha256_of(partial_path(self.folder / name))

    def discard(self, names: Iterable[str]) -> None:
        """Remove files of an earlier run under partial names."""
        with self.on_disk():
            for name in names:
                path = partial_path(self.folder / name)
                if name in self._ours and _is_plain_file(path):
                    path.unlink(missing_ok=True)

    def discard_listed(self, names: Collection[str]) -> None:
        """Remove the partial files of another run that its progress log lists. Raises RefusedError like `own`."""
        self.own(names, names)
        self.discard(names)

    @contextmanager
    def as_published(self, record: Mapping[str, object]) -> Iterator[Path]:
        """Yield a folder elsewhere that has the output as it will be: links to its files by their final names."""
        with tempfile.TemporaryDirectory(prefix="mxcli-") as made:
            folder = Path(made)
            for name in self.names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(partial_path(self.folder / name).absolute())
            with (folder / RECORD).open("xb") as file:
                file.writelines(json_parts(record, RECORD_LEVELS))
            yield folder

    def publish(
        self, record: Mapping[str, object], sha256: Mapping[str, str], progress: Sequence[ProgressRecord]
    ) -> None:
        """Give every file its final name, remove files of an earlier output that this one lacks, add the record, and
        remove the progress logs."""
        written = self.write_json(RECORD, record)
        with self.on_disk():
            self._rename({**sha256, RECORD: written}, progress)
            for each in progress:
                each.remove()

    def take_back(self, progress: ProgressRecord) -> None:
        """Rename files back to their partial names if a run was killed while renaming; files that still have a partial
        name are not touched. Raises InputError for a file that the run did not write."""
        log = progress.log
        if not log.latest(PUBLISHING):
            return
        for name, hashes in log.latest(EARLIER).items():
            self._earlier[name] = self._earlier.get(name, frozenset()).union(hashes)
        written = log.sha256_with(PUBLISHING)
        for name in (*self.names, RECORD):
            final, partial = self.folder / name, partial_path(self.folder / name)
            if self._is_half_named(name):
                with self.on_disk():
                    final.unlink()
            if os.path.lexists(partial) or not os.path.lexists(final) or not stays_inside(self.folder, name):
                continue
            if not _is_plain(final.lstat()) or sha256_of(final) != written.get(name):
                raise InputError(f"{printable(final)}: is not what the interrupted run wrote; move it away.")
            with self.on_disk():
                os.replace(final, partial)
            self._ours.add(name)
        with self.on_disk():
            progress.add([self.publishing_line])

    def remove(self, names: Iterable[str]) -> None:
        """Remove files under partial names, and the directories made for them."""
        # An error is being raised already; a file that cannot be removed still has its partial name.
        with suppress(MxcliError):
            self.discard(names)
        self.remove_folders()

    def remove_folders(self) -> None:
        """Remove the directories that were made and are empty."""
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()

    @contextmanager
    def on_disk(self, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
        """Turn errors of the output's disk into EnvironmentFailure, but for some."""
        try:
            yield
        except but:
            pass
        except OSError as error:
            if error.errno in _FULL:
                available = shutil.disk_usage(existing_parent(self.folder)).free
                raise self._full(available, self.needed_bytes, os.strerror(error.errno)) from error
            raise EnvironmentFailure(f"{printable(self.folder)}: cannot be written: {printable(error)}.") from error

    def _rename(self, sha256: Mapping[str, str], progress: Sequence[ProgressRecord]) -> None:
        folder = self.folder
        progress[0].add([{**self.publishing_line, PUBLISHING: True, SHA256: dict(sha256)}])
        _sync_folders(folder, self.names)
        if self._replace or RECORD in self._earlier:
            (folder / RECORD).unlink(missing_ok=True)
        for name in self.names:
            self._give_name(name)
        for name in sorted(self._earlier.keys() - {*self.names, RECORD}):
            self._remove_earlier(name)
        _sync_folders(folder, self.names)
        self._give_name(RECORD)
        _sync_folders(folder, (RECORD,))

    def _remove_earlier(self, name: str) -> None:
        """Remove a file of the output before this one, unless it was changed since."""
        path, hashes = self.folder / name, self._earlier[name]
        if not os.path.lexists(path):
            return
        if _is_plain_file(path) and (not hashes or sha256_of(path) in hashes):
            path.unlink()
        else:
            self.stayed.append(name)

    def _give_name(self, name: str) -> None:
        """Give a file its final name. Raises RefusedError if a file has it that may not be replaced."""
        partial, final = partial_path(self.folder / name), self.folder / name
        if self._replace or name in self._earlier:
            os.replace(partial, final)
            return
        try:
            name_new(partial, final)
        except FileExistsError as error:
            raise RefusedError(f"{printable(final)}: appeared meanwhile; move it away, then use --resume.") from error

    def _is_half_named(self, name: str) -> bool:
        """Return whether a file has its final name and its partial one, as between the two steps of naming it."""
        with suppress(OSError):
            partial, final = partial_path(self.folder / name).lstat(), (self.folder / name).lstat()
            return stat.S_ISREG(partial.st_mode) and partial.st_nlink == 2 and os.path.samestat(partial, final)
        return False

    def _write_whole(self, name: str, chunks: Iterator[bytes], mode: int | None = None) -> str:
        digest = hashlib.sha256()
        with self.on_disk(), self.create(name, mode) as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _full(self, available: int, needed: int, words: str) -> EnvironmentFailure:
        """Return the error of a full disk: what is missing, or else in the words of the system."""
        if free_inodes(self.folder) == 0:
            words = "no free inodes, so that the file system takes no more files"
        if available >= needed or free_inodes(self.folder) == 0:
            return EnvironmentFailure(
                f"{printable(self.folder)}: disk full: {words}; free some space, or give another -o/--output."
            )
        return EnvironmentFailure(
            f"{printable(self.folder)}: disk full: the output needs {needed:,} bytes and {available:,} are available; "
            "free some space, or give another -o/--output."
        )


def _is_plain(status: os.stat_result) -> bool:
    """Return whether it is the status of a regular file with a single name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _is_plain_file(path: Path) -> bool:
    """Return whether a path is a regular file with a single name; nothing there is none."""
    try:
        return _is_plain(path.lstat())
    except FileNotFoundError:
        return False


def _sync_folders(folder: Path, names: Sequence[str]) -> None:
    for each in folders_of(folder, names):
        sync_folder(each)
