"""Dequantization of a checkpoint, tensor by tensor, under its plain names; stacks of experts are put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import UsageError, printable
from mxcli.files.accounting import ACCOUNTING, Accounting
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.directory import GGUF
from mxcli.files.layouts import Entry
from mxcli.files.model_files import CONFIG
from mxcli.files.reading import as_floats
from mxcli.files.record_schema import DEQUANTIZED
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.doctor import own_version
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.write.accounting import accounting_of, dequantized_tensors
from mxcli.flows.write.experts import split_stacks
from mxcli.flows.write.hugging_face import as_hugging_face, hugging_face_fault
from mxcli.flows.write.pipeline import Outcome, Work, WriteJob, WriteOptions, write_checkpoint
from mxcli.flows.write.records import fingerprint
from mxcli.flows.write.restack import stacks_of
from mxcli.flows.write.restore import PlainView, omission_notes, plain_view
from mxcli.flows.write.sharding import Unit, shards_of

DTYPES = ("BF16", "F16", "F32", "F64")
_WAY_OUT = (
    "`mxcli verify` of the source finds the cause, and --dtype F32 holds what F16 does not; --no-verify writes it as "
    "it is."
)
_PIECE = 1 << 20
"""Elements checked at a time."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a run: the dequantized weights with their dtypes, notes, the files of the source, and the
    progress."""

    folder: Path
    layout: str
    dtypes: Mapping[str, str]
    notes: tuple[str, ...]
    accounting: Accounting
    outcome: Outcome


def memory_to_dequantize(checkpoint: Checkpoint, dtype: str | None = None) -> Need:
    """Return the memory of `dequantize_checkpoint`: a weight as stored and as written, or a stack and an expert of it,
    while the previous one is being written."""
    stacks = stacks_of(_plain_view(checkpoint, dtype))
    tensors = stacks.tensors()
    pending = max(tensors[name].nbytes for name in stacks.dtypes)
    return need_of(((name, stacks.working_bytes(info)) for name, info in tensors.items()), pending)


def dequantize_checkpoint(
    checkpoint: Checkpoint,
    output: str | Path,
    *,
    backend: Backend,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    options: WriteOptions = WriteOptions(),
    command: Sequence[str] = (),
) -> Restored:
    """Dequantize every weight and write a plain checkpoint: complete under final names, or not at all.

    `dtype` is one of DTYPES; None: the recorded dtype of each weight, else the model's, else BF16. Values are rounded
    once, from binary32 to BF16 or F16. Raises RefusedError for a layout that cannot be read back, and like
    quantize_checkpoint for the output; InputError if tensors do not fit their configuration.
    """
    view = _plain_view(checkpoint, dtype)
    stacks = stacks_of(view)
    plain = stacks.checkpoint(view.checkpoint(backend))
    units: dict[Path, list[Unit]] = {}
    for info in plain.tensors.values():
        units.setdefault(info.file, []).append((Entry(info.name, info.dtype, info.shape),))
    dtypes = stacks.dtypes
    notes = (*omission_notes(view), *_names_notes(view), *stacks.notes)
    accounting = accounting_of(checkpoint, view)
    not_finite: dict[str, int] = {}
    record: dict[str, object] = {
        "schema": DEQUANTIZED,
        "version": own_version(),
        "command": list(command),
        "input": fingerprint(checkpoint),
        "layout": view.layout.name,
        "dtypes": dtypes,
        "notes": list(notes),
        ACCOUNTING: accounting.record(dequantized_tensors(view)),
    }
    work = Work(
        shards=shards_of(plain, units, max_shard_bytes),
        jobs=tuple(_job(plain, info, not_finite if info.name in dtypes else None) for info in plain.tensors.values()),
        configs={CONFIG: plain.config} if plain.config else {},
        record=record,
        way_out=_WAY_OUT,
        finish=lambda record: {**record, "notes": [*notes, *_not_finite_notes(plain, not_finite)]},
    )
    outcome = write_checkpoint(checkpoint, Path(output), work, options)
    all_notes = (*notes, *_not_finite_notes(plain, not_finite))
    return Restored(Path(output), view.layout.name, dtypes, all_notes, accounting, outcome)


def plain_checkpoint(checkpoint: Checkpoint, backend: Backend, dtype: str | None = None) -> Checkpoint:
    """Return what `dequantize_checkpoint` would write, as a checkpoint whose weights are decoded when they are read."""
    view = _plain_view(checkpoint, dtype)
    return stacks_of(view).checkpoint(view.checkpoint(backend))


def _plain_view(checkpoint: Checkpoint, dtype: str | None) -> PlainView:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype '{printable(dtype)}': {', '.join(DTYPES)} can be written")
    view = plain_view(checkpoint, dtype)
    return split_stacks(view if hugging_face_fault(view) else as_hugging_face(view, dtype))


def _names_notes(view: PlainView) -> list[str]:
    """Return a note on names that could not be replaced by those of Hugging Face."""
    fault = None if view.renamed else hugging_face_fault(view)
    if fault is None:
        return []
    owner = "llama.cpp" if view.source.kind == GGUF else "Mistral"
    return [f"Names and order of rows stay those of {owner}, which transformers does not load: {fault}."]


def _job(plain: Checkpoint, info: TensorInfo, not_finite: dict[str, int] | None) -> WriteJob:
    """Return the job of a tensor; `not_finite` (None: not a dequantized weight) gets the number of its values that are
    not finite."""

    def make() -> Iterator[tuple[str, Array]]:
        x = read(plain, info)
        if not_finite is not None:
            not_finite[info.name] = _not_finite(x, info.dtype)
        yield info.name, x

    def recall(count: object) -> None:
        if not_finite is not None and isinstance(count, int):
            not_finite[info.name] = count

    remember = (lambda: None) if not_finite is None else (lambda: not_finite.get(info.name, 0))
    return WriteJob(info.name, info.nbytes, (info.name,), make, (info,), remember, recall)


def _not_finite(x: Array, dtype: str) -> int:
    flat = x.reshape(-1)
    pieces = (as_floats(flat[begin : begin + _PIECE], dtype) for begin in range(0, flat.size, _PIECE))
    return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in pieces)


def _not_finite_notes(plain: Checkpoint, not_finite: Mapping[str, int]) -> list[str]:
    """Return a note on weights with values that are not finite."""
    names = [name for name in plain.tensors if not_finite.get(name)]
    if not names:
        return []
    more = ", …" if len(names) > 1 else ""
    holds = "holds" if len(names) == 1 else "hold"
    values = sum(not_finite.values())
    return [
        f"{len(names):,} of {len(not_finite):,} weights {holds} NaN or infinities, {values:,} values in all "
        f"('{printable(names[0])}'{more}): `mxcli verify` finds the scales or codes responsible."
    ]
