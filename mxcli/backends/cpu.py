"""The CPU backend: numpy arrays in and out, one call of the compiled kernel each."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import numpy as np

from mxcli.backends.library import Float, KernelRecipe, KernelStats, Result, Rounding, Tensor, load
from mxcli.errors import UsageError
from mxcli.numerics.blocks import PerBlock, Quantized, folded, grid_shape, packed_columns
from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.recipe import Recipe
from mxcli.numerics.rounding import ScaleRecipe, ScaleRounding
from mxcli.numerics.stats import Histogram, Stats

Array = np.ndarray
_TYPES = {"F32": (0, np.float32), "BF16": (1, np.uint16), "F16": (2, np.float16), "F64": (3, np.float64)}
SOURCE_TYPES = tuple(_TYPES)
"""The tensor types the kernel reads; BF16 arrives as the uint16 array of its bits."""
_POWER_OF_TWO, _MINIFLOAT, _BINARY32 = 0, 1, 2


def thread_count(threads: int | None = None) -> int:
    """The number asked for, or one per processor this process may use."""
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is not a positive number")
    if threads is not None:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def instruction_set() -> str:
    """The instruction set the kernel runs on here: `baseline`, `avx2` or `avx512`."""
    return str(load().mx_isa().decode())


@dataclass(frozen=True, slots=True)
class Amax:
    """Largest finite magnitude of a tensor; how many NaN and infinities it holds, and where the first lies (or -1)."""

    value: float
    nonfinite: int
    first_nonfinite: int


def amax(x: Array, dtype: str, threads: int | None = None) -> Amax:
    """The largest finite magnitude of `x`, whose elements are of safetensors type `dtype`."""
    nonfinite, first = ctypes.c_int64(0), ctypes.c_int64(-1)
    tensor, keep = _tensor(x, dtype)
    value = load().mx_amax(tensor, thread_count(threads), nonfinite, first)
    del keep
    return Amax(value, nonfinite.value, first.value)


def quantize(
    x: Array,
    dtype: str,
    recipe: Recipe,
    *,
    tensor_amax: float | None = None,
    codes: bool = True,
    stats: bool = True,
    per_block: bool = False,
    threads: int | None = None,
    reuse: Quantized | None = None,
) -> Quantized:
    """Quantizes `x` in one pass (two where the format has a tensor scale and `tensor_amax` is not given).

    `tensor_amax` is the largest finite magnitude of the set of tensors that share a tensor scale. Without `codes`
    only statistics are computed: `packed` and `scales` are empty. `reuse` gives up the arrays of an
    earlier result of the same shape and format, which saves the cost of fresh memory.
    """
    row, grid = recipe.format, grid_shape(recipe.format, x.shape)
    _, _, columns = folded(x.shape)
    if row.tensor_scale is not None and tensor_amax is None:
        tensor_amax = amax(x, dtype, threads).value
    packed_shape = (*x.shape[:-1], packed_columns(row, columns)) if codes else (0,)
    scale_type = np.float32 if row.scale is FP32 else np.uint8
    if reuse is not None and reuse.packed.shape == packed_shape and reuse.format == row and codes:
        packed, scales = reuse.packed, reuse.scales
    else:
        packed, scales = np.empty(packed_shape, np.uint8), np.empty(grid if codes else (0,), scale_type)
    blocks = _per_block_arrays(grid) if per_block else None
    totals = KernelStats() if stats else None
    result = Result(codes=packed.ctypes.data if codes else None, scales=scales.ctypes.data if codes else None)
    if totals is not None:
        result.stats = ctypes.pointer(totals)
    if blocks is not None:
        for name in PerBlock.__slots__:
            setattr(result.per_block, name, getattr(blocks, name).ctypes.data)
    tensor, keep = _tensor(x, dtype)
    load().mx_quantize(_kernel_recipe(recipe), tensor, tensor_amax or 0.0, thread_count(threads), result)
    del keep
    return Quantized(
        recipe,
        tuple(x.shape),
        packed,
        scales,
        result.decode if row.tensor_scale is not None else None,
        result.encode,
        _stats(totals) if totals is not None else None,
        blocks,
    )


def dequantize(q: Quantized, dtype: str = "F32", threads: int | None = None) -> Array:
    """The values of a quantized tensor as F32 or F64, or rounded to nearest even as BF16 (uint16 bits) or F16."""
    if dtype not in _TYPES:
        raise UsageError(f"dequantized type {dtype} is not one of {', '.join(_TYPES)}")
    out = np.empty(q.shape, _TYPES[dtype][1])
    packed, scales = np.ascontiguousarray(q.packed), np.ascontiguousarray(q.scales)
    tensor, _ = _tensor(out, dtype)
    load().mx_dequantize(
        _kernel_recipe(q.recipe),
        packed.ctypes.data,
        scales.ctypes.data,
        q.tensor_encode,
        1.0 if q.tensor_scale is None else q.tensor_scale,
        tensor,
        thread_count(threads),
    )
    return out


def unpack(q: Quantized) -> Array:
    """One code per byte, in the tensor's shape."""
    batch, rows, columns = folded(q.shape)
    codes = np.empty(q.shape, np.uint8)
    packed = np.ascontiguousarray(q.packed)
    load().mx_unpack(packed.ctypes.data, batch * rows, columns, q.format.element.stored_bits, codes.ctypes.data)
    return codes


