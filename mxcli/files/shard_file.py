"""One file of weights, written tensor by tensor: its header is complete before its first byte of data."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.layouts.layout import Entry
from mxcli.files.tensors import DTYPES, Array

ALIGNMENT = 8
CHUNK_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind of file is put together: its header, its tensors in the order of their bytes, and what the position of
    each and the length of the file are multiples of."""

    header: Callable[[Shard], bytes]
    order: Callable[[Sequence[Entry]], tuple[Entry, ...]]
    alignment: int = 1

    def aligned(self, position: int) -> int:
        """The position, or the first multiple after it."""
        return -(-position // self.alignment) * self.alignment


def _safetensors_header(shard: Shard) -> bytes:
    """Length and JSON header, padded with spaces so that the data begins on a multiple of 8. A missing `format` is
    added, which transformers insists on."""
    described: dict[str, object] = {"__metadata__": {"format": "pt", **shard.metadata}}
    begin = 0
    for entry in shard.in_order:
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.nbytes],
        }
        begin += entry.nbytes
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _widest_first(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """In order of element width, else as given: so each is aligned to its elements without holes."""
    return tuple(sorted(entries, key=lambda entry: -DTYPES[entry.dtype].bits))


SAFETENSORS_FORM = Form(_safetensors_header, _widest_first)


@dataclass(frozen=True)
class Shard:
    """A file to be written: its name, its tensors, its `__metadata__`, and how it is put together."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    form: Form = SAFETENSORS_FORM

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.form.aligned(max(self.ends.values(), default=len(self.header)))

    @cached_property
    def header(self) -> bytes:
        """What stands before the data."""
        return self.form.header(self)

    @property
    def in_order(self) -> tuple[Entry, ...]:
        """The tensors in the order of their bytes."""
        return self.form.order(self.entries)

    @cached_property
    def ends(self) -> dict[str, int]:
        """The position behind the last byte of each tensor."""
        ends, end = {}, len(self.header)
        for entry in self.in_order:
            end = self.form.aligned(end) + entry.nbytes
            ends[entry.name] = end
        return ends


class ShardFile:
    """A shard under its partial name. Tensors may come in any order; nothing is mapped and nothing is buffered.

    `written` are tensors that the file holds already, after its header; without any both are begun.
    """

    def __init__(self, shard: Shard, file: BinaryIO, written: Collection[str] = ()) -> None:
        ends, held = shard.ends, frozenset(written)
        self._file, self._nbytes = file, shard.nbytes
        self._missing = {
            entry.name: (entry, ends[entry.name] - entry.nbytes) for entry in shard.entries if entry.name not in held
        }
        if not held:
            self._file.write(shard.header)

    def write(self, name: str, array: Array) -> None:
        """Write the bytes of one tensor in its place; the array must hold as many as the header says."""
        entry, position = self._missing.pop(name)
        contiguous = np.ascontiguousarray(array)
        if contiguous.nbytes != entry.nbytes:
            raise ValueError(f"{name}: {contiguous.nbytes} bytes given, {entry.nbytes} described")
        if not contiguous.nbytes:
            return
        self._file.seek(position)
        flat = contiguous.reshape(-1).view(np.uint8)
        for start in range(0, entry.nbytes, CHUNK_BYTES):
            self._file.write(flat[start : start + CHUNK_BYTES].data)

    def finish(self) -> None:
        """Bring everything to the disk and close; every tensor must have been written."""
        if self._missing:
            raise ValueError(f"tensors described but not written: {sorted(self._missing)}")
        self._file.truncate(self._nbytes)  # what pads the last tensor
        self.sync()
        self._file.close()

    def sync(self) -> None:
        """Bring what was written so far to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close without a claim that the file is complete."""
        self._file.close()


def partial_path(path: Path) -> Path:
    """Where a file lies until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)
