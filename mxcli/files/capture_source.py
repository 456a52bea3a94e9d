"""Several capture files as one source: whose records are whose, and one name for each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.captures import Capture, captured
from mxcli.files.directory import by_numbers, counted
from mxcli.files.foreign_dumps import dumped, told_by
from mxcli.files.roles import role_of
from mxcli.files.tensors import Array, FileContents, TensorInfo


@dataclass(frozen=True, slots=True)
class Captures:
    """The files of a source with their tensors under the names that the source has for them, and the record of each
    captured one; no records where the source is no capture. `layers_of_model` has the linear layers of the model, where
    its files tell them; `notes` say how it was recognised, where its names tell."""

    contents: Mapping[Path, FileContents]
    records: Mapping[str, Capture]
    is_capture: bool
    layers_of_model: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def as_captures(root: Path, contents: Mapping[Path, FileContents], *, is_foreign: bool) -> Captures:
    """A source as captures, if its files are: those of the documented form, or else, where `is_foreign`, a dump of
    another program. A name that several files hold becomes `FILE/name`, FILE being the path below `root` without its
    suffix, or the folder where that is enough. Files are in the order of the numbers in their names, which give records
    the step and rank that they lack. The model has the layers that any of them tells: ranks may hold a part each.

    Raises InputError naming every unsound record, or where some files are captures and others are not.
    """
    problems: list[str] = []
    own: dict[Path, Mapping[str, Capture]] = {}
    model: dict[Path, Sequence[str]] = {}
    for path, part in contents.items():
        try:
            said = captured(path, part.metadata, {info.name: info for info in part.tensors})
        except InputError as error:
            problems += error.reasons
            continue
        if said is not None:
            told = told_by(path.relative_to(root))
            own[path] = {name: {**told, **record} for name, record in said.records.items()}
            model[path] = said.layers_of_model
    if problems:
        raise together(InputError, printable(root), problems)
    foreign = dumped(root, contents) if is_foreign and not own else None
    notes: tuple[str, ...] = ()
    if foreign is not None:
        dump, named = foreign
        notes = (f"Read as captures, by names: {dump.name}.",)
        own = {path: {each.name: each.record for each in found if each.role} for path, found in named.items()}
        new = {path: {each.held: each.name for each in found} for path, found in named.items()}
        contents = {path: _renamed(part, new.get(path, {})) for path, part in contents.items()}
    if not own:
        return Captures(contents, {}, is_capture=False)
    others = [path.name for path in contents if path not in own]
    if others:
        raise InputError(
            f"{printable(root)}: {counted([path.name for path in own])} captures and {counted(others)} not; keep them "
            "in directories of their own, or give one file."
        )
    contents = {path: contents[path] for path in sorted(contents, key=by_numbers)}
    names = _unique(root, contents)
    return Captures(
        {path: _renamed(part, names[path]) for path, part in contents.items()},
        {names[path].get(name, name): record for path in contents for name, record in own[path].items()},
        is_capture=True,
        layers_of_model=tuple(dict.fromkeys(layer for path in contents for layer in model.get(path, ()))),
        notes=notes,
    )


def _unique(root: Path, contents: Mapping[Path, FileContents]) -> dict[Path, dict[str, str]]:
    """By file the new names of its tensors whose names other files hold too."""
    count = Counter(info.name for part in contents.values() for info in part.tensors)
    names: dict[Path, dict[str, str]] = {}
    for prefix_of in _PREFIXES:
        prefixes = {path: prefix_of(path.relative_to(root)).as_posix() for path in contents}
        names = {
            path: {info.name: f"{prefixes[path]}/{info.name}" for info in part.tensors if count[info.name] > 1}
            for path, part in contents.items()
        }
        if len({name for own in names.values() for name in own.values()}) == sum(map(len, names.values())):
            break
    return names


_PREFIXES: tuple[Callable[[Path], Path], ...] = (lambda path: path.parent, lambda path: path.with_suffix(""))


def _renamed(contents: FileContents, names: Mapping[str, str]) -> FileContents:
    """The contents of a file with some of its tensors under other names, which tell their roles."""
    if all(old == new for old, new in names.items()):
        return contents
    back = {new: old for old, new in names.items()}
    decode = contents.decode

    def decoded(info: TensorInfo) -> Array:
        assert decode is not None
        return decode(replace(info, name=back.get(info.name, info.name)))

    return replace(
        contents,
        tensors=tuple(_called(info, names.get(info.name, info.name)) for info in contents.tensors),
        tied={names.get(alias, alias): names.get(stored, stored) for alias, stored in contents.tied.items()},
        decode=decoded if decode else None,
    )


def _called(info: TensorInfo, name: str) -> TensorInfo:
    return info if name == info.name else replace(info, name=name, role=role_of(name, info.shape, info.dtype))
