""".npy and .npz files, read without pickles: arrays are read in place if possible, else decoded."""

from __future__ import annotations

import ast
import lzma
import re
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np

from mxcli.errors import InputError, printable, together
from mxcli.files.plain import foreign_content, read_head
from mxcli.files.reading import member_start, read_span
from mxcli.files.roles import role_of
from mxcli.files.tensors import DTYPES, IN_MEMORY, LARGEST, Array, FileContents, TensorInfo, byte_count

NAMES = {np.dtype(dtype.storage): dtype.name for dtype in DTYPES.values() if not dtype.is_raw}
NAMED = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Types that numpy lacks, by their names in ml_dtypes; a type with a single field of that name is one too."""
DESCRIBED = {**NAMED, "<V2": "BF16", "<f1": "F8_E5M2"}
"""The same as headers spell them. ml_dtypes saves one type as <V2 and one as <f1, but a dozen as <V1; |V2 and |V1 are
numpy's plain bytes."""
UNREADABLE = (ValueError, TypeError, RecursionError, EOFError, OSError)
UNREADABLE_MEMBER = (
    *UNREADABLE,
    ArithmeticError,
    LookupError,
    RuntimeError,
    lzma.LZMAError,
    struct.error,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
)
"""What the packages raise for a damaged archive or member."""
MAGIC = b"\x93NUMPY"
LENGTHS = {(1, 0): "<H", (2, 0): "<I"}
MAX_HEADER_BYTES = 1 << 16
FIELDS = {"descr", "fortran_order", "shape"}
DAMAGED = "its .npy header is damaged; write it again"
MOST_DEFLATED = 1032
"""The most bytes that a byte of a deflated member stands for."""
_LONG = re.compile(r"\b(\d+)L\b")
"""An integer as Python 2 wrote it."""


