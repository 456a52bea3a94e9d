"""The part of a training checkpoint that is its model, by the names of its parts: tables, and a refusal where nothing
says which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, printable
from mxcli.files.nested import flatten
from mxcli.files.tensors import LeftOut, sized

MOST_DEEP = 4


@dataclass(frozen=True, slots=True)
class StateRow:
    """Names of parts (a regex, matched in full, without case) that are not the model, and what they are. A `certain`
    one says that a file is a training checkpoint."""

    names: str
    what: str
    certain: bool = False


# The first matching row decides; parts with dots in their names are tensors of a state dict.
STATE = (
    StateRow(r"(.*_)?(optim[a-z]*|opt)(_.*)?|param_groups", "optimizer state", certain=True),
    StateRow(
        r"(.*_)?(lr_?)?sched[a-z]*(_.*)?|(.*_)?(lrs?|learning_rates?|warmup)(_.*)?", "learning rates", certain=True
    ),
    StateRow(r"(.*_)?scal(er|ers|ing)(_.*)?|amp(_.*)?|mixedprecision[a-z]*", "loss scaling", certain=True),
    StateRow(r"(.*_)?(rng|random|seeds?)(_.*)?", "random states", certain=True),
    StateRow(r"(.*_)?(loss|losses|criterions?)(_.*)?", "loss of training"),
    StateRow(r"(.*_)?(discriminators?|disc|net_?d)(_.*)?", "discriminator, which only training uses"),
    StateRow(
        r"(.*_)?(callbacks?|loops?|epochs?|iter[a-z]*|steps?|best|metrics?|meters?|history|stats|progress|timestamp"
        r"|config|cfg|args|options|hparams|hyper_?parameters|dims|data_?loaders?|dl|samplers?|datamodule|datasets?"
        r"|trainer|task|extra|early_stopping|version)(_.*)?",
        "progress and options of training",
    ),
)
_MODEL = r"(model|module|net|network|generator|(net|model)_?g)(_(state|params|parameters|weights))?(_?dict)?"
MODEL = re.compile(rf"{_MODEL}|state_?dict|weights|params|parameters", re.IGNORECASE)
"""Names of the part that is the model."""
OUTER = re.compile(r"state|app|checkpoint|ckpt", re.IGNORECASE)
"""Names of a part that may hold the model and other parts in turn."""
AVERAGED = re.compile(r"(.*_)?(ema|swa|averaged?|polyak|shadow)(_.*)?", re.IGNORECASE)
"""Names of averaged copies of the model."""
COPY = "averaged copy of the model"
COUNTERS = "counters and other integers"
SAME = "the tensors of the model again"


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a loaded object: the part that is it, the names that lead there (none: the object itself), and the
    parts that are left out."""

    value: Any
    names: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """An entry of a dictionary with the tensors in it."""

    name: str
    value: Any
    tensors: tuple[Any, ...]
    row: StateRow | None

    @property
    def is_certain(self) -> bool:
        """Return whether its name is one that only state of training has."""
        return self.row is not None and self.row.certain

    @property
    def holds_weights(self) -> bool:
        """Return whether a tensor in it has floats and a dimension."""
        return any(tensor.is_floating_point() and tensor.dim() for tensor in self.tensors)

    @property
    def is_state_dict(self) -> bool:
        """Return whether it may be a model: a dictionary with weights."""
        return isinstance(self.value, dict) and self.holds_weights

    @property
    def views(self) -> set[tuple[object, ...]]:
        """Return what its tensors view."""
        return {
            (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) if is_dense(tensor) else (id(tensor),)
            for tensor in self.tensors
        }

    def described(self) -> str:
        """Return its name with the number and bytes of its tensors."""
        return f"'{printable(self.name)}' ({sized(len(self.tensors), sum(map(bytes_of, self.tensors)))})"

    def left_out(self, what: str) -> LeftOut:
        """Return it as left out."""
        return LeftOut(self.name, what, len(self.tensors), sum(map(bytes_of, self.tensors)))


@dataclass(frozen=True, slots=True)
class _Parts:
    """The entries of a dictionary that may be a training checkpoint, by what their names say."""

    all: Sequence[_Part]
    models: Sequence[_Part]
    copies: Sequence[_Part]
    unknown: Sequence[_Part]

    @property
    def is_trained(self) -> bool:
        """Return whether a part is certainly the state of training."""
        return any(part.is_certain and part.tensors for part in self.all)


def is_tensor(leaf: object) -> bool:
    """Return whether a leaf is a tensor of PyTorch."""
    return hasattr(leaf, "untyped_storage")


