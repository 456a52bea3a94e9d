"""Checks of the codes and scales of a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mxcli.files.tensors import Array
from mxcli.flows.verify.checks.check import NOTE, PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.weight_summary import WeightSummary, scales_that
from mxcli.numerics.floats import E8M0, FP32

PLAUSIBLE_LOW, PLAUSIBLE_HIGH = 2.0**-20, 2.0**10
"""Bounds of the amax of a weight of any known model."""
UNSCALED_AMAX = 0.25
"""Weights with scales of 1 that use less than this fraction of the format's range were not scaled to it."""
REQUANTIZE = "Requantize the weight from its source."
_COMPARE = "Compare with --against SOURCE."
_AS_NUMBERS = np.asarray([0, *(1 << np.arange(8))])
"""E8M0 values converted to 8-bit integers: all below 1 are 0."""


def _flag(
    where: str, count: int, whole: int, noun: str, fault: str, need: str, way_out: str = REQUANTIZE
) -> Iterator[Finding]:
    """Yield a finding if `count` of `whole` have a fault."""
    if count:
        yield Finding(where, f"{count:,} of {whole:,} {noun}{'' if whole == 1 else 's'} {fault}", need, way_out)


def _flag_scales(weight: WeightSummary, bad: Array, fault: str, need: str) -> Iterator[Finding]:
    """Yield a finding if some scales are bad, with the place of the first in the grid."""
    if bad.any():
        first = [int(at) for at in np.argwhere(bad)[0]]
        fault = f"{fault}, the first at {first} of the grid {list(weight.scales.shape)}"
        yield from _flag(weight.scales_name, int(np.count_nonzero(bad)), bad.size, "scale", fault, need)


def _not_finite_scales(weight: WeightSummary) -> Iterator[Finding]:
    bad = scales_that(_are_not_finite, weight.format.scale, weight.scales)
    byte = "" if weight.format.scale is FP32 or not bad.any() else f" (byte 0x{int(weight.scales[bad][0]):02X})"
    need = "finite scales: others make whole blocks of the weight NaN or infinite"
    yield from _flag_scales(weight, bad, f"NaN or infinite{byte}", need)


def _negative_scales(weight: WeightSummary) -> Iterator[Finding]:
    need = "positive scales: kernels drop the sign bit or negate the block"
    bad = scales_that(_are_negative, weight.format.scale, weight.scales)
    yield from _flag_scales(weight, bad, "negative", need)


def _are_not_finite(values: Array) -> Array:
    return np.asarray(~np.isfinite(values))


def _are_negative(values: Array) -> Array:
    return np.asarray(values < 0)


def _lost_blocks(weight: WeightSummary) -> Iterator[Finding]:
    count = weight.lost + weight.emptied if weight.lost or weight.format.scale is FP32 else 0
    fault = "with scale 0 and codes that are not 0"
    need = "scales above 0: a scale that underflowed does not leave such codes"
    yield from _flag(weight.scales_name, count, weight.scales.size, "block", fault, need)


def _emptied_blocks(weight: WeightSummary) -> Iterator[Finding]:
    count = 0 if weight.format.scale is FP32 else weight.emptied
    fault = "with scale 0: they read as 0"
    need = "scales above 0, unless those blocks are tiny compared with the largest weight"
    way_out = "Compare with --against, or requantize with a rule that has a smallest scale (torchao, modelopt)."
    yield from _flag(weight.scales_name, count, weight.scales.size, "block", fault, need, way_out)


def _tensor_scale(weight: WeightSummary) -> Iterator[Finding]:
    decode, encode = weight.tensor_scale, weight.tensor_encode
    for content in weight.stored.contents:
        value = {"encode": encode, "decode": decode}.get(content.holds.name)
        if value is not None and not (math.isfinite(value) and value > 0):
            yield Finding(
                content.entry.name,
                f"{value:g}",
                "a finite scale above 0: others make every value of the weight 0, infinite or NaN",
                "Requantize the weight; the tensor scale of an all-zero weight is 1.",
            )
    if decode and encode != 1.0 and abs(decode * encode - 1) > 2.0**-7:
        need = "reciprocal scales"
        yield Finding(weight.name, f"tensor scales {encode:g} and {decode:g}", need, REQUANTIZE)


def _not_finite_codes(weight: WeightSummary) -> Iterator[Finding]:
    elements = math.prod(weight.stored.weight.shape)
    need = "finite codes: a value too large for the format was cast without saturation"
    yield from _flag(weight.codes_name, weight.not_finite_codes, elements, "code", "NaN or infinite", need)


