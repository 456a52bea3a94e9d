"""Repair of an output of mxcli: damaged tensors made again from the source, and proven by the hashes of the record.

A file is replaced whole or not at all: sound tensors are copied into a new file, the others computed again by the
recorded options, and the new file gets its name only if every hash of the record agrees.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mxcli.atomic import whole_file
from mxcli.backends.backend import Backend
from mxcli.errors import EnvironmentFailure, InputError, MxcliError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.hashes import hash_of, sha256_of
from mxcli.files.layouts import Entry, InputScale
from mxcli.files.model_files import RECORD
from mxcli.files.output_folder import stays_inside
from mxcli.files.partials import json_bytes
from mxcli.files.progress import header_hash
from mxcli.files.record import OutputRecord, as_written, read_record
from mxcli.files.record_schema import ALL_QUANTIZED, QUANTIZED, REQUANTIZED_FROM
from mxcli.files.selection import Rule
from mxcli.files.shard_file import Shard
from mxcli.files.tensors import Array
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.flows.write.arrange import Arrangement, arrange
from mxcli.flows.write.names import model_name
from mxcli.flows.write.pipeline import WriteJob
from mxcli.flows.write.quantize import write_jobs
from mxcli.flows.write.restore import open_floats
from mxcli.flows.write.sharding import index_of
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import TENSOR_RULES, Rules

_PIECE = 1 << 24
_AGAIN = "Quantize the source again, or copy the file from where the output was sound."


@dataclass(frozen=True, slots=True)
class Repair:
    """A repaired file: the tensors written again; none if only its other bytes were damaged."""

    file: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Damaged:
    """A shard whose bytes are not as recorded, with the names of the damaged tensors and the jobs that make them."""

    shard: Shard
    names: tuple[str, ...]
    jobs: tuple[WriteJob, ...]


def repair(folder: Path, against: str | Path, backend: Backend) -> tuple[Repair, ...]:
    """Restore damaged files of an output in `folder` from its source, and return the files.

    Raises RefusedError before anything is written, naming all that cannot be made again: without a record with hashes,
    with another source, and for files whose recorded content does not follow from both; InputError for a record or a
    source that cannot be read, EnvironmentFailure if the disk fails. A file that cannot be repaired stays as it is.
    """
    record = _record(folder)
    names = [name for name in record.sha256 if _sha256(folder / name) != record.sha256[name]]
    if not names:
        return ()
    restored = record.content.get(REQUANTIZED_FROM) is not None
    source = open_floats(against, requantize=restored)
    arrangement = _arrangement(source, record)
    shards, problems = _shards(arrangement, record)
    jobs = write_jobs(source, arrangement, backend)
    damaged = [_damage(folder, shards[name], record, jobs) for name in names if name in shards]
    problems += _changed_sources(source, record, [job for each in damaged for job in each.jobs])
    documents = {}
    for name in names:
        if name not in record.headers:
            content = _content(name, source, arrangement, shards)
            if content is None or hashlib.sha256(content).hexdigest() != record.sha256[name]:
                problems.append(
                    f"{printable(folder / name)}: its recorded content does not follow from {RECORD} and "
                    f"{printable(source.where)}. {_AGAIN}"
                )
            else:
                documents[name] = content
    if problems:
        raise together(RefusedError, f"{printable(folder)}: cannot be repaired", problems)
    return (
        *(_write_shard(folder, each, record) for each in damaged),
        *(_write_document(folder, name, content) for name, content in documents.items()),
    )


def _record(folder: Path) -> OutputRecord:
    """Return the record of an output. Raises RefusedError without one that proves a repair."""
    record = read_record(folder) if folder.is_dir() else None
    if record is None:
        raise RefusedError(
            f"{printable(folder)}: has no {RECORD}, and only an output of mxcli can be repaired: nothing else says "
            "which bytes it had. Quantize its source again."
        )
    if record.content.get("schema") not in ALL_QUANTIZED:
        raise RefusedError(
            f"{printable(folder)}: its {RECORD} is {printable(record.content.get('schema'))}; only {QUANTIZED} can be "
            "repaired. Make the output again."
        )
    shards = set(record.headers) & set(record.stored) & set(record.sha256)
    if not record.sha256 or not shards or shards != set(record.headers) | set(record.stored):
        raise RefusedError(
            f"{printable(folder)}: its {RECORD} does not have the hashes of all files and tensors, so that no repair "
            "can be proven. Quantize the source again."
        )
    outside = [name for name in record.sha256 if not stays_inside(folder, name)]
    if outside:
        raise RefusedError(f"{printable(folder / outside[0])}: leads out of the output by a link. Remove the link.")
    return record


def _sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return sha256_of(path)
    except InputError:
        return None


def _arrangement(source: Checkpoint, record: OutputRecord) -> Arrangement:
    """Return the arrangement that the recorded options give for a source."""
    where = source.root / RECORD
    with as_written(where, "'options'"):
        options = _options(record.content["options"])
        scales = {name: _input_scale(each) for name, each in record.content["tensors"].items()}
    try:
        plan = make_plan(source, options)
    except MxcliError as error:
        raise RefusedError(
            f"{printable(source.where)}: is not the source of this output: {error.reasons[0]}"
        ) from error
    return arrange(source, _with_scales(plan, scales))


def _options(stated: Mapping[str, Any]) -> Options:
    """Return the options of a run from their record."""
    hadamard = stated["hadamard"]
    signs = None if hadamard is None else tuple(1 if sign == "+" else -1 for sign in hadamard["signs"])
    named = {name: stated[name] for name in (*TENSOR_RULES, "nonfinite", "seed")}
    transform = None if hadamard is None or signs is None else Hadamard(hadamard["size"], signs, hadamard["seed"])
    return Options(
        format=stated["format"],
        rules=Rules(**named, hadamard=transform),
        on_indivisible=stated["on_indivisible"],
        selection=tuple(Rule("include" in each, *each.values()) for each in stated["selection"]),
        overrides=tuple(
            Override(
                each["selector"],
                each.get("format"),
                bool(each.get("keep")),
                Rules(**{name: each.get(name) for name in TENSOR_RULES}),
            )
            for each in stated["overrides"]
        ),
        layout=stated["layout"],
        axis=stated["axis"],
        fuse=stated["fuse"],
    )


def _input_scale(tensor: Mapping[str, Any]) -> InputScale | None:
    return InputScale(**tensor["input_scale"]) if tensor.get("input_scale") else None


def _with_scales(plan: Plan, scales: Mapping[str, InputScale | None]) -> Plan:
    """Return the plan with the recorded scales of inputs."""
    return replace(
        plan, tensors=tuple(replace(each, input_scale=scales.get(each.tensor.name)) for each in plan.tensors)
    )


def _shards(arrangement: Arrangement, record: OutputRecord) -> tuple[dict[str, Shard], list[str]]:
    """Return the recorded shards by name, each with the recorded header and hashes of all its tensors, and why there
    is none of that header."""
    entries = [entry for shard in arrangement.shards for entry in shard.entries]
    found: dict[str, Shard] = {}
    problems = []
    for name, header in record.headers.items():
        candidates = _candidates(name, arrangement, [each for each in entries if each.name in record.stored[name]])
        shard = next((each for each in candidates if header_hash(each.header) == header), None)
        unhashed = [entry.name for entry in shard.entries if entry.name not in record.stored[name]] if shard else []
        if shard is None:
            problems.append(
                f"{printable(name)}: the recorded options arrange other tensors, or differently, with this source. "
                f"{_AGAIN}"
            )
        elif unhashed:
            problems.append(f"{printable(name)}: {RECORD} lacks the hash of {printable(unhashed[0])}. {_AGAIN}")
        else:
            found[name] = shard
    return found, problems


def _candidates(name: str, arrangement: Arrangement, entries: Sequence[Entry]) -> Iterator[Shard]:
    """Yield the shards that a file may be: as arranged, or with its own tensors, since the size of shards is not among
    the options."""
    yield from (shard for shard in arrangement.shards if shard.name == name)
    shared = set.intersection(*(set(shard.metadata.items()) for shard in arrangement.shards))
    for metadata in (*(shard.metadata for shard in arrangement.shards), dict(sorted(shared))):
        yield Shard(name, tuple(entries), metadata, arrangement.shards[0].form)


def _damage(folder: Path, shard: Shard, record: OutputRecord, jobs: Sequence[WriteJob]) -> _Damaged:
    """Return the tensors of a shard that are not as recorded."""
    stored = record.stored[shard.name]
    path, names = folder / shard.name, [each.name for each in shard.entries]
    with suppress(OSError):
        if path.is_file():  # a pipe would wait
            with path.open("rb") as file:
                names = [each.name for each in shard.entries if hash_of(_bytes(file, shard, each)) != stored[each.name]]
    needed = set(names)
    return _Damaged(shard, tuple(names), tuple(job for job in jobs if not needed.isdisjoint(job.entries)))


def _bytes(file: BinaryIO, shard: Shard, entry: Entry) -> Array:
    """Return the bytes where a tensor is to be; fewer if the file ends before. A device that looks like a file has no
    size, and reading beyond it would wait."""
    begin = shard.ends[entry.name] - entry.nbytes
    file.seek(begin)
    return np.frombuffer(file.read(max(0, min(entry.nbytes, os.fstat(file.fileno()).st_size - begin))), np.uint8)


def _changed_sources(source: Checkpoint, record: OutputRecord, jobs: Sequence[WriteJob]) -> list[str]:
    """Return the tensors to read that are not those that were read for the output."""
    if source.restored_from is not None:
        return []
    read_names = dict.fromkeys(job.name for job in jobs if job.name in source.tensors)
    known = {name: record.source_hashes[name] for name in read_names if name in record.source_hashes}
    return [
        f"{printable(source.where)}: '{printable(name)}' is not the tensor that this output was made from. Give the "
        "source of this output."
        for name, expected in known.items()
        if hash_of(read(source, source.tensors[name])).xxh3 != expected
    ]


def _content(name: str, source: Checkpoint, arrangement: Arrangement, shards: Mapping[str, Shard]) -> bytes | None:
    """Return the content of a file that is not a shard; None if nothing makes it."""
    documents = {model_name(source).index: index_of(tuple(shards.values())), **arrangement.configs}
    if name in documents:
        return json_bytes(documents[name])
    carried = {path.relative_to(source.root).as_posix(): path for path in source.side_files}
    try:
        return carried[name].read_bytes() if name in carried else None
    except OSError as error:
        raise InputError(f"{printable(carried[name])}: cannot be read: {printable(error)}.") from error


def _write_shard(folder: Path, damaged: _Damaged, record: OutputRecord) -> Repair:
    shard, path = damaged.shard, folder / damaged.shard.name
    stored = record.stored[shard.name]
    with _on_disk(path), whole_file(path, replace=True, mode=_mode(path)) as file:
        file.write(shard.header)
        if path.is_file():
            with path.open("rb") as old:
                for entry in shard.entries:
                    if entry.name not in damaged.names:
                        _put(file, shard, entry.name, _bytes(old, shard, entry))
        for job in damaged.jobs:
            for name, array in job.make():
                if name in damaged.names:
                    if hash_of(array) != stored[name]:
                        raise RefusedError(_unproven(path, f"'{printable(name)}' made again"))
                    _put(file, shard, name, array)
        file.truncate(shard.nbytes)
        if _digest(file) != record.sha256[shard.name]:
            raise RefusedError(_unproven(path, "the file made again"))
    return Repair(shard.name, damaged.names)


def _put(file: BinaryIO, shard: Shard, name: str, array: Array) -> None:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    file.seek(shard.ends[name] - flat.nbytes)
    file.write(flat.data)


def _digest(file: BinaryIO) -> str:
    """Return the SHA-256 of a file that is being written."""
    digest = hashlib.sha256()
    file.flush()
    file.seek(0)
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _unproven(path: Path, what: str) -> str:
    return f"{printable(path)}: {what} does not have the hash in {RECORD}; the file stays as it is. {_AGAIN}"


def _write_document(folder: Path, name: str, content: bytes) -> Repair:
    path = folder / name
    with _on_disk(path), whole_file(path, replace=True, mode=_mode(path)) as file:
        file.write(content)
    return Repair(name)


def _mode(path: Path) -> int:
    """Return the permissions of the file that is replaced."""
    return path.stat().st_mode & 0o777 if path.is_file() else 0o666


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise EnvironmentFailure(f"{printable(path)}: cannot be repaired: {printable(error)}.") from error
