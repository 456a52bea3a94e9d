"""A quantized checkpoint back as plain floats, tensor by tensor, under the names it had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import UsageError, printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import Entry
from mxcli.files.model_files import CONFIG
from mxcli.files.reading import as_floats
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.doctor import own_version
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.write.pipeline import Outcome, Work, WriteJob, WriteOptions, write_checkpoint
from mxcli.flows.write.records import fingerprint
from mxcli.flows.write.restore import Restoring, restoring, restoring_notes
from mxcli.flows.write.sharding import Unit, shards_of

DTYPES = ("BF16", "F16", "F32", "F64")
_PIECE = 1 << 20
"""Elements looked at together."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was written where and how far it came: the weights that were scaled back, with their dtype, and notes."""

    folder: Path
    layout: str
    dtypes: Mapping[str, str]
    notes: tuple[str, ...]
    outcome: Outcome


def memory_to_dequantize(checkpoint: Checkpoint, dtype: str | None = None) -> Need:
    """Return what `dequantize_checkpoint` needs: a weight as stored and as written, while the one before is being
    written."""
    plain = _restoring(checkpoint, dtype)
    pending = max(plain.tensors[name].nbytes for name in plain.dtypes)
    return need_of(((name, plain.working_bytes(info)) for name, info in plain.tensors.items()), pending)


def dequantize_checkpoint(
    checkpoint: Checkpoint,
    output: str | Path,
    *,
    backend: Backend,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    manner: WriteOptions = WriteOptions(),
    command: Sequence[str] = (),
) -> Restored:
    """Scale every quantized weight back as its layout says and write a plain checkpoint: under final names all or
    nothing.

    `dtype` is one of DTYPES; None is the dtype that each weight had as far as it is recorded (else the model's,
    else BF16). Values are rounded to BF16 or F16 once, from binary32. Raises RefusedError for a source in no layout
    that is read back, and like quantize_checkpoint for the output; InputError where tensors do not fit their
    configuration.
    """
    seen = _restoring(checkpoint, dtype)
    plain = seen.checkpoint(backend)
    units: dict[Path, list[Unit]] = {}
    for info in plain.tensors.values():
        units.setdefault(info.file, []).append((Entry(info.name, info.dtype, info.shape),))
    dtypes = seen.dtypes
    notes = tuple(restoring_notes(seen))
    broken: dict[str, int] = {}
    record: dict[str, object] = {
        "schema": "mxcli.dequantized/1",
        "version": own_version(),
        "command": list(command),
        "input": fingerprint(checkpoint),
        "layout": seen.layout.name,
        "dtypes": dtypes,
        "notes": list(notes),
    }
    work = Work(
        shards=shards_of(plain, units, max_shard_bytes),
        jobs=tuple(_job(plain, info, broken if info.name in dtypes else None) for info in plain.tensors.values()),
        configs={CONFIG: plain.config} if plain.config else {},
        record=record,
        finish=lambda record: {**record, "notes": [*notes, *_not_finite_notes(plain, broken)]},
    )
    outcome = write_checkpoint(checkpoint, Path(output), work, manner)
    told = (*notes, *_not_finite_notes(plain, broken))
    return Restored(Path(output), seen.layout.name, dtypes, told, outcome)


def _restoring(checkpoint: Checkpoint, dtype: str | None) -> Restoring:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype '{printable(dtype)}': {', '.join(DTYPES)} can be written")
    return restoring(checkpoint, dtype)


def _job(plain: Checkpoint, info: TensorInfo, broken: dict[str, int] | None) -> WriteJob:
    """Yield the job for a tensor; of a weight that is scaled back `broken` is told how many values are not finite."""

    def make() -> Iterator[tuple[str, Array]]:
        x = read(plain, info)
        if broken is not None:
            broken[info.name] = _not_finite(x, info.dtype)
        yield info.name, x

    def recall(count: object) -> None:
        if broken is not None and isinstance(count, int):
            broken[info.name] = count

    remember = (lambda: None) if broken is None else (lambda: broken.get(info.name, 0))
    return WriteJob(info.name, info.nbytes, (info.name,), make, (info,), remember, recall)


def _not_finite(x: Array, dtype: str) -> int:
    flat = x.reshape(-1)
    pieces = (as_floats(flat[begin : begin + _PIECE], dtype) for begin in range(0, flat.size, _PIECE))
    return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in pieces)


def _not_finite_notes(plain: Checkpoint, broken: Mapping[str, int]) -> list[str]:
    """Return what is said of weights with values that no model computes with."""
    names = [name for name in plain.tensors if broken.get(name)]
    if not names:
        return []
    more = ", …" if len(names) > 1 else ""
    holds = "holds" if len(names) == 1 else "hold"
    return [
        f"{len(names):,} of {len(broken):,} weights {holds} NaN or infinities, {sum(broken.values()):,} values in all "
        f"('{printable(names[0])}'{more}): `mxcli verify` tells which scales or codes are to blame."
    ]
