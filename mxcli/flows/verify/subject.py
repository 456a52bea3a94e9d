"""A quantized checkpoint as its checks see it: what could be read of it, and what did not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from mxcli.errors import InputError, RefusedError, printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.dialect import UNSCALED
from mxcli.files.layouts import COLUMN, ROW, Layout, OnDisk, Weight
from mxcli.files.layouts.layout import Misfits, module_of
from mxcli.files.layouts.loaders import Ignored, unread
from mxcli.files.model_files import RECORD
from mxcli.files.plain import read_json_object
from mxcli.files.reading import release_pages
from mxcli.files.structure import LAST, reduction_axis
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.plan.plan import TensorPlan
from mxcli.flows.write.arrange import ignored_modules
from mxcli.flows.write.restore import Restoring, StoredWeight, on_disk, reading_layout, restored_as
from mxcli.flows.write.split import pieces_of, stack_module


@dataclass(frozen=True, slots=True)
class Original:
    """One plain tensor, or the part of one, as a weight of its own: its shape, and how to read it."""

    info: TensorInfo
    shape: tuple[int, ...]
    read: Callable[[], Array]


@dataclass(frozen=True, slots=True)
class Originals:
    """The originals by the name that the quantized checkpoint has for each; names that a tie leaves out are not
    `stored`."""

    checkpoint: Checkpoint
    by_name: Mapping[str, Original]
    tied: frozenset[str]


def originals_of(source: Checkpoint, seen: Restoring) -> Originals:
    """Return the tensors of a source by the names they have in a checkpoint made from it: stacks of experts are split
    where the checkpoint has each expert by itself."""
    found: dict[str, Original] = {}
    for name, info in source.tensors.items():
        pieces = {} if name in seen.tensors else _experts(source, info, seen)
        found |= pieces or {name: Original(info, info.shape, partial(read, source, info))}
    return Originals(source, found, frozenset(source.tied) | frozenset(seen.source.tied))


def _experts(source: Checkpoint, info: TensorInfo, seen: Restoring) -> dict[str, Original]:
    """Return the experts of a stack by their names in the checkpoint; none for another tensor, or in another order."""
    module = stack_module(info.name)
    some = next((s.weight for name, s in seen.weights.items() if module and name.startswith(f"{module}.")), None)
    if some is None or len(info.shape) != 3:
        return {}
    axis = ROW if reduction_axis(info, source.config) == LAST else COLUMN
    pieces = pieces_of(TensorPlan(info, some.scheme, "", axis), seen.layout, source.config)
    if isinstance(pieces, str):
        return {}

    def piece_of(at: int) -> Array:
        x = read(source, info)
        part = np.ascontiguousarray(pieces[at].of(x, axis))
        release_pages(x)
        return part

    return {
        piece.weight.name: Original(info, piece.weight.shape, partial(piece_of, at)) for at, piece in enumerate(pieces)
    }


LINEAR_ROLES = frozenset({"weight", "lm_head", "router", "mtp"})
"""Roles of what a loader holds in a linear layer."""


@dataclass(frozen=True)
class Subject:
    """A checkpoint, the layout it is in (None: FP8 without scales), its weights as far as they fit, and `misfits`: what
    does not, by the name it goes by. `tensor_parallel` is the number of devices asked about."""

    checkpoint: Checkpoint
    layout: Layout | None
    seen: Restoring | None
    misfits: Mapping[str, str]
    tensor_parallel: int | None = None

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """The weights that fit, by plain name."""
        return {} if self.seen is None else self.seen.weights

    @cached_property
    def disk(self) -> OnDisk:
        """What the layout was told."""
        return on_disk(self.checkpoint)

    @cached_property
    def quantized_modules(self) -> dict[str, str]:
        """The module of every quantized weight, misfits too, and the weight."""
        found = {_module(stored.weight): name for name, stored in self.weights.items()}
        return found | {name.removesuffix(".weight"): name for name in self.misfits if "." in name}

    @cached_property
    def plain_modules(self) -> tuple[str, ...]:
        """Modules of linear layers that are not quantized, tied ones too."""
        tensors = self.checkpoint.tensors if self.seen is None else self.seen.tensors
        kept = [info for name, info in tensors.items() if name not in self.weights and info.role in LINEAR_ROLES]
        found = ignored_modules(kept, self.checkpoint.tied, self.weights)
        return tuple(module for module in found if module not in self.quantized_modules)

    @cached_property
    def recorded_files(self) -> dict[str, str | None]:
        """The files that our record beside them names, and their SHA-256 where it has one."""
        named, hashed = self._record.get("files"), self._record.get("sha256")
        hashes = {str(name): str(told) for name, told in hashed.items()} if isinstance(hashed, Mapping) else {}
        names = dict.fromkeys((*map(str, named if isinstance(named, list) else ()), *hashes))
        # What lies elsewhere is nobody's business here.
        return {name: hashes.get(name) for name in names if Path(name).name == name}

    @cached_property
    def recorded_tensors(self) -> dict[str, Mapping[str, object]]:
        """What our record beside them says of each tensor that it calls quantized."""
        tensors = self._record.get("tensors")
        told = tensors if isinstance(tensors, Mapping) else {}
        return {
            str(name): each
            for name, each in told.items()
            if isinstance(each, Mapping) and each.get("decision") == "quantized"
        }

    @cached_property
    def _record(self) -> Mapping[str, object]:
        """Our record beside the checkpoint; empty where there is none that can be read."""
        path = self.checkpoint.root / RECORD
        try:
            return read_json_object(path) if path.is_file() else {}
        except InputError:
            return {}

    @cached_property
    def ignored(self) -> Ignored | None:
        """What loaders are told to leave alone, entries that are no pattern left out; None: they are told nothing."""
        if self.layout is None:
            return None
        told = self.layout.ignored(self.disk)
        if told is None:
            return None
        faulty = unread(told)
        entries = tuple(entry for entry in told.entries if entry not in faulty)
        return Ignored(told.key, entries, told.names, told.reading, told.targeted, told.strict)


def subject_of(checkpoint: Checkpoint, tensor_parallel: int | None = None) -> Subject:
    """Return a checkpoint to be checked. Raises RefusedError for a plain source and one in no layout that is read back,
    InputError where the configuration that must say what the codes mean is missing."""
    if checkpoint.dialect is None:
        raise RefusedError(
            f"{printable(checkpoint.root)}: not quantized; there is nothing to verify. Use `mxcli inspect`."
        )
    if checkpoint.dialect == UNSCALED:
        return Subject(checkpoint, None, None, {}, tensor_parallel)
    layout = reading_layout(checkpoint)
    misfits: dict[str, str] = {}
    found: list[Weight] = []
    try:
        found = layout.weights(on_disk(checkpoint))
    except Misfits as error:
        misfits |= error.faults
        found = list(error.sound)
    except InputError as error:
        for reason in error.reasons:
            where, _, fault = reason.partition(": ")
            misfits[where] = f"{misfits[where]} {fault}" if where in misfits else fault
    return Subject(checkpoint, layout, restored_as(checkpoint, layout, found), misfits, tensor_parallel)


def _module(weight: Weight) -> str:
    """Return the module of a weight; of a stack of experts, the one that holds it."""
    return module_of(weight) if weight.name.endswith(".weight") else weight.name.rpartition(".")[0]
