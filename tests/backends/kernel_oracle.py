"""Run the CPU kernel and the oracle on the same scheme: mxcli's names mapped to the oracle's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle

from mxcli.backends import cpu
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.formats import FORMATS, find_format
from mxcli.numerics.mantissa_rules import BlockScaleFormula, ElementScaleFormula, MantissaScaleRule
from mxcli.numerics.scheme import Rules, Scheme, resolve, scale_kind, scale_rules
from mxcli.numerics.stats import Stats

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

SPELLED = (
    "e3m2:e8m0:1x16",
    "e4m3:e8m0:128x128",
    "e2m1:e8m0:1x1024",
    "e5m1:e8m0:1x64",
    "e1m2:e8m0:1x32",
    "e7m0:e8m0:1x32",
    "e3m0:e8m0:4x8",
    "int4:e8m0:1x32",
    "int8:e8m0:tensor",
    "e5m2:e8m0:1x7",
    "e2m1:e4m3:1x1024:fp32",
    "int4:e4m3:2x8:fp32",
    "e4m3:e4m3:1x16",
    "e4m3:fp32:8x24",
    "int8:fp32:1x600",
    "e2m1:fp32:1x32",
)
"""Formats without a name: other elements, block widths and shapes, and blocks wider than the kernel's stripe."""
CHANNELS = tuple(f"{element}:e8m0:channel" for element in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8", "int4"))

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}


def format_rules(formats: Sequence[str] = (*FORMATS, *SPELLED, *CHANNELS)) -> list[tuple[str, str]]:
    """Return all formats with all scale rules that support them."""
    return [(name, rule) for name in formats for rule in scale_rules(find_format(name))]


def default_rules() -> list[tuple[str, str]]:
    """Return the named formats with their default scale rules."""
    return [(name, scheme_of(name).scale_rule.name) for name in FORMATS]


def power_of_two_rules(*rules: str) -> list[tuple[str, str]]:
    """Return the named formats with E8M0 scales, with those of the rules that support them."""
    rows = [name for name, row in FORMATS.items() if scale_kind(row) == "e8m0"]
    return [(name, rule) for name, rule in format_rules(rows) if rule in rules]


# --- The kernel --------------------------------------------------------------------------------------------


def kernel(x: Array, scheme: Scheme, **options: Any) -> Quantized:
    """Quantize `x`; its numpy type sets the source type."""
    dtype = next(name for name, kind in DTYPES.items() if kind == x.dtype)
    return cpu.quantize(x.view(np.uint16) if dtype == "BF16" else x, dtype, scheme, **options)


def stats_of(q: Quantized) -> Stats:
    """Return the statistics of a tensor quantized with them."""
    assert q.stats is not None
    return q.stats


def scheme_of(name: str, rule: str | None = None, **choices: Any) -> Scheme:
    """Return the scheme of a format name and a scale rule."""
    return resolve(name, Rules(scale_rounding=rule, **choices))


# --- The oracle --------------------------------------------------------------------------------------------

_BYTE0 = {-127: "exact", -126: "torchao", 0: "torchao"}
_ZEROS = {"clear_zero_code": "unsigned", "clear_zero_input": "plus-for-zero", "set_zero_input": "minus-for-zero"}


def expected(x: Array, scheme: Scheme, tensor_amax: float | None = None) -> oracle.OracleResult:
    """Return the oracle's result; binary64 is rounded to binary32 first, per-tensor blocks become one row."""
    with np.errstate(over="ignore", invalid="ignore"):
        source = x.astype(np.float32) if x.dtype == np.float64 else x
        if scheme.format.block != (None, None):
            return _expected(source, scheme, tensor_amax)
        return _reshaped(_expected(source.reshape(1, -1), scheme, tensor_amax), x.shape)


def statistics(x: Array, scheme: Scheme, result: oracle.OracleResult) -> dict[str, Any]:
    """Return the oracle's statistics of a result of `expected`."""
    if scheme.format.block == (None, None):
        return oracle.statistics(x.reshape(1, -1), _reshaped(result, (1, x.size)))
    return oracle.statistics(x, result)


def _reshaped(result: oracle.OracleResult, shape: tuple[int, ...]) -> oracle.OracleResult:
    names = ("codes", "dequantized", "arguments")
    return replace(result, **{name: getattr(result, name).reshape(shape) for name in names})


def _expected(x: Array, scheme: Scheme, tensor_amax: float | None) -> oracle.OracleResult:
    row, choice, rule = scheme.format, scheme.choice, scheme.scale_rule.name

    def run(**options: Any) -> oracle.OracleResult:
        return oracle.quantize(
            x,
            element=row.element.name,
            block=row.block,
            rounding=scheme.rounding.name,
            seed=scheme.seed,
            nonfinite="nan-block" if scheme.infinity_is_nan else "saturate",
            flush_subnormal_blocks=choice.flush_subnormal_blocks,
            flush_subnormals=choice.flush_subnormals,
            zeros=next((name for flag, name in _ZEROS.items() if getattr(choice, flag)), None),
            **options,
        )

    if scale_kind(row) == "narrow":
        tensor_scale = {"tensor_scale": row.tensor_scale is not None, "tensor_amax": tensor_amax}
        return run(scale="e4m3", variant=rule, **tensor_scale)
    if isinstance(scheme.scale_rule, MantissaScaleRule):
        return _with_binary32_scales(x, scheme, scheme.scale_rule)
    result = run(rule=rule, byte0=_BYTE0[choice.byte0_exponent.get(rule, -127)])
    if rule == "best":  # errors do not decide for blocks of zeros or with an infinity
        result = _where_no_error_decides(x, run(rule="floor"), result)
    if scale_kind(row) == "fp32":
        codes = result.scales.astype(np.int64)
        values = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
        result = replace(result, scale="fp32", scales=values)
    return result


