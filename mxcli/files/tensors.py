"""Dtypes as rows, and what a file header states about each tensor before any data is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mxcli.errors import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

IN_MEMORY = -1
MAX_DIMENSIONS = 32
LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class DType:
    """A safetensors dtype: its name, its width, the numpy dtype of the arrays returned for it, and whether it is a
    float."""

    name: str
    bits: int
    storage: str
    is_float: bool

    @property
    def storage_bytes(self) -> int:
        """Return the bytes of one storage element; programs that map a file need offsets to be multiples of it."""
        return max(self.bits // 8, 1)

    @property
    def is_raw(self) -> bool:
        """Return whether numpy lacks this float type, so that its bytes are returned as unsigned integers."""
        return self.is_float and not self.storage.startswith("<f")


_DTYPES = (
    DType("F64", 64, "<f8", True),
    DType("F32", 32, "<f4", True),
    DType("F16", 16, "<f2", True),
    DType("BF16", 16, "<u2", True),
    DType("F8_E4M3", 8, "|u1", True),
    DType("F8_E5M2", 8, "|u1", True),
    DType("F8_E4M3FNUZ", 8, "|u1", True),
    DType("F8_E5M2FNUZ", 8, "|u1", True),
    DType("F8_E8M0", 8, "|u1", True),
    DType("F6_E2M3", 6, "|u1", True),
    DType("F6_E3M2", 6, "|u1", True),
    DType("F4", 4, "|u1", True),
    DType("I64", 64, "<i8", False),
    DType("I32", 32, "<i4", False),
    DType("I16", 16, "<i2", False),
    DType("I8", 8, "|i1", False),
    DType("U64", 64, "<u8", False),
    DType("U32", 32, "<u4", False),
    DType("U16", 16, "<u2", False),
    DType("U8", 8, "|u1", False),
    DType("BOOL", 8, "|b1", False),
    DType("C64", 64, "<c8", False),
)
DTYPES: Mapping[str, DType] = {dtype.name: dtype for dtype in _DTYPES}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a source.

    `dtype` is a safetensors name and `shape` the logical shape (an F4 row of 16 counts 16, not 8). `offset` is the
    position of its first byte in `file`, or IN_MEMORY if the bytes must be decoded first (compressed, pickled,
    byte-swapped or transposed data). `nbytes` counts the bytes that `read` returns. `block_type` is the GGUF type of
    the blocks, empty for other tensors. `layer` is the module it was captured at, empty for uncaptured tensors.
    `reason` says why it has its role; empty if its name decided it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    file: Path
    offset: int
    nbytes: int
    block_type: str = ""
    layer: str = ""
    reason: str = ""

    @property
    def type_name(self) -> str:
        """Return the usual name of its type."""
        return self.block_type or self.dtype

    @property
    def elements(self) -> int:
        """Return the number of logical elements; 1 for a 0-dim tensor, 0 for an empty one."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a file that is not read: its name, what it is, and its tensors with their bytes."""

    name: str
    what: str
    tensors: int
    nbytes: int

    def __str__(self) -> str:
        return f"'{printable(self.name)}', {self.what} ({sized(self.tensors, self.nbytes)})"


def sized(tensors: int, nbytes: int) -> str:
    """Return number and bytes of tensors."""
    return f"{tensors:,} tensor{'' if tensors == 1 else 's'}, {nbytes:,} bytes"


@dataclass(frozen=True, slots=True)
class FileContents:
    """The contents of one file in file order, as every reader returns them.

    `decode` returns tensors whose offset is IN_MEMORY. `tied` maps a name to the earlier name it shares storage with.
    `left_out` are the parts of a training checkpoint that are not the model.
    """

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    decode: Callable[[TensorInfo], Array] | None = None
    left_out: tuple[LeftOut, ...] = ()


def storage_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in storage elements: the last dimension shrinks for dtypes below one byte.

    Raises ValueError if a row of such a dtype does not end on a byte.
    """
    bits = DTYPES[dtype].bits
    if bits >= 8:
        return shape
    multiple = 8 // gcd(bits, 8)
    last = shape[-1] if shape else 1
    if last % multiple:
        plural = "" if multiple * bits == 8 else "s"
        packing = f"{multiple} elements into {multiple * bits // 8} byte{plural}"
        raise ValueError(f"{dtype} packs {packing}, so its last dimension must be a multiple of {multiple}, not {last}")
    return (*shape[:-1], last * bits // 8)


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. Raises ValueError like storage_shape, and for more than numpy can hold."""
    stored = storage_shape(dtype, shape)
    if len(stored) > MAX_DIMENSIONS:
        raise ValueError(f"{len(stored)} dimensions; at most {MAX_DIMENSIONS} can be held")
    itemsize = DTYPES[dtype].storage_bytes
    nbytes = prod(stored) * itemsize
    # The sizes next to a 0 must be within the limit too.
    if nbytes > LARGEST or (nbytes == 0 and prod(size for size in stored if size) * itemsize > LARGEST):
        raise ValueError("its byte count overflows 2^63 - 1")
    return nbytes
