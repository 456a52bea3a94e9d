"""The CPU backend: numpy arrays in and out, one call of the compiled kernel each."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mxcli.backends import CPU
from mxcli.backends.abi import (
    STATS_ARRAYS,
    STATS_NUMBERS,
    Cut,
    KernelStats,
    Result,
    Tensor,
    kernel_scheme,
    load,
    rotation,
)
from mxcli.errors import RefusedError, UsageError
from mxcli.numerics.blocks import PerBlock, Quantized, folded, grid_shape, packed_columns
from mxcli.numerics.floats import FP32
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Amax, Histogram, Stats

Array = np.ndarray
TYPES = {"F32": (0, np.float32), "BF16": (1, np.uint16), "F16": (2, np.float16), "F64": (3, np.float64)}
"""Element types by their safetensors name: the kernels' number, and the numpy type of their bits."""
SOURCE_TYPES = tuple(TYPES)
"""The tensor types the kernel reads; BF16 arrives as the uint16 array of its bits."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor as a `Backend`; `threads` None is one per processor this process may use."""

    threads: int | None = None

    @property
    def name(self) -> str:
        """As `--device` takes it."""
        return CPU

    def amax(self, x: Array, dtype: str, hadamard: Hadamard | None = None) -> Amax:
        """Implement `Backend.amax`."""
        return amax(x, dtype, self.threads, hadamard)

    def quantize(
        self,
        x: Array,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        codes: bool = True,
        stats: bool = True,
        per_block: bool = False,
        reuse: Quantized | None = None,
    ) -> Quantized:
        """Implement `Backend.quantize`."""
        return quantize(
            x,
            dtype,
            scheme,
            tensor_amax=tensor_amax,
            stream=stream,
            codes=codes,
            stats=stats,
            per_block=per_block,
            threads=self.threads,
            reuse=reuse,
        )

    def quantize_both(self, x: Array, dtype: str, scheme: Scheme, *, stream: int = 0) -> tuple[Quantized, Quantized]:
        """Implement `Backend.quantize_both`."""
        return both_ways(partial(self.quantize, stream=stream, stats=False), x, dtype, scheme)

    def dequantize(self, q: Quantized, dtype: str = "F32") -> Array:
        """Implement `Backend.dequantize`."""
        return dequantize(q, dtype, self.threads)

    def quantize_dequantize(
        self,
        x: Array,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        out: Array | None = None,
    ) -> Array:
        """Implement `Backend.quantize_dequantize`."""
        return quantize_dequantize(
            x, dtype, scheme, tensor_amax=tensor_amax, stream=stream, out=out, threads=self.threads
        )


def thread_count(threads: int | None = None) -> int:
    """Return the requested number, or one per processor this process may use."""
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is not a positive number")
    if threads is not None:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def instruction_set() -> str:
    """Return the instruction set the kernel runs on here: `baseline`, `avx2` or `avx512`."""
    return str(load().mx_isa().decode())


def amax(x: Array, dtype: str, threads: int | None = None, hadamard: Hadamard | None = None) -> Amax:
    """Return the largest finite magnitude of `x`, whose elements are of safetensors type `dtype`; of its transform, if
    one is given."""
    nonfinite, first = ctypes.c_int64(0), ctypes.c_int64(-1)
    tensor, keep = _tensor(x, dtype, hadamard)
    value = load().mx_amax(tensor, thread_count(threads), nonfinite, first)
    del keep
    return Amax(value, nonfinite.value, first.value)


