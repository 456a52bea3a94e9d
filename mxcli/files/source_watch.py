"""The watch on a source: the content hash of every tensor that a run reads, and the proof that the source is unchanged.

A file whose identity (inode, size, times) is unchanged is unchanged. Where that proves nothing, because another run
read the file, it was written to just before, or chmod or a new link changed its status, its tensors are read again and
must have the hashes that they had.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mxcli.errors import InputError, MxcliError, printable, together
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.hashes import hash_of, hash_of_parts
from mxcli.files.identity import FileIdentity, changes, identity
from mxcli.files.safetensors import LENGTH_BYTES
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo

END_BYTES, SAMPLE_BYTES = 1 << 16, 1 << 12
"""Bytes at both ends of a file, and in each of three places of a tensor, that stand for the rest."""
SETTLED_NS = 100_000_000
"""The time after a change from which on the next one has another time stamp, on every file system."""
UNKNOWN = [0, 0, 0, 0, 0]
"""The identity of a file that was written to just before it was opened: no file has it."""


class SourceWatch:
    """The hashes of the tensors that a run reads of a source, by name; they are those of the files at its end."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = checkpoint.stored or checkpoint
        hashed = {file: replace(each, is_hashed=True) for file, each in self._source.identities.items()}
        self._unseen = replace(self._source, observers=[], identities=hashed)
        self._began = time.time_ns()
        self.hashes: dict[str, str] = {}
        self._of_job: dict[str, str] = {}

    @property
    def identities(self) -> dict[str, list[int]]:
        """Return the identity of each file by its name in the source."""
        return {
            self._name_of(file): UNKNOWN if self._is_new(each) else each.record
            for file, each in self._source.identities.items()
        }

    def saw(self, info: TensorInfo, array: Array, at: int | None) -> None:
        """Hash a tensor that is read for the first time; of one that is read in parts, all of them."""
        if info.name not in self.hashes:
            self.hashes[info.name] = hash_of(array).xxh3 if at is None else _hash(self._unseen, info)
        self._of_job[info.name] = self.hashes[info.name]

    def take_job(self) -> dict[str, str]:
        """Return the hashes of the tensors that were read since the last call."""
        found, self._of_job = self._of_job, {}
        return found

    def expect(self, hashes: Mapping[str, str], identities: Mapping[str, object], error: type[MxcliError]) -> None:
        """Take over the hashes of an earlier run. Tensors of files that had another identity are read for it; raises
        the given error, naming file and tensor, if one is not what it was."""
        problems, now = [], self.identities
        for name, expected in hashes.items():
            info = self._source.tensors.get(name)
            if info is None:
                problems.append(f"{printable(self._source.where)}: has no tensor '{printable(name)}' any more.")
                continue
            file = self._name_of(info.file)
            if identities.get(file) != now[file] or now[file] == UNKNOWN:
                problems += _change(self._unseen, info, expected)
        if problems:
            raise together(error, f"{printable(self._source.where)}: the source has changed", problems)
        self.hashes |= hashes

    def finish(self) -> None:
        """Raise InputError unless all files are what they were when they were opened."""
        opened = self._source.identities
        found = changes(self._unseen.identities)
        if found:
            raise together(InputError, printable(self._source.where), found)
        now = {file: identity(file) for file in opened}
        again = {file for file, each in opened.items() if self._is_new(each) or now[file] != each}
        source = replace(self._unseen, identities=now)
        problems = [
            change
            for name, seen in self.hashes.items()
            if self._source.tensors[name].file in again
            for change in _change(source, self._source.tensors[name], seen)
        ]
        if problems:
            raise together(InputError, f"{printable(self._source.where)}: the source has changed", problems)

    def samples(self) -> dict[str, str]:
        """Return a hash of both ends of each file, and one of both ends and the middle of each tensor in place."""
        found = {}
        for file in self._source.files:
            infos = [each for each in self._source.tensors.values() if each.file == file and each.offset != IN_MEMORY]
            try:
                with file.open("rb", buffering=0) as opened:
                    size = os.fstat(opened.fileno()).st_size
                    for info in infos:
                        end = info.offset + info.nbytes
                        found[info.name] = _sample(opened.fileno(), info.offset, end, SAMPLE_BYTES)
                    found[self._name_of(file)] = _sample(opened.fileno(), 0, size, END_BYTES)
            except OSError as error:
                raise InputError(f"{printable(file)}: cannot be read: {printable(error)}.") from error
        return found

    def _name_of(self, file: Path) -> str:
        """Return the name of a file in the source."""
        root = self._source.root
        return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name

    def _is_new(self, identity: FileIdentity) -> bool:
        return max(identity.modified, identity.changed) + SETTLED_NS > self._began


def fingerprint_of(file: Path) -> dict[str, object]:
    """Return size and fingerprint of a weight file: the SHA-256 of its header, or of its first and last 64 KiB."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            identifying = _identifying(opened, size)
    except OSError as error:
        raise InputError(f"{printable(file)}: cannot be read: {printable(error)}.") from error
    return {"bytes": size, "fingerprint": hashlib.sha256(identifying).hexdigest()}


@contextmanager
def watching(checkpoint: Checkpoint) -> Iterator[SourceWatch]:
    """Yield the watch of a run on a source; it ends with the block."""
    watch = SourceWatch(checkpoint)
    checkpoint.observers.append(watch.saw)
    try:
        yield watch
    finally:
        checkpoint.observers.remove(watch.saw)


def _hash(source: Checkpoint, info: TensorInfo) -> str:
    """Return the hash of a tensor, read in parts if it is in place and has several dimensions."""
    if info.offset == IN_MEMORY or len(info.shape) < 3:
        return hash_of(read(source, info)).xxh3
    return hash_of_parts(read(source, info, at) for at in range(info.shape[0]))


def _change(source: Checkpoint, info: TensorInfo, expected: str) -> Iterator[str]:
    """Yield why a tensor is not what it was."""
    if _hash(source, info) != expected:
        yield (
            f"{printable(info.file)}: tensor '{printable(info.name)}' of the source is not what it was when it was "
            "read before; put the source back, or start again with --force and without --resume."
        )


def _sample(descriptor: int, begin: int, end: int, most: int) -> str:
    """Return the hash of at most `most` bytes at the begin, in the middle, and at the end of a part of a file."""
    starts = sorted({max(begin, start) for start in (begin, (begin + end - most) // 2, end - most)})
    parts = [os.pread(descriptor, min(most, end - start), start) for start in starts]
    return hash_of(np.frombuffer(b"".join(parts), np.uint8)).xxh3


def _identifying(opened: BinaryIO, size: int) -> bytes:
    start = opened.read(LENGTH_BYTES + 1)
    if start.endswith(b"{"):
        return start + opened.read(int.from_bytes(start[:LENGTH_BYTES], "little") - 1)
    head = start + opened.read(END_BYTES)
    opened.seek(max(0, size - END_BYTES))
    return head + opened.read()
