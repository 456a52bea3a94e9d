"""Tensor bytes of an opened source as numpy arrays: mapped in place, copied only if they must be."""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import IO

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, TensorInfo, storage_shape

AHEAD_BYTES = 1 << 30


def as_floats(x: Array, dtype: str) -> Array:
    """Convert an array as `read` returns it to floats: BF16 bits to binary32; other dtypes are unchanged."""
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else x


def read_in_place(info: TensorInfo) -> Array:
    """Read the tensor as a read-only C-contiguous array of its dtype's storage type.

    Each call maps this tensor alone, and the map is closed with the last array over it. A tensor that is not aligned to
    its element is copied. Raises InputError if the file has shrunk or vanished since it was opened.
    """
    dtype = np.dtype(DTYPES[info.dtype].storage)
    shape = storage_shape(info.dtype, info.shape)
    if info.nbytes == 0:
        return _frozen(np.empty(shape, dtype))
    try:
        with info.file.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < info.offset + info.nbytes:
                raise InputError(_changed(info, file))
            if info.offset % dtype.itemsize:
                return _frozen(
                    np.fromfile(file, dtype, info.nbytes // dtype.itemsize, offset=info.offset).reshape(shape)
                )
            start = info.offset - info.offset % mmap.ALLOCATIONGRANULARITY
            length = info.offset + info.nbytes - start
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
    except OSError as error:
        raise InputError(f"{printable(info.file)}: cannot be read: {printable(error)}.") from error
    count = info.nbytes // dtype.itemsize
    return np.frombuffer(mapped, dtype, count, info.offset - start).reshape(shape)


def read_rows(info: TensorInfo, firsts: Sequence[int], rows: int) -> Array:
    """Read `rows` rows from each of `firsts` on, leading dimensions folded into rows: [firsts, rows, columns], a copy.
    The tensor must be in place; nothing else of the file is read.

    Raises InputError like `read_in_place`.
    """
    dtype = np.dtype(DTYPES[info.dtype].storage)
    columns = storage_shape(info.dtype, info.shape)[-1]
    out = np.empty((len(firsts), rows, columns), dtype)
    row_bytes = columns * dtype.itemsize
    try:
        with info.file.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), info.offset, info.nbytes, os.POSIX_FADV_RANDOM)
            for first, run in zip(firsts, out, strict=True):
                _fill(file, info, first * row_bytes, memoryview(run).cast("B"))
    except OSError as error:
        raise InputError(f"{printable(info.file)}: cannot be read: {printable(error)}.") from error
    return out


def _fill(file: io.FileIO, info: TensorInfo, start: int, buffer: memoryview) -> None:
    """Fill the buffer with the bytes of a tensor from `start` on."""
    file.seek(info.offset + start)
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise InputError(_changed(info, file))
        done += count


def _changed(info: TensorInfo, file: io.FileIO) -> str:
    return (
        f"{printable(info.file)}: changed while in use: tensor '{printable(info.name)}' ends at "
        f"byte {info.offset + info.nbytes:,} and the file now has {os.fstat(file.fileno()).st_size:,}; run again once "
        "nothing writes it."
    )


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


def release_pages(array: Array) -> None:
    """Return a mapped array's memory to the system; the array stays valid and is read again when used.

    Does nothing for arrays that read_in_place did not map.
    """
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


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
