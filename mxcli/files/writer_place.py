"""Where an output may go: not over or into its source, not through links, and not over other work unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import INDEX_SUFFIX, KINDS, PARTIAL_SUFFIX
from mxcli.files.model_files import RECORD
from mxcli.files.writer_draft import names_in
from mxcli.files.writer_progress import EARLIER, PUBLISHING, progress_records, read_progress


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that may be written to, and the files in it that an earlier output of ours left."""

    folder: Path
    earlier: frozenset[str] = frozenset()


def check_place(
    folder: Path, checkpoint: Checkpoint, names: Sequence[str], *, force: bool, resume: bool = False
) -> Place:
    """The place for an output of these files; raises RefusedError with every reason against it.

    What unfinished runs left is no reason. With `resume`, nor are files that one gave their final names already.
    """
    problem = _inside_source(folder, checkpoint, names) or _in_cache(folder)
    if problem is None and os.path.lexists(folder) and not folder.is_dir():
        problem = f"{printable(folder)}: not a directory; an output is one."
    if problem:
        raise RefusedError(problem)
    return free_place(folder, names, force=force, resume=resume)


def free_place(folder: Path, names: Sequence[str], *, force: bool, resume: bool = False) -> Place:
    """The place for files in a directory of which the source is no part; raises like check_place."""
    published, before = _half_published(folder)
    occupied = None if force or not folder.is_dir() else _occupied(folder, published if resume else (), resume=resume)
    if occupied:
        raise RefusedError(occupied)
    earlier = _earlier(folder) | published | before
    obstacles = [*_obstacles(folder, names), *_other_weights(folder, {*names, *earlier})]
    if obstacles:
        raise together(RefusedError, printable(folder), obstacles)
    return Place(folder, earlier)


def folders_of(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """The directory and every folder in it that the names need, outermost first."""
    needed = {folder}
    for name in names:
        needed |= {folder / parent for parent in PurePosixPath(name).parents}
    return tuple(sorted(needed, key=lambda path: len(path.parts)))


def stays_inside(folder: Path, name: str) -> bool:
    """Whether a name that a file gives leads to nothing outside the directory, links resolved."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        return False
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _inside_source(folder: Path, checkpoint: Checkpoint, names: Sequence[str]) -> str | None:
    """Why the folder is, or lies in, the source, links resolved. Beside a file opened by itself is allowed."""
    target, root = folder.resolve(), checkpoint.root.resolve()
    homes = {root, *(file.resolve().parent for file in (*checkpoint.files, *checkpoint.side_files))}
    if any(_same(written.resolve(), home) for written in folders_of(folder, names) for home in homes):
        return f"{printable(folder)}: holds the source itself; give another directory, the source is never written to."
    whole = bool(checkpoint.config or checkpoint.index or checkpoint.side_files or len(checkpoint.files) > 1)
    if whole and any(_same(parent, root) for parent in target.parents):
        return f"{printable(folder)}: lies inside the source {printable(checkpoint.root)}; give a directory outside it."
    return None


def _in_cache(folder: Path) -> str | None:
    """Why the folder is part of a download cache (`models--org--name/snapshots/…`), links resolved."""
    target = folder.resolve()
    for path in (target, *target.parents):
        if path.name in ("snapshots", "blobs") and path.parent.name.startswith(("models--", "datasets--")):
            return f"{printable(folder)}: lies in the download cache {printable(path.parent)}; give another directory."
    return None


def _occupied(folder: Path, published: Collection[str], *, resume: bool) -> str | None:
    """Why the directory is in use: what is in it, but for what unfinished runs left there."""
    ours = {PurePosixPath(name).parts[0] for name in published}
    held = [path for path in folder.iterdir() if path.name not in ours and _holds(path)]
    if not held:
        return None
    if resume and (folder / RECORD).exists() and not progress_records(folder):
        return f"{printable(folder)}: complete, so that there is nothing to resume; --force writes it anew."
    return (
        f"{printable(folder)}: exists and holds {len(held):,} entries; give a new directory, or --force to replace "
        "what an output replaces."
    )


def _holds(path: Path) -> bool:
    """Whether there is more to it than partial files."""
    if path.is_dir() and not path.is_symlink():
        return any(map(_holds, path.iterdir()))
    return not path.name.endswith(PARTIAL_SUFFIX)


def _half_published(folder: Path) -> tuple[frozenset[str], frozenset[str]]:
    """The files of runs that were cut short while they gave them their names, and those of the outputs before them."""
    published, before = set[str](), set[str]()
    for path in progress_records(folder):
        told = read_progress(path)
        before.update(told.latest(EARLIER) or ())
        if told.header is not None and told.latest(PUBLISHING):
            published.update((*names_in(told.header), RECORD, *before))
    inside = frozenset(name for name in published | before if stays_inside(folder, name))
    return inside & published, inside & before


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _earlier(folder: Path) -> frozenset[str]:
    """Files that the record of an earlier output lists; none where there is no record of ours."""
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
    """Weights and indexes that would stay beside the output, where a loader could take them for part of it."""
    if not folder.is_dir():
        return []
    return [
        f"{printable(folder / name)}: weights of another checkpoint, which could be taken for this one; move them away."
        for name in sorted(os.listdir(folder))
        if name not in ours and (Path(name).suffix in KINDS or name.endswith(INDEX_SUFFIX))
    ]
