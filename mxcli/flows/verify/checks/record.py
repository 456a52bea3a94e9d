"""Checks of a checkpoint against its record: the hashes of every tensor, header and file, and what was decided."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Event

import xxhash

from mxcli.errors import InputError, printable
from mxcli.files.checkpoint import content_hash
from mxcli.files.directory import GGUF, SAFETENSORS
from mxcli.files.hashes import ContentHash, differing_bytes, sha256_of
from mxcli.files.layouts import LAYOUTS
from mxcli.files.model_files import CONFIG, RECORD
from mxcli.files.tensors import TensorInfo
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding, some
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.names import place_of

ANOTHER_MODEL = 0.9
"""Of more tensors than this share differing, the record is of another model."""
_FEW = 4
"""Tensors from which on such a share is one finding."""


@dataclass(frozen=True)
class Recorded:
    """A checkpoint with the hashes of its parts as they are: of tensors by name, of headers and whole files by file
    name. A hash that could not be computed is the reason in words."""

    subject: Subject
    tensors: Mapping[str, ContentHash | str]
    headers: Mapping[str, str]
    files: Mapping[str, str]

    def place_of(self, file: Path) -> str:
        """Return the name of a weight file in the output, as a record has it."""
        return place_of(self.subject.checkpoint, file)

    @property
    def expected(self) -> dict[str, ContentHash]:
        """The recorded hashes of tensors by name."""
        return {name: each for entries in self.subject.record.stored.values() for name, each in entries.items()}

    @cached_property
    def differing(self) -> dict[str, tuple[ContentHash, ContentHash | str]]:
        """The recorded and the found hash of each tensor for which they differ."""
        pairs = {name: (each, self.tensors[name]) for name, each in self.expected.items() if name in self.tensors}
        return {
            name: (one, other)
            for name, (one, other) in pairs.items()
            if not isinstance(other, ContentHash) or one.xxh3 != other.xxh3
        }

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The recorded tensors that are not there."""
        return tuple(name for name in self.expected if name not in self.subject.checkpoint.tensors)

    @cached_property
    def proven(self) -> frozenset[str]:
        """The tensors whose bytes are as recorded: their own hash is, or that of their whole file."""
        whole = {name for name, found in self.files.items() if self.subject.record.sha256.get(name) == found}
        tensors = self.subject.checkpoint.tensors
        own = self.expected.keys() & self.tensors.keys() - self.differing.keys()
        return frozenset(own) | {name for name, info in tensors.items() if self.place_of(info.file) in whole}

    @cached_property
    def is_complete(self) -> bool:
        """True if every tensor and config.json are as recorded."""
        config = CONFIG in self.files and self.subject.record.sha256.get(CONFIG) == self.files[CONFIG]
        return config and len(self.proven) == len(self.subject.checkpoint.tensors) and not self.missing

    @cached_property
    def is_of_another_model(self) -> bool:
        """True if nearly nothing that the record lists and that is here is as recorded."""
        here = len(self.expected) - len(self.missing)
        return len(self.expected) >= _FEW and len(self.differing) >= ANOTHER_MODEL * here