def is_dense(tensor: Any) -> bool:
    """Return whether a tensor has its elements in a storage."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_meta and not tensor.is_nested


def bytes_of(tensor: Any) -> int:
    """Return the bytes of the elements of a tensor, 0 for one that is not dense."""
    return int(tensor.numel()) * int(tensor.element_size()) if is_dense(tensor) else 0


def find_model(loaded: Any, path: Path) -> Model:
    """Return the model of an object loaded from a file: a part of it if it is a training checkpoint, else all of it.

    Raises InputError if nothing says which part is the model, or if there is only state of training.
    """
    model = Model(loaded)
    while isinstance(model.value, dict) and len(model.names) < MOST_DEEP:
        parts = _parts(model.value, path)
        chosen = _chosen(parts, path)
        if chosen is None:
            break
        left = [part.left_out(_what(part, chosen)) for part in parts.all if part.tensors and not _is_in(part, chosen)]
        names = (*model.names, chosen.name) if chosen.name else model.names
        model = Model(chosen.value, names, (*model.left_out, *left))
        if not OUTER.fullmatch(chosen.name):
            break
    return model


def notes_of(model: Model, path: Path) -> Iterator[str]:
    """Yield which part of a file is read as the model, what is left out, and how a copy is read instead."""
    shown = printable(path)
    if model.names:
        yield f"{shown}: its part '{printable('.'.join(model.names))}' is read as the model."
    if model.left_out:
        yield f"{shown}: left out: {'; '.join(map(str, model.left_out))}."
    outer = model.names[:-1]
    for part in model.left_out:
        if part.what == COPY:
            saved = _saved_alone(path, (*outer, part.name))
            yield f"{shown}: to read '{printable(part.name)}' instead of the model, save it alone: {saved}."


def _saved_alone(path: Path, names: Sequence[str]) -> str:
    """Return the Python that saves a part of a file alone."""
    keys = "".join(f"[{printable(name)!r}]" for name in names)
    return f"torch.save(torch.load({printable(path.name)!r}){keys}, {printable(names[-1] + '.pt')!r})"


def _parts(level: Mapping[object, Any], path: Path) -> _Parts:
    parts, models, copies, unknown = list[_Part](), list[_Part](), list[_Part](), list[_Part]()
    for key, value in level.items():
        name = str(key)
        tensors = tuple(leaf for _, leaf in flatten(value, path) if is_tensor(leaf))
        is_copy, is_model = (row.fullmatch(name) for row in (AVERAGED, MODEL))
        in_table = (row for row in STATE if re.fullmatch(row.names, name, re.IGNORECASE))
        row = None if is_copy or is_model or "." in name else next(in_table, None)
        part = _Part(name, value, tensors, row)
        parts.append(part)
        if row is not None or not part.holds_weights:
            continue
        may_hold_model = is_model or (OUTER.fullmatch(name) and _holds_model(value, path))
        kind = copies if is_copy else models if may_hold_model else unknown
        (kind if part.is_state_dict else unknown).append(part)
    return _Parts(parts, models, copies, unknown)


def _holds_model(value: object, path: Path) -> bool:
    return isinstance(value, dict) and bool(_parts(value, path).models)


def _chosen(parts: _Parts, path: Path) -> _Part | None:
    """Return the part that is the model, None if the whole dictionary may be one."""
    names = {part.name for part in parts.all}
    if {"state", "param_groups"} <= names:
        raise InputError(f"{printable(path)}: the state of an optimizer, without a model; give the file of the model.")
    models = [part for at, part in enumerate(parts.models) if not at or not part.views <= parts.models[0].views]
    known = models[0].views if models else set[tuple[object, ...]]()
    unknown = [part for part in parts.unknown if not part.views <= known]
    if len(models) == 1 and not unknown:
        return models[0]
    if not models and not unknown and len(parts.copies) == 1:
        return parts.copies[0]
    if not parts.is_trained and not (models and parts.copies):
        return None
    if not models and unknown and all(is_tensor(part.value) for part in unknown):
        direct = {part.name: part.value for part in parts.all if is_tensor(part.value) and not part.is_certain}
        return _Part("", direct, tuple(direct.values()), None)
    if not models and not parts.copies and len(unknown) == 1 and unknown[0].is_state_dict:
        return unknown[0]
    candidates = [*models, *parts.copies, *unknown]
    if not candidates:
        state = ", ".join(part.described() for part in parts.all if part.tensors)
        raise InputError(f"{printable(path)}: holds no model, only state of training: {state}.")
    listed = ", ".join(part.described() for part in candidates[:10])
    more = f" and {len(candidates) - 10:,} more" if len(candidates) > 10 else ""
    raise InputError(
        f"{printable(path)}: a training checkpoint, and nothing says which of its parts is the model: {listed}{more}; "
        f"save one alone: {_saved_alone(path, [candidates[0].name])}."
    )


def _is_in(part: _Part, chosen: _Part) -> bool:
    return part is chosen or (not chosen.name and part.name in chosen.value)


def _what(part: _Part, chosen: _Part) -> str:
    """Return what a part is that is left out next to the chosen one."""
    if part.row is not None:
        return part.row.what
    if part.views <= chosen.views:
        return SAME
    return COPY if part.holds_weights else COUNTERS
