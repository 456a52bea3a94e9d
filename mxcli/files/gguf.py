"""GGUF files: the header, read without trusting any of it, and tensors in place.

`_HeaderReader` and `read_gguf` refuse hostile headers. Tensors of a block type (Q4_0, Q6_K, MXFP4, …) are bytes, blocks
along the last dimension, with the type's name.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np

from mxcli.errors import InputError, import_extra, printable, together
from mxcli.files.plain import foreign_content, read_head
from mxcli.files.roles import role_of
from mxcli.files.tensors import DTYPES, Array, FileContents, TensorInfo, byte_count

DECODED_DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


def gguf_package() -> ModuleType:
    """Import the package gguf. Raises EnvironmentFailure if it is not installed."""
    return import_extra("gguf", "reading and writing GGUF files")


@lru_cache(maxsize=1)
def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Return name, elements per block and bytes per block of every tensor type, by its number."""
    sizes = gguf_package().GGML_QUANT_SIZES
    return {int(kind): (kind.name, elements, nbytes) for kind, (elements, nbytes) in sizes.items()}


def shape_of_blocks(name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in elements of a tensor of a block type whose bytes have the shape `stored`."""
    _, elements, nbytes = next(row for row in block_sizes().values() if row[0] == name)
    return (*stored[:-1], stored[-1] // nbytes * elements)


def is_decoded(name: str) -> bool:
    """Return whether the package has a decoder for a block type."""
    _, _, nbytes = next(row for row in block_sizes().values() if row[0] == name)
    try:
        gguf_package().dequantize(np.zeros((1, nbytes), np.uint8), _type(name))
    except NotImplementedError:
        return False
    return True


def decode_blocks(blocks: Array, name: str, dtype: str) -> Array:
    """Decode blocks with the package to binary32, or rounded once to a dtype of DECODED_DTYPES."""
    values = gguf_package().dequantize(blocks, _type(name))
    if dtype == "F64":
        return np.asarray(values, np.float64)
    rounded = values if dtype == "F32" else gguf_package().quantize(values, _type(dtype))
    return np.ascontiguousarray(rounded).view(DECODED_DTYPES[dtype]).reshape(values.shape)


def _type(name: str) -> Any:
    return gguf_package().GGMLQuantizationType[name]


GGUF_NAMES = (
    "Names of GGUF files, which are llama.cpp's, are matched with those of Hugging Face for Llama, Mistral, Qwen2 and "
    "Qwen3 models only, experts not included."
)
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 100_000_000
MAX_NAME_BYTES = 1 << 16
MAX_NESTING = 4
ALIGNMENT, ALIGNMENT_KEY, MAX_ALIGNMENT = 32, "general.alignment", 1 << 20
WEIGHT, SCALE = ".weight", ".scale"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# Minimum bytes of a setting (empty name, type, one-byte value) and a tensor (empty name, one dimension, type, offset).
_PAIR_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor as a header lists it: sizes with the fastest dimension first, the number of its type, its offset in the
    data."""

    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header: its scalar settings (lists are left out), its tensors, and where their data begins."""

    settings: Mapping[str, Scalar]
    tensors: tuple[TensorHeader, ...]
    alignment: int
    data_start: int


def read_gguf(path: Path) -> FileContents:
    """Read the tensors of a file in their order; no tensor data is read.

    Raises InputError with every problem found: a file that is truncated, empty or of another kind, counts and lengths
    beyond its end, duplicate names and keys, unknown types, sizes that are not whole blocks, and offsets other than
    those that the tensors' sizes give. Raises EnvironmentFailure without the package gguf.
    """
    header, size = _header(path)
    shown, problems, tensors = printable(path), list[str](), list[TensorInfo]()
    reached = 0
    for stored in header.tensors:
        try:
            info = _info(path, stored, header.data_start)
            if stored.offset != reached:
                raise ValueError(f"begins at {stored.offset:,} of the data; the tensor before it ends at {reached:,}")
        except ValueError as fault:
            problems.append(f"{shown}: tensor '{printable(stored.name)}': {fault}.")
            break
        tensors.append(info)
        reached = stored.offset + -(-info.nbytes // header.alignment) * header.alignment
    counted = Counter(stored.name for stored in header.tensors)
    problems += [f"{shown}: '{printable(name)}' occurs twice in its header." for name, n in counted.items() if n > 1]
    end = max((info.offset + info.nbytes for info in tensors), default=header.data_start)
    if not problems and end > size:
        problems.append(
            f"{shown}: truncated: the header describes {end:,} bytes and the file has {size:,} ({end - size:,} "
            "missing); download it again."
        )
    if problems:
        raise together(InputError, shown, problems)
    after = size - header.data_start - reached
    notes = (f"{shown}: {after:,} bytes after the last tensor belong to no tensor.",) if after > 0 else ()
    return FileContents(_with_scales(tensors), notes=(*_block_notes(path, tensors), *notes))


def read_settings(path: Path) -> Mapping[str, Scalar]:
    """Read the scalar settings of a file. Raises InputError if its header cannot be read."""
    return _header(path)[0].settings


def _header(path: Path) -> tuple[GgufHeader, int]:
    """Return the header and the size of the file."""
    head, size = read_head(path)
    shown = printable(path)
    if not head.startswith(MAGIC):
        raise InputError(
            foreign_content(path, head, size)
            or f"{shown}: not a GGUF file: it begins with {head[: len(MAGIC)]!r}, not {MAGIC!r}."
        )
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _parsed(_HeaderReader(file, size)), size
    except ValueError as fault:
        raise InputError(f"{shown}: {fault}.") from fault
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {printable(error)}.") from error


def _parsed(cursor: _HeaderReader) -> GgufHeader:
    cursor.number("4s", "its first bytes")
    version = int(cursor.number("I", "its version"))
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "big-endian numbers" if swapped else f"version {version}"
        raise ValueError(f"a GGUF file of {what}; little-endian ones of versions 2 and 3 can be read")
    tensor_count = cursor.count("tensors", _TENSOR_BYTES)
    pair_count = cursor.count("settings", _PAIR_BYTES)
    settings: dict[str, Scalar] = {}
    seen: set[str] = set()
    for _ in range(pair_count):
        key = cursor.text("the name of a setting", MAX_NAME_BYTES)
        if key in seen:
            raise ValueError(f"the setting '{printable(key)}' occurs twice")
        seen.add(key)
        value = cursor.value(int(cursor.number("I", f"the type of '{printable(key)}'")), f"'{printable(key)}'")
        if value is not None:
            settings[key] = value
    alignment = settings.get(ALIGNMENT_KEY, ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"{ALIGNMENT_KEY} is {printable(alignment)}; it must be a power of two")
    tensors = tuple(cursor.tensor() for _ in range(tensor_count))
    return GgufHeader(settings, tensors, alignment, -(-cursor.at // alignment) * alignment)


class _HeaderReader:
    """A reader of a header from front to back; raises ValueError for anything beyond the end."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size
        self._end = min(size, MAX_HEADER_BYTES)
        self.at = 0

    def number(self, layout: str, what: str) -> Scalar:
        found: Scalar = struct.unpack("<" + layout, self._take(struct.calcsize("<" + layout), what))[0]
        return found

    def count(self, what: str, least_bytes: int) -> int:
        """Read a count of items that take at least `least_bytes` each."""
        number = int(self.number("Q", f"the number of {what}"))
        if number * least_bytes > self._end - self.at:
            raise ValueError(f"its header states {number:,} {what}, which its {self._limit} cannot hold")
        return number

    def text(self, what: str, most_bytes: int = MAX_HEADER_BYTES) -> str:
        length = int(self.number("Q", what))
        if length > most_bytes:
            raise ValueError(f"{what} is {length:,} bytes long; the limit is {most_bytes:,}")
        at, content = self.at, self._take(length, what)
        try:
            return str(content, "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} at byte {at:,} is not valid UTF-8") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Scalar | None:
        """Read a value; None for a list, which is skipped."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _TEXT:
            return self.text(what)
        if kind != _LIST:
            raise ValueError(f"{what} is of the unknown type {kind}")
        if depth == MAX_NESTING:
            raise ValueError(f"{what} is lists in lists, more than {MAX_NESTING} deep")
        inner = int(self.number("I", what))
        if inner in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[inner])
            self._skip(self.count(f"values of {what}", width) * width, what)
            return None
        for _ in range(self.count(f"values of {what}", struct.calcsize("<Q"))):
            if inner == _TEXT:
                self._skip(int(self.number("Q", what)), what)
            else:
                self.value(inner, what, depth + 1)
        return None

    def tensor(self) -> TensorHeader:
        name = self.text("the name of a tensor", MAX_NAME_BYTES)
        what = f"tensor '{printable(name)}'"
        sizes = tuple(int(self.number("Q", what)) for _ in range(self._dimensions(what)))
        return TensorHeader(name, sizes, int(self.number("I", what)), int(self.number("Q", what)))

    def _dimensions(self, what: str) -> int:
        dimensions = int(self.number("I", what))
        if dimensions * struct.calcsize("<Q") > self._end - self.at:
            raise ValueError(f"{what} has {dimensions:,} dimensions, which its {self._limit} cannot hold")
        return dimensions

    @property
    def _limit(self) -> str:
        return f"{self._end:,} bytes"

    def _take(self, nbytes: int, what: str) -> bytes:
        """Return the next bytes."""
        self._check(nbytes, what)
        found = self._file.read(nbytes)
        if len(found) < nbytes:
            raise ValueError(f"changed while in use: its header ends at byte {self.at + len(found):,}")
        self.at += nbytes
        return found

    def _skip(self, nbytes: int, what: str) -> None:
        self._check(nbytes, what)
        self.at += nbytes
        self._file.seek(self.at)

    def _check(self, nbytes: int, what: str) -> None:
        if nbytes > self._end - self.at:
            cut = "truncated" if self._end == self._size else f"longer than {MAX_HEADER_BYTES:,} bytes"
            raise ValueError(f"its header is {cut}: {what} needs {nbytes:,} bytes from byte {self.at:,} on")


def _info(path: Path, stored: TensorHeader, data_start: int) -> TensorInfo:
    """Return a tensor of the file. Raises ValueError for an invalid type or sizes."""
    known = block_sizes().get(stored.kind)
    if known is None:
        raise ValueError(f"its type {stored.kind} is unknown to this version of the package gguf")
    kind, elements, nbytes = known
    shape = tuple(reversed(stored.sizes))
    if kind in DTYPES:
        offset, size = data_start + stored.offset, byte_count(kind, shape)
        return TensorInfo(stored.name, kind, shape, role_of(stored.name, shape, kind), path, offset, size)
    columns = shape[-1] if shape else 1
    if columns % elements:
        raise ValueError(f"its rows of {columns:,} are not whole blocks of {elements} ({kind})")
    packed = (*shape[:-1], columns // elements * nbytes)
    offset, size = data_start + stored.offset, byte_count("U8", packed)
    return TensorInfo(stored.name, "U8", packed, "codes", path, offset, size, block_type=kind)


def _with_scales(tensors: list[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Set the role of `x.scale` next to a blocked `x.weight` to scale."""
    weights = {info.name.removesuffix(WEIGHT) for info in tensors if info.block_type and info.name.endswith(WEIGHT)}
    return tuple(
        replace(info, role="scale") if info.name.removesuffix(SCALE) in weights and info.name.endswith(SCALE) else info
        for info in tensors
    )


def _block_notes(path: Path, tensors: list[TensorInfo]) -> list[str]:
    """Return one sentence on the block types in the file."""
    counts = Counter(info.block_type for info in tensors if info.block_type)
    if not counts:
        return []
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
    return [
        f"{printable(path.name)}: blocks of GGUF types are read as bytes: {kinds}; shapes and elements count bytes."
    ]
