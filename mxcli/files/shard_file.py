"""A weight file, written tensor by tensor: its header is complete before its first byte of data."""

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
    """The layout of a kind of file: its header, the order of its tensors, and the alignment of each tensor and of the
    file's length."""

    header: Callable[[Shard], bytes]
    order: Callable[[Sequence[Entry]], tuple[Entry, ...]]
    alignment: int = 1

    def aligned(self, position: int) -> int:
        """Return the position, rounded up to the alignment."""
        return -(-position // self.alignment) * self.alignment


def _safetensors_header(shard: Shard) -> bytes:
    """Return length and JSON header, padded with spaces so that the data begins on a multiple of 8. Adds `format` if
    missing: transformers requires it."""
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
    """Sort by element width, widest first: each tensor is then aligned to its elements without holes."""
    return tuple(sorted(entries, key=lambda entry: -DTYPES[entry.dtype].bits))


SAFETENSORS_FORM = Form(_safetensors_header, _widest_first)


@dataclass(frozen=True)
class Shard:
    """A file to write: its name, its tensors, its `__metadata__` and its form."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    form: Form = SAFETENSORS_FORM

    @property
    def data_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the file."""
        return self.form.aligned(max(self.ends.values(), default=len(self.header)))

    @cached_property
    def header(self) -> bytes:
        """Return the bytes before the data."""
        return self.form.header(self)

    @property
    def in_order(self) -> tuple[Entry, ...]:
        """Return the tensors in the order of their bytes."""
        return self.form.order(self.entries)

    @cached_property
    def ends(self) -> dict[str, int]:
        """Return the end position of each tensor."""
        ends, end = {}, len(self.header)
        for entry in self.in_order:
            end = self.form.aligned(end) + entry.nbytes
            ends[entry.name] = end
        return ends

    def place(self, name: str) -> tuple[int, int]:
        """Return the position and the bytes of a tensor."""
        return self.ends[name] - self._sizes[name], self._sizes[name]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Return the begin and end of each run of bytes that belongs to no tensor; all are zero."""
        found, end = [], len(self.header)
        for entry in self.in_order:
            begin = self.ends[entry.name] - entry.nbytes
            found.append((end, begin))
            end = self.ends[entry.name]
        return [(begin, end) for begin, end in (*found, (end, self.nbytes)) if begin < end]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {entry.name: entry.nbytes for entry in self.entries}


class ShardFile:
    """A shard under its partial name. Tensors may come in any order; nothing is mapped or buffered.

    `written` are tensors that the file already holds behind its header; without any, the header is written first.
    """

    def __init__(self, shard: Shard, file: BinaryIO, written: Collection[str] = ()) -> None:
        ends, written = shard.ends, frozenset(written)
        self._file, self._shard = file, shard
        self._missing = {
            entry.name: (entry, ends[entry.name] - entry.nbytes) for entry in shard.entries if entry.name not in written
        }
        if not written:
            self._file.write(shard.header)

    def write(self, name: str, array: Array) -> None:
        """Write the bytes of one tensor. Raises ValueError unless the array has as many as the header states."""
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
        """Complete the file, sync everything to disk and close. Raises ValueError if a tensor was not written."""
        self.pad()
        self.sync()
        self._file.close()

    def pad(self) -> None:
        """Write what is between the tensors and after them; the file then has all its bytes, synced or not. Raises
        ValueError if a tensor was not written."""
        if self._missing:
            raise ValueError(f"tensors described but not written: {sorted(self._missing)}")
        for begin, end in self._shard.gaps:
            self._file.seek(begin)
            self._file.write(bytes(end - begin))
        self._file.truncate(self._shard.nbytes)
        self._file.flush()

    def sync(self) -> None:
        """Sync what was written so far to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close, complete or not."""
        self._file.close()


def partial_path(path: Path) -> Path:
    """Return the path of a file until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)
