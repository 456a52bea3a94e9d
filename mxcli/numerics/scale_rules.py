"""Rounding rules as rows: of elements, of power-of-two scales, and of scales with a mantissa.

A rule is numbers that the kernel (`kernels/numerics.h`) computes with; nothing here rounds a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from mxcli.numerics.floats import FloatFormat

FRACTION_BITS = 23
"""Fraction bits of binary32, the width in which scales are chosen."""


@dataclass(frozen=True, slots=True)
class ElementRounding:
    """A rounding of elements.

    A magnitude between two codes goes up when its fraction of the step is above `above`, or is one half and the lower
    code is odd (`half_if` 1) or in any case (`half_always`). With `is_random` it goes up when the fraction is above a
    number drawn for the element, from 0 to below 1 in steps of 2^-24; the other numbers are then used where a scale is
    searched for.
    """

    name: str
    above: float
    half_if: int
    half_always: int
    meaning: str
    source: str
    is_random: bool = False


ELEMENT_ROUNDINGS: dict[str, ElementRounding] = {
    row.name: row
    for row in (
        ElementRounding(
            "nearest-even",
            0.5,
            1,
            0,
            "the nearest code; of two equally near, the even one",
            "OCP MX v1.0, section 5.3.3",
        ),
        ElementRounding(
            "half-away",
            0.5,
            0,
            1,
            "the nearest code; of two equally near, the one farther from zero",
            "microxcaling 1.1, round='nearest'",
        ),
        ElementRounding(
            "toward-zero", 2.0, 0, 0, "the nearest code that is not larger in magnitude", "IEEE 754-2019, 4.3.2"
        ),
        ElementRounding(
            "half-toward-zero",
            0.5,
            0,
            0,
            "the nearest code; of two equally near, the one nearer to zero",
            "ModelOpt 0.47 and gguf 0.19, MXFP4",
        ),
        ElementRounding(
            "stochastic",
            0.5,
            1,
            0,
            "one of the two neighbours at random: up with a probability equal to the fraction, so that the mean is "
            "the value itself; depends only on the seed, the tensor's name and the element's index (Philox 4x32-10, "
            "24 bits)",
            "Pretraining Large Language Models with NVFP4, section 4.4; Random123 (Philox)",
            is_random=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class PowerOfTwoScaleRule:
    """A rule for the exponent of a power-of-two scale, given a block's amax.

    The exponent is that of amax minus the element's emax, or with `of_ratio` that of fl(amax / element max); plus one
    when the 23-bit fraction is above `carry_above(element)`. `candidates` are exponents relative to that one of which
    the one with the lowest squared error is kept (the larger of equals).
    """

    name: str
    of_ratio: bool
    carry_above: Callable[[FloatFormat], int]
    meaning: str
    formula: str
    source: str
    candidates: tuple[int, ...] = ()
    serves: Callable[[FloatFormat], bool] = lambda element: True
    aliases: tuple[str, ...] = ()


_NEVER = (1 << FRACTION_BITS) - 1


def _half_of_last_bit(element: FloatFormat) -> int:
    """Return the fractions that round up to the next binade when amax is rounded (half up) to the element's mantissa
    bits."""
    return (1 << FRACTION_BITS) - (1 << (FRACTION_BITS - 1 - element.mantissa_bits)) - 1


POWER_OF_TWO_SCALE_RULES: dict[str, PowerOfTwoScaleRule] = {
    row.name: row
    for row in (
        PowerOfTwoScaleRule(
            "floor",
            False,
            lambda element: _NEVER,
            "rounds the scale down: ignores amax's fraction, so a block whose amax is above element max * scale "
            "saturates",
            "2^(floor(log2 amax) - emax)",
            "OCP MX v1.0, section 6.3",
        ),
        PowerOfTwoScaleRule(
            "ceil",
            False,
            lambda element: 0,
            "rounds amax up to a power of two: never saturates, and wastes up to a binade",
            "2^(ceil(log2 amax) - emax)",
            "torchao 0.18, ScaleCalculationMode.CEIL",
        ),
        PowerOfTwoScaleRule(
            "rceil",
            True,
            lambda element: 0,
            "the smallest scale under which no element saturates: rounds amax / element max up",
            "2^ceil(log2(amax / element max))",
            "Recipes for Pre-training LLMs with MXFP8, algorithm 1 and appendix A.1; Transformer Engine; cuBLAS",
            aliases=("ue8m0",),
        ),
        PowerOfTwoScaleRule(
            "even",
            False,
            _half_of_last_bit,
            "rounds amax (half up) to the element's mantissa bits first, then takes the power of two below",
            "2^(floor(log2 round(amax, mantissa bits)) - emax)",
            "torchao 0.18, ScaleCalculationMode.EVEN; AMD Quark 0.13",
            serves=lambda element: not element.twos_complement,
        ),
        PowerOfTwoScaleRule(
            "nearest",
            True,
            lambda element: (1 << (FRACTION_BITS - 1)) - 1,
            "the nearest power of two to amax / element max (midpoint 1.5 * 2^k, up): saturates often",
            "2^round(amax / element max)",
            "the E8M0 cast of torch and ml_dtypes",
        ),
        PowerOfTwoScaleRule(
            "ct-even1",
            False,
            lambda element: 0x5FFFFF,
            "rounds up when amax's significand is 1.75 or more, for any element: `even` with one mantissa bit",
            "2^(floor(log2 round(amax, 1 bit)) - emax)",
            "compressed-tensors 0.20, mxfp8_e4m3",
        ),
        PowerOfTwoScaleRule(
            "best",
            False,
            lambda element: _NEVER,
            "tries the exponents floor-1, floor and floor+1 and keeps the one with the lowest squared error of the "
            "block",
            "argmin over k in {-1, 0, 1} of |x - Q(x; 2^(floor exponent + k))|^2",
            "exhaustive search; the larger of equals",
            candidates=(1, 0, -1),
        ),
    )
}


class TensorScaleFormula(IntEnum):
    """Formula of the tensor's encode and decode scale, given its amax (`MxTensorStep` in numerics.h)."""

    NONE = 0
    ENCODE = 1
    DECODE = 2
    RECIPROCAL_CLAMPED = 3
    RECIPROCAL_ZERO = 4
    ENCODE_BF16 = 5


