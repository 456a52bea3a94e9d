"""The directory of an output: `check_output_folder` refuses those that must not be written to."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import INDEX_SUFFIX, KINDS, PARTIAL_SUFFIX, SAFETENSORS, SHARD_NAME, SOLE
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG, RECORD
from mxcli.files.progress import header_hash, names_in, progress_records, read_progress
from mxcli.files.progress_lines import EARLIER, NO_LOG, PUBLISHING, ProgressLog
from mxcli.files.record import read_record
from mxcli.files.safetensors import LENGTH_BYTES
from mxcli.files.shard_file import partial_path

Hashes = Mapping[str, frozenset[str]]
"""The SHA-256s that the content of a file may have, by its name; none: it was not recorded."""


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """A directory that may be written to, and the files in it that belong to an earlier output of ours."""

    path: Path
    earlier: Hashes = field(default_factory=dict)


def check_output_folder(
    folder: Path,
    checkpoint: Checkpoint,
    names: Sequence[str],
    *,
    force: bool,
    resume: bool = False,
    inputs: Iterable[Path] = (),
) -> OutputFolder:
    """Return the folder for an output of these files. Raises RefusedError with every reason against it.

    Leftovers of unfinished runs are allowed. With `resume`, so are files that an interrupted run already renamed.
    `inputs` are the files that the run reads besides the source: none of them is ever replaced or removed.
    """
    problem = _inside_source(folder, checkpoint, names) or _in_cache(folder)
    if problem is None and os.path.lexists(folder) and not folder.is_dir():
        problem = f"{printable(folder)}: not a directory; an output is one."
    if problem:
        raise RefusedError(problem)
    found = check_free_folder(folder, names, force=force, resume=resume)
    read = dict.fromkeys([*checkpoint.files, *checkpoint.side_files, *inputs])
    problems = list(_inputs_among(read, folder, {*names, *found.earlier, RECORD}))
    if problems:
        raise together(RefusedError, printable(folder), problems)
    return found


def check_free_folder(folder: Path, names: Sequence[str], *, force: bool, resume: bool = False) -> OutputFolder:
    """Return the folder for files in a directory outside the source. Raises like check_output_folder, and InputError
    for a record or progress log there that mxcli did not write."""
    published, before = _half_published(folder, force=force and not resume)
    occupied = None if force or not folder.is_dir() else _occupied(folder, published if resume else ())
    if occupied:
        raise RefusedError(occupied)
    earlier = _joined(_earlier(folder, names), published, before if force else {})
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


def existing_parent(folder: Path) -> Path:
    """Return the directory itself, or the nearest one above it that exists."""
    path = folder.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def free_inodes(folder: Path) -> int | None:
    """Return how many files the file system of a directory, or where it would be, still takes; None if that is not
    limited or not known."""
    with suppress(OSError):
        status = os.statvfs(existing_parent(folder))
        return status.f_favail if status.f_files else None
    return None


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


def _half_published(folder: Path, *, force: bool) -> tuple[Hashes, Hashes]:
    """Return the files of runs interrupted while renaming, and those of the outputs before them. With `force`, a log
    that mxcli did not write is as good as none."""
    published, before = list[Hashes](), list[Hashes]()
    for path in progress_records(folder):
        log = _log(path, force=force)
        before.append({name: frozenset(hashes) for name, hashes in (log.latest(EARLIER) or {}).items()})
        if log.header is not None and log.latest(PUBLISHING):
            written = log.sha256_with(PUBLISHING)
            names = (*names_in(log.header), RECORD)
            published.append({name: frozenset({written[name]} if name in written else ()) for name in names})
    of_runs, of_others = _joined(*published), _joined(*before)
    return (
        {name: hashes for name, hashes in of_runs.items() if stays_inside(folder, name)},
        {name: hashes for name, hashes in of_others.items() if stays_inside(folder, name)},
    )


def _joined(*parts: Hashes) -> Hashes:
    """Return the files of all parts, each with all of its hashes."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: frozenset().union(*(part.get(name, ()) for part in parts)) for name in names}


def _log(path: Path, *, force: bool) -> ProgressLog:
    try:
        return read_progress(path)
    except InputError:
        if not force:
            raise
        return NO_LOG


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _earlier(folder: Path, names: Sequence[str]) -> Hashes:
    """Return the files that the record of an earlier output proves to be its own: those with a hash, but for weights
    without the recorded header that an output of these names would leave; of a record without hashes, those with the
    names that mxcli gives."""
    record = read_record(folder)
    if record is None or not record.files:
        return {}
    own = {
        name: frozenset({record.sha256[name]} if record.sha256 else ())
        for name in record.files
        if stays_inside(folder, name)
        and (name in record.sha256 if record.sha256 else _OWN.fullmatch(name))
        and (name in names or _has_header(folder / name, record.headers.get(name)))
    }
    return {**own, RECORD: frozenset()}


_SOLE = "|".join(re.escape(name) for name in SOLE.values())
_OWN = re.compile(rf"{SHARD_NAME.pattern}|({_SOLE})(\.index\.json)?|{re.escape(CONFIG)}|{re.escape(PRODUCER_CONFIG)}")


def _has_header(path: Path, recorded: str | None) -> bool:
    """Return whether a file has the recorded header, if there is one and it is a safetensors file."""
    if recorded is None or KINDS.get(path.suffix) != SAFETENSORS or not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        length = min(int.from_bytes(start, "little"), os.fstat(file.fileno()).st_size)
        return header_hash(start + file.read(length)) == recorded


def _inputs_among(inputs: Iterable[Path], folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the inputs that are files of an output, finished or not, by any names and links."""
    written = [folder / name for name in names]
    taken: dict[tuple[int, int], Path] = {}
    for path in (*written, *map(partial_path, written), *progress_records(folder)):
        for status in (os.stat, os.lstat):
            with suppress(OSError, ValueError):
                found = status(path)
                taken.setdefault((found.st_dev, found.st_ino), path)
    for path in inputs if taken else ():
        for status in (os.stat, os.lstat):
            with suppress(OSError, ValueError):
                found = status(path)
                if (found.st_dev, found.st_ino) in taken:
                    where = taken[found.st_dev, found.st_ino]
                    yield (
                        f"{printable(path)}: is read by this run, and the output would replace or remove it as "
                        f"{printable(where)}; give another -o/--output."
                    )
                    break


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