class Hashing:
    """The hashes of a checkpoint's parts, computed by threads while other checks run, within a `with` block: those of
    whole files, which take longest, from its beginning, and the others from `hash_tensors` on."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._pool = ThreadPoolExecutor(threads(), "hash")
        self._stopped = Event()
        self._files: dict[str, Future[ContentHash | str]] = {}
        self._headers: dict[str, Future[ContentHash | str]] = {}
        self._tensors: dict[str, Future[ContentHash | str]] = {}

    def __enter__(self) -> Hashing:
        root, submit = self._subject.checkpoint.root, partial(self._submit, sha256_of)
        names = [name for name in self._subject.record.sha256 if (root / name).is_file()]
        self._files = {name: submit(root / name, self._stopped.is_set) for name in names}
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def hash_tensors(self) -> None:
        """Begin with headers and tensors, of which threads hold those that must be decoded."""
        subject, submit = self._subject, self._submit
        place, record = partial(place_of, subject.checkpoint), subject.record
        files = {place(file): file for file in subject.checkpoint.files}
        begins: dict[str, int] = {}
        for info in subject.checkpoint.tensors.values():
            file = place(info.file)
            begins[file] = min(info.offset, begins.get(file, info.offset))
        self._headers = {
            name: submit(_header_hash, files[name], begins[name]) for name in record.headers if name in begins
        }
        self._tensors = {
            name: submit(self._tensor_hash, info)
            for name, info in subject.checkpoint.tensors.items()
            if name in record.stored.get(place(info.file), {})
        }

    def result(self) -> Recorded:
        """Wait for all hashes that were begun."""
        headers, files = (
            {name: str(each.result()) for name, each in parts.items()} for parts in (self._headers, self._files)
        )
        tensors = {name: each.result() for name, each in self._tensors.items()}
        return Recorded(self._subject, tensors, headers, files)

    def _submit(self, hashed: Callable[..., ContentHash | str], *of: object) -> Future[ContentHash | str]:
        return self._pool.submit(partial(_hashed_or_reason, hashed, *of))

    def _tensor_hash(self, info: TensorInfo) -> ContentHash:
        return content_hash(self._subject.checkpoint, info)


def threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hashed_or_reason(hashed: Callable[..., ContentHash | str], *of: object) -> ContentHash | str:
    try:
        return hashed(*of)
    except InputError as error:
        return error.reasons[0]


def _header_hash(path: Path, nbytes: int) -> str:
    """Return the hash of the bytes before the first tensor of a file."""
    try:
        with path.open("rb") as file:
            return xxhash.xxh3_128_hexdigest(file.read(nbytes))
    except OSError as error:
        raise InputError(f"{printable(path)}: cannot be read: {printable(error)}.") from error


def _way_out(recorded: Recorded) -> str:
    return f"Restore them: mxcli verify {printable(recorded.subject.checkpoint.root)} --against SOURCE --repair."


def _malformed(recorded: Recorded) -> Iterator[Finding]:
    for key, fault in recorded.subject.record.faults.items():
        yield Finding(
            RECORD, fault if key == RECORD else f"'{key}' {fault}", "the record as mxcli wrote it", "Copy it again."
        )


def _other_layout(recorded: Recorded) -> Iterator[Finding]:
    """Yield the recorded layout if the files are in another one that is read."""
    layout, stated = recorded.subject.layout, recorded.subject.record.layout
    known = LAYOUTS.get(stated)
    # Layouts that differ in the order of scales alone are read by one of them.
    if layout is not None and stated and (known is None or known.weights is not layout.weights):
        yield Finding(
            RECORD,
            f"'layout' is {printable(stated)}",
            f"{layout.name}, the layout of the files",
            "Copy the record of this output again, or the files.",
        )


def _differing(recorded: Recorded) -> Iterator[Finding]:
    record = recorded.subject.record
    if recorded.is_of_another_model:
        for shard in record.stored:
            yield Finding(
                shard,
                f"{len(recorded.differing):,} of the {len(recorded.expected):,} tensors that {RECORD} lists have other "
                f"bytes, and {len(recorded.missing):,} are missing: one of the two is of another model",
                "the record written with these files",
                f"Copy this file or {RECORD} again, or quantize again.",
            )
        return
    tensors = recorded.subject.checkpoint.tensors
    for name, (one, other) in recorded.differing.items():
        if not isinstance(other, ContentHash):
            yield Finding(name, other.rstrip("."), "bytes that can be read", "Copy the file again.")
            continue
        info = tensors[name]
        ranges = list(differing_bytes(one, other, info.nbytes))
        listed = some(_place(info, begin, end) for begin, end in ranges)
        yield Finding(name, f"{listed} not as recorded", f"the bytes whose hash is in {RECORD}", _way_out(recorded))
    for shard, entries in record.headers.items():
        found = recorded.headers.get(shard)
        if found is not None and found != entries:
            yield Finding(
                shard,
                "the header (names, dtypes, shapes and positions of tensors) is not as recorded",
                f"the header whose hash is in {RECORD}",
                _way_out(recorded),
            )


def _place(info: TensorInfo, begin: int, end: int) -> str:
    """Return a range of a tensor's bytes with the rows, matrices or blocks that they hold."""
    text = f"bytes {begin:,} to {end - 1:,} of {info.nbytes:,}"
    rows = math.prod(info.shape[:-1])
    if len(info.shape) < 2 or not rows:
        return text
    row = info.nbytes / rows
    first, last = int(begin // row), min(math.ceil(end / row), rows) - 1
    return f"{text} ({'row' if first == last else 'rows'} {first:,}{'' if first == last else f' to {last:,}'})"


def _listing(recorded: Recorded) -> Iterator[Finding]:
    record, checkpoint = recorded.subject.record, recorded.subject.checkpoint
    if recorded.is_of_another_model or not record.stored:
        return
    by_shard = {name: shard for shard, entries in record.stored.items() for name in entries}
    unlisted = record.stored.keys() - {recorded.place_of(file) for file in checkpoint.files}
    if checkpoint.index is not None and any((checkpoint.root / shard).is_file() for shard in unlisted):
        yield Finding(
            checkpoint.index.name,
            f"does not name {some(map(printable, sorted(unlisted)))}",
            f"every shard that {RECORD} lists",
            _way_out(recorded),
        )
    for name in recorded.missing:
        yield Finding(
            name, f"missing; {RECORD} lists it in {by_shard[name]}", "every recorded tensor", _way_out(recorded)
        )
    for name, info in checkpoint.tensors.items():
        shard = by_shard.get(name)
        if shard is None:
            yield Finding(
                name,
                f"{info.dtype} {list(info.shape)} is not in {RECORD}",
                "recorded tensors only: nobody knows where this one is from",
                "Copy the shards of this output again.",
            )
        elif shard != (found := recorded.place_of(info.file)):
            yield Finding(name, f"is in {found}", f"{shard}, as {RECORD} says", "Copy the shards again.")


def _decided(recorded: Recorded) -> Iterator[Finding]:
    """Yield tensors of the source whose decision does not show: kept ones that are missing or differ, and quantized
    ones that are missing or plain."""
    subject = recorded.subject
    checkpoint, view = subject.checkpoint, subject.view
    if view is None or checkpoint.kind == GGUF or recorded.is_of_another_model:
        return
    stacks = {name.rpartition(".experts.")[0] for name in view.tensors if ".experts." in name}
    for name, record in subject.record.tensors.items():
        decision, shape = record.get("decision"), record.get("shape")
        if decision == "tied" or decision not in ("kept", "quantized"):
            continue
        info = view.tensors.get(name)
        fault = need = None
        if info is None:
            if name not in subject.misfits and name.rpartition(".experts.")[0] not in stacks:
                fault, need = f"missing; {RECORD} says {decision}", "every tensor of the source"
        elif decision == "quantized" and name not in subject.weights and name not in subject.misfits:
            fault, need = f"{info.dtype} {list(info.shape)}, plain", f"codes: {RECORD} says quantized"
        elif decision == "kept" and name in subject.weights:
            fault, need = f"{subject.weights[name].weight.format.name} codes", f"a plain tensor: {RECORD} says kept"
        elif isinstance(shape, list) and list(info.shape) != shape:
            fault, need = f"has shape {list(info.shape)}", f"{printable(shape)}, as {RECORD} says"
        elif decision == "kept" and checkpoint.kind == SAFETENSORS and info.dtype != record.get("dtype"):
            fault, need = f"is {info.dtype}", f"{printable(record.get('dtype'))}, as {RECORD} says"
        if fault is not None and need is not None:
            yield Finding(name, fault, need, _way_out(recorded))


def _files(recorded: Recorded) -> Iterator[Finding]:
    subject = recorded.subject
    record, root = subject.record, subject.checkpoint.root
    shards = {recorded.place_of(file) for file in subject.checkpoint.files}
    for name in dict.fromkeys((*record.files, *record.sha256)):
        if not (root / name).is_file():
            yield Finding(name, "missing", f"the file recorded in {RECORD}", "Copy it again.")
        elif (
            record.sha256.get(name, found := recorded.files.get(name)) != found
            and not recorded.is_of_another_model
            and not (name in shards and _is_explained(recorded, name))
        ):
            yield Finding(name, "other content", f"the SHA-256 recorded in {RECORD}", _way_out(recorded))


def _is_explained(recorded: Recorded, shard: str) -> bool:
    """Return whether findings on tensors or the header of a shard say where its content differs."""
    tensors = recorded.subject.checkpoint.tensors
    entries = recorded.subject.record.stored.get(shard, {})
    header = recorded.headers.get(shard, "") != recorded.subject.record.headers.get(shard, "")
    return header or any(name in recorded.differing or name not in tensors for name in entries)


RECORD_CHECKS: tuple[Check[Recorded], ...] = (
    Check(
        "record",
        PROBLEM,
        "a record that was changed: it proves nothing",
        "the form of every key and hash",
        _malformed,
    ),
    Check(
        "recorded_layout",
        PROBLEM,
        "a record of another layout than the files have: the record or the files are of another output",
        "the layout that the configuration and the names of tensors show",
        _other_layout,
    ),
    Check(
        "recorded_bytes",
        PROBLEM,
        "bytes that changed since they were written",
        "XXH3 of every tensor and every header against the record; chunks of 1 MiB locate what differs",
        _differing,
    ),
    Check(
        "recorded_tensor",
        PROBLEM,
        "tensors that the record lists and that are missing, or the other way round",
        "names and shards of all tensors against the record",
        _listing,
    ),
    Check(
        "recorded_decision",
        PROBLEM,
        "tensors that are not what the record decided",
        "every tensor of the source: kept in its dtype and shape, or quantized in its shape",
        _decided,
    ),
    Check(
        "recorded_file",
        PROBLEM,
        "files that are missing or changed since they were written",
        f"the files named in {RECORD}, and their SHA-256",
        _files,
    ),
)
