"""Rounding rules as rows: of elements and of power-of-two scales.

A rule is numbers that the kernel (`kernels/numerics.h`) computes with; nothing here rounds a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