class BlockScaleFormula(IntEnum):
    """Formula of a block's scale, given its amax (`MxBlockStep` in numerics.h)."""

    A_TIMES_ENCODE_OVER_D = 0
    A_OVER_D_TIMES_ENCODE = 1
    A_OVER_D_OVER_DECODE = 2
    A_OVER_D_TIMES_DECODE = 3
    ENCODE_TIMES_A_OVER_D = 4
    BF16_A_OVER_D_TIMES_ENCODE = 5


class ElementScaleFormula(IntEnum):
    """Formula that scales an element, and its inverse (`MxElementStep` in numerics.h)."""

    TIMES_RECIPROCAL = 0
    TIMES_QUOTIENT = 1
    OVER_PRODUCT = 2
    OVER_QUOTIENT = 3
    TIMES_RECIPROCAL_ZERO = 4
    OVER_PRODUCT_BF16 = 5


@dataclass(frozen=True, slots=True)
class MantissaScaleRule:
    """A rule for scales with a mantissa: an order of operations, each one in binary32.

    `scale` is the kind of scale it serves: `fp32`, or `narrow` for scales of 8 bits with a mantissa. `zero_scale`
    replaces a scale that is exactly 0, `zero_code` a scale code that is 0, `min_scale` clamps from below (0: none).
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
    aliases: tuple[str, ...] = ()


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
            "amax-bf16",
            "fp32",
            TensorScaleFormula.NONE,
            BlockScaleFormula.A_OVER_D_TIMES_ENCODE,
            ElementScaleFormula.OVER_PRODUCT_BF16,
            "`amax` in bfloat16 arithmetic: scale and quotient are rounded to bfloat16; 2^-7 for a zero block",
            "S = bf16(amax / element max); bf16(x / S)",
            "compressed-tensors 0.20 on a CPU, float-quantized, bfloat16 weights",
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
            "NVIDIA ModelOpt 0.47, FP8QTensor, bfloat16 weights",
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
