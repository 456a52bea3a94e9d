"""A quantized checkpoint to verify: the weights that fit its configuration, and the misfits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mxcli.errors import InputError, RefusedError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.dialect import UNSCALED
from mxcli.files.directory import KINDS
from mxcli.files.layouts import Layout, OnDisk, Weight
from mxcli.files.layouts.layout import Misfits, Transforms, Unread, module_of
from mxcli.files.layouts.loaders import Ignored
from mxcli.files.layouts.loaders import unread as unread_entries
from mxcli.files.model_files import RECORD
from mxcli.files.tensors import DTYPES
from mxcli.flows.verify.record import Record, read_record
from mxcli.flows.write.ignored import ignored_modules
from mxcli.flows.write.restore import PlainView, StoredWeight, on_disk, reading_layout, view_of_weights

LINEAR_ROLES = frozenset({"weight", "lm_head", "router", "mtp"})
"""Roles of weights of linear layers."""


@dataclass(frozen=True)
class Subject:
    """A checkpoint, its layout (None: FP8 without scales), the plain view of the weights that fit, and the faults of
    `misfits` by name. `tensor_parallel` is the number of devices to divide it over (None: not checked). `unread` says
    why the codes cannot be read though nothing may be wrong with them (None: they can), and `unread_weights` is their
    number as far as the layout names them. `engines` are those that must load it."""

    checkpoint: Checkpoint
    layout: Layout | None
    view: PlainView | None
    misfits: Mapping[str, str]
    tensor_parallel: int | None = None
    unread: str | None = None
    engines: tuple[str, ...] = ()
    unread_weights: int = 0

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """The weights that fit, by plain name."""
        return {} if self.view is None else self.view.weights

    @cached_property
    def disk(self) -> OnDisk:
        """The tensors and configurations that layouts read."""
        return on_disk(self.checkpoint)

    @cached_property
    def transforms(self) -> Transforms:
        """The transforms that the configuration states."""
        return Transforms() if self.layout is None else self.layout.transforms(self.disk)

    @cached_property
    def quantized_modules(self) -> dict[str, str]:
        """Names of quantized weights by module, misfits included."""
        found = {_module(stored.weight): name for name, stored in self.weights.items()}
        return found | {name.removesuffix(".weight"): name for name in self.misfits if "." in name}

    @cached_property
    def plain_modules(self) -> tuple[str, ...]:
        """Modules of linear layers that are not quantized, tied ones included."""
        tensors = self.checkpoint.tensors if self.view is None else self.view.tensors
        others = self.weights.keys() | self.transforms.tensors
        kept = [info for name, info in tensors.items() if name not in others and info.role in LINEAR_ROLES]
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


def check_whole(source: Path) -> None:
    """Raise RefusedError for one shard of a recorded output: the record, the model and its layers are of all."""
    shards = [name for name in read_record(source.parent).files if Path(name).suffix in KINDS]
    if len(shards) > 1 and source.name in shards and source.is_file():
        raise RefusedError(
            f"{printable(source)}: is one of the {len(shards):,} shards that {RECORD} records; an output is verified "
            f"as a whole: give {printable(source.parent)}."
        )


def subject_of(checkpoint: Checkpoint, tensor_parallel: int | None = None, engines: tuple[str, ...] = ()) -> Subject:
    """Return a checkpoint to verify, divided over devices and loaded by `engines`.

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
    unread, unread_weights = None, 0
    try:
        found = layout.weights(on_disk(checkpoint))
    except Unread as error:
        unread, unread_weights = error.reasons[0], error.count
        found = list(error.sound)
    except Misfits as error:
        misfits |= error.faults
        found = list(error.sound)
    except InputError as error:
        for reason in error.reasons:
            where, _, fault = reason.partition(": ")
            misfits[where] = f"{misfits[where]} {fault}" if where in misfits else fault
    try:
        view = view_of_weights(checkpoint, layout, found, recorded=_recorded_dtypes(read_record(checkpoint.root)))
    except Unread as error:
        return Subject(checkpoint, layout, None, {}, tensor_parallel, error.reasons[0])
    return Subject(checkpoint, layout, view, misfits, tensor_parallel, unread, engines, unread_weights)


def _recorded_dtypes(record: Record) -> dict[str, str]:
    """Return the dtypes that a record states; what is wrong with others is for the check of the record."""
    stated = {name: each.get("dtype") for name, each in record.tensors.items()}
    return {name: dtype for name, dtype in stated.items() if isinstance(dtype, str) and dtype in DTYPES}


def _module(weight: Weight) -> str:
    """Return the module of a weight; for a stack of experts, the module that holds it."""
    return module_of(weight) if weight.name.endswith(".weight") else weight.name.rpartition(".")[0]
