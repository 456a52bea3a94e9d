"""A quantized checkpoint to verify: the weights that fit its configuration, and the misfits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from mxcli.errors import InputError, RefusedError, printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.dialect import UNSCALED
from mxcli.files.layouts import COLUMN, ROW, Layout, OnDisk, Weight
from mxcli.files.layouts.layout import Misfits, Unread, module_of
from mxcli.files.layouts.loaders import Ignored
from mxcli.files.layouts.loaders import unread as unread_entries
from mxcli.files.structure import LAST, reduction_axis
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.plan.plan import TensorPlan
from mxcli.flows.verify.record import Record, read_record
from mxcli.flows.write.arrange import ignored_modules
from mxcli.flows.write.restore import PlainView, StoredWeight, on_disk, reading_layout, view_of_weights
from mxcli.flows.write.split import pieces_of, read_piece, stack_module


@dataclass(frozen=True, slots=True)
class Original:
    """A plain tensor, or a part of one: its header, its shape, and a function that reads it."""

    info: TensorInfo
    shape: tuple[int, ...]
    read: Callable[[], Array]


@dataclass(frozen=True, slots=True)
class Originals:
    """The originals by their names in the quantized checkpoint; `tied` names may be missing in it."""

    checkpoint: Checkpoint
    by_name: Mapping[str, Original]
    tied: frozenset[str]


def originals_of(source: Checkpoint, view: PlainView) -> Originals:
    """Return the tensors of a source by their names in a checkpoint made from it: stacked experts are split if the
    checkpoint stores them one by one."""
    found: dict[str, Original] = {}
    for name, info in source.tensors.items():
        pieces = {} if name in view.tensors else _experts(source, info, view)
        found |= pieces or {_known_as(name, view): Original(info, info.shape, partial(read, source, info))}
    return Originals(source, found, frozenset(source.tied) | frozenset(view.source.tied))


_RENAMED = ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))
_MIXTURE, _MLP = ".block_sparse_moe.", ".mlp."
"""Names of experts in checkpoints of Mixtral, and those that transformers 5 gives them when it writes one."""


def _known_as(name: str, view: PlainView) -> str:
    """Return the name of a tensor of the source in a checkpoint made from it."""
    renamed = name
    for old, new in _RENAMED if _MIXTURE in name else ():
        renamed = renamed.replace(old, new)
    candidates = (name, renamed, renamed.replace(_MIXTURE, _MLP), name.replace(_MIXTURE, _MLP))
    return next((each for each in candidates if each in view.tensors), name)


def _experts(source: Checkpoint, info: TensorInfo, view: PlainView) -> dict[str, Original]:
    """Return the experts of a stack by their names in the checkpoint; empty for other tensors, or in another order."""
    module = stack_module(info.name)
    first = next((s.weight for name, s in view.weights.items() if module and name.startswith(f"{module}.")), None)
    if first is None or len(info.shape) != 3:
        return {}
    axis = ROW if reduction_axis(info, source.config) == LAST else COLUMN
    pieces = pieces_of(TensorPlan(info, first.scheme, "", axis), view.layout, source.config)
    if isinstance(pieces, str):
        return {}

    def piece_of(at: int) -> Array:
        return np.ascontiguousarray(read_piece(source, info, pieces[at], axis))

    return {
        piece.weight.name: Original(info, piece.weight.shape, partial(piece_of, at)) for at, piece in enumerate(pieces)
    }


LINEAR_ROLES = frozenset({"weight", "lm_head", "router", "mtp"})
"""Roles of weights of linear layers."""


@dataclass(frozen=True)
class Subject:
    """A checkpoint, its layout (None: FP8 without scales), the plain view of the weights that fit, and the faults of
    `misfits` by name. `tensor_parallel` is the number of devices to divide it over (None: not checked). `unread` says
    why the codes cannot be read though nothing may be wrong with them (None: they can)."""

    checkpoint: Checkpoint
    layout: Layout | None
    view: PlainView | None
    misfits: Mapping[str, str]
    tensor_parallel: int | None = None
    unread: str | None = None

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """The weights that fit, by plain name."""
        return {} if self.view is None else self.view.weights

    @cached_property
    def disk(self) -> OnDisk:
        """The tensors and configurations that layouts read."""
        return on_disk(self.checkpoint)

    @cached_property
    def quantized_modules(self) -> dict[str, str]:
        """Names of quantized weights by module, misfits included."""
        found = {_module(stored.weight): name for name, stored in self.weights.items()}
        return found | {name.removesuffix(".weight"): name for name in self.misfits if "." in name}

    @cached_property
    def plain_modules(self) -> tuple[str, ...]:
        """Modules of linear layers that are not quantized, tied ones included."""
        tensors = self.checkpoint.tensors if self.view is None else self.view.tensors
        kept = [info for name, info in tensors.items() if name not in self.weights and info.role in LINEAR_ROLES]
        found = ignored_modules(kept, self.checkpoint.tied, self.weights)
        return tuple(module for module in found if module not in self.quantized_modules)

    @cached_property
    def record(self) -> Record:
        """The record next to the checkpoint."""
        return read_record(self.checkpoint.root)

    @cached_property
    def recorded_tensors(self) -> dict[str, Mapping[str, object]]:
        """The records of tensors recorded as quantized."""
        return {name: each for name, each in self.record.tensors.items() if each.get("decision") == "quantized"}

    @cached_property
    def ignored(self) -> Ignored | None:
        """The ignore list without entries that are not valid patterns; None: the layout has no list."""
        if self.layout is None:
            return None
        ignored = self.layout.ignored(self.disk)
        if ignored is None:
            return None
        faulty = unread_entries(ignored)
        return replace(ignored, entries=tuple(entry for entry in ignored.entries if entry not in faulty))


def subject_of(checkpoint: Checkpoint, tensor_parallel: int | None = None) -> Subject:
    """Return a checkpoint to verify.

    Raises RefusedError for a plain source and for a layout that cannot be read back, InputError if the configuration
    that describes the codes is missing.
    """
    if checkpoint.dialect is None:
        raise RefusedError(
            f"{printable(checkpoint.root)}: not quantized; there is nothing to verify. Use `mxcli inspect`."
        )
    if checkpoint.dialect == UNSCALED:
        return Subject(checkpoint, None, None, {}, tensor_parallel)
    try:
        layout = reading_layout(checkpoint)
    except RefusedError as error:
        # The record of mxcli proves what can be proven; a file without one is refused.
        if not read_record(checkpoint.root).is_there:
            raise
        return Subject(checkpoint, None, None, {}, tensor_parallel, error.reasons[0])
    misfits: dict[str, str] = {}
    found: list[Weight] = []
    unread = None
    try:
        found = layout.weights(on_disk(checkpoint))
    except Unread as error:
        unread = error.reasons[0]
    except Misfits as error:
        misfits |= error.faults
        found = list(error.sound)
    except InputError as error:
        for reason in error.reasons:
            where, _, fault = reason.partition(": ")
            misfits[where] = f"{misfits[where]} {fault}" if where in misfits else fault
    try:
        view = view_of_weights(checkpoint, layout, found)
    except Unread as error:
        return Subject(checkpoint, layout, None, {}, tensor_parallel, error.reasons[0])
    return Subject(checkpoint, layout, view, misfits, tensor_parallel, unread)


def _module(weight: Weight) -> str:
    """Return the module of a weight; for a stack of experts, the module that holds it."""
    return module_of(weight) if weight.name.endswith(".weight") else weight.name.rpartition(".")[0]
