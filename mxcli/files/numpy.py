""".npy and .npz files, read without pickles: arrays are mapped in place if possible, else decoded."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np

from mxcli.errors import InputError, printable, together
from mxcli.files.plain import foreign_content, read_head
from mxcli.files.reading import member_start
from mxcli.files.roles import role_of
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, FileContents, TensorInfo, byte_count

NAMES = {np.dtype(dtype.storage): dtype.name for dtype in DTYPES.values() if not dtype.is_raw}
UNREADABLE = (ValueError, TypeError, RecursionError, EOFError, OSError)
UNREADABLE_MEMBER = (*UNREADABLE, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class _NpyHeader:
    """A parsed .npy header: dtype, order, shape and the position of the data in the stream."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.shape, self.fortran, self.dtype = _header(stream)
        self.start = stream.tell()
        if self.dtype.hasobject:
            raise ValueError("holds Python objects, which only a pickle can load; save plain numbers")
        native = self.dtype.newbyteorder("<")
        if native not in NAMES:
            raise ValueError(f"dtype {self.dtype} has no safetensors counterpart; convert it to float32")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {self.shape} has a negative dimension")
        self.name = NAMES[native]
        self.swapped = native != self.dtype
        self.nbytes = byte_count(self.name, self.shape)

    @property
    def in_place(self) -> bool:
        """Return whether the stored bytes are C-ordered and little-endian."""
        return not self.swapped and (not self.fortran or len(self.shape) < 2)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, Fortran order and dtype. Raises ValueError, with the same words for any damage."""
    try:
        version = np.lib.format.read_magic(stream)
        parse = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        parsed = parse(stream) if parse else None
    except UNREADABLE as error:
        raise ValueError("its .npy header is damaged; write it again") from error
    if parsed is None:
        raise ValueError(f"version {version[0]}.{version[1]} of the .npy format is not supported")
    return parsed


def read_npy(path: Path) -> FileContents:
    """Read the tensor of a .npy file, named after the file. Raises InputError for objects, damage and odd dtypes."""
    head, size = read_head(path)
    shown = printable(path)
    if not head.startswith(b"\x93NUMPY"):
        raise InputError(foreign_content(path, head, size) or f"{shown}: not a .npy file.")
    try:
        with path.open("rb") as file:
            header = _NpyHeader(file)
    except UNREADABLE as error:
        raise InputError(f"{shown}: {printable(error)}.") from error
    if size != header.start + header.nbytes:
        fault = "truncated" if size < header.start + header.nbytes else "too long"
        raise InputError(f"{shown}: {fault}: its header needs {header.start + header.nbytes:,} bytes, it has {size:,}.")
    info = _info(path, path.stem, header, header.start if header.in_place else IN_MEMORY)

    def decode(info: TensorInfo) -> Array:
        return _plain(np.load(path, mmap_mode="r" if info.nbytes else None, allow_pickle=False))

    return FileContents((info,), decode=decode)


def read_npz(path: Path) -> FileContents:
    """Read the .npy members of a .npz file under their own names. Raises InputError with every problem found."""
    head, size = read_head(path)
    shown = printable(path)
    if not head.startswith(b"PK"):
        raise InputError(foreign_content(path, head, size) or f"{shown}: not a .npz file.")
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return _members(path, archive, file)
    except UNREADABLE_MEMBER as error:
        raise InputError(f"{shown}: truncated or damaged zip archive: {printable(error)}.") from error


def _members(path: Path, archive: zipfile.ZipFile, file: IO[bytes]) -> FileContents:
    members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    shown, problems, tensors = printable(path), [], []
    counted = Counter(member.filename for member in members)
    problems += [f"{shown}: '{printable(name)}' occurs twice." for name, count in counted.items() if count > 1]
    names: dict[str, str] = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        try:
            with archive.open(member) as stream:
                header = _NpyHeader(stream)
            if member.file_size != header.start + header.nbytes:
                raise ValueError(f"needs {header.start + header.nbytes:,} bytes and has {member.file_size:,}")
        except UNREADABLE_MEMBER as error:
            problems.append(f"{shown}: tensor '{printable(name)}': {printable(error)}.")
            continue
        stored = member.compress_type == zipfile.ZIP_STORED and header.in_place
        offset = member_start(file, member) + header.start if stored else IN_MEMORY
        tensors.append(_info(path, name, header, offset))
        names[name] = member.filename
    if problems:
        raise together(InputError, shown, problems)
    others = len(archive.infolist()) - len(members)
    notes = (f"{shown}: {others} members that are not .npy arrays are not read.",) if others else ()

    def decode(info: TensorInfo) -> Array:
        try:
            with zipfile.ZipFile(path) as again, again.open(names[info.name]) as stream:
                return _plain(np.lib.format.read_array(stream, allow_pickle=False))
        except UNREADABLE_MEMBER as error:
            raise InputError(f"{shown}: tensor '{printable(info.name)}': {printable(error)}.") from error

    return FileContents(tuple(tensors), notes=notes, decode=decode)


def _info(path: Path, name: str, header: _NpyHeader, offset: int) -> TensorInfo:
    shape = tuple(header.shape)
    role = role_of(name, shape, header.name)
    return TensorInfo(name, header.name, shape, role, path, offset, header.nbytes)


def _plain(array: Array) -> Array:
    """Return the values as a read-only little-endian C-contiguous array."""
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(array.shape)
    plain.flags.writeable = False
    return plain
