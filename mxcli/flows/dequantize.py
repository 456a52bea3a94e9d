"""A quantized checkpoint back as plain floats, tensor by tensor, under the names it had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcli.backends import Backend
from mxcli.errors import UsageError, printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import Entry
from mxcli.files.model_files import CONFIG
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.doctor import own_version
from mxcli.flows.fingerprint import fingerprint
from mxcli.flows.memory import Need, need_of
from mxcli.flows.restoring import Restoring, restoring, restoring_notes
from mxcli.flows.sharding import shards_of
from mxcli.flows.writing import Job, Progress, write_checkpoint

DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was written where: the weights that were scaled back, with their dtype, and notes."""

    folder: Path
    layout: str
    dtypes: Mapping[str, str]
    notes: tuple[str, ...]


def memory_to_dequantize(checkpoint: Checkpoint, dtype: str | None = None) -> Need:
    """What `dequantize_checkpoint` needs: a weight as stored and as written, while the one before is being written."""
    plain = _restoring(checkpoint, dtype)
    pending = max(stored.plain.nbytes for stored in plain.weights.values())
    return need_of(((name, _working_bytes(plain, info)) for name, info in plain.tensors.items()), pending)


def dequantize_checkpoint(
    checkpoint: Checkpoint,
    output: str | Path,
    *,
    backend: Backend,
    dtype: str | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
    command: Sequence[str] = (),
) -> Restored:
    """Scale every quantized weight back as its layout says and write a plain checkpoint, all or nothing.

    `dtype` is one of DTYPES; None is the dtype that each weight had as far as it is recorded (else the model's,
    else BF16). Values are rounded to BF16 or F16 once, from binary32. Raises RefusedError for a source in no layout
    that is read back, and like quantize_checkpoint for the output; InputError where tensors do not fit their
    configuration.
    """
    seen = _restoring(checkpoint, dtype)
    plain = seen.checkpoint(backend)
    entries: dict[Path, list[Entry]] = {}
    for info in plain.tensors.values():
        entries.setdefault(info.file, []).append(Entry(info.name, info.dtype, info.shape))
    dtypes = {name: stored.weight.dtype for name, stored in seen.weights.items()}
    notes = tuple(restoring_notes(seen))
    record: dict[str, object] = {
        "schema": "mxcli.dequantized/1",
        "version": own_version(),
        "command": list(command),
        "input": fingerprint(checkpoint),
        "layout": seen.layout.name,
        "dtypes": dtypes,
        "notes": list(notes),
    }
    write_checkpoint(
        checkpoint,
        Path(output),
        shards_of(plain, entries),
        [_job(plain, info) for info in plain.tensors.values()],
        configs={CONFIG: plain.config} if plain.config else {},
        record=lambda: record,
        force=force,
        on_progress=on_progress,
    )
    return Restored(Path(output), seen.layout.name, dtypes, notes)


def _restoring(checkpoint: Checkpoint, dtype: str | None) -> Restoring:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype '{printable(dtype)}': {', '.join(DTYPES)} can be written")
    return restoring(checkpoint, dtype)


def _working_bytes(plain: Restoring, info: TensorInfo) -> int:
    stored = plain.weights.get(info.name)
    return info.nbytes if stored is None else stored.working_bytes


def _job(plain: Checkpoint, info: TensorInfo) -> Job:
    def make() -> Iterator[tuple[str, Array]]:
        yield info.name, read(plain, info)

    return Job(info.name, info.nbytes, (info.name,), make)
