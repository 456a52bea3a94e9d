"""Verdicts on weights whose bytes no known rule reproduces, or another than the one that is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.tensors import Array
from mxcli.flows.measure.amax import oriented
from mxcli.flows.verify.against.excess import DEVIANT, Excess, Place, excess
from mxcli.flows.verify.against.mismatch import Mismatch, mismatch_of
from mxcli.flows.verify.against.originals import Original
from mxcli.flows.verify.against.provenance import Amaxes, Provenance, requantize, stored_form
from mxcli.flows.verify.checks.check import Finding
from mxcli.flows.verify.errors import Distance, distance, widened
from mxcli.flows.verify.subject import Subject
from mxcli.flows.verify.weight_summary import decode_scale
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.scheme import Scheme, resolve

SWAPPED, OTHER_BYTES, FAR = "swapped_codes", "other_bytes", "far_from_source"
RESCALED, OTHER_CHOICE = "rescaled", "other_choice"
SWAPPED_GAIN = 0.25
"""Codes are swapped if exchanging them leaves less than this fraction of the squared error."""
_DOUBTFUL = 2.0
"""Squared errors above this multiple of the rule's are looked at for exchanged codes and rescaled channels."""
_EXPLAINED = 4.0
"""Squared error, in multiples of the rule's, that rescaled channels may leave: they are rounded elsewhere."""
_ARITHMETIC = 2.0**-7
_SEARCHED = 1 / 16
"""Where more than this share of all codes are not the nearest, they were searched (GPTQ)."""
_SAMPLED = 1 << 21
"""Elements, in whole rows, that factors of channels are fitted to."""
_ALTERNATIONS = 4
"""Fits of rows and columns in turn, after which products of both kinds of factors are found."""
_SPREAD = 0.02
"""Relative distance of channel factors from their median that rounding does not explain."""
_REPAIR = "Repair it with --repair if it is an output of mxcli with a record; else requantize it."


@dataclass(frozen=True, slots=True)
class Traced:
    """A weight that was compared: its original, its distance, and the provenance of its bytes."""

    stored: StoredWeight
    original: Original
    distance: Distance
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Judged:
    """A weight with a verdict and the finding on it."""

    verdict: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The rule of most weights of a format: the scheme that makes their bytes (None: no scheme does), and whether their
    codes are the nearest."""

    scheme: Scheme | None = None
    nearest: bool = False


def judged_weights(
    subject: Subject, traced: Mapping[str, Traced], amaxes: Amaxes, backend: Backend
) -> Iterator[Judged]:
    """Yield a verdict for every weight that the rule of its record, or of most weights in its format, does not make,
    and for those whose error nothing explains."""
    siblings = _siblings(list(traced.values()))
    examined: dict[str, _Examined] = {}
    for name, each in traced.items():
        known = siblings[each.stored.weight.format.name]
        if _is_doubtful(each, known):
            examined[name] = _examine(subject.checkpoint, each, known, amaxes, backend)
    sane = Counter(each.traced.stored.weight.format.name for each in examined.values() if each.is_nearest)
    exact = Counter(each.stored.weight.format.name for each in traced.values() if each.provenance.exact)
    total = Counter(each.stored.weight.format.name for each in traced.values())
    rescaled = sum(1 for each in examined.values() if each.rescaled_columns)
    for doubtful in examined.values():
        fmt = doubtful.traced.stored.weight.format.name
        known = replace(siblings[fmt], nearest=2 * (sane[fmt] + exact[fmt]) > total[fmt])
        judged = _verdict(doubtful, known, rescaled=rescaled, rotated=is_rotated(subject))
        if judged is not None:
            yield judged


def _siblings(traced: Sequence[Traced]) -> dict[str, _Siblings]:
    found = {}
    for fmt in {each.stored.weight.format.name for each in traced}:
        mine = [each.provenance for each in traced if each.stored.weight.format.name == fmt]
        schemes = Counter(each.scheme for each in mine if each.exact and not each.implied)
        most = 2 * schemes.total() > len(mine)
        found[fmt] = _Siblings(schemes.most_common(1)[0][0] if most else None)
    return found


def _is_doubtful(each: Traced, known: _Siblings) -> bool:
    provenance = each.provenance
    is_measured = each.distance.noise and not each.distance.unmatched
    if provenance.draws_unknown or not (is_measured or provenance.named):
        return False
    return not provenance.exact or (provenance.implied and known.scheme is not None)


@dataclass(frozen=True, slots=True)
class _Examined:
    """A doubtful weight: its mismatch with the rule, its error by places (None: transformed weights have none), whether
    its tensor scale follows from the source (`same`: it is that of the rule), and what exchanging codes or rescaling
    channels explains."""

    traced: Traced
    scheme: Scheme
    mismatch: Mismatch
    excess: Excess | None
    rule_noise: float
    tensor_scale: bool
    same: bool
    swapped: Distance | None
    rescaled_columns: bool
    rescaled_rows: bool

    @property
    def is_nearest(self) -> bool:
        """True if every code is the nearest for its scale."""
        return self.excess is not None and not self.excess.off

    @property
    def ratio(self) -> float:
        """The squared error in multiples of the rule's."""
        noise = self.traced.distance.noise
        return noise / self.rule_noise if self.rule_noise else float("inf")