def _where_no_error_decides(x: Array, floor: oracle.OracleResult, best: oracle.OracleResult) -> oracle.OracleResult:
    """Return `floor` for the blocks that are all zero or have an infinity, `best` for the others."""
    matrix = oracle._matrix(oracle._widen(x))
    amax = np.abs(oracle._split(matrix, best.block)).max((-2, -1))
    blocks = (amax == 0) | np.isinf(amax)
    tiles = np.broadcast_to(oracle._spread(blocks), (*blocks.shape, *best.block))
    elements = oracle._join(tiles, matrix.shape).reshape(x.shape)
    masks = {"codes": elements, "dequantized": elements, "arguments": elements, "scales": blocks}
    chosen = {n: np.where(mask, getattr(floor, n), getattr(best, n)) for n, mask in masks.items()}
    return replace(best, **chosen)


def _with_binary32_scales(x: Array, scheme: Scheme, rule: MantissaScaleRule) -> oracle.OracleResult:
    """Quantize with binary32 scales and the rule's options for zero, small and bfloat16 scales."""
    fmt = oracle.element_format(scheme.format.element.name)
    matrix = oracle._matrix(oracle._widen(x))
    rows, columns = scheme.format.block
    tile = (rows or max(matrix.shape[-2], 1), columns or max(matrix.shape[-1], 1))
    blocks = oracle._split(matrix, tile)
    amax = np.abs(blocks).max((-2, -1))
    if scheme.infinity_is_nan:
        amax = np.where(np.isinf(amax), oracle.NAN, amax)
    with np.errstate(all="ignore"):
        wanted = oracle._finite(amax) / np.float32(fmt.max)
        times = rule.element_step is ElementScaleFormula.TIMES_D_OVER_A
        largest, finite = np.float32(fmt.max), oracle._finite(amax)
        by_product = rule.block_step is BlockScaleFormula.RECIPROCAL_OF_D_BY_A
        encode = np.minimum(largest * (np.float32(1) / finite) if by_product else largest / finite, oracle.FLT_MAX)
        if times:
            wanted = np.where(amax == 0, np.float32(0), 1 / encode)
        scale = oracle._bfloat16(wanted) if rule.bf16_scale else wanted
        scale = np.maximum(np.where(scale == 0, np.float32(rule.zero_scale), scale), np.float32(rule.min_scale))
        factor = oracle._spread(scale)
        quotient = blocks * oracle._spread(np.where(amax == 0, np.float32(1), encode)) if times else blocks / factor
        if rule.element_step is ElementScaleFormula.OVER_PRODUCT_BF16:
            quotient = oracle._bfloat16(quotient)
        infinite = np.isinf(blocks) & ~np.isnan(factor)
        arguments = np.where(infinite, blocks, quotient).astype(np.float64)
        drawn = oracle._split(oracle.draws(x.size, scheme.seed).reshape(matrix.shape), tile)
        codes = oracle.encode(arguments, fmt, scheme.rounding.name, drawn)
        values = (oracle.decode(codes, fmt) * factor).astype(np.float32)

    def joined(tiles: Array) -> Array:
        return oracle._join(tiles, matrix.shape).reshape(x.shape)

    return oracle.OracleResult(
        element=fmt,
        scale="fp32",
        block=tile,
        codes=joined(codes),
        scales=scale,
        tensor_encode=None,
        tensor_decode=None,
        dequantized=joined(values),
        arguments=joined(arguments),
        scale_arguments=wanted,
    )


# --- One compared with the other ---------------------------------------------------------------------------


def assert_equals_oracle(x: Array, scheme: Scheme, tensor_amax: float | None = None, **options: Any) -> Quantized:
    """Compare codes, scales, tensor scales and dequantized values, bit for bit; NaN equals NaN."""
    q, e = kernel(x, scheme, tensor_amax=tensor_amax, **options), expected(x, scheme, tensor_amax)
    case = f"{scheme.format.name} {scheme.scale_rule.name} {scheme.rounding.name} {x.dtype} {x.shape}"
    assert_same_bits(q.scales, e.scales, f"{case}: scales")
    assert_same_bits(cpu.unpack(q), e.codes, f"{case}: codes")
    assert_same_bits(cpu.dequantize(q), e.dequantized, f"{case}: dequantized")
    if e.tensor_decode is not None:
        assert q.tensor_scale == e.tensor_decode, f"{case}: tensor scale"
    if e.tensor_encode is not None:
        assert q.tensor_encode == e.tensor_encode, f"{case}: tensor encode scale"
    return q


def assert_same_bits(actual: Array, wanted: Array, case: str) -> None:
    """Compare types, shapes and values including signs of zero; NaN equals NaN."""
    if actual.dtype == wanted.dtype and actual.shape == wanted.shape and actual.tobytes() == wanted.tobytes():
        return
    assert actual.dtype == wanted.dtype, case
    np.testing.assert_array_equal(actual, wanted, err_msg=case, strict=True)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(actual)[numbers], np.signbit(wanted)[numbers], err_msg=case)
