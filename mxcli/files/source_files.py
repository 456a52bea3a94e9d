"""Which files belong to a source: whatever else is asked for, those are never written to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mxcli.errors import InputError
from mxcli.files.directory import INDEX_SUFFIX, KINDS
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG, RECORD
from mxcli.files.source import locate

_READ_BESIDE = (CONFIG, PRODUCER_CONFIG, RECORD)
"""What is read beside weights, whether they were named by their directory or by themselves."""


def source_of(file: Path, sources: Iterable[str]) -> str | None:
    """The first of the sources that a file belongs to, or would if it were there; None where it is none's.

    To a directory, and to a file that stands for the model of one, belongs every file in it, and a new one by a name
    that is read as part of a model. To a file by itself belong it and the configuration beside it. Links are resolved.
    """
    return next((source for source in sources if _belongs(file, source)), None)


def _belongs(file: Path, source: str) -> bool:
    try:
        located = locate(source)
    except (InputError, OSError):  # no checkpoint, or none yet: what reads it will say what it thinks of it
        path = Path(source)
        return _same(file, path) or (path.is_dir() and _is_part(file, path))
    parts = (*located.files, *(() if located.index is None else (located.index.path,)))
    if any(_same(file, part) for part in parts):
        return True
    if located.is_model or located.is_dump:
        return _is_part(file, located.root)
    return any(place.parent == located.root.resolve() and place.name in _READ_BESIDE for place in _places(file))


def _is_part(file: Path, root: Path) -> bool:
    """Whether a file lies in a directory, or would and be read as part of the model there."""
    inside = any(place.is_relative_to(root.resolve()) for place in _places(file))
    return inside and (file.exists() or _is_read(file.name))


def _places(file: Path) -> tuple[Path, Path]:
    """Where a file lies: by its own name, and by that of what it is a link to."""
    return file.parent.resolve() / file.name, file.resolve()


def _is_read(name: str) -> bool:
    """Whether a file of that name would be read as part of a model."""
    return name in _READ_BESIDE or name.endswith(INDEX_SUFFIX) or Path(name).suffix in KINDS


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))
