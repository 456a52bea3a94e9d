"""A quantized checkpoint as its checks see it: what could be read of it, and what did not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mxcli.errors import InputError, RefusedError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.dialect import UNSCALED
from mxcli.files.layouts import Layout, OnDisk, Weight
from mxcli.files.layouts.layout import Misfits, module_of
from mxcli.files.layouts.loaders import Ignored, unread
from mxcli.files.model_files import RECORD
from mxcli.files.plain import read_json_object
from mxcli.flows.ignored import ignored_modules
from mxcli.flows.restoring import Restoring, StoredWeight, on_disk, reading_layout, restored_as

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
    """A checkpoint to be checked. Raises RefusedError for a plain source and one in no layout that is read back,
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
    """The module of a weight; of a stack of experts, the one that holds it."""
    return module_of(weight) if weight.name.endswith(".weight") else weight.name.rpartition(".")[0]
