"""Several capture files as one source: the record and a unique name of each tensor, also of other programs' dumps."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.captures import Capture, incomplete_notes, parse_captures, shape_fault
from mxcli.files.directory import by_numbers, counted
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT, role_of
from mxcli.files.tensors import Array, FileContents, TensorInfo

ROLE_OF_WORD = {
    "activation": ACTIVATION,
    "input": ACTIVATION,
    "x": ACTIVATION,
    "gradient": GRADIENT,
    "grad": GRADIENT,
    "grad_output": GRADIENT,
    "dy": GRADIENT,
    "weight": WEIGHT,
}
"""The role that a tensor's word stands for; other words stand for none of the three."""


@dataclass(frozen=True, slots=True)
class DumpedTensor:
    """A tensor of a dump: its name in the file, and the layer, word, step and rank in its names."""

    stored_name: str
    layer: str
    word: str
    step: int | None
    rank: int | None

    @property
    def name(self) -> str:
        """Return its name in the source: that of its file if the layer is in it."""
        return self.stored_name if self.stored_name.startswith(f"{self.layer}.") else f"{self.layer}.{self.word}"

    @property
    def role(self) -> str | None:
        """Return its role if it is an input, a gradient or a weight."""
        return ROLE_OF_WORD.get(self.word.lower())

    @property
    def record(self) -> Capture:
        """Return its capture record."""
        values = {"role": self.role, "layer": self.layer, "step": self.step, "rank": self.rank}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Dump:
    """A kind of dump: its name for notes, and the source that documents it.

    `path` is matched with a file's absolute path, since a source may be one file of a dump, and `tensor` with the names
    in it, both in full, for their groups `layer`, `word`, `step` and `rank`. `select` returns those of the tensors
    found in a source that belong to the dump (none: not such a dump). `needs` is searched in the names: if it is in
    none of them, `select` returns none.
    """

    name: str
    path: str
    tensor: str
    select: Callable[[Sequence[DumpedTensor]], list[DumpedTensor]]
    source: str
    needs: str = ""


def _with_inputs(found: Sequence[DumpedTensor]) -> list[DumpedTensor]:
    """Return the tensors of layers with a dumped input or gradient; any model has weights alone.

    A bare word as a name (`x`) counts only together with another role.
    """
    layers = {each.layer for each in found if each.role != WEIGHT}
    selected = [each for each in found if each.layer in layers]
    certain = len({each.role for each in selected}) > 1
    certain = certain or any(each.stored_name.startswith(f"{each.layer}.") for each in selected)
    return selected if certain else []


# The first row that matches a source decides.
DUMPS = (
    Dump(
        "Transformer Engine's DumpTensors",
        r"(.*/)?rank_(?P<rank>\d+)/iter_(?P<step>\d+)/"
        r"(?P<layer>[^/]+)_(?P<word>activation|gradient|weight|output|wgrad|dgrad)\.pt",
        r"high_precision",
        list,
        "Transformer Engine 2.15, debug/features/dump_tensors.py: tensor_dumps/rank_R/iter_NNNNNN/LAYER_TENSOR.pt, "
        "dots and blanks of LAYER made `_`, each a dict of a tensor before quantization (`high_precision`) and the "
        "object of it quantized (`quantized`: codes and scales by row and by column; not read)",
    ),
    Dump(
        f"tensors called LAYER.WORD, WORD being one of {', '.join(ROLE_OF_WORD)}",
        r".*",
        rf"((?P<layer>.+)\.)?(?P<word>{'|'.join(ROLE_OF_WORD)})(\.(?P<step>\d+))?",
        _with_inputs,
        "dicts as hooks collect them, flat or nested: LAYER.WORD to a tensor, or to a list of them, one of each step",
        rf"(^|\.)({'|'.join(word for word, role in ROLE_OF_WORD.items() if role != WEIGHT)})(\.\d+)?$",
    ),
)
STEP = re.compile(r"(?<![a-z])(?:step|iter|iteration)[-_]?(\d{1,18})(?!\d)", re.IGNORECASE)
RANK = re.compile(r"(?<![a-z])rank[-_]?(\d{1,18})(?!\d)", re.IGNORECASE)


def find_dump(root: Path, contents: Mapping[Path, FileContents]) -> tuple[Dump, dict[Path, list[DumpedTensor]]] | None:
    """Return the first of DUMPS that matches the files of a source below `root`, and its tensors by file, in their
    order; None if none matches.

    Tensors without floats or rows are ignored.
    """
    for dump in DUMPS:
        if not _has_needed(dump, contents.values()):
            continue
        found = {path: list(_found(dump, root, path, part)) for path, part in contents.items()}
        selected = set(dump.select([each for listed in found.values() for each in listed]))
        if selected:
            chosen = {path: [each for each in listed if each in selected] for path, listed in found.items()}
            return dump, {path: listed for path, listed in chosen.items() if listed}
    return None


def _has_needed(dump: Dump, contents: Iterable[FileContents]) -> bool:
    needs = re.compile(dump.needs, re.IGNORECASE)
    return not dump.needs or any(needs.search(info.name) for part in contents for info in part.tensors)


def step_and_rank(path: Path) -> dict[str, int]:
    """Return the step and rank in names such as `step-000100.safetensors` or `rank_1/iter_5/x.pt`. The path is relative
    to the source: folders above it do not describe its content."""
    text = path.as_posix()
    found = {"step": STEP.findall(text), "rank": RANK.findall(text)}
    return {key: int(numbers[-1]) for key, numbers in found.items() if numbers}


