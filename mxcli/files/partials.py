"""The files of an output under their partial names, and the step that gives all of them their final names.

`check_output_folder` refuses directories that must not be written to.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mxcli.errors import EnvironmentFailure, InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import INDEX_SUFFIX, KINDS, PARTIAL_SUFFIX
from mxcli.files.model_files import RECORD
from mxcli.files.progress import EARLIER, PUBLISHING, ProgressRecord, names_in, progress_records, read_progress
from mxcli.files.shard_file import CHUNK_BYTES, partial_path


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """A directory that may be written to, and the files in it that belong to an earlier output of ours."""

    path: Path
    earlier: frozenset[str] = frozenset()


def check_output_folder(
    folder: Path, checkpoint: Checkpoint, names: Sequence[str], *, force: bool, resume: bool = False
) -> OutputFolder:
    """Return the folder for an output of these files. Raises RefusedError with every reason against it.

    Leftovers of unfinished runs are allowed. With `resume`, so are files that an interrupted run already renamed.
    """
    problem = _inside_source(folder, checkpoint, names) or _in_cache(folder)
    if problem is None and os.path.lexists(folder) and not folder.is_dir():
        problem = f"{printable(folder)}: not a directory; an output is one."
    if problem:
        raise RefusedError(problem)
    return check_free_folder(folder, names, force=force, resume=resume)


def check_free_folder(folder: Path, names: Sequence[str], *, force: bool, resume: bool = False) -> OutputFolder:
    """Return the folder for files in a directory outside the source. Raises like check_output_folder."""
    published, before = _half_published(folder)
    occupied = None if force or not folder.is_dir() else _occupied(folder, published if resume else (), resume=resume)
    if occupied:
        raise RefusedError(occupied)
    earlier = _earlier(folder) | published | before
    obstacles = [*_obstacles(folder, names), *_other_weights(folder, {*names, *earlier})]
    if obstacles:
        raise together(RefusedError, printable(folder), obstacles)
    return OutputFolder(folder, earlier)


def folders_of(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """Return the directory and every folder in it that the names need, outermost first."""
    needed = {folder}
    for name in names:
        needed |= {folder / parent for parent in PurePosixPath(name).parents}
    return tuple(sorted(needed, key=lambda path: len(path.parts)))


def stays_inside(folder: Path, name: str) -> bool:
    """Return whether a name found in a file leads to nothing outside the directory, links resolved."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _inside_source(folder: Path, checkpoint: Checkpoint, names: Sequence[str]) -> str | None:
    """Return why the folder is the source or is inside it, links resolved. Next to a single-file source is allowed."""
    target, root = folder.resolve(), checkpoint.root.resolve()
    homes = {root, *(file.resolve().parent for file in (*checkpoint.files, *checkpoint.side_files))}
    if any(_same(written.resolve(), home) for written in folders_of(folder, names) for home in homes):
        return f"{printable(folder)}: holds the source itself; give another directory, the source is never written to."
    whole = bool(checkpoint.config or checkpoint.index or checkpoint.side_files or len(checkpoint.files) > 1)
    if whole and any(_same(parent, root) for parent in target.parents):
        return f"{printable(folder)}: is inside the source {printable(checkpoint.root)}; give a directory outside it."
    return None


def _in_cache(folder: Path) -> str | None:
    """Return why the folder is part of a download cache (`models--org--name/snapshots/…`), links resolved."""
    target = folder.resolve()
    for path in (target, *target.parents):
        if path.name in ("snapshots", "blobs") and path.parent.name.startswith(("models--", "datasets--")):
            return f"{printable(folder)}: is in the download cache {printable(path.parent)}; give another directory."
    return None


def _occupied(folder: Path, published: Collection[str], *, resume: bool) -> str | None:
    """Return why the directory is in use: it holds more than leftovers of unfinished runs."""
    ours = {PurePosixPath(name).parts[0] for name in published}
    held = [path for path in folder.iterdir() if path.name not in ours and _holds(path)]
    if not held:
        return None
    if resume and (folder / RECORD).exists() and not progress_records(folder):
        return f"{printable(folder)}: complete, nothing to resume; --force writes it again."
    return (
        f"{printable(folder)}: exists and holds {len(held):,} entries; give a new directory, or --force to replace "
        "what an output replaces."
    )


