"""Checks of a quantized checkpoint against its source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN, quantized_from
from mxcli.files.tensors import Array
from mxcli.flows.verify.check import NOTE, PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.errors import Distance, distance, same_bytes
from mxcli.flows.verify.subject import Original, Originals, Subject
from mxcli.flows.write.restore import StoredWeight, values_of
from mxcli.numerics.formats import BlockFormat

SWAPPED_GAIN = 0.25
"""Codes are swapped if exchanging them leaves less than this fraction of the squared error."""


@dataclass(frozen=True, slots=True)
class AgainstSource:
    """A checkpoint with the originals of its tensors."""

    subject: Subject
    originals: Originals


@dataclass(frozen=True, slots=True)
class AgainstOriginal:
    """A weight with its distance from the original, and the distance with the 4-bit codes of each byte exchanged (None:
    not computed, since the first is small)."""

    stored: StoredWeight
    distance: Distance
    swapped: Distance | None


def largest_error(fmt: BlockFormat) -> float:
    """Return a relative error that rounding a weight to this format stays below: two to five times the usual one."""
    return 2.0 ** -min(fmt.element.mantissa_bits, 6)


def compare_weight(
    checkpoint: Checkpoint, stored: StoredWeight, original: Original, x: Array, backend: Backend
) -> AgainstOriginal:
    """Compare a weight with its original `x`."""
    wide = replace(stored, weight=replace(stored.weight, dtype="F32"))
    found = distance(x, original.info.dtype, values_of(checkpoint, wide, backend))
    swapped = None
    if _is_far(stored, found) and stored.weight.format.element.stored_bits == 4:
        swapped = distance(x, original.info.dtype, _exchanged(checkpoint, wide, backend))
    return AgainstOriginal(stored, found, swapped)


def _exchanged(checkpoint: Checkpoint, stored: StoredWeight, backend: Backend) -> Array:
    """Return the values of a weight with the codes of each byte exchanged."""
    arrays = [(content, read(checkpoint, checkpoint.tensors[content.entry.name])) for content in stored.contents]
    q = quantized_from(stored.weight, arrays)
    values = backend.dequantize(replace(q, packed=(q.packed << 4) | (q.packed >> 4)), "F32")
    return np.swapaxes(values, -1, -2) if stored.weight.axis == COLUMN else values


def _is_far(stored: StoredWeight, found: Distance) -> bool:
    error = found.relative_error
    return (error is None and found.noise > 0) or (error is not None and error > largest_error(stored.weight.format))


def _is_swapped(compared: AgainstOriginal) -> bool:
    return compared.swapped is not None and compared.swapped.noise < SWAPPED_GAIN * compared.distance.noise


def _swapped(compared: AgainstOriginal) -> Iterator[Finding]:
    if _is_swapped(compared) and compared.swapped is not None:
        yield Finding(
            compared.stored.contents[0].entry.name,
            f"relative error {_error(compared.distance)}, and {_error(compared.swapped)} with exchanged codes",
            "the element with the even index in the low 4 bits",
            "Exchange the two codes of every byte.",
        )


def _far(compared: AgainstOriginal) -> Iterator[Finding]:
    if not _is_far(compared.stored, compared.distance) or _is_swapped(compared):
        return
    gain = compared.distance.gain
    times = f"; its best fit is {gain:.4g} times the source" if gain is not None and abs(gain - 1) > 0.1 else ""
    yield Finding(
        compared.stored.weight.name,
        f"relative error {_error(compared.distance)}{times}",
        f"at most {largest_error(compared.stored.weight.format):g}, the bound for rounding to "
        f"{compared.stored.weight.format.name}",
        "Check that this is the right source; if it is, requantize the weight.",
    )


def _error(found: Distance) -> str:
    return "infinite" if found.relative_error is None else f"{found.relative_error:.3g}"


def _not_finite(compared: AgainstOriginal) -> Iterator[Finding]:
    if compared.distance.unmatched:
        yield Finding(
            compared.stored.weight.name,
            f"{compared.distance.unmatched:,} values are finite in only one of the two",
            "NaN and infinities only where the source has them",
            "Requantize the weight.",
        )


def _missing(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    there = set() if view is None else view.tensors.keys()
    for name, original in against.originals.by_name.items():
        if name not in there and name not in against.originals.tied and name not in against.subject.misfits:
            if name.removesuffix(".weight") in against.subject.misfits:
                continue
            yield Finding(
                name,
                "missing",
                f"{original.info.dtype} {list(original.shape)}, as in the source",
                "Copy or quantize it.",
            )


def _extra(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        known = name in against.originals.by_name or info.role in ("scale", "codes")
        if not known and name not in against.originals.tied:
            yield Finding(name, f"{info.dtype} {list(info.shape)}", "no tensor: the source has none of this name")


def _shapes(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        if original is not None and original.shape != info.shape:
            yield Finding(name, f"{list(info.shape)}", f"{list(original.shape)}, as in the source", "Requantize it.")


def _changed(against: AgainstSource) -> Iterator[Finding]:
    """Yield plain tensors whose bytes differ from the source."""
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        quantized = view is not None and (name in view.weights or name in view.foreign)
        if original is None or quantized or original.shape != info.shape or original.info.dtype != info.dtype:
            continue
        if not same_bytes(read(against.subject.checkpoint, info), original.read()):
            yield Finding(
                name, "values differ from the source", "equal values, unless the change was intended", "Compare both."
            )


def _retyped(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        if original is not None and name not in (view.weights if view else {}) and original.info.dtype != info.dtype:
            yield Finding(name, info.dtype, f"{original.info.dtype}, as in the source")


SOURCE_CHECKS: tuple[Check[AgainstSource], ...] = (
    Check(
        "missing", PROBLEM, "tensors of the source that are missing", "names, with stacked experts one by one", _missing
    ),
    Check("shape", PROBLEM, "tensors whose shape differs from the source", "plain shapes", _shapes),
    Check("extra", WARNING, "tensors missing in the source", "names; scales and codes have their own checks", _extra),
    Check("changed", WARNING, "plain tensors whose values differ from the source", "byte by byte", _changed),
    Check("retyped", NOTE, "plain tensors whose dtype differs from the source", "dtypes", _retyped),
)
ORIGINAL_CHECKS: tuple[Check[AgainstOriginal], ...] = (
    Check(
        "swapped_codes",
        PROBLEM,
        "4-bit codes in the wrong order within a byte",
        "exchanging the codes of each byte leaves less than a quarter of the squared error",
        _swapped,
    ),
    Check(
        "far_from_source",
        PROBLEM,
        "weights that do not match the source",
        "relative error above 2^-(mantissa bits of the element), the bound for rounding",
        _far,
    ),
    Check(
        "finite_elsewhere",
        PROBLEM,
        "values that are finite in only one of checkpoint and source",
        "element by element",
        _not_finite,
    ),
)
