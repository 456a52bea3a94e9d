"""An output directory: nothing bears its final name before everything is complete and on the disk.

Files are written as `NAME.partial`, synced, and renamed together at the end; the record (`mxcli.json`) comes
last, so that a directory with a record is complete. The source is never written to, nor what a link leads to.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from mxcli.errors import EnvironmentFailure, InputError, printable
from mxcli.files.model_files import RECORD
from mxcli.files.tensors import Array
from mxcli.files.writer_place import Place, folders_of
from mxcli.files.writer_shards import CHUNK_BYTES, Shard, ShardFile, partial_path

SPARE_BYTES = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


def json_bytes(content: object) -> bytes:
    """JSON text as all our files have it: sorted keys, two spaces, a final newline."""
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


class Output:
    """A directory being written; leaving the `with` block by an exception removes all that was begun.

    `names` are the files it will consist of, the record apart; `data_bytes` what they need on the disk, about.
    """

    def __init__(self, place: Place, names: Sequence[str], data_bytes: int) -> None:
        self.place = place
        self.needed_bytes = data_bytes + SPARE_BYTES
        self._names = (*names, RECORD)
        self._begun: list[Path] = []
        self._made: list[Path] = []
        self._shard: ShardFile | None = None

    def __enter__(self) -> Output:
        """Make the directory and see that the disk can hold the output; raises EnvironmentFailure if it cannot."""
        try:
            with self._on_disk():
                for folder in folders_of(self.place.folder, self._names):
                    self._make(folder)
                for name in self._names:
                    partial_path(self.place.folder / name).unlink(missing_ok=True)
                available = shutil.disk_usage(self.place.folder).free
            if available < self.needed_bytes:
                raise self._full(available)
        except BaseException:
            self._remove_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shard is not None:
            with suppress(OSError):
                self._shard.close()
        if kind is not None:
            self._remove_all()

    def begin_shard(self, shard: Shard) -> None:
        """Open the next shard and write its header."""
        with self._on_disk():
            self._shard = ShardFile(shard, self._create(shard.name))

    def write(self, name: str, array: Array) -> None:
        """Write one tensor of the open shard."""
        assert self._shard is not None
        with self._on_disk():
            self._shard.write(name, array)

    def end_shard(self) -> None:
        """Bring the open shard to the disk."""
        assert self._shard is not None
        with self._on_disk():
            self._shard.finish()
        self._shard = None

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file."""
        self._write_whole(name, iter([json_bytes(content)]))

    def copy(self, source: Path, name: str) -> None:
        """Write the content of a file; a link is followed to its content and never copied as a link."""
        self._write_whole(name, _chunks(source))

    def publish(self, record: dict[str, object]) -> None:
        """Give every file its final name, remove files of an earlier output that this one lacks, then add the
        record.
        """
        folder = self.place.folder
        self.write_json(RECORD, {**record, "files": sorted(self._names[:-1])})
        with self._on_disk():
            (folder / RECORD).unlink(missing_ok=True)
            for name in self._names[:-1]:
                os.replace(partial_path(folder / name), folder / name)
            for name in self.place.earlier - set(self._names):
                (folder / name).unlink(missing_ok=True)
            _sync_folders(folder, self._names)
            os.replace(partial_path(folder / RECORD), folder / RECORD)
            _sync_folders(folder, (RECORD,))
        self._begun.clear()

    def _write_whole(self, name: str, chunks: Iterator[bytes]) -> None:
        with self._on_disk():
            file = self._create(name)
        with file:
            for chunk in chunks:
                with self._on_disk():
                    file.write(chunk)
            with self._on_disk():
                file.flush()
                os.fsync(file.fileno())

    def _create(self, name: str) -> BinaryIO:
        path = partial_path(self.place.folder / name)
        file = path.open("xb")  # fails on a link that appeared meanwhile instead of following it
        self._begun.append(path)
        return file

    def _make(self, folder: Path) -> None:
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir()
            self._made.append(parent)

    def _remove_all(self) -> None:
        # An error is on its way already; what cannot be removed has a partial name and claims nothing.
        for path in self._begun:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        """Turn errors of the output's disk into EnvironmentFailure."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(shutil.disk_usage(self.place.folder).free) from error
            raise EnvironmentFailure(
                f"{printable(self.place.folder)}: cannot be written: {printable(error)}."
            ) from error

    def _full(self, available: int) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{printable(self.place.folder)}: disk full: the output needs {self.needed_bytes:,} bytes and "
            f"{available:,} are available; free some space, or give another -o/--output. Nothing was left behind."
        )


def _chunks(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise InputError(f"{printable(source)}: cannot be read: {printable(error)}.") from error


def _sync_folders(folder: Path, names: Sequence[str]) -> None:
    for parent in folders_of(folder, names):
        descriptor = os.open(parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no such call for directories; the files themselves are synced.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)