def quantize(
    x: Array,
    dtype: str,
    scheme: Scheme,
    *,
    tensor_amax: float | None = None,
    stream: int = 0,
    codes: bool = True,
    stats: bool = True,
    per_block: bool = False,
    threads: int | None = None,
    reuse: Quantized | None = None,
) -> Quantized:
    """Quantize `x` in one pass (two where the format has a tensor scale and `tensor_amax` is not given).

    `tensor_amax` is the largest finite magnitude of the set of tensors that share a tensor scale; where one block is
    the whole tensor, what its scale is made for (a history of steps has one). `stream` is that of a random rounding.
    Without `codes`
    only statistics are computed: `packed` and `scales` are empty. `reuse` gives up the arrays of an
    earlier result of the same shape and format, which saves the cost of fresh memory.
    """
    row = scheme.format
    if row.tensor_scale is not None and tensor_amax is None:
        tensor_amax = amax(x, dtype, threads, scheme.hadamard).value
    packed, scales = outputs(scheme, x.shape, codes=codes, reuse=reuse)
    blocks = per_block_arrays(scheme, x.shape) if per_block else None
    totals = KernelStats() if stats else None
    result = Result(codes=packed.ctypes.data if codes else None, scales=scales.ctypes.data if codes else None)
    if totals is not None:
        result.stats = ctypes.pointer(totals)
    if blocks is not None:
        for name in PerBlock.__slots__:
            setattr(result.per_block, name, getattr(blocks, name).ctypes.data)
    tensor, keep = _tensor(x, dtype, scheme.hadamard)
    given = -1.0 if tensor_amax is None else tensor_amax
    load().mx_quantize(kernel_scheme(scheme), tensor, given, scheme.seed, stream, thread_count(threads), result)
    del keep
    return Quantized(
        scheme,
        tuple(x.shape),
        packed,
        scales,
        result.decode if row.tensor_scale is not None else None,
        result.encode,
        _stats(totals) if totals is not None else None,
        blocks,
    )


def both_ways(
    quantize: Callable[[Array, str, Scheme], Quantized], x: Array, dtype: str, scheme: Scheme
) -> tuple[Quantized, Quantized]:
    """Return a tensor, and what comes of exchanging its last two dimensions, each quantized by itself."""
    return quantize(x, dtype, scheme), quantize(np.ascontiguousarray(np.swapaxes(x, -1, -2)), dtype, scheme)


def cut(shape: tuple[int, ...], scheme: Scheme) -> Cut:
    """Return how a tensor of a shape is cut into the chunks whose sums are added in order, on every device."""
    out = Cut()
    load().mx_cut(kernel_scheme(scheme), Tensor(None, 0, *folded(shape)), out)
    return out


def tensor_scales(scheme: Scheme, amax: float) -> tuple[float, float]:
    """Return the tensor's encode and decode scale under a recipe, from its largest finite magnitude."""
    nothing = quantize(np.empty((1, 0), np.float32), "F32", scheme, tensor_amax=amax, codes=False, stats=False)
    return nothing.tensor_encode, 1.0 if nothing.tensor_scale is None else nothing.tensor_scale


def dequantize(q: Quantized, dtype: str = "F32", threads: int | None = None) -> Array:
    """Return the values of a quantized tensor as F32 or F64, or rounded to nearest even as BF16 (uint16 bits) or
    F16."""
    if dtype not in TYPES:
        raise UsageError(f"dequantized type {dtype} is not one of {', '.join(TYPES)}")
    out = np.empty(q.shape, TYPES[dtype][1])
    packed, scales = np.ascontiguousarray(q.packed), np.ascontiguousarray(q.scales)
    tensor, _ = _tensor(out, dtype, q.scheme.hadamard)
    load().mx_dequantize(
        kernel_scheme(q.scheme),
        packed.ctypes.data,
        scales.ctypes.data,
        q.tensor_encode,
        1.0 if q.tensor_scale is None else q.tensor_scale,
        tensor,
        thread_count(threads),
    )
    return out


def quantize_dequantize(
    x: Array,
    dtype: str,
    scheme: Scheme,
    *,
    tensor_amax: float | None = None,
    stream: int = 0,
    out: Array | None = None,
    threads: int | None = None,
) -> Array:
    """Return the values of `x` under a scheme without its codes, in one pass (two as in `quantize`, and where one block
    is the whole tensor); `out` as in `Backend.quantize_dequantize`."""
    tensor, source = _tensor(x, dtype, scheme.hadamard)
    if scheme.format.tensor_scale is not None and tensor_amax is None:
        tensor_amax = amax(source, dtype, threads, scheme.hadamard).value
    made, target, kind = values_for(source.reshape(x.shape), dtype, out)
    values, _ = _tensor(target, kind)
    given = -1.0 if tensor_amax is None else tensor_amax
    load().mx_quantize_dequantize(
        kernel_scheme(scheme), tensor, given, scheme.seed, stream, values, thread_count(threads)
    )
    if target is not made:
        made[...] = target
    return made