def _examine(checkpoint: Checkpoint, each: Traced, known: _Siblings, amaxes: Amaxes, backend: Backend) -> _Examined:
    stored, dtype = each.stored, each.original.info.dtype
    scheme = each.provenance.scheme
    if not each.provenance.named and known.scheme is not None and known.scheme.hadamard == scheme.hadamard:
        scheme = known.scheme
    x = oriented(np.ascontiguousarray(each.original.read()), stored.weight.axis)
    q = stored_form(checkpoint, stored)

    def by_rule(scheme: Scheme) -> tuple[float, Scheme, Quantized, bool]:
        rule, same = requantize(backend, stored, q, x, dtype, scheme, amaxes.near(stored))
        return distance(x, dtype, backend.dequantize(rule, "F32")).noise, scheme, rule, same

    noise, scheme, rule, same = by_rule(scheme)
    if known.scheme is None and not each.provenance.named and scheme.hadamard is None:
        # The rule nearest to damaged bytes may be one with a large error of its own.
        noise, scheme, rule, same = min((noise, scheme, rule, same), by_rule(resolve(scheme.format)), key=itemgetter(0))
    far = each.distance.noise > _DOUBTFUL * noise
    swapped = None
    if far and stored.weight.format.element.stored_bits == 4:
        exchanged = replace(q, packed=(q.packed << 4) | (q.packed >> 4))
        swapped = distance(x, dtype, backend.dequantize(exchanged, "F32"))
    columns = rows = False
    if far and not each.provenance.named:
        columns, rows = _rescaled(x, dtype, backend.dequantize(q, "F32"), noise)
        rows = rows and not _permuted(q, rule)
    tensor_scale = same or _is_near(q, rule)
    mismatch = mismatch_of(checkpoint, stored, q, rule)
    places = None if q.scheme.hadamard is not None else excess(x, dtype, q, rule)
    return _Examined(each, scheme, mismatch, places, noise, tensor_scale, same, swapped, columns, rows)


def is_rotated(subject: Subject) -> bool:
    """Return whether the configuration names transforms that the producer applied to the model before quantizing."""
    return bool(subject.disk.settings.get("transform_config"))


