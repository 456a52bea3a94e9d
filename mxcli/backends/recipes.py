"""Recipes as the kernels take them: every choice a number (`MxRecipe` in `kernels/numerics.h`)."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32
from functools import cache

from mxcli.backends.library import Float, KernelRecipe, Rotation, Rounding
from mxcli.numerics.floats import FP32, FloatFormat
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.recipe import Recipe
from mxcli.numerics.rounding import ElementRounding, ScaleRecipe, ScaleRounding

_POWER_OF_TWO, _MINIFLOAT, _BINARY32 = 0, 1, 2


def _float(f: FloatFormat) -> Float:
    if f is FP32:
        return Float(max=f.max)
    return Float(f.bits, f.mantissa_bits, f.emin, f.emax, f.nan_code or 0, f.twos_complement, f.max)


def _rounding(r: ElementRounding) -> Rounding:
    return Rounding(r.above, r.half_if, r.half_always, r.is_random)


@cache
def kernel_recipe(recipe: Recipe) -> KernelRecipe:
    """The numbers that a recipe means; they are to be read only."""
    row, rule, choice = recipe.format, recipe.scale_rule, recipe.choice
    rows, columns = row.block
    k = KernelRecipe(
        element=_float(row.element),
        scale=_float(row.scale),
        rounding=_rounding(recipe.rounding),
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


def rotation(hadamard: Hadamard | None) -> Rotation:
    """A transform as kernels take it; None is none."""
    if hadamard is None:
        return Rotation()
    words = (c_uint32 * 4)()
    for place, sign in enumerate(hadamard.signs):
        words[place // 32] |= (sign < 0) << place % 32
    return Rotation(hadamard.size, words)


def literal(value: ctypes.Structure) -> str:
    """A structure as C++ initializes it, so that a compiler sees constants."""
    return "{" + ", ".join(_constant(getattr(value, field[0]), field[1]) for field in value._fields_) + "}"


def _constant(value: object, kind: object) -> str:
    if isinstance(value, ctypes.Structure):
        return literal(value)
    if isinstance(value, ctypes.Array):
        return "{" + ", ".join(str(each) for each in value) + "}"
    if isinstance(value, float):
        return f"{value.hex()}f"
    return f"{value}u" if kind is ctypes.c_uint32 else str(value)
