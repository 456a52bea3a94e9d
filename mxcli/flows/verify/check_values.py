"""Checks of what codes and scales say: one weight at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mxcli.flows.verify.check import NOTE, PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.weight_summary import Facts
from mxcli.numerics.floats import E8M0, FP32

PLAUSIBLE_LOW, PLAUSIBLE_HIGH = 2.0**-20, 2.0**10
"""Between these lies the largest magnitude of a weight of any model we know of."""
UNSCALED_AMAX = 0.25
"""A weight under scales of 1 that reaches less than this part of its format's range was not scaled to it."""
_AS_NUMBERS = np.asarray([0, *(1 << np.arange(8))])
"""What E8M0 values become as integers of 8 bits: all below 1 are 0."""


def _scale_name(facts: Facts) -> str:
    """Return the tensor that holds the scales of the blocks, by themselves or with the codes."""
    contents = facts.stored.contents
    return next((content.entry.name for content in contents if content.holds.name == "scales"), contents[0].entry.name)


def _codes_name(facts: Facts) -> str:
    return facts.stored.contents[0].entry.name


def _place(facts: Facts, where: object) -> str:
    found = np.argwhere(np.asarray(where))
    return f"the first at {[int(at) for at in found[0]]} of the grid {list(facts.scales.shape)}"


def _of(part: int, whole: int, noun: str) -> str:
    return f"{part:,} of {whole:,} {noun}{'' if whole == 1 else 's'}"


def _not_finite_scales(facts: Facts) -> Iterator[Finding]:
    bad = ~np.isfinite(facts.scale_values)
    count = int(np.count_nonzero(bad))
    if count:
        row = facts.stored.weight.format.scale
        spelled = "" if row is FP32 else f" (byte 0x{int(facts.scales[bad][0]):02X})"
        yield Finding(
            _scale_name(facts),
            f"{_of(count, bad.size, 'scale')} NaN or infinite{spelled}, {_place(facts, bad)}",
            "finite scales: a whole block of the weight is not finite",
            "Quantize the weight again from its source.",
        )


def _negative_scales(facts: Facts) -> Iterator[Finding]:
    bad = facts.scale_values < 0
    count = int(np.count_nonzero(bad))
    if count:
        yield Finding(
            _scale_name(facts),
            f"{_of(count, bad.size, 'scale')} negative, {_place(facts, bad)}",
            "positive scales: kernels take the sign bit for zero, or turn the block round",
            "Quantize the weight again from its source.",
        )


def _lost_blocks(facts: Facts) -> Iterator[Finding]:
    if facts.lost or (facts.emptied and facts.stored.weight.format.scale is FP32):
        yield Finding(
            _scale_name(facts),
            f"{_of(facts.lost + facts.emptied, facts.scales.size, 'block')} with scale 0 and codes that are not 0",
            "scales above 0: no rounding of a small scale leaves such codes",
            "Quantize the weight again from its source.",
        )


def _emptied_blocks(facts: Facts) -> Iterator[Finding]:
    if facts.emptied and facts.stored.weight.format.scale is not FP32:
        yield Finding(
            _scale_name(facts),
            f"{_of(facts.emptied, facts.scales.size, 'block')} with scale 0: all of it reads as 0",
            "nothing, if those blocks are tiny beside the largest weight: their scale rounded to 0",
            "Compare with --against, or quantize with a rule that has a smallest scale (torchao, modelopt).",
        )


def _tensor_scale(facts: Facts) -> Iterator[Finding]:
    for content in facts.stored.contents:
        value = {"encode": facts.tensor_encode, "decode": facts.tensor_scale}.get(content.holds.name)
        if value is not None and not (math.isfinite(value) and value > 0):
            yield Finding(
                content.entry.name,
                f"{value:g}",
                "a finite scale above 0: with this one every value of the weight is 0, infinite or NaN",
                "Quantize the weight again; of an all-zero weight the tensor scale is 1.",
            )
    both = facts.tensor_scale is not None and facts.tensor_encode != 1.0
    if both and facts.tensor_scale and abs(facts.tensor_scale * facts.tensor_encode - 1) > 2.0**-7:
        yield Finding(
            facts.name,
            f"tensor scales {facts.tensor_encode:g} and {facts.tensor_scale:g}",
            "the one the inverse of the other",
            "Quantize the weight again from its source.",
        )


def _not_finite_codes(facts: Facts) -> Iterator[Finding]:
    if facts.not_finite_codes:
        elements = math.prod(facts.stored.weight.shape)
        yield Finding(
            _codes_name(facts),
            f"{_of(facts.not_finite_codes, elements, 'code')} NaN or infinite",
            "finite codes: one value too large for the format was cast, not saturated",
            "Quantize the weight again from its source.",
        )