def _verdict(each: _Examined, known: _Siblings, *, rescaled: int, rotated: bool) -> Judged | None:
    name, provenance = each.traced.stored.weight.name, each.traced.provenance
    if each.traced.stored.weight.adjusting:
        return _adjusted(each)
    if each.swapped is not None and each.swapped.noise < SWAPPED_GAIN * each.traced.distance.noise:
        return Judged(
            SWAPPED,
            Finding(
                each.traced.stored.contents[0].entry.name,
                f"relative error {_error(each.traced.distance)}, and {_error(each.swapped)} with exchanged codes",
                "the element with the even index in the low 4 bits",
                "Exchange the two codes of every byte.",
            ),
        )
    rule = f"{each.scheme.scale_rule.name}, {each.scheme.rounding.name}, as {each.scheme.dialect.name}"
    error = f"; relative error {_error(each.traced.distance)}, {_relative(each)} by the rule"
    bytes_of = f"{each.mismatch.expected} there: the bytes of {rule}, which"
    if provenance.named:
        found = Finding(each.mismatch.where, each.mismatch.found + error, f"{bytes_of} is named for it", _REPAIR)
        return Judged(OTHER_BYTES, found)
    # Where the rule makes most weights of the source as it is, one rescaled weight alone is damage.
    if (each.rescaled_columns or each.rescaled_rows) and rescaled > (known.scheme is not None):
        which = "column" if each.rescaled_columns else "row"
        value = f"not comparable: one factor for each {which} leaves the error of rounding"
        return Judged(RESCALED, Finding(name, value, "no comparison: give the rescaled model as SOURCE to have one"))
    if rotated and each.ratio > _EXPLAINED:
        value = "not comparable: the configuration names transforms of the model (transform_config)"
        return Judged(RESCALED, Finding(name, value, "no comparison: give the transformed model as SOURCE to have one"))
    differs = not each.tensor_scale or each.mismatch.has_padding
    if known.scheme is not None and (differs or (known.nearest and _has_off(each)) or _has_stepped(each)):
        found = Finding(each.mismatch.where, each.mismatch.found + error, f"{bytes_of} most weights have", _REPAIR)
        return Judged(OTHER_BYTES, found)
    reason = _unexplained(each, known)
    if reason:
        gain = each.traced.distance.gain
        fits = f"; its best fit is {gain:.4g} times the source" if gain is not None and abs(gain - 1) > 0.1 else ""
        return Judged(
            FAR,
            Finding(
                name,
                f"relative error {_error(each.traced.distance)}{fits}; {reason}",
                f"about the error of {rule}, {_relative(each)}",
                "Check that this is the right source; if it is, requantize the weight.",
            ),
        )
    if each.ratio > 1.05:
        return Judged(
            OTHER_CHOICE,
            Finding(name, f"{_times(each.ratio)} the squared error of {rule}", "nothing: calibration may gain from it"),
        )
    return None


def _adjusted(each: _Examined) -> Judged:
    """Return the verdict on a weight that tensors next to its codes change: by its values alone, since what was
    quantized is not in the source."""
    weight = each.traced.stored.weight
    names = ", ".join(entry.name for entry in weight.adjusting)
    if each.ratio <= _EXPLAINED:
        value = f"bytes not comparable: {names} {'changes' if len(weight.adjusting) == 1 else 'change'} what they are"
        return Judged(RESCALED, Finding(weight.name, value, "no comparison: its values have the error of rounding"))
    return Judged(
        FAR,
        Finding(
            weight.name,
            f"relative error {_error(each.traced.distance)} with {names}",
            f"about the error of {each.scheme.scale_rule.name}, {_relative(each)}",
            "Check that this is the right source; if it is, requantize the weight.",
        ),
    )


def _has_off(each: _Examined) -> bool:
    return each.excess is not None and each.excess.off > 0


def _has_stepped(each: _Examined) -> bool:
    """Return whether a few scales are not those of the rule, as nearly all are; under another tensor scale, which
    producers round differently, some are."""
    return each.same and each.excess is not None and each.excess.stepped > 0 and each.excess.mostly_rule