def values_for(x: Array, dtype: str, out: Array | None) -> tuple[Array, Array, str]:
    """Return the array for the values of a contiguous tensor (`out`, or a new one in its type, of F64 in F32), the
    array that a kernel may write while it reads x, and their type."""
    if out is None:
        out = np.empty(x.shape, TYPES["F32" if dtype == "F64" else dtype][1])
    known = next((name for name, (_, kind) in TYPES.items() if out.dtype == kind), None)
    if known is None or out.shape != x.shape or not out.flags.writeable:
        raise UsageError(
            f"values of shape {list(x.shape)} do not go into an array of {out.dtype} and shape {list(out.shape)}: pass "
            f"a writable one of {', '.join(np.dtype(kind).name for _, kind in TYPES.values())} (uint16: BF16)"
        )
    # A block is written after it is read; another view of the elements could be written before.
    in_place = out.ctypes.data == x.ctypes.data and known == dtype
    if out.flags.c_contiguous and (in_place or not np.may_share_memory(out, x)):
        return out, out, known
    return out, np.empty(x.shape, out.dtype), known


def unpack(q: Quantized) -> Array:
    """Return one code per byte, in the tensor's shape."""
    batch, rows, columns = folded(q.shape)
    codes = np.empty(q.shape, np.uint8)
    packed = np.ascontiguousarray(q.packed)
    load().mx_unpack(packed.ctypes.data, batch * rows, columns, q.format.element.stored_bits, codes.ctypes.data)
    return codes


def bits_of(x: Array, dtype: str) -> Array:
    """Return the elements as kernels read them: contiguous, in the numpy type of their bits."""
    if dtype not in TYPES:
        raise UsageError(f"type {dtype} is not one the kernel reads: {', '.join(SOURCE_TYPES)}")
    return np.ascontiguousarray(x, dtype=TYPES[dtype][1])


def _tensor(x: Array, dtype: str, hadamard: Hadamard | None = None) -> tuple[Tensor, Array]:
    """Return the kernel's view of an array, and the array that must outlive it."""
    check_transform(x.shape, hadamard)
    contiguous = bits_of(x, dtype)
    return Tensor(contiguous.ctypes.data, TYPES[dtype][0], *folded(x.shape), rotation(hadamard)), contiguous


def check_transform(shape: tuple[int, ...], hadamard: Hadamard | None) -> None:
    """Raise RefusedError for a length that groups of a transform do not divide."""
    if hadamard is not None and shape[-1] % hadamard.size:
        raise RefusedError(
            f"a length of {shape[-1]} does not divide into groups of {hadamard.size} (Hadamard transform): cut it, or "
            "take another transform"
        )


def outputs(
    scheme: Scheme, shape: tuple[int, ...], *, codes: bool = True, reuse: Quantized | None = None
) -> tuple[Array, Array]:
    """Return the arrays for the codes and scales of a tensor, those of `reuse` where they fit; empty ones without
    `codes`."""
    row, (_, _, columns) = scheme.format, folded(shape)
    packed_shape = (*shape[:-1], packed_columns(row, columns)) if codes else (0,)
    if reuse is not None and reuse.packed.shape == packed_shape and reuse.format == row and codes:
        return reuse.packed, reuse.scales
    scale_type = np.float32 if row.scale is FP32 else np.uint8
    return np.empty(packed_shape, np.uint8), np.empty(grid_shape(row, shape) if codes else (0,), scale_type)


def per_block_arrays(scheme: Scheme, shape: tuple[int, ...]) -> PerBlock:
    """Return the arrays for the numbers of a tensor's blocks."""
    grid = grid_shape(scheme.format, shape)
    kinds = {
        "amax": np.float32,
        "decode": np.float32,
        "saturated": np.int32,
        "underflowed": np.int32,
        "noise": np.float64,
    }
    return PerBlock(**{name: np.zeros(grid, kind) for name, kind in kinds.items()})


def _stats(k: KernelStats) -> Stats:
    """Return the totals, taken out of memory all at once: a look-up by field would take longer than a small tensor
    does."""
    raw = bytes(k)
    values: dict[str, Any] = dict(
        zip(STATS_NUMBERS, struct.unpack_from("".join(STATS_NUMBERS.values()), raw), strict=True)
    )
    arrays = {name: raw[place.offset : place.offset + place.size] for name, place in STATS_ARRAYS.items()}
    worst = arrays.pop("worst")[: values.pop("worst_count") * struct.calcsize("dq")]
    values |= {name: Histogram.of(array) for name, array in arrays.items()}
    return Stats(**values, worst=tuple(struct.iter_unpack("dq", worst)))
