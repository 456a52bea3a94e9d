"""Several capture files as one source: whose records are whose, and one name for each tensor."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.captures import Capture, captured, shape_fault
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
"""What the word for a tensor says it is; other words say that it is none of the three."""


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor that a dump's names describe: its name in the file, and what they say of it."""

    held: str
    layer: str
    word: str
    step: int | None
    rank: int | None

    @property
    def name(self) -> str:
        """What it is called here: as in its file, where that has a layer in it."""
        return self.held if self.held.startswith(f"{self.layer}.") else f"{self.layer}.{self.word}"

    @property
    def role(self) -> str | None:
        """Its role if it is an input, a gradient or a weight."""
        return ROLE_OF_WORD.get(self.word.lower())

    @property
    def record(self) -> Capture:
        """As the record of a capture has it."""
        said = {"role": self.role, "layer": self.layer, "step": self.step, "rank": self.rank}
        return {key: value for key, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Dump:
    """A way to dump, named as in a note, and the source that it is known from.

    `path` is matched with a file's absolute path, since one file of a dump may be all that is given, and `tensor` with
    the names in it, both whole, for their groups `layer`, `word`, `step` and `rank`. `keeps` tells which of the tensors
    found in a source are the dump's (none: it is no such dump).
    """

    name: str
    path: str
    tensor: str
    keeps: Callable[[Sequence[Found]], list[Found]]
    source: str


def _with_inputs(found: Sequence[Found]) -> list[Found]:
    """The tensors of layers that an input or a gradient was dumped of, and not its weight alone, as any model has.

    A name that is a word and nothing more (`x`) means something only beside another one.
    """
    layers = {each.layer for each in found if each.role != WEIGHT}
    kept = [each for each in found if each.layer in layers]
    certain = len({each.role for each in kept}) > 1 or any(each.held.startswith(f"{each.layer}.") for each in kept)
    return kept if certain else []


# The first row that fits a source decides.
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
    ),
)
STEP = re.compile(r"(?<![a-z])(?:step|iter|iteration)[-_]?(\d{1,18})(?!\d)", re.IGNORECASE)
RANK = re.compile(r"(?<![a-z])rank[-_]?(\d{1,18})(?!\d)", re.IGNORECASE)


def dumped(root: Path, contents: Mapping[Path, FileContents]) -> tuple[Dump, dict[Path, list[Found]]] | None:
    """The first of DUMPS that fits the files of a source below `root`, and what it tells of tensors by file, in their
    order, of files that are the dump's; None if none fits.

    Tensors that hold no floats or no rows are none.
    """
    for dump in DUMPS:
        found = {path: list(_found(dump, root, path, part)) for path, part in contents.items()}
        kept = set(dump.keeps([each for listed in found.values() for each in listed]))
        if kept:
            own = {path: [each for each in listed if each in kept] for path, listed in found.items()}
            return dump, {path: listed for path, listed in own.items() if listed}
    return None


def told_by(path: Path) -> dict[str, int]:
    """The step and rank that names such as `step-000100.safetensors` or `rank_1/iter_5/x.pt` tell. The path is one
    below the source: folders above it, which a `step_3` may happen to be among, say nothing of what is in it."""
    text = path.as_posix()
    found = {"step": STEP.findall(text), "rank": RANK.findall(text)}
    return {key: int(numbers[-1]) for key, numbers in found.items() if numbers}


def _found(dump: Dump, root: Path, path: Path, part: FileContents) -> Iterator[Found]:
    """What the names of a file and of tensors in it say together, of those that the dump describes."""
    whole = Path(os.path.abspath(path))  # whatever folder the source was named from
    in_path = re.fullmatch(dump.path, whole.as_posix(), re.DOTALL)
    if in_path is None:
        return
    tensor, told = re.compile(dump.tensor, re.IGNORECASE | re.DOTALL), told_by(path.relative_to(root))
    for info in part.tensors:
        in_name = tensor.fullmatch(info.name)
        if in_name is None or shape_fault(info):
            continue
        said = in_path.groupdict() | {key: value for key, value in in_name.groupdict().items() if value is not None}
        layer = said.get("layer") or (whole.stem if whole.stem != info.name else whole.parent.name)
        steps = told | {key: int(said[key]) for key in ("step", "rank") if said.get(key)}
        yield Found(info.name, layer, said["word"], steps.get("step"), steps.get("rank"))


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
