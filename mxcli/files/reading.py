"""Tensor bytes of an opened source as numpy arrays of their own. Files are read, never mapped: a map of a file that is
cut short ends the process."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.identity import FileIdentity, changed, check_unchanged
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, TensorInfo, storage_shape

AHEAD_BYTES = 1 << 30


def as_floats(x: Array, dtype: str) -> Array:
    """Convert an array as `read` returns it to floats: BF16 bits to binary32; other dtypes are unchanged."""
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else x


def from_floats(values: Array, dtype: str) -> Array:
    """Round floats to F64, F32, F16 or, by way of binary32, the bits of BF16: to the nearest, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "BF16":
            return values.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype])
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def read_in_place(info: TensorInfo, known: FileIdentity) -> Array:
    """Read the tensor as a read-only C-contiguous array of its dtype's storage type.

    Raises InputError if the file is not the `known` one any more, before or after, or cannot be read.
    """
    out = np.empty(storage_shape(info.dtype, info.shape), DTYPES[info.dtype].storage)
    if info.nbytes:
        with _opened(info, known) as file:
            _fill(file, info, info.offset, out.reshape(-1).view(np.uint8).data)
    out.flags.writeable = False
    return out


def read_chunks(info: TensorInfo, known: FileIdentity, nbytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in place, `nbytes` at a time; each chunk lasts until the next one is read.

    Raises InputError like `read_in_place`.
    """
    if not info.nbytes:
        return
    buffer = memoryview(bytearray(min(nbytes, info.nbytes)))
    with _opened(info, known) as file:
        for begin in range(0, info.nbytes, nbytes):
            chunk = buffer[: info.nbytes - begin]
            _fill(file, info, info.offset + begin, chunk)
            yield chunk


def read_rows(info: TensorInfo, firsts: Sequence[int], rows: int, known: FileIdentity) -> Array:
    """Read `rows` rows from each of `firsts` on, leading dimensions folded into rows: [firsts, rows, columns]. The
    tensor must be in place; nothing else of the file is read.

    Raises InputError like `read_in_place`.
    """
    dtype = np.dtype(DTYPES[info.dtype].storage)
    columns = storage_shape(info.dtype, info.shape)[-1]
    out = np.empty((len(firsts), rows, columns), dtype)
    row_bytes = columns * dtype.itemsize
    if not out.size:
        return out
    with _opened(info, known) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), info.offset, info.nbytes, os.POSIX_FADV_RANDOM)
        for first, run in zip(firsts, out, strict=True):
            _fill(file, info, info.offset + first * row_bytes, memoryview(run).cast("B"))
    return out


def read_span(info: TensorInfo, begin: int, nbytes: int) -> Array:
    """Read the bytes that a tensor is decoded from, within `unchanged`."""
    out = np.empty(nbytes, np.uint8)
    with info.file.open("rb", buffering=0) as file:
        _fill(file, info, begin, out.data)
    return out


@contextmanager
def unchanged(info: TensorInfo, known: FileIdentity) -> Iterator[None]:
    """Raise InputError if a tensor's file is not the known one before the block or after it, or cannot be read."""
    try:
        check_unchanged(info.file, known, os.stat(info.file), info.name)
        yield
        check_unchanged(info.file, known, os.stat(info.file), info.name)
    except OSError as error:
        raise InputError(f"{printable(info.file)}: cannot be read: {printable(error)}.") from error


@contextmanager
def _opened(info: TensorInfo, known: FileIdentity) -> Iterator[io.FileIO]:
    """Open a tensor's file like `unchanged`: what is opened is looked at before, and what then has its name after."""
    name = os.fspath(info.file)
    try:
        with open(name, "rb", buffering=0) as file:
            check_unchanged(info.file, known, os.fstat(file.fileno()), info.name)
            yield file
        check_unchanged(info.file, known, os.stat(name), info.name)
    except OSError as error:
        raise InputError(f"{printable(info.file)}: cannot be read: {printable(error)}.") from error


def _fill(file: io.FileIO, info: TensorInfo, begin: int, buffer: memoryview) -> None:
    """Fill the buffer with the bytes of a tensor's file from `begin` on."""
    file.seek(begin)
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            end = f"it ends at byte {begin + done:,}, within the tensor"
            raise InputError(changed(info.file, end, info.name))
        done += count


def will_need(infos: Iterable[TensorInfo]) -> None:
    """Request that the system read ahead tensors that are in place; of a very large one only the beginning, which
    leaves room for what is in use.

    This is a hint: without support nothing happens.
    """
    for info in infos:
        if info.offset == IN_MEMORY or not hasattr(os, "posix_fadvise"):
            continue
        with suppress(OSError), info.file.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), info.offset, min(info.nbytes, AHEAD_BYTES), os.POSIX_FADV_WILLNEED)


LOCAL_HEADER_BYTES = 30
LOCAL_SIGNATURE = b"PK\x03\x04"


def member_start(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Return the position of a member's first byte, after its local header, name and extra field. Raises BadZipFile."""
    file.seek(member.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES or not header.startswith(LOCAL_SIGNATURE):
        raise zipfile.BadZipFile("a member has no local header")
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, LOCAL_HEADER_BYTES - 4)
    return member.header_offset + LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
