"""The directory of an output: `check_output_folder` refuses those that must not be written to."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import INDEX_SUFFIX, KINDS, PARTIAL_SUFFIX
from mxcli.files.model_files import RECORD
from mxcli.files.progress import names_in, progress_records, read_progress
from mxcli.files.progress_lines import EARLIER, NO_LOG, PUBLISHING, ProgressLog
from mxcli.files.record import read_record


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
    """Return the folder for files in a directory outside the source. Raises like check_output_folder, and InputError
    for a record or progress log there that mxcli did not write."""
    published, before = _half_published(folder, force=force and not resume)
    occupied = None if force or not folder.is_dir() else _occupied(folder, published if resume else ())
    if occupied:
        raise RefusedError(occupied)
    earlier = _earlier(folder) | published | (before if force else frozenset())
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


def _occupied(folder: Path, published: Collection[str]) -> str | None:
    """Return why the directory is in use: it holds more than leftovers of unfinished runs."""
    ours = {PurePosixPath(name).parts[0] for name in published}
    held = [path for path in folder.iterdir() if path.name not in ours and _holds(path)]
    if not held:
        return None
    return (
        f"{printable(folder)}: exists and holds {len(held):,} entries; give a new directory, or --force to replace "
        "what an output replaces."
    )


def _holds(path: Path) -> bool:
    """Return whether a path holds more than partial files."""
    if path.is_dir() and not path.is_symlink():
        return any(map(_holds, path.iterdir()))
    return not path.name.endswith(PARTIAL_SUFFIX)


def _half_published(folder: Path, *, force: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return the files of runs interrupted while renaming, and those of the outputs before them. With `force`, a log
    that mxcli did not write is as good as none."""
    published, before = set[str](), set[str]()
    for path in progress_records(folder):
        log = _log(path, force=force)
        before.update(log.latest(EARLIER) or ())
        if log.header is not None and log.latest(PUBLISHING):
            published.update((*names_in(log.header), RECORD))
    inside = frozenset(name for name in published | before if stays_inside(folder, name))
    return inside & published, inside & before


def _log(path: Path, *, force: bool) -> ProgressLog:
    try:
        return read_progress(path)
    except InputError:
        if not force:
            raise
        return NO_LOG


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _earlier(folder: Path) -> frozenset[str]:
    """Return the files that the record of an earlier output lists; none without a record."""
    record = read_record(folder)
    if record is None or not record.files:
        return frozenset()
    return frozenset(name for name in record.files if stays_inside(folder, name)) | {RECORD}


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
