"""The compiled CPU kernel: its place, and the C structures of `kernels/quantize.h` field by field."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Iterator
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import mxcli
from mxcli.errors import EnvironmentFailure
from mxcli.numerics import stats
from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.mantissa_rules import MantissaScaleRule
from mxcli.numerics.scale_rules import ElementRounding, PowerOfTwoScaleRule
from mxcli.numerics.scheme import Scheme

_NAME = {"darwin": "libmxcli_cpu.dylib", "win32": "mxcli_cpu.dll"}.get(sys.platform, "libmxcli_cpu.so")


class Float(ctypes.Structure):
    """`MxFloat`: a scalar format."""

    _fields_ = (
        *((name, c_int32) for name in ("bits", "mantissa_bits", "emin", "emax", "nan_code", "twos_complement")),
        ("max", c_float),
    )


class Rounding(ctypes.Structure):
    """`MxRounding`: an element rounding."""

    _fields_ = (("above", c_float), *((name, c_int32) for name in ("half_if", "half_always", "is_random")))


class KernelScheme(ctypes.Structure):
    """`MxScheme`: a way to quantize as numbers."""

    _fields_ = (
        ("element", Float),
        ("scale", Float),
        ("rounding", Rounding),
        *(
            (name, c_int32)
            for name in ("scale_kind", "scale_stored_bits", "block_rows", "block_columns", "stored_bits")
        ),
        ("of_ratio", c_int32),
        ("carry_above", c_uint32),
        ("candidates", c_int32 * 4),
        *(
            (name, c_int32)
            for name in (
                "candidate_count",
                "min_exponent",
                "byte0_exponent",
                "flush_subnormal_blocks",
                "tensor_step",
                "block_step",
                "element_step",
            )
        ),
        ("element_reach", c_float),
        ("scale_reach", c_float),
        ("multiples", c_float * 4),
        ("tries_codes", c_int32),
        ("error_norm", c_int32),
        ("min_scale", c_float),
        ("zero_scale", c_float),
        *(
            (name, c_int32)
            for name in (
                "zero_code",
                "bf16_scale",
                "clear_zero_input",
                "clear_zero_code",
                "set_zero_input",
                "infinity_is_nan",
                "flush_subnormals",
            )
        ),
    )


class Rotation(ctypes.Structure):
    """`MxRotation`: a random Hadamard transform; none where `size` is 0."""

    _fields_ = (("size", c_int32), ("signs", c_uint32 * 4), ("bf16", c_int32))


class Tensor(ctypes.Structure):
    """`MxTensor`: a row-major tensor with its leading dimensions folded, and its rotation."""

    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("type", "batch", "rows", "columns")),
        ("rotation", Rotation),
    )


class Worst(ctypes.Structure):
    """`MxWorst`: a block and its noise."""

    _fields_ = (("noise", c_double), ("block", c_int64))


class KernelStats(ctypes.Structure):
    """`MxStats`: the totals of one tensor."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "elements",
                "blocks",
                "zero_blocks",
                "nan_blocks",
                "saturated",
                "saturated_blocks",
                "underflowed",
                "scale_underflowed_blocks",
                "nan",
                "infinite",
                "first_nonfinite",
                "worst_count",
            )
        ),
        *(
            (name, c_double)
            for name in (
                "amax",
                "max_abs_error",
                "max_rel_error",
                "min_block_sqnr",
                "min_block_range",
                "signal",
                "noise",
                "cross",
                "error",
            )
        ),
        ("measured", c_int64),
        ("scale_bins", c_int64 * stats.SCALE_BINS),
        ("code_bins", c_int64 * stats.CODE_BINS),
        ("block_code_bins", c_int64 * stats.CODE_BINS),
        ("sqnr_bins", c_int64 * stats.SQNR_BINS),
        ("range_bins", c_int64 * stats.RANGE_BINS),
        ("worst", Worst * stats.WORST_BLOCKS),
    )