class _NpyHeader:
    """A parsed .npy header: dtype, order, shape and the position of the data in the stream."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.shape, self.fortran, described = _header(stream)
        self.start = stream.tell()
        self.dtype, self.name = _type_of(described)
        self.swapped = self.dtype.newbyteorder("<") != self.dtype
        self.nbytes = byte_count(self.name, self.shape)

    @property
    def in_place(self) -> bool:
        """Return whether the stored bytes are C-ordered and little-endian."""
        return not self.swapped and (not self.fortran or len(self.shape) < 2)


def _type_of(described: Any) -> tuple[np.dtype[Any], str]:
    """Return the numpy dtype of the stored bytes that a header describes, and the name of their type. Raises ValueError
    for types that are not read."""
    if isinstance(described, str) and described in DESCRIBED:
        name = DESCRIBED[described]
        return np.dtype(DTYPES[name].storage), name
    try:
        dtype = np.dtype(described if isinstance(described, str) else list(described))
    except (*UNREADABLE, SyntaxError, MemoryError) as error:
        raise ValueError(f"dtype {printable(described)} is unknown") from error
    if dtype.hasobject:
        raise ValueError("holds Python objects, which only a pickle can load; save plain numbers")
    native = dtype.newbyteorder("<")
    if native in NAMES:
        return dtype, NAMES[native]
    if (field := _sole_field(dtype)) is not None:
        return field
    if dtype.kind == "V" and dtype.names is None and dtype.itemsize in (1, 2):
        raise ValueError(_unstated(printable(described), dtype.itemsize))
    raise ValueError(f"dtype {printable(dtype)} has no safetensors counterpart; convert it to float32")


def _sole_field(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], str] | None:
    """Return the dtype of a single field with the name of a type, and that type; None for others."""
    (only, *others) = dtype.names or ("",)
    if others or only not in NAMED or dtype.fields is None:
        return None
    stored, of_type = dtype.fields[only][0], np.dtype(DTYPES[NAMED[only]].storage)
    if dtype.itemsize != of_type.itemsize or stored.itemsize != of_type.itemsize or stored.kind not in "uV":
        return None
    return of_type.newbyteorder(stored.byteorder) if stored.kind == "u" else of_type, NAMED[only]


def _unstated(described: str, nbytes: int) -> str:
    """Return a refusal of plain bytes, with the way to state their type."""
    name = next(name for name, dtype in NAMED.items() if DTYPES[dtype].storage_bytes == nbytes)
    return (
        f"dtype {described} does not state which type its {nbytes * 8} bits are; save it with the type's name, such as "
        f"array.view([('{name}', 'u{nbytes}')])"
    )


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Read shape, Fortran order and the description of the type, without numpy's own parser, which trusts their types.
    Raises ValueError."""
    magic = _exactly(stream, len(MAGIC) + 2)
    version = magic[-2], magic[-1]
    if not magic.startswith(MAGIC):
        raise ValueError(DAMAGED)
    if version not in LENGTHS:
        raise ValueError(f"version {version[0]}.{version[1]} of the .npy format is not supported")
    (length,) = struct.unpack(LENGTHS[version], _exactly(stream, struct.calcsize(LENGTHS[version])))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its .npy header states {length:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
    text = _LONG.sub(r"\1", _exactly(stream, length).decode("latin1").strip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = ast.literal_eval(text)
    except (*UNREADABLE, SyntaxError, MemoryError) as error:
        raise ValueError(DAMAGED) from error
    if not isinstance(parsed, dict) or set(map(str, parsed)) != FIELDS:
        raise ValueError(f"its .npy header needs {', '.join(sorted(FIELDS))} and nothing else; write it again")
    shape, fortran, described = parsed["shape"], parsed["fortran_order"], parsed["descr"]
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size <= LARGEST for size in shape):
        raise ValueError(f"shape {printable(shape)} must be a tuple of whole numbers from 0 to 2^63 - 1")
    if not isinstance(fortran, bool):
        raise ValueError(f"fortran_order {printable(fortran)} must be True or False")
    return shape, fortran, described


def _exactly(stream: IO[bytes], nbytes: int) -> bytes:
    """Read that many bytes. Raises ValueError if there are fewer."""
    found = stream.read(nbytes)
    if len(found) < nbytes:
        raise ValueError(DAMAGED)
    return found


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
        stored = read_span(info, header.start, header.nbytes).view(header.dtype)
        return _plain(stored.reshape(header.shape, order="F" if header.fortran else "C"))

    return FileContents((info,), decode=decode)


def read_npz(path: Path) -> FileContents:
    """Read the .npy members of a .npz file under their own names. Raises InputError with every problem found."""
    head, size = read_head(path)
    shown = printable(path)
    if not head.startswith(b"PK"):
        raise InputError(foreign_content(path, head, size) or f"{shown}: not a .npz file.")
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return _members(path, archive, file, size)
    except UNREADABLE_MEMBER as error:
        raise InputError(f"{shown}: truncated or damaged zip archive: {printable(error)}.") from error


def _members(path: Path, archive: zipfile.ZipFile, file: IO[bytes], size: int) -> FileContents:
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
            stored = member.compress_type == zipfile.ZIP_STORED
            most = member.compress_size * (1 if stored else MOST_DEFLATED)
            if member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) and member.file_size > most:
                raise ValueError(f"needs {member.file_size:,} bytes, which its {member.compress_size:,} cannot hold")
            offset = member_start(file, member) + header.start if stored and header.in_place else IN_MEMORY
            if offset != IN_MEMORY and offset + header.nbytes > size:
                raise ValueError(f"ends at byte {offset + header.nbytes:,} and the file has {size:,}")
        except UNREADABLE_MEMBER as error:
            problems.append(f"{shown}: tensor '{printable(name)}': {printable(error)}.")
            continue
        tensors.append(_info(path, name, header, offset))
        names[name] = member.filename
    if problems:
        raise together(InputError, shown, problems)
    others = len(archive.infolist()) - len(members)
    notes = (f"{shown}: {others} members that are not .npy arrays are not read.",) if others else ()

    def decode(info: TensorInfo) -> Array:
        try:
            with zipfile.ZipFile(path) as again, again.open(names[info.name]) as stream:
                header = _NpyHeader(stream)
                stored = np.frombuffer(_exactly(stream, header.nbytes), header.dtype)
                return _plain(stored.reshape(header.shape, order="F" if header.fortran else "C"))
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
