"""A quantized checkpoint back as plain floats, tensor by tensor, under the names it had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mxcli.backends import Backend
from mxcli.errors import InputError, RefusedError, UsageError, printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import (
    COLUMN,
    LAYOUTS,
    QUANTIZATION_CONFIG,
    Content,
    Entry,
    Layout,
    Weight,
    quantized_from,
)
from mxcli.files.model_files import RECORD
from mxcli.files.plain import read_json_object
from mxcli.files.tensors import Array
from mxcli.flows.doctor import own_version
from mxcli.flows.fingerprint import fingerprint
from mxcli.flows.memory import Need, need_of
from mxcli.flows.sharding import shards_of
from mxcli.flows.writing import Job, Progress, write_checkpoint

DTYPES = ("BF16", "F16", "F32", "F64")
ACTIVATION_SCALES = (".input_scale", ".input_global_scale")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was written where: the weights that were scaled back, with their dtype, and notes."""

    folder: Path
    layout: str
    dtypes: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    """A plain tensor to write: scaled back from the contents of a weight, or (`weight` None) copied."""

    entry: Entry
    weight: Weight | None
    contents: tuple[Content, ...]
    nbytes: int


def memory_to_dequantize(checkpoint: Checkpoint, dtype: str | None = None) -> Need:
    """What `dequantize_checkpoint` needs: a weight as stored and as written, while the one before is being written."""
    _, tasks, _ = _arranged(checkpoint, dtype)
    restored = [task for _, task in tasks if task.weight is not None]
    pending = max((task.entry.nbytes for task in restored), default=0)
    return need_of(((task.entry.name, _working_bytes(task)) for _, task in tasks), pending)


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
    layout, tasks, notes = _arranged(checkpoint, dtype)
    entries: dict[Path, list[Entry]] = {}
    for file, task in tasks:
        entries.setdefault(file, []).append(task.entry)
    restored = {task.entry.name: task.entry.dtype for _, task in tasks if task.weight is not None}
    record: dict[str, object] = {
        "schema": "mxcli.dequantized/1",
        "version": own_version(),
        "command": list(command),
        "input": fingerprint(checkpoint),
        "layout": layout.name,
        "dtypes": restored,
        "notes": notes,
    }
    write_checkpoint(
        checkpoint,
        Path(output),
        shards_of(checkpoint, entries),
        [_job(checkpoint, task, backend) for _, task in tasks],
        config=_plain(checkpoint.config or {}),
        record=lambda: record,
        force=force,
        on_progress=on_progress,
    )
    return Restored(Path(output), layout.name, restored, tuple(notes))


def _arranged(checkpoint: Checkpoint, dtype: str | None) -> tuple[Layout, list[tuple[Path, _Task]], list[str]]:
    """The layout of the source, its tasks with the file of each, and notes."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype '{printable(dtype)}': {', '.join(DTYPES)} can be written")
    config = checkpoint.config or {}
    layout = _layout_of(checkpoint, config)
    weights = layout.weights(checkpoint.tensors, config)
    if not weights:
        raise RefusedError(f"{printable(checkpoint.root)}: holds no quantized weights.")
    recorded = _recorded_dtypes(checkpoint.root / RECORD)
    weights = [replace(weight, dtype=recorded.get(weight.name, weight.dtype)) for weight in weights]
    tasks, notes = _tasks(checkpoint, layout, weights, dtype)
    return layout, tasks, notes


def _working_bytes(task: _Task) -> int:
    if task.weight is None:
        return task.nbytes
    copies = 2 if task.weight.axis == COLUMN else 1
    return task.nbytes + copies * task.entry.nbytes


def _layout_of(checkpoint: Checkpoint, config: Mapping[str, object]) -> Layout:
    settings = config.get(QUANTIZATION_CONFIG)
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if checkpoint.dialect in LAYOUTS and not isinstance(settings, Mapping):
        raise InputError(
            f"{printable(checkpoint.where)}: holds quantized weights ({checkpoint.dialect}) without a config.json "
            "with a quantization_config beside it to say what they mean: put the checkpoint's own there."
        )
    found = LAYOUTS.get(str(method)) or LAYOUTS.get(str(checkpoint.dialect))
    if found is not None:
        return found
    known = ", ".join(LAYOUTS)
    if checkpoint.dialect is None and method is None:
        raise RefusedError(f"{printable(checkpoint.root)}: not quantized; there is nothing to scale back.")
    raise RefusedError(
        f"{printable(checkpoint.root)}: quantized by {printable(method or checkpoint.dialect)}; only {known} are "
        "read back."
    )


def _recorded_dtypes(record: Path) -> dict[str, str]:
    """The dtype of each plain tensor where the record of our own output tells it."""
    tensors = read_json_object(record).get("tensors") if record.is_file() else None
    if not isinstance(tensors, Mapping):
        return {}
    dtypes = {name: told.get("dtype") for name, told in tensors.items() if isinstance(told, Mapping)}
    return {name: dtype for name, dtype in dtypes.items() if isinstance(dtype, str)}


def _tasks(
    checkpoint: Checkpoint, layout: Layout, weights: Sequence[Weight], dtype: str | None
) -> tuple[list[tuple[Path, _Task]], list[str]]:
    """Every tensor of the output with the file of the source it comes from, in order, and notes."""
    first: dict[str, tuple[Weight, tuple[Content, ...]]] = {}
    consumed: set[str] = set()
    for weight in weights:
        contents = layout.contents(weight)
        first[contents[0].entry.name] = weight, contents
        consumed |= {content.entry.name for content in contents}
    unused = {weight.name.removesuffix(".weight") + ending for weight in weights for ending in ACTIVATION_SCALES}
    tasks, dropped = [], []
    for name, info in checkpoint.tensors.items():
        if name in first:
            weight, contents = first[name]
            nbytes = sum(content.entry.nbytes for content in contents)
            tasks.append((info.file, _Task(_restored(weight, dtype), weight, contents, nbytes)))
        elif name in unused:
            dropped.append(name)
        elif name not in consumed:
            tasks.append((info.file, _Task(Entry(name, info.dtype, info.shape), None, (), info.nbytes)))
    notes = [f"{len(dropped):,} scales of activations ('{printable(dropped[0])}', …) are left out."] if dropped else []
    return tasks, notes


def _restored(weight: Weight, dtype: str | None) -> Entry:
    shape = weight.shape
    if weight.axis == COLUMN:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return Entry(weight.name, dtype or weight.dtype, shape)


def _job(checkpoint: Checkpoint, task: _Task, backend: Backend) -> Job:
    def make() -> Iterator[tuple[str, Array]]:
        yield task.entry.name, _values(checkpoint, task, backend)

    return Job(task.entry.name, task.nbytes, (task.entry.name,), make)


def _values(checkpoint: Checkpoint, task: _Task, backend: Backend) -> Array:
    if task.weight is None:
        return read(checkpoint, checkpoint.tensors[task.entry.name])
    arrays = {content.holds: read(checkpoint, checkpoint.tensors[content.entry.name]) for content in task.contents}
    values = backend.dequantize(quantized_from(task.weight, arrays), task.entry.dtype)
    return np.swapaxes(values, -1, -2) if task.weight.axis == COLUMN else values


def _plain(config: Mapping[str, object]) -> dict[str, object]:
    """A configuration without quantization, in its parts neither."""
    return {
        key: _plain(part) if isinstance(part, Mapping) else part
        for key, part in config.items()
        if key not in (QUANTIZATION_CONFIG, "compression_config")
    }