def _found(dump: Dump, root: Path, path: Path, part: FileContents) -> Iterator[DumpedTensor]:
    """Yield the tensors that a dump describes, from the names of a file and of the tensors in it."""
    whole = Path(os.path.abspath(path))  # independent of the current directory
    in_path = re.fullmatch(dump.path, whole.as_posix(), re.DOTALL)
    if in_path is None:
        return
    tensor, of_path = re.compile(dump.tensor, re.IGNORECASE | re.DOTALL), step_and_rank(path.relative_to(root))
    for info in part.tensors:
        in_name = tensor.fullmatch(info.name)
        if in_name is None or shape_fault(info):
            continue
        groups = in_path.groupdict() | {key: value for key, value in in_name.groupdict().items() if value is not None}
        layer = groups.get("layer") or (whole.stem if whole.stem != info.name else whole.parent.name)
        numbers = of_path | {key: int(groups[key]) for key in ("step", "rank") if groups.get(key)}
        yield DumpedTensor(info.name, layer, groups["word"], numbers.get("step"), numbers.get("rank"))


@dataclass(frozen=True, slots=True)
class Captures:
    """The files of a source with their tensors under unique names, and the record of each captured tensor; no records
    if the source is not a capture. `layers_of_model` has the linear layers of the model if its files list them; `notes`
    say how a dump was recognized."""

    contents: Mapping[Path, FileContents]
    records: Mapping[str, Capture]
    is_capture: bool
    layers_of_model: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def as_captures(root: Path, contents: Mapping[Path, FileContents], *, is_foreign: bool) -> Captures:
    """Return a source as captures if its files are: of the documented form, or else, with `is_foreign`, a dump of
    another program. A name in several files becomes `FILE/name`, FILE being the path below `root` without its suffix,
    or the folder if that is enough. Files are ordered by the numbers in their names, which supply steps and ranks
    missing in records. The model's layers are those of all files: each rank may hold a part.

    Raises InputError naming every invalid record, or if some files are captures and others are not.
    """
    problems: list[str] = []
    records: dict[Path, Mapping[str, Capture]] = {}
    model: dict[Path, Sequence[str]] = {}
    for path, part in contents.items():
        try:
            parsed = parse_captures(path, part.metadata, {info.name: info for info in part.tensors})
        except InputError as error:
            problems += error.reasons
            continue
        if parsed is not None:
            numbers = step_and_rank(path.relative_to(root))
            records[path] = {name: {**numbers, **record} for name, record in parsed.records.items()}
            model[path] = parsed.layers_of_model
    if problems:
        raise together(InputError, printable(root), problems)
    foreign = find_dump(root, contents) if is_foreign and not records else None
    notes: tuple[str, ...] = ()
    if foreign is not None:
        dump, named = foreign
        notes = (f"Read as captures, by names: {dump.name}.",)
        records = {path: {each.name: each.record for each in found if each.role} for path, found in named.items()}
        new = {path: {each.stored_name: each.name for each in found} for path, found in named.items()}
        contents = {path: _renamed(part, new.get(path, {})) for path, part in contents.items()}
    if not records:
        return Captures(contents, {}, is_capture=False)
    others = [path.name for path in contents if path not in records]
    if others:
        raise InputError(
            f"{printable(root)}: {counted([path.name for path in records])} captures and {counted(others)} not; keep "
            "them in separate directories, or give one file."
        )
    contents = {path: contents[path] for path in sorted(contents, key=by_numbers)}
    names = _unique(root, contents)
    return Captures(
        {path: _renamed(part, names[path]) for path, part in contents.items()},
        {names[path].get(name, name): record for path in contents for name, record in records[path].items()},
        is_capture=True,
        layers_of_model=tuple(dict.fromkeys(layer for path in contents for layer in model.get(path, ()))),
        notes=(*notes, *incomplete_notes(root)),
    )


def _unique(root: Path, contents: Mapping[Path, FileContents]) -> dict[Path, dict[str, str]]:
    """Return, by file, the new names of tensors whose names other files hold too."""
    count = Counter(info.name for part in contents.values() for info in part.tensors)
    names: dict[Path, dict[str, str]] = {}
    for prefix_of in _PREFIXES:
        prefixes = {path: prefix_of(path.relative_to(root)).as_posix() for path in contents}
        names = {
            path: {info.name: f"{prefixes[path]}/{info.name}" for info in part.tensors if count[info.name] > 1}
            for path, part in contents.items()
        }
        if len({name for renamed in names.values() for name in renamed.values()}) == sum(map(len, names.values())):
            break
    return names


_PREFIXES: tuple[Callable[[Path], Path], ...] = (lambda path: path.parent, lambda path: path.with_suffix(""))


def _renamed(contents: FileContents, names: Mapping[str, str]) -> FileContents:
    """Return the contents of a file with some of its tensors renamed; roles follow the new names."""
    if all(old == new for old, new in names.items()):
        return contents
    back = {new: old for old, new in names.items()}
    decode = contents.decode

    def decode_renamed(info: TensorInfo) -> Array:
        assert decode is not None
        return decode(replace(info, name=back.get(info.name, info.name)))

    return replace(
        contents,
        tensors=tuple(_with_name(info, names.get(info.name, info.name)) for info in contents.tensors),
        tied={names.get(alias, alias): names.get(stored, stored) for alias, stored in contents.tied.items()},
        decode=decode_renamed if decode else None,
    )


def _with_name(info: TensorInfo, name: str) -> TensorInfo:
    return info if name == info.name else replace(info, name=name, role=role_of(name, info.shape, info.dtype))
