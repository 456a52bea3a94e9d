"""Rules for scales with a mantissa, such as E4M3 and binary32, as rows: orders of operations, and scales to try.

A rule is numbers that the kernel (`kernels/numerics.h`) computes with; nothing here rounds a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from mxcli.numerics.floats import E2M1, FloatFormat


class TensorScaleFormula(IntEnum):
    """Formula of the tensor's encode and decode scale, given its amax (`MxTensorStep` in numerics.h)."""

    NONE = 0
    ENCODE = 1
    DECODE = 2
    RECIPROCAL_CLAMPED = 3
    RECIPROCAL_ZERO = 4
    ENCODE_BF16 = 5
    DECODE_OF_BLOCK = 6


class BlockScaleFormula(IntEnum):
    """Formula of a block's scale, given its amax (`MxBlockStep` in numerics.h)."""

    A_TIMES_ENCODE_OVER_D = 0
    A_OVER_D_TIMES_ENCODE = 1
    A_OVER_D_OVER_DECODE = 2
    A_OVER_D_TIMES_DECODE = 3
    ENCODE_TIMES_A_OVER_D = 4
    BF16_A_OVER_D_TIMES_ENCODE = 5
    RECIPROCAL_OF_D_OVER_A = 6
    LEAST_A_OVER_D_OVER_DECODE = 7
    RECIPROCAL_OF_D_BY_A = 8


class ElementScaleFormula(IntEnum):
    """Formula that scales an element, and its inverse (`MxElementStep` in numerics.h)."""

    TIMES_RECIPROCAL = 0
    TIMES_QUOTIENT = 1
    OVER_PRODUCT = 2
    OVER_QUOTIENT = 3
    TIMES_RECIPROCAL_ZERO = 4
    OVER_PRODUCT_BF16 = 5
    TIMES_RECIPROCAL_ONCE = 6
    TIMES_D_OVER_A = 7
    OVER_A_OVER_D = 8


class ErrorNorm(IntEnum):
    """Error of a block that decides between scales which a rule tries (`MxErrorNorm` in numerics.h)."""

    SQUARES = 0
    MAGNITUDES = 1
    LARGEST = 2


Reach = Callable[[FloatFormat, FloatFormat], tuple[float, float]]
"""Of an element and a scale format: the element value that a block's amax is scaled to (D), and the scale of the block
that has the tensor's amax."""


def full_reach(element: FloatFormat, scale: FloatFormat) -> tuple[float, float]:
    """Return the largest element and the largest scale."""
    return element.max, scale.max


def _room_for_larger_scales(element: FloatFormat, scale: FloatFormat) -> tuple[float, float]:
    return element.max, 2.0**scale.emax


def _four(element: FloatFormat, scale: FloatFormat) -> tuple[float, float]:
    return 4.0, scale.max


def _never_clipped(element: FloatFormat, scale: FloatFormat) -> tuple[float, float]:
    """Return the reach with which an amax stays in range although its scale was rounded down: by a factor of at most
    n / (n + 1), n codes being in half a binade."""
    n = 2 ** (scale.mantissa_bits + 1)
    return element.max * n / (n + 1), scale.max


def _has_four_and_six(element: FloatFormat) -> bool:
    return element is E2M1


@dataclass(frozen=True, slots=True)
class MantissaScaleRule:
    """A rule for scales with a mantissa: an order of operations, each one in binary32.

    `scale` is the kind of scale it serves: `fp32`, or `narrow` for scales of 8 bits with a mantissa. `zero_scale`
    replaces a scale that is exactly 0, `zero_code` a scale code that is 0, `min_scale` clamps from below (0: none).

    With `multiples` the block scale times each of them is tried, with `tries_codes` every scale code; the one with the
    lowest `error` is kept: of equals the first multiple, or the smallest code.
    """

    name: str
    scale: str
    tensor_step: TensorScaleFormula
    block_step: BlockScaleFormula
    element_step: ElementScaleFormula
    meaning: str
    formula: str
    source: str
    min_scale: float = 0.0
    zero_scale: float = 0.0
    zero_code: int = 0
    bf16_scale: bool = False
    clear_zero_input: bool = False
    reach: Reach = full_reach
    multiples: tuple[float, ...] = ()
    tries_codes: bool = False
    error: ErrorNorm = ErrorNorm.SQUARES
    serves: Callable[[FloatFormat], bool] = lambda element: True
    aliases: tuple[str, ...] = ()


