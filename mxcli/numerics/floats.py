"""Scalar formats, of elements and of scales alike: one row each, everything else derived from the row.

Sources: OCP Microscaling Formats (MX) v1.0, section 5.3; "Recipes for Pre-training LLMs with MXFP8", table 1.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A format of at most 32 bits: sign, `exponent_bits`, `mantissa_bits`.

    The magnitude code `c` is worth `c * 2^(1-bias-mantissa_bits)` while its exponent field is zero, else
    `(1 + fraction) * 2^(field - bias)`; `max_code` is the largest finite magnitude code. `twos_complement` only
    changes how a sign is written: INT8's magnitudes 0..127 in units of 1/64 are exactly such a float with one
    exponent bit, a fixed-point grid. `has_zero=False` is E8M0: no zero, no subnormals.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None = None
    signed: bool = True
    twos_complement: bool = False
    has_zero: bool = True

    @property
    def bits(self) -> int:
        """Width of a code, its sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def stored_bits(self) -> int:
        """Width of a code in packed storage: the smallest of 4, 6, 8 (and 32) bits that holds it."""
        return next(width for width in (4, 6, 8, 32) if width >= self.bits)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value; for E8M0, of its smallest value."""
        return (1 if self.has_zero else 0) - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self.magnitude(self.max_code)

    @property
    def min_normal(self) -> float:
        """Smallest normal value (for a fixed-point grid: the value of its first code with the top bit set)."""
        return math.ldexp(1.0, self.emin)

    @property
    def min_positive(self) -> float:
        """Smallest positive value: the smallest subnormal where the format has subnormals."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits) if self.has_zero else self.min_normal

    @property
    def binades(self) -> float:
        """log2 of the largest over the smallest positive value (MXFP8 recipe paper, table 1)."""
        return math.log2(self.max / self.min_positive)

    def magnitude(self, code: int) -> float:
        """Return the value of a magnitude code (sign bit cleared), exact in binary64."""
        field, fraction = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if field == 0 and self.has_zero:
            return math.ldexp(fraction, self.emin - self.mantissa_bits)
        return math.ldexp((1 << self.mantissa_bits) + fraction, field - self.bias - self.mantissa_bits)

    def value(self, code: int) -> float:
        """Return the value of a code with its sign; NaN and infinities where the format has them."""
        if self.twos_complement:
            signed = code - (1 << self.bits) if code >> (self.bits - 1) else code
            return math.ldexp(signed, self.emin - self.mantissa_bits)
        sign_bit = 1 << (self.bits - 1) if self.signed else 0
        sign = -1.0 if code & sign_bit else 1.0
        magnitude = code & ~sign_bit
        if magnitude <= self.max_code:
            return sign * self.magnitude(magnitude)
        is_infinity = self.nan_code is not None and magnitude == self.max_code + 1 != self.nan_code
        return sign * math.inf if is_infinity else math.nan


E4M3 = FloatFormat("e4m3", 4, 3, bias=7, max_code=0b1111_110, nan_code=0b1111_111)
E5M2 = FloatFormat("e5m2", 5, 2, bias=15, max_code=0b11110_11, nan_code=0b11111_11)
E2M3 = FloatFormat("e2m3", 2, 3, bias=1, max_code=0b11_111)
E3M2 = FloatFormat("e3m2", 3, 2, bias=3, max_code=0b111_11)
E2M1 = FloatFormat("e2m1", 2, 1, bias=1, max_code=0b11_1)
INT8 = FloatFormat("int8", 1, 6, bias=1, max_code=0b1_111111, twos_complement=True)
INT6 = FloatFormat("int6", 1, 4, bias=1, max_code=0b1_1111, twos_complement=True)
INT4 = FloatFormat("int4", 1, 2, bias=1, max_code=0b1_11, twos_complement=True)

E8M0 = FloatFormat("e8m0", 8, 0, bias=127, max_code=0xFE, nan_code=0xFF, signed=False, has_zero=False)
FP32 = FloatFormat("fp32", 8, 23, bias=127, max_code=0x7F7FFFFF, nan_code=0x7FC00000)

ELEMENTS: dict[str, FloatFormat] = {row.name: row for row in (E4M3, E5M2, E2M3, E3M2, E2M1, INT8, INT6, INT4)}
SCALES: dict[str, FloatFormat] = {row.name: row for row in (E8M0, E4M3, E5M2, FP32)}


def element_format(name: str) -> FloatFormat | None:
    """Return the row called `name`, else the format that `eXmY` spells out (2 to 8 bits, every code finite), else
    None."""
    if name in ELEMENTS:
        return ELEMENTS[name]
    spelled = re.fullmatch(r"e([1-7])m([0-6])", name)
    if not spelled:
        return None
    exponent_bits, mantissa_bits = int(spelled[1]), int(spelled[2])
    if not 2 <= 1 + exponent_bits + mantissa_bits <= 8:
        return None
    bias = (1 << (exponent_bits - 1)) - 1
    return FloatFormat(name, exponent_bits, mantissa_bits, bias, max_code=(1 << (exponent_bits + mantissa_bits)) - 1)
