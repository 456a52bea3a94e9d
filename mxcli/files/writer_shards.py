"""One safetensors file, written tensor by tensor: its header is complete before its first byte of data."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.layouts.layout import Entry
from mxcli.files.tensors import DTYPES, Array

ALIGNMENT = 8
CHUNK_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to be written: its name, its tensors, and its `__metadata__`."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.data_bytes

    @property
    def header(self) -> bytes:
        """Length and JSON header, padded with spaces so that the data begins on a multiple of 8.

        Tensors lie in order of element width, widest first, else as given: so each is aligned to its elements
        without holes. A missing `format` is added, which transformers insists on.
        """
        described: dict[str, object] = {"__metadata__": {"format": "pt", **self.metadata}}
        begin = 0
        for entry in self.in_order:
            described[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [begin, begin + entry.nbytes],
            }
            begin += entry.nbytes
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return struct.pack("<Q", len(text)) + text

    @property
    def in_order(self) -> tuple[Entry, ...]:
        """The tensors in the order of their bytes."""
        return tuple(sorted(self.entries, key=lambda entry: -DTYPES[entry.dtype].bits))


class ShardFile:
    """A shard under its partial name. Tensors may come in any order; nothing is mapped and nothing is buffered."""

    def __init__(self, shard: Shard, file: BinaryIO) -> None:
        header = shard.header
        self._file = file
        self._missing: dict[str, tuple[Entry, int]] = {}
        position = len(header)
        for entry in shard.in_order:
            self._missing[entry.name] = (entry, position)
            position += entry.nbytes
        self._file.write(header)

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
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close without a claim that the file is complete."""
        self._file.close()


def partial_path(path: Path) -> Path:
    """Where a file lies until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)