_FOUR_OVER_SIX = tuple(
    MantissaScaleRule(
        f"four-over-six-{name}",
        "narrow",
        TensorScaleFormula.ENCODE,
        BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
        ElementScaleFormula.TIMES_RECIPROCAL_ONCE,
        f"tries each block's amax as 6 and as 4, between which E2M1 has no value, and takes 4 where {words} is smaller",
        f"encode = 1536/T; S = e4m3((A/6) * encode) or e4m3((A/6) * encode * 1.5), by {formula}; x * 1/(S * decode)",
        f"fouroversix 1.0.5, {name}; Four Over Six (2025)",
        reach=_room_for_larger_scales,
        multiples=(1.0, 1.5),
        error=error,
        serves=_has_four_and_six,
        aliases=("four-over-six",) if error is ErrorNorm.SQUARES else (),
    )
    for name, words, formula, error in (
        ("mse", "the sum of squared errors", "sum (y - x)^2", ErrorNorm.SQUARES),
        ("mae", "the sum of the errors' magnitudes", "sum |y - x|", ErrorNorm.MAGNITUDES),
        ("max", "the largest error", "max |y - x|", ErrorNorm.LARGEST),
    )
)

MANTISSA_SCALE_RULES: dict[str, MantissaScaleRule] = {
    row.name: row
    for row in (
        MantissaScaleRule(
            "te",
            "narrow",
            TensorScaleFormula.ENCODE,
            BlockScaleFormula.A_TIMES_ENCODE_OVER_D,
            ElementScaleFormula.TIMES_RECIPROCAL,
            "the published NVFP4 recipe in its authors' order of operations; defined for zero tensors and zero blocks",
            "encode = 2688/T; S = e4m3(A * (encode * 1/6)); x * 1/(S * decode)",
            "Transformer Engine 2.20; Pretraining Large Language Models with NVFP4, appendix B",
            clear_zero_input=True,
        ),
        MantissaScaleRule(
            "paper",
            "narrow",
            TensorScaleFormula.ENCODE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.TIMES_RECIPROCAL,
            "the equations of the NVFP4 paper read literally",
            "encode = 2688/T; S = e4m3((A/6) * encode); x * 1/(S * decode)",
            "Pretraining Large Language Models with NVFP4, appendix B, equations 1 to 4",
        ),
        MantissaScaleRule(
            "torchao",
            "narrow",
            TensorScaleFormula.DECODE,
            BlockScaleFormula.A_OVER_D_OVER_DECODE,
            ElementScaleFormula.TIMES_QUOTIENT,
            "torchao's order; block scales are at least 2^-6, the smallest normal E4M3",
            "decode = T/2688; S = e4m3(max((A/6)/decode, 2^-6)); x * ((1/decode)/S)",
            "torchao 0.18, nvfp4_quantize",
            min_scale=2.0**-6,
        ),
        MantissaScaleRule(
            "modelopt",
            "narrow",
            TensorScaleFormula.DECODE,
            BlockScaleFormula.A_OVER_D_TIMES_DECODE,
            ElementScaleFormula.OVER_PRODUCT,
            "ModelOpt's order; a zero block has scale 1, others at least 2^-9",
            "decode = T/2688; S = e4m3(max(A/(6*decode), 2^-9)); x / (S * decode)",
            "NVIDIA ModelOpt 0.47, NVFP4QTensor",
            min_scale=2.0**-9,
            zero_scale=1.0,
            clear_zero_input=True,
        ),
        MantissaScaleRule(
            "ct",
            "narrow",
            TensorScaleFormula.RECIPROCAL_CLAMPED,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_QUOTIENT,
            "compressed-tensors' order on binary32 input; a scale code of 0 becomes 0.125",
            "encode = (1/T)*2688; S = e4m3((A/6) * encode); x / (S / encode)",
            "compressed-tensors 0.20, nvfp4-pack-quantized",
            zero_code=0x20,
            clear_zero_input=True,
            aliases=("compressed-tensors",),
        ),
        MantissaScaleRule(
            "ct-bf16",
            "narrow",
            TensorScaleFormula.ENCODE_BF16,
            BlockScaleFormula.BF16_A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_QUOTIENT,
            "compressed-tensors as it runs on bfloat16 weights: the tensor scale and A/6 are rounded to bfloat16",
            "encode = bf16(bf16(1/T)*2688); S = e4m3(bf16(A/6) * encode); x / (S / encode)",
            "compressed-tensors 0.20 through llm-compressor 0.14, bfloat16 checkpoints",
            zero_code=0x20,
            clear_zero_input=True,
        ),
        MantissaScaleRule(
            "vllm",
            "narrow",
            TensorScaleFormula.RECIPROCAL_ZERO,
            BlockScaleFormula.ENCODE_TIMES_A_OVER_D,
            ElementScaleFormula.TIMES_RECIPROCAL_ZERO,
            "the reference of vLLM's tests, with 1/0 = 0 throughout",
            "encode = 2688 * (1/T); S = e4m3(encode * (A * 1/6)); x * 1/(S * (1/encode))",
            "vLLM 0.33, tests; auto-round 0.14",
        ),
        *_FOUR_OVER_SIX,
        MantissaScaleRule(
            "static-6",
            "narrow",
            TensorScaleFormula.ENCODE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.TIMES_RECIPROCAL_ONCE,
            "`paper` with codes of 0 where the scale is 0",
            "encode = 2688/T; S = e4m3((A/6) * encode); x * 1/(S * decode), 0 if S = 0",
            "fouroversix 1.0.5, static_6",
            serves=_has_four_and_six,
        ),
        MantissaScaleRule(
            "static-4",
            "narrow",
            TensorScaleFormula.ENCODE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.TIMES_RECIPROCAL_ONCE,
            "every block's amax becomes 4, so that E2M1's gap between 4 and 6 is not used",
            "encode = 1792/T; S = e4m3((A/4) * encode); x * 1/(S * decode)",
            "fouroversix 1.0.5, static_4",
            reach=_four,
            serves=_has_four_and_six,
        ),
        MantissaScaleRule(
            "best",
            "narrow",
            TensorScaleFormula.ENCODE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.TIMES_RECIPROCAL_ONCE,
            "tries every scale code and keeps the one with the lowest squared error of the block; with E4M3 scales "
            "the tensor scale leaves room above 256, as that of four over six",
            "encode = 1536/T; S = argmin over e4m3 of |x - Q(x; S)|^2; x * 1/(S * decode)",
            "exhaustive search; the smallest of equals",
            reach=_room_for_larger_scales,
            tries_codes=True,
        ),
        MantissaScaleRule(
            "unbiased",
            "narrow",
            TensorScaleFormula.ENCODE,
            BlockScaleFormula.A_TIMES_ENCODE_OVER_D,
            ElementScaleFormula.TIMES_RECIPROCAL,
            "`te` with 6 * 16/17 in place of 6, so that a scale rounded down by E4M3 never clips its block's amax: "
            "with stochastic rounding the mean over draws is then the value itself (subnormal scales excepted)",
            "D = 6 * 16/17; encode = 448 * D/T; S = e4m3(A * (encode * 1/D)); x * 1/(S * decode)",
            "Quartet II (2026); its factor 16/17",
            clear_zero_input=True,
            reach=_never_clipped,
        ),
        MantissaScaleRule(
            "auto-round",
            "narrow",
            TensorScaleFormula.RECIPROCAL_CLAMPED,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_QUOTIENT,
            "`ct` on binary32 input with a scale code of 0 kept",
            "encode = (1/T)*2688; S = e4m3((A/6) * encode); x / (S / encode)",
            "auto-round 0.14, NVFP4 (read)",
        ),
        MantissaScaleRule(
            "nncf",
            "narrow",
            TensorScaleFormula.DECODE_OF_BLOCK,
            BlockScaleFormula.LEAST_A_OVER_D_OVER_DECODE,
            ElementScaleFormula.OVER_A_OVER_D,
            "codes are those of the block scale before its rounding to E4M3, and are decoded with the rounded one; "
            "no scale is below 2^-23",
            "e = 2^-23; decode = max(max(T/6, e)/448, e); S = e4m3(max(A/6, e)/decode); x / max(A/6, e)",
            "NNCF 3.4, NVFP4",
            zero_scale=2.0**-23,
        ),
        MantissaScaleRule(
            "amax",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_PRODUCT,
            "the binary32 scale that maps amax to the element's maximum; 1 for a zero block",
            "S = amax / element max; x / S",
            "torchao 0.18 and ModelOpt 0.47, FP8 weights",
            zero_scale=1.0,
        ),
        MantissaScaleRule(
            "amax-eps",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_PRODUCT,
            "`amax` with 2^-23, the epsilon of binary32, for a zero block",
            "S = amax / element max; x / S",
            "compressed-tensors 0.20 and AMD Quark 0.13, FP8, binary32 weights",
            zero_scale=2.0**-23,
        ),
        MantissaScaleRule(
            "amax-bf16",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_PRODUCT_BF16,
            "`amax` in bfloat16 arithmetic: scale and quotient are rounded to bfloat16; 2^-7 for a zero block",
            "S = bf16(amax / element max); bf16(x / S)",
            "compressed-tensors 0.20 and AMD Quark 0.13 on a CPU, FP8, bfloat16 weights",
            zero_scale=2.0**-7,
            bf16_scale=True,
        ),
        MantissaScaleRule(
            "amax-bf16-scale",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_PRODUCT,
            "`amax` with the scale rounded to bfloat16, the type in which loaders of BF16 models keep it; 2^-7 for a "
            "zero block",
            "S = bf16(amax / element max); x / S",
            "compressed-tensors 0.20 on a GPU, float-quantized, bfloat16 weights (read)",
            zero_scale=2.0**-7,
            bf16_scale=True,
        ),
        MantissaScaleRule(
            "amax-bf16-quotient",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_PRODUCT_BF16,
            "`amax` with the quotient rounded to bfloat16",
            "S = amax / element max; bf16(x / S)",
            "NVIDIA ModelOpt 0.47, FP8 with one scale for a tensor, bfloat16 weights",
            zero_scale=1.0,
        ),
        MantissaScaleRule(
            "encode",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.RECIPROCAL_OF_D_OVER_A,
            ElementScaleFormula.TIMES_D_OVER_A,
            "multiplies by the encode scale and stores its reciprocal; 1 for a zero block",
            "encode = element max / amax; S = 1 / encode; x * encode",
            "Transformer Engine 2.20, current and delayed scaling",
            zero_scale=1.0,
        ),
        MantissaScaleRule(
            "encode-reciprocal",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.RECIPROCAL_OF_D_BY_A,
            ElementScaleFormula.TIMES_D_OVER_A,
            "`encode` with a product in place of its first quotient, as PyTorch divides a number by a tensor",
            "encode = element max * (1/amax); S = 1 / encode; x * encode",
            "transformers 5.24, FineGrainedFP8",
            zero_scale=1.0,
        ),
        MantissaScaleRule(
            "vllm-min",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_PRODUCT,
            "`amax`, at least 1 / (448 * 512)",
            "S = max(amax / element max, 1/(448*512)); x / S",
            "vLLM 0.33, dynamic per-token FP8",
            min_scale=1.0 / (448 * 512),
        ),
    )
}