def _direction(weight: WeightSummary) -> Iterator[Finding]:
    amax, inverted = weight.amax, weight.amax_inverted
    if _plausible(amax) or not amax:
        return
    reads = f"its weights reach {_magnitude(amax)}"
    if inverted != amax and _plausible(inverted):
        holder = next((c for c in weight.stored.contents if c.holds.name in ("encode", "decode")), None)
        yield Finding(
            weight.scales_name if holder is None else holder.entry.name,
            f"{reads}, and with the inverse scale {_magnitude(inverted)}",
            "the inverse: this layout " + ("multiplies by it" if holder is None else _DIRECTIONS[holder.holds.name]),
            "Store 1 / scale.",
        )
    elif weight.format.scale is E8M0 and np.isin(weight.scales, _AS_NUMBERS).all():
        yield Finding(
            weight.scales_name,
            f"{reads}: its bytes are {', '.join(map(str, np.unique(weight.scales)[:4]))} only",
            "biased exponents: these bytes look like scales converted to integers by value",
            "Copy the bytes of F8_E8M0 scales.",
        )


def _implausible(weight: WeightSummary) -> Iterator[Finding]:
    if 0 < weight.amax < math.inf and not _plausible(weight.amax) and not list(_direction(weight)):
        need = "an amax between 2^-20 and 2^10, as in known models"
        yield Finding(weight.name, f"its weights reach {_magnitude(weight.amax)}", need, _COMPARE)


def _unscaled(weight: WeightSummary) -> Iterator[Finding]:
    element = weight.format.element
    if weight.format.scale is not FP32 or element.bits != 8 or element.twos_complement or not weight.scales.size:
        return
    if (weight.scale_values == 1).all() and 0 < weight.amax < UNSCALED_AMAX * element.max:
        yield Finding(
            weight.scales_name,
            f"every scale is 1, and codes reach {weight.amax:g} of {element.max:g}",
            "scales that use the range: these weights were cast, and small values were lost",
            REQUANTIZE,
        )


def _one_code(weight: WeightSummary) -> Iterator[Finding]:
    if weight.code is not None and weight.amax:
        need = "several codes, as in a trained layer"
        yield Finding(weight.codes_name, f"every code is {weight.code}", need, _COMPARE)


def _zero_weight(weight: WeightSummary) -> Iterator[Finding]:
    if weight.ranks.size and not weight.ranks.any():
        yield Finding(weight.name, "all values are 0", "other values, unless the layer is not used")


def _plausible(amax: float) -> bool:
    return PLAUSIBLE_LOW <= amax <= PLAUSIBLE_HIGH


def _magnitude(value: float) -> str:
    if not 0 < value < math.inf:
        return f"{value:g}"
    return f"{value:.3g} (2^{math.frexp(value)[1] - 1})"


_DIRECTIONS = {"encode": "divides by it", "decode": "multiplies by it"}

WEIGHT_CHECKS: tuple[Check[WeightSummary], ...] = (
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
        "negative scales, which no producer writes",
        "the sign bit of E4M3 and binary32 scales other than 0",
        _negative_scales,
    ),
    Check(
        "zero_scale",
        PROBLEM,
        "blocks that read as 0 although their codes are not 0",
        "scale 0 with codes other than 0 and the largest (a scale that underflowed leaves only these); binary32 scales "
        "of 0 with any code that is not 0",
        _lost_blocks,
    ),
    Check(
        "underflowed_scale",
        WARNING,
        "blocks that read as 0 because their scale rounded to 0",
        "scale 0 with codes that are all 0 or the largest",
        _emptied_blocks,
    ),
    Check(
        "tensor_scale",
        PROBLEM,
        "tensor scales that are 0, negative, infinite or NaN",
        "the scale as stored; if a layout stores both directions, one must be the inverse of the other",
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
        "scales stored inverted, or converted to integers by value",
        "the largest dequantized magnitude is outside 2^-20 to 2^10, and inside it with inverted scales; or all E8M0 "
        "bytes are 0 or a power of two",
        _direction,
    ),
    Check(
        "magnitude",
        WARNING,
        "weights far larger or smaller than in known models",
        "the largest dequantized magnitude is outside 2^-20 to 2^10, with inverted scales too",
        _implausible,
    ),
    Check(
        "unscaled",
        WARNING,
        "FP8 weights that were cast without scaling",
        "every scale is 1 and the codes reach less than a quarter of the format's range",
        _unscaled,
    ),
    Check("one_code", WARNING, "weights with a single value", "all codes of the weight are the same, not 0", _one_code),
    Check("zero_weight", NOTE, "weights that are all 0", "all codes of the weight are zeros", _zero_weight),
)