_CODES = {c_int64: "q", c_double: "d"}
STATS_NUMBERS = {field[0]: _CODES[field[1]] for field in KernelStats._fields_ if field[1] in _CODES}
"""The numbers of `MxStats`, which come first, with the code of their type."""
STATS_ARRAYS = {field[0]: getattr(KernelStats, field[0]) for field in KernelStats._fields_ if field[1] not in _CODES}
"""The other fields, with their offsets."""


class KernelPerBlock(ctypes.Structure):
    """`MxPerBlock`: addresses of per-block arrays, or null."""

    _fields_ = tuple((name, c_void_p) for name in ("amax", "decode", "saturated", "underflowed", "noise"))


class Result(ctypes.Structure):
    """`MxResult`: where the kernel writes."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("stats", ctypes.POINTER(KernelStats)),
        ("per_block", KernelPerBlock),
        ("encode", c_float),
        ("decode", c_float),
    )


class Cut(ctypes.Structure):
    """`MxCut`: how a tensor is cut into chunks."""

    _fields_ = tuple((name, c_int64) for name in ("unit_rows", "units", "part", "parts", "per_chunk", "chunks"))


_MIRRORED = (KernelScheme, Tensor, KernelStats, KernelPerBlock, Result, Float)


def kernel_folder() -> Path:
    """Return the folder that holds the compiled kernel and the kernel sources of this installation."""
    candidates = [Path(place) / "kernels" for place in mxcli.__path__]
    for folder in itertools.chain(candidates, _installed_folders()):
        if (folder / _NAME).is_file():
            return folder
    raise EnvironmentFailure(
        f"the CPU kernel {_NAME} is neither in {candidates[0]} nor installed: install mxcli with a C++17 compiler "
        "present (pip install .)"
    )


def _installed_folders() -> Iterator[Path]:
    """Yield the folders where pip put the kernel: not next to these modules if they run from a checkout or an editable
    installation."""
    import importlib.metadata

    try:
        files = importlib.metadata.files("mxcli") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == _NAME:
            yield Path(str(file.locate())).parent


@functools.cache
def load() -> ctypes.CDLL:
    """Return the kernel library, its structures checked against the ones declared here."""
    library = ctypes.CDLL(str(kernel_folder() / _NAME))
    sizes = (c_int64 * len(_MIRRORED))()
    library.mx_sizes(sizes)
    expected = [ctypes.sizeof(structure) for structure in _MIRRORED]
    if list(sizes) != expected or not hasattr(library, "mx_quantize_dequantize"):
        raise EnvironmentFailure(
            f"the CPU kernel {_NAME} was built for another version of mxcli (structures of {list(sizes)} bytes, not "
            f"{expected}): install mxcli again"
        )
    pointer = ctypes.POINTER
    library.mx_isa.restype = ctypes.c_char_p
    library.mx_amax.restype = c_float
    library.mx_amax.argtypes = (pointer(Tensor), ctypes.c_int, pointer(c_int64), pointer(c_int64))
    library.mx_quantize.restype = None
    library.mx_quantize.argtypes = (
        pointer(KernelScheme), pointer(Tensor), c_float, c_uint32, c_uint32, ctypes.c_int, pointer(Result),
    )  # fmt: skip
    library.mx_dequantize.restype = None
    library.mx_dequantize.argtypes = (
        pointer(KernelScheme), c_void_p, c_void_p, c_float, c_float, pointer(Tensor), ctypes.c_int,
    )  # fmt: skip
    library.mx_quantize_dequantize.restype = None
    library.mx_quantize_dequantize.argtypes = (
        pointer(KernelScheme), pointer(Tensor), c_float, c_uint32, c_uint32, pointer(Tensor), ctypes.c_int,
    )  # fmt: skip
    library.mx_cut.restype = None
    library.mx_cut.argtypes = (pointer(KernelScheme), pointer(Tensor), pointer(Cut))
    library.mx_unpack.restype = None
    library.mx_unpack.argtypes = (c_void_p, c_int64, c_int64, ctypes.c_int, c_void_p)
    return library


_POWER_OF_TWO, _MINIFLOAT, _BINARY32 = 0, 1, 2


def _float(f: FloatFormat) -> Float:
    if f is FP32:
        return Float(max=f.max)
    return Float(f.bits, f.mantissa_bits, f.emin, f.emax, f.nan_code or 0, f.twos_complement, f.max)


def _rounding(r: ElementRounding) -> Rounding:
    return Rounding(r.above, r.half_if, r.half_always, r.is_random)


@cache
def kernel_scheme(scheme: Scheme) -> KernelScheme:
    """Return the numbers that a recipe means; they are to be read only."""
    row, rule, choice = scheme.format, scheme.scale_rule, scheme.choice
    rows, columns = row.block
    k = KernelScheme(
        element=_float(row.element),
        scale=_float(row.scale),
        rounding=_rounding(scheme.rounding),
        scale_stored_bits=row.scale.bits,
        block_rows=rows or 0,
        block_columns=columns or 0,
        stored_bits=row.element.stored_bits,
        min_exponent=choice.min_exponent,
        byte0_exponent=choice.byte0_exponent.get(rule.name, -127),
        flush_subnormal_blocks=choice.flush_subnormal_blocks or choice.flush_subnormals,
        flush_subnormals=choice.flush_subnormals,
        clear_zero_input=choice.clear_zero_input,
        clear_zero_code=choice.clear_zero_code,
        set_zero_input=choice.set_zero_input,
        infinity_is_nan=scheme.infinity_is_nan,
    )
    if isinstance(rule, PowerOfTwoScaleRule):
        k.scale_kind = _POWER_OF_TWO
        k.of_ratio = rule.of_ratio
        k.carry_above = rule.carry_above(row.element)
        k.candidate_count = len(rule.candidates)
        k.candidates[: len(rule.candidates)] = rule.candidates
    else:
        k.scale_kind = _BINARY32 if row.scale is FP32 else _MINIFLOAT
        k.tensor_step = rule.tensor_step if row.tensor_scale is not None else 0
        k.element_reach, k.scale_reach = rule.reach(row.element, row.scale)
        _set_steps(k, rule)
    return k


def _set_steps(k: KernelScheme, rule: MantissaScaleRule) -> None:
    k.block_step = rule.block_step
    k.element_step = rule.element_step
    k.min_scale = rule.min_scale
    k.zero_scale = rule.zero_scale
    k.zero_code = rule.zero_code
    k.bf16_scale = rule.bf16_scale
    k.clear_zero_input |= rule.clear_zero_input
    k.candidate_count = 1 if rule.tries_codes else len(rule.multiples)
    k.multiples[: len(rule.multiples)] = rule.multiples
    k.tries_codes = rule.tries_codes
    k.error_norm = rule.error


def rotation(hadamard: Hadamard | None) -> Rotation:
    """Return a transform as kernels take it; None is none."""
    if hadamard is None:
        return Rotation()
    words = (c_uint32 * 4)()
    for place, sign in enumerate(hadamard.signs):
        words[place // 32] |= (sign < 0) << place % 32
    return Rotation(hadamard.size, words, hadamard.bf16)


def literal(value: ctypes.Structure) -> str:
    """Return a structure as C++ initializes it, so that a compiler sees constants."""
    return "{" + ", ".join(_constant(getattr(value, field[0]), field[1]) for field in value._fields_) + "}"


def _constant(value: object, kind: object) -> str:
    if isinstance(value, ctypes.Structure):
        return literal(value)
    if isinstance(value, ctypes.Array):
        return "{" + ", ".join(str(each) for each in value) + "}"
    if isinstance(value, float):
        return f"{value.hex()}f"
    return f"{value}u" if kind is ctypes.c_uint32 else str(value)