def _tensor(x: Array, dtype: str) -> tuple[Tensor, Array]:
    """The kernel's view of an array, and the array that must outlive it."""
    if dtype not in _TYPES:
        raise UsageError(f"type {dtype} is not one the kernel reads: {', '.join(SOURCE_TYPES)}")
    number, storage = _TYPES[dtype]
    contiguous = np.ascontiguousarray(x, dtype=storage)
    batch, rows, columns = folded(x.shape)
    return Tensor(contiguous.ctypes.data, number, batch, rows, columns), contiguous


def _float(f: FloatFormat) -> Float:
    if f is FP32:
        return Float(max=f.max)
    return Float(f.bits, f.mantissa_bits, f.emin, f.emax, f.nan_code or 0, f.twos_complement, f.max)


def _kernel_recipe(recipe: Recipe) -> KernelRecipe:
    row, rule, choice = recipe.format, recipe.scale_rule, recipe.choice
    rows, columns = row.block
    k = KernelRecipe(
        element=_float(row.element),
        scale=_float(row.scale),
        rounding=Rounding(recipe.rounding.above, recipe.rounding.half_if, recipe.rounding.half_always),
        scale_stored_bits=row.scale.bits,
        block_rows=rows or 0,
        block_columns=columns or 0,
        stored_bits=row.element.stored_bits,
        min_exponent=choice.min_exponent,
        byte0_exponent=choice.byte0_exponent.get(rule.name, -127),
        flush_subnormal_blocks=choice.flush_subnormal_blocks,
        clear_zero_input=choice.clear_zero_input,
        clear_zero_code=choice.clear_zero_code,
        set_zero_input=choice.set_zero_input,
        infinity_is_nan=recipe.infinity_is_nan,
    )
    if isinstance(rule, ScaleRounding):
        k.scale_kind = _POWER_OF_TWO
        k.of_ratio = rule.of_ratio
        k.carry_above = rule.carry_above(row.element)
        k.candidate_count = len(rule.candidates)
        k.candidates[: len(rule.candidates)] = rule.candidates
    else:
        _set_scale_recipe(k, rule, has_tensor_scale=row.tensor_scale is not None, binary32=row.scale is FP32)
    return k


def _set_scale_recipe(k: KernelRecipe, rule: ScaleRecipe, *, has_tensor_scale: bool, binary32: bool) -> None:
    k.scale_kind = _BINARY32 if binary32 else _MINIFLOAT
    k.tensor_step = rule.tensor_step if has_tensor_scale else 0
    k.block_step = rule.block_step
    k.element_step = rule.element_step
    k.min_scale = rule.min_scale
    k.zero_scale = rule.zero_scale
    k.zero_code = rule.zero_code
    k.bf16_scale = rule.bf16_scale
    k.clear_zero_input |= rule.clear_zero_input


def _per_block_arrays(grid: tuple[int, ...]) -> PerBlock:
    kinds = {
        "amax": np.float32,
        "decode": np.float32,
        "saturated": np.int32,
        "underflowed": np.int32,
        "noise": np.float64,
    }
    return PerBlock(**{name: np.zeros(grid, kind) for name, kind in kinds.items()})


def _stats(k: KernelStats) -> Stats:
    values: dict[str, object] = {}
    for name in Stats.__slots__:
        value = getattr(k, name)
        values[name] = Histogram.of(bytes(value)) if name.endswith("_bins") else value
    values["worst"] = tuple((w.noise, w.block) for w in k.worst[: k.worst_count])
    return Stats(**values)  # type: ignore[arg-type]