def _holds(path: Path) -> bool:
    """Return whether a path holds more than partial files."""
    if path.is_dir() and not path.is_symlink():
        return any(map(_holds, path.iterdir()))
    return not path.name.endswith(PARTIAL_SUFFIX)


def _half_published(folder: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the files of runs interrupted while renaming, and those of the outputs before them."""
    published, before = set[str](), set[str]()
    for path in progress_records(folder):
        log = read_progress(path)
        before.update(log.latest(EARLIER) or ())
        if log.header is not None and log.latest(PUBLISHING):
            published.update((*names_in(log.header), RECORD, *before))
    inside = frozenset(name for name in published | before if stays_inside(folder, name))
    return inside & published, inside & before


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _earlier(folder: Path) -> frozenset[str]:
    """Return the files that the record of an earlier output lists; none without a record of ours."""
    record = folder / RECORD
    try:
        parsed = json.loads(record.read_bytes()) if record.is_file() else {}
    except ValueError:
        return frozenset()
    files = parsed.get("files") if isinstance(parsed, dict) else None
    listed = [name for name in files if isinstance(name, str)] if isinstance(files, list) else []
    return frozenset(name for name in listed if stays_inside(folder, name)) | ({RECORD} if listed else set())


def _obstacles(folder: Path, names: Sequence[str]) -> list[str]:
    problems = []
    for path in folders_of(folder, names)[1:]:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            problems.append(f"{printable(path)}: a link or file where the output needs a folder; remove it.")
    for name in names:
        if (folder / name).is_dir():
            problems.append(f"{printable(folder / name)}: a folder where the output needs a file; remove it.")
    return problems


def _other_weights(folder: Path, ours: set[str]) -> list[str]:
    """Return weights and indexes that would stay next to the output, where a loader could mistake them for part of
    it."""
    if not folder.is_dir():
        return []
    return [
        f"{printable(folder / name)}: weights of another checkpoint, which could be taken for this one; move them away."
        for name in sorted(os.listdir(folder))
        if name not in ours and (Path(name).suffix in KINDS or name.endswith(INDEX_SUFFIX))
    ]


SPARE_BYTES = 1 << 20
BLOCK_BYTES = 512
"""The unit of st_blocks on every file system."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


def json_bytes(content: object) -> bytes:
    """Return JSON text as all files of mxcli have it: sorted keys, two spaces, a final newline."""
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


class Partials:
    """The files `names` of a directory, each as `NAME.partial`; OSError becomes EnvironmentFailure everywhere.

    `needed_bytes` is about what they take on disk. The record, `mxcli.json`, is one file more.
    """

    def __init__(self, folder: OutputFolder, names: Sequence[str], needed_bytes: int) -> None:
        self.folder = folder.path
        self.names = tuple(names)
        self.needed_bytes = needed_bytes + SPARE_BYTES
        self._earlier = folder.earlier
        self._made: list[Path] = []

    @property
    def publishing_line(self) -> dict[str, object]:
        """Return the progress line that lists the files of the output before this one."""
        return {PUBLISHING: False, EARLIER: sorted(self._earlier)}

    def make_folders(self) -> None:
        """Create the directory and the folders in it that the names need."""
        with self.on_disk():
            for folder in folders_of(self.folder, self.names):
                missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
                for parent in reversed(missing):
                    parent.mkdir(exist_ok=True)  # another process may make it at the same time
                    self._made.append(parent)

    def check_space(self, partial: Iterable[str] = ()) -> None:
        """Raise EnvironmentFailure if the disk cannot hold the files, less what the `partial` ones occupy already."""
        with self.on_disk():
            held = 0
            for name in partial:
                with suppress(FileNotFoundError):
                    held += partial_path(self.folder / name).lstat().st_blocks * BLOCK_BYTES
            available = shutil.disk_usage(self.folder).free
        if available + held < self.needed_bytes:
            raise self._full(available, self.needed_bytes - held)

    def create(self, name: str) -> BinaryIO:
        """Create a file under the partial name; a link or file there is replaced, never followed."""
        path = partial_path(self.folder / name)
        with self.on_disk():
            path.unlink(missing_ok=True)
            return path.open("xb")  # fails on a link that appeared meanwhile

    def reopen(self, name: str) -> BinaryIO | None:
        """Open what an earlier run left under the partial name; None unless it is a regular file with a single name."""
        path = partial_path(self.folder / name)
        with self.on_disk():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                    return None
                raise
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                os.close(descriptor)
                return None
            return open(descriptor, "r+b")

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file."""
        self._write_whole(name, iter([json_bytes(content)]))

    def copy(self, source: Path, name: str) -> None:
        """Copy the content of a file; a link is followed, never copied as a link."""
        self._write_whole(name, _chunks(source))

    def discard(self, names: Iterable[str]) -> None:
        """Remove files under partial names."""
        with self.on_disk():
            for name in names:
                if os.path.lexists(path := partial_path(self.folder / name)) and not path.is_dir():
                    path.unlink(missing_ok=True)

    def publish(self, record: dict[str, object], progress: Sequence[ProgressRecord]) -> None:
        """Give every file its final name, remove files of an earlier output that this one lacks, add the record, and
        remove the progress logs."""
        self.write_json(RECORD, {**record, "files": sorted(self.names)})
        with self.on_disk():
            self._rename(progress)
            for each in progress:
                each.remove()

    def take_back(self, progress: ProgressRecord) -> None:
        """Rename files back to their partial names if a run was killed while renaming; files that still have a partial
        name are not touched."""
        if not progress.log.latest(PUBLISHING):
            return
        self._earlier |= frozenset(progress.log.latest(EARLIER))
        with self.on_disk():
            for name in (*self.names, RECORD):
                final, partial = self.folder / name, partial_path(self.folder / name)
                if not os.path.lexists(partial) and os.path.lexists(final):
                    os.replace(final, partial)
            progress.add([self.publishing_line])

    def remove(self, names: Iterable[str]) -> None:
        """Remove files under partial names, and the directories made for them."""
        # An error is being raised already; a file that cannot be removed still has its partial name.
        for name in names:
            with suppress(OSError):
                partial_path(self.folder / name).unlink(missing_ok=True)
        self.remove_folders()

    def remove_folders(self) -> None:
        """Remove the directories that were made and are empty."""
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()

    @contextmanager
    def on_disk(self) -> Iterator[None]:
        """Turn errors of the output's disk into EnvironmentFailure."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(shutil.disk_usage(self.folder).free, self.needed_bytes) from error
            raise EnvironmentFailure(f"{printable(self.folder)}: cannot be written: {printable(error)}.") from error

    def _rename(self, progress: Sequence[ProgressRecord]) -> None:
        folder = self.folder
        progress[0].add([{**self.publishing_line, PUBLISHING: True}])
        _sync_folders(folder, self.names)
        (folder / RECORD).unlink(missing_ok=True)
        for name in self.names:
            os.replace(partial_path(folder / name), folder / name)
        for name in self._earlier - {*self.names, RECORD}:
            (folder / name).unlink(missing_ok=True)
        _sync_folders(folder, self.names)
        os.replace(partial_path(folder / RECORD), folder / RECORD)
        _sync_folders(folder, (RECORD,))

    def _write_whole(self, name: str, chunks: Iterator[bytes]) -> None:
        with self.on_disk(), self.create(name) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def _full(self, available: int, needed: int) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{printable(self.folder)}: disk full: the output needs {needed:,} bytes and {available:,} are available; "
            "free some space, or give another -o/--output."
        )


def sync_folder(folder: Path) -> None:
    """Sync the names in a directory to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync directories; the files themselves are synced.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _sync_folders(folder: Path, names: Sequence[str]) -> None:
    for each in folders_of(folder, names):
        sync_folder(each)


def _chunks(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise InputError(f"{printable(source)}: cannot be read: {printable(error)}.") from error
