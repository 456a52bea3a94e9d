"""The files behind a source as typed: a file, a directory, a sharded directory or an index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcli.errors import InputError, did_you_mean, printable
from mxcli.files.directory import (
    GGUF,
    INDEX_SUFFIX,
    KINDS,
    NUMPY,
    PARTIAL_SUFFIX,
    PYTORCH,
    SAFETENSORS,
    SHARD_NAME,
    ShardIndex,
    choose_index,
    counted,
    dump_files,
    is_index,
    listing,
    model_names,
    of_kind,
    read_index,
    refuse_gaps,
    refuse_variants,
    without_weights,
)
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG, RECORD
from mxcli.files.pipelines import refuse_pipeline
from mxcli.files.plain import foreign_content, path_problem, read_head
from mxcli.files.safetensors import looks_like_safetensors
from mxcli.files.trainers.adapters import refuse_adapter
from mxcli.files.trainers.formats import format_of, is_state, refuse_format, refuse_part, state_note


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one kind in name order, the index that names them, and notes on what was left aside.

    `is_model` is true if the files are the model of the directory `root`, so that its side files belong to them; false
    for a file opened by itself. `is_dump` is true if they are in step and rank folders below `root`, as only captures
    are.
    """

    root: Path
    kind: str
    files: tuple[Path, ...]
    index: ShardIndex | None = None
    is_model: bool = False
    notes: tuple[str, ...] = ()
    is_dump: bool = False

    @property
    def may_be_dump(self) -> bool:
        """Return whether the files may be captures of another program: those have no index and no numbered shards."""
        numbered = any(SHARD_NAME.fullmatch(path.name) for path in self.files)
        return self.kind != GGUF and self.index is None and not numbered


def locate(source: str | Path) -> Source:
    """Find the files behind a source. Raises InputError if there are none, or some are missing or unreadable.

    A file is read by itself, unless it is the whole model of a directory with a config.json: then it stands for the
    directory.
    """
    if not str(source).strip():
        raise InputError("The source is empty; give a checkpoint file or directory.")
    path = Path(source).expanduser() if str(source).startswith("~/") else Path(source)
    problem = path_problem(path)
    if problem:
        raise InputError(problem + _neighbour(path))
    if path.is_dir():
        return _in_directory(path)
    if is_index(path.name):
        return _indexed(path, listing(path.parent), [])
    refuse_part(path)
    kind = _kind_of(path)
    names = listing(path.parent)
    refuse_adapter(path.parent, [path.name], names)
    indexed = any(name.endswith(INDEX_SUFFIX) for name in names)
    if "config.json" in names and not indexed and model_names(kind, names, []) == [path.name]:
        return _in_directory(path.parent, (kind,))
    if kind == GGUF and len(parts := _parts_of(path, names)) > 1:
        return Source(path.parent, kind, parts)
    return Source(path.parent, kind, (path,), notes=_lone_shard(path, names))


