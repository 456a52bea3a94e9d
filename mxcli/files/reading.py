"""Tensor bytes of an opened source as numpy arrays: mapped where they lie, copied only where they must be."""

from __future__ import annotations

import mmap
import os

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.tensors import DTYPES, Array, TensorInfo, storage_shape


def read_in_place(info: TensorInfo) -> Array:
    """The tensor as a read-only C-contiguous array of its dtype's storage type.

    Each call maps the tensor alone and the map is closed with the last array over it, so nothing accumulates.
    A tensor that is not aligned to its element is copied. Raises InputError if the file has shrunk or
    vanished since it was opened.
    """
    dtype = np.dtype(DTYPES[info.dtype].storage)
    shape = storage_shape(info.dtype, info.shape)
    if info.nbytes == 0:
        return _frozen(np.empty(shape, dtype))
    try:
        with info.file.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = info.offset + info.nbytes
            if size < end:
                raise InputError(
                    f"{printable(info.file)}: changed while in use: tensor '{printable(info.name)}' ends at "
                    f"byte {end:,} and the file now has {size:,}; run again on a file at rest."
                )
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


def release_pages(array: Array) -> None:
    """Give a mapped array's memory back to the system; it stays valid and is read again when touched.

    Does nothing for arrays that are not mapped by read_in_place.
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