def _unexplained(each: _Examined, known: _Siblings) -> str:
    """Return in words what no choice of scales and rounding explains; empty if nothing."""
    found = each.excess
    if found is None:
        return "" if each.ratio <= 4 else f"{_times(each.ratio)} the squared error of the nearest rule"
    if found.sunk and found.first_sunk is not None:
        return (
            f"in {found.sunk:,} of {found.blocks:,} blocks the values are far below those of the source, the first at "
            f"{_place(found.first_sunk)}"
        )
    searched = found.off > _SEARCHED * found.elements
    if (found.wide or (found.loose and not searched)) and found.mostly_rule and found.first_stepped is not None:
        return (
            f"{found.stepped:,} of {found.blocks:,} scales are not those of the rule, as the others are, the first at "
            f"{_place(found.first_stepped)}"
        )
    allowed = DEVIANT if searched else 0.0
    if found.beyond > allowed * found.regions and found.first_beyond is not None:
        return (
            f"in {found.beyond:,} of {found.regions:,} places it is larger than rounding to any neighbour gives, the "
            f"first at {_place(found.first_beyond)}"
        )
    if found.unfit > allowed * found.blocks and found.first_unfit is not None:
        return (
            f"{found.unfit:,} of {found.blocks:,} scales do not fit their codes, the first at "
            f"{_place(found.first_unfit)}"
        )
    if not found.scales_fit:
        return f"other scales would leave {100 * found.fitted / found.found:.0f} % of its squared error"
    if known.nearest and found.off and found.first_off is not None:
        return (
            f"{found.off:,} of {found.elements:,} codes are not the nearest for their scale, as those of most weights "
            f"are, the first at {_place(found.first_off)}"
        )
    return ""


def _rescaled(original: Array, dtype: str, decoded: Array, noise: float) -> tuple[bool, bool]:
    """Return whether one factor per column (and one per row), and whether one per row alone leave the error of
    rounding, with most factors away from the median: damage has one factor for all, or for a few."""
    if original.ndim != 2:
        return False, False
    step = max(1, original.size // _SAMPLED)
    x, y = widened(original[::step], dtype), np.asarray(decoded[::step], np.float64)
    left = _EXPLAINED * noise * x.shape[0] / original.shape[0]
    by_rows, rows = _fitted(x, y, 1)
    fitted, columns = _fitted(x, y, 0)
    improved = 2 * _error_of(x, fitted) < _error_of(x, y)
    for _ in range(_ALTERNATIONS):
        fitted = _fitted(x, _fitted(x, fitted, 1)[0], 0)[0]
    return columns and improved and _error_of(x, fitted) <= left, rows and _error_of(x, by_rows) <= left


def _error_of(x: Array, y: Array) -> float:
    return float(np.sum((x - y) ** 2))


def _fitted(x: Array, y: Array, axis: int) -> tuple[Array, bool]:
    """Return values with the best factor for each column (axis 0) or row, and whether most factors are away from the
    median."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.nan_to_num((x * y).sum(axis=axis, keepdims=True) / (y * y).sum(axis=axis, keepdims=True))
    apart = np.abs(factors / (np.median(factors) or 1.0) - 1) > _SPREAD
    return y * factors, 2 * int(np.count_nonzero(apart)) > apart.size


def _is_near(q: Quantized, rule: Quantized) -> bool:
    """Return whether the tensor scale is that of the rule up to arithmetic in bfloat16, whose results have 16 bits."""
    one, other = (decode_scale(each.tensor_scale, each.tensor_encode) for each in (q, rule))
    stored = q.tensor_encode if q.tensor_scale is None else q.tensor_scale
    is_short = not np.float32(stored).view(np.uint32) & 0xFFFF
    return bool(is_short) and abs(one - other) <= _ARITHMETIC * other


def _permuted(q: Quantized, rule: Quantized) -> bool:
    """Return whether the scales are those of the rule in another order."""
    return np.array_equal(np.sort(q.scales, axis=None), np.sort(rule.scales, axis=None))


def _place(place: Place) -> str:
    return f"row {place.row:,}, columns {place.begin:,} to {place.end - 1:,}"


def _error(found: Distance) -> str:
    return "infinite" if found.relative_error is None else f"{found.relative_error:.3g}"


def _relative(each: _Examined) -> str:
    signal = each.traced.distance.signal
    return "0" if not signal else f"{(each.rule_noise / signal) ** 0.5:.3g}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"
