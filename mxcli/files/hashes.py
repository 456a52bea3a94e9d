"""Content hashes: XXH3 of each tensor, which costs less than reading it, and SHA-256 of each finished file.

XXH3-128 (Collet, xxHash) finds any accidental change; it is not meant to withstand a forger, which SHA-256 of a file
is. Tensors longer than a chunk have a hash per chunk too, so that a change is located without the source.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from mxcli.errors import InputError, printable
from mxcli.files.tensors import Array

CHUNK_BYTES = 1 << 20
XXH3, CHUNKS = "xxh3_128", "chunks_xxh3_64"
_XXH3_TEXT, _CHUNK_TEXT = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")
_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ContentHash:
    """XXH3-128 of a tensor's bytes as stored, and XXH3-64 of each chunk of CHUNK_BYTES if there are several; both in
    hexadecimal digits."""

    xxh3: str
    chunks: tuple[str, ...] = ()

    @property
    def record(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {XXH3: self.xxh3, **({CHUNKS: list(self.chunks)} if self.chunks else {})}


def hash_of(array: Array) -> ContentHash:
    """Return the hash of an array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.nbytes <= CHUNK_BYTES:
        return ContentHash(xxhash.xxh3_128_hexdigest(flat.data))
    return hash_of_chunks(flat[at : at + CHUNK_BYTES].data for at in range(0, flat.nbytes, CHUNK_BYTES))


def hash_of_chunks(chunks: Iterable[memoryview]) -> ContentHash:
    """Return the hash of the bytes of consecutive chunks of CHUNK_BYTES, the last one shorter."""
    whole, hashes = xxhash.xxh3_128(), []
    for chunk in chunks:
        whole.update(chunk)
        hashes.append(xxhash.xxh3_64_hexdigest(chunk))
    return ContentHash(whole.hexdigest(), tuple(hashes) if len(hashes) > 1 else ())


def hash_of_parts(parts: Iterable[Array]) -> str:
    """Return the XXH3-128 of the bytes of several arrays, one after the other."""
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return whole.hexdigest()


def recorded_hash(record: object) -> ContentHash | None:
    """Return the hash that a JSON value states; None if it states none, or not in the form that mxcli writes."""
    if not isinstance(record, Mapping):
        return None
    whole, chunks = record.get(XXH3), record.get(CHUNKS, [])
    if not isinstance(whole, str) or not _XXH3_TEXT.fullmatch(whole) or not isinstance(chunks, list):
        return None
    if not all(isinstance(chunk, str) and _CHUNK_TEXT.fullmatch(chunk) for chunk in chunks):
        return None
    return ContentHash(whole, tuple(chunks))


def differing_bytes(recorded: ContentHash, found: ContentHash, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each range of a tensor's bytes that has another hash than recorded, adjacent chunks
    joined; the whole tensor where chunks do not locate it."""
    if recorded.xxh3 == found.xxh3:
        return
    if len(recorded.chunks) != len(found.chunks) or recorded.chunks == found.chunks:
        yield 0, nbytes
        return
    begin = None
    for at, (one, other) in enumerate(zip(recorded.chunks, found.chunks, strict=True)):
        if one != other and begin is None:
            begin = at * CHUNK_BYTES
        elif one == other and begin is not None:
            yield begin, at * CHUNK_BYTES
            begin = None
    if begin is not None:
        yield begin, nbytes


def sha256_of(path: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Return the SHA-256 of a file's whole content, as `sha256sum` prints it. Raises InputError if it cannot be
    read, or is a pipe or device, which may never end; CancelledError once it `is_stopped`."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_FILE_BYTES))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{printable(path)}: cannot be read: not a file.")
        with path.open("rb", buffering=0) as file:
            has_bytes = os.fstat(file.fileno()).st_size > 0
            while has_bytes and (count := file.readinto(buffer)):
                digest.update(buffer[:count])
                if is_stopped():
                    raise CancelledError
    except OSError as error:
        raise InputError(f"{printable(path)}: cannot be read: {printable(error)}.") from error
    return digest.hexdigest()