def _direction(facts: Facts) -> Iterator[Finding]:
    amax, inverted = facts.amax, facts.amax_inverted
    if _plausible(amax) or not amax:
        return
    row = facts.stored.weight.format.scale
    reads = f"its weights reach {_magnitude(amax)}"
    if inverted != amax and _plausible(inverted):
        holder = next((c for c in facts.stored.contents if c.holds.name in ("encode", "decode")), None)
        yield Finding(
            _scale_name(facts) if holder is None else holder.entry.name,
            f"{reads}, and with the inverse scale {_magnitude(inverted)}",
            "the inverse: this layout " + ("multiplies by it" if holder is None else _DIRECTIONS[holder.holds.name]),
            "Store 1 / scale.",
        )
    elif row is E8M0 and np.isin(facts.scales, _AS_NUMBERS).all():
        yield Finding(
            _scale_name(facts),
            f"{reads}: its bytes are {', '.join(map(str, np.unique(facts.scales)[:4]))} only",
            "biased exponents: these look like scales converted as numbers",
            "Copy the bytes of F8_E8M0 scales.",
        )


def _magnitude_check(facts: Facts) -> Iterator[Finding]:
    if 0 < facts.amax < math.inf and not _plausible(facts.amax) and not list(_direction(facts)):
        yield Finding(
            facts.name,
            f"its weights reach {_magnitude(facts.amax)}",
            "weights that reach between 2^-20 and 2^10, as those of models do",
            "Compare with --against SOURCE.",
        )


def _unscaled(facts: Facts) -> Iterator[Finding]:
    row = facts.stored.weight.format
    if row.scale is not FP32 or row.element.bits != 8 or row.element.twos_complement or not facts.scales.size:
        return
    if (facts.scale_values == 1).all() and 0 < facts.amax < UNSCALED_AMAX * row.element.max:
        yield Finding(
            _scale_name(facts),
            f"every scale is 1, and codes reach {facts.amax:g} of {row.element.max:g}",
            "scales that use the range: these weights were cast, and what is small was lost",
            "Quantize the weight again from its source.",
        )


def _one_code(facts: Facts) -> Iterator[Finding]:
    if facts.code is not None and facts.amax:
        yield Finding(
            _codes_name(facts),
            f"every code is {facts.code}",
            "codes that differ, as those of a trained layer do",
            "Compare with --against SOURCE.",
        )


def _zero_weight(facts: Facts) -> Iterator[Finding]:
    if facts.code_max.size and not facts.code_max.any():
        yield Finding(facts.name, "all of it is 0", "nothing")


def _plausible(amax: float) -> bool:
    return PLAUSIBLE_LOW <= amax <= PLAUSIBLE_HIGH


def _magnitude(value: float) -> str:
    if not 0 < value < math.inf:
        return f"{value:g}"
    return f"{value:.3g} (2^{math.frexp(value)[1] - 1})"


_DIRECTIONS = {"encode": "divides by it", "decode": "multiplies by it"}

WEIGHT_CHECKS: tuple[Check[Facts], ...] = (
    Check(
        "nan_scale",
        PROBLEM,
        "scales that are NaN or infinite make their whole block NaN",
        "E8M0 0xFF, E4M3 0x7F and 0xFF, binary32 that is not finite",
        _not_finite_scales,
    ),
    Check(
        "negative_scale",
        PROBLEM,
        "scales below zero, which no producer writes",
        "the sign bit of E4M3 and binary32 scales other than 0",
        _negative_scales,
    ),
    Check(
        "zero_scale",
        PROBLEM,
        "blocks that read as 0 though their codes say otherwise",
        "scale 0 over codes that are neither 0 nor the largest (which a scale that underflowed leaves); binary32 "
        "scales of 0 over any code",
        _lost_blocks,
    ),
    Check(
        "underflowed_scale",
        WARNING,
        "blocks that read as 0 because their scale rounded to 0",
        "scale 0 over codes that are all 0 or the largest",
        _emptied_blocks,
    ),
    Check(
        "tensor_scale",
        PROBLEM,
        "tensor scales that are 0, negative, infinite or NaN",
        "the scale as stored; where a layout stores both directions, that one is the inverse of the other",
        _tensor_scale,
    ),
    Check(
        "nan_code",
        PROBLEM,
        "weights that read as NaN",
        "codes of FP8 that are NaN or infinite",
        _not_finite_codes,
    ),
    Check(
        "scale_direction",
        PROBLEM,
        "scales stored the wrong way round, or as numbers instead of bytes",
        "the largest magnitude that codes and scales stand for lies outside 2^-20 to 2^10, and inside it with inverted "
        "scales; or E8M0 bytes are all 0 or a power of two",
        _direction,
    ),
    Check(
        "magnitude",
        WARNING,
        "weights far larger or smaller than those of models",
        "the largest magnitude lies outside 2^-20 to 2^10 whichever way the scales are read",
        _magnitude_check,
    ),
    Check(
        "unscaled",
        WARNING,
        "FP8 weights that were cast without being scaled",
        "every scale is 1 and the codes reach less than a quarter of the format's range",
        _unscaled,
    ),
    Check("one_code", WARNING, "weights of one value only", "every code of the weight is the same, not 0", _one_code),
    Check("zero_weight", NOTE, "weights that are all 0", "every code of the weight is a zero", _zero_weight),
)