def _parts_of(path: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Return the parts of the GGUF file that a file is a part of, in order: llama.cpp names a whole one by its first
    part. Raises InputError for those that are missing."""
    match = SHARD_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    parts = [(part, name) for name in names if (part := SHARD_NAME.fullmatch(name)) and _set_of(part) == _set_of(match)]
    refuse_gaps(path.parent, [name for _, name in parts])
    return tuple(path.parent / name for part, name in sorted(parts, key=lambda each: int(each[0][2])))


def _set_of(shard: re.Match[str]) -> tuple[str, ...]:
    return shard[1], shard[3], shard[4]


def _in_directory(root: Path, kinds: Sequence[str] = (SAFETENSORS, PYTORCH, GGUF, NUMPY)) -> Source:
    names = listing(root)
    refuse_pipeline(root, names)
    notes: list[str] = []
    index = choose_index(root, names, notes)
    if index is not None:
        return _indexed(root / index, names, notes)
    weights = [name for name in names if not is_state(name)]
    for kind in kinds:
        chosen = model_names(kind, weights, notes)
        if chosen:
            refuse_format(root, chosen)
            refuse_adapter(root, chosen, names)
            refuse_variants(root, kind, chosen)
            refuse_gaps(root, chosen)
            notes += [*state_note(root, names), *_unfinished(names)]
            return Source(root, kind, tuple(root / name for name in chosen), None, True, tuple(notes))
    kind, dumped = dump_files(root)
    if dumped and format_of(root) is None:
        return Source(root, kind, dumped, is_dump=True)
    raise InputError(without_weights(root, names))


def _indexed(path: Path, names: list[str], notes: list[str]) -> Source:
    index = read_index(path)
    kinds = {KINDS.get(shard.suffix) for shard in index.shards}
    kind = kinds.pop()
    if kinds or kind not in (SAFETENSORS, PYTORCH):
        raise InputError(f"{printable(path)}: its shards must all be .safetensors or all PyTorch files.")
    used = {shard.name for shard in index.shards}
    others = [name for name in of_kind(kind, names) if name not in used and not is_state(name)]
    if others:
        notes.append(f"{counted(others)} not named by {printable(path.name)}; not read.")
    notes += [*state_note(path.parent, names), *_unfinished(names)]
    return Source(path.parent, kind, index.shards, index, True, tuple(notes))


def _unfinished(names: list[str]) -> list[str]:
    partial = [name for name in names if name.endswith(PARTIAL_SUFFIX)]
    return [f"{counted(partial)} left by an unfinished run; not read."] if partial else []


def _lone_shard(path: Path, names: list[str]) -> tuple[str, ...]:
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or int(match[3]) <= 1:
        return ()
    whole = next((name for name in names if name.endswith(INDEX_SUFFIX)), "the directory")
    return (f"{printable(path.name)} is one of {int(match[3]):,} shards; {printable(whole)} gives all of them.",)


def _kind_of(path: Path) -> str:
    """Return the kind by a file's ending, else by its first bytes. Raises InputError if both are unknown."""
    if path.suffix in KINDS:
        return KINDS[path.suffix]
    head, size = read_head(path)
    if looks_like_safetensors(head):
        return SAFETENSORS
    if head.startswith((b"PK", b"\x80\x02")):
        return PYTORCH
    if head.startswith(b"\x93NUMPY"):
        return NUMPY
    if head.startswith(b"GGUF"):
        return GGUF
    raise InputError(
        foreign_content(path, head, size)
        or f"{printable(path)}: not a checkpoint; known endings are {', '.join(KINDS)} and {INDEX_SUFFIX}."
    )


def _neighbour(path: Path) -> str:
    """Return a question naming a similar file next to a path that does not exist, or an empty string."""
    if os.path.lexists(path):
        return ""
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""


_CONFIGS = (CONFIG, PRODUCER_CONFIG, RECORD)
"""Files read along with weights, whether the source is their directory or the weight file."""


def source_of(file: Path, sources: Iterable[str]) -> str | None:
    """Return the first of the sources that a file belongs to, or would if it existed; None without one.

    Every file in a directory belongs to it, and to a file that stands for the directory's model, as does a new one
    whose name is read as part of a model. To a file by itself belong it and the configuration next to it. Links are
    resolved.
    """
    return next((source for source in sources if _belongs(file, source)), None)


def _belongs(file: Path, source: str) -> bool:
    try:
        located = locate(source)
    except (InputError, OSError):  # not a checkpoint, or not yet: reading it will raise the error
        path = Path(source)
        return _same(file, path) or (path.is_dir() and _is_part(file, path))
    parts = (*located.files, *(() if located.index is None else (located.index.path,)))
    if any(_same(file, part) for part in parts):
        return True
    if located.is_model or located.is_dump:
        return _is_part(file, located.root)
    return any(path.parent == located.root.resolve() and path.name in _CONFIGS for path in _paths(file))


def _is_part(file: Path, root: Path) -> bool:
    """Return whether a file is in a directory, or would be and be read as part of the model there."""
    inside = any(path.is_relative_to(root.resolve()) for path in _paths(file))
    return inside and (file.exists() or _is_read(file.name))


def _paths(file: Path) -> tuple[Path, Path]:
    """Return the path of a file by its own name, and with its link resolved."""
    return file.parent.resolve() / file.name, file.resolve()


def _is_read(name: str) -> bool:
    """Return whether a file of that name would be read as part of a model, on file systems that ignore case too."""
    name = name.casefold()
    return name in _CONFIGS or name.endswith(INDEX_SUFFIX) or Path(name).suffix in KINDS


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))
