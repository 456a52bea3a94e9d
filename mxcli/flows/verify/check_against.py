"""Checks of a quantized checkpoint against the source it was made from."""

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
"""Codes are swapped if reading them the other way round leaves less than this part of the squared error."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A checkpoint and the originals of its tensors."""

    subject: Subject
    originals: Originals


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight, how far it is from its original, and how far with every two codes of 4 bits exchanged (None: not
    tried, since it is near enough)."""

    stored: StoredWeight
    distance: Distance
    swapped: Distance | None


def largest_error(row: BlockFormat) -> float:
    """Return the relative error that no rounding of a weight to this format has: twice to five times what is usual."""
    return 2.0 ** -min(row.element.mantissa_bits, 6)


def pair_of(checkpoint: Checkpoint, stored: StoredWeight, original: Original, x: Array, backend: Backend) -> Pair:
    """Return a weight beside its original `x`."""
    wide = replace(stored, weight=replace(stored.weight, dtype="F32"))
    found = distance(x, original.info.dtype, values_of(checkpoint, wide, backend))
    swapped = None
    if _is_far(stored, found) and stored.weight.format.element.stored_bits == 4:
        swapped = distance(x, original.info.dtype, _exchanged(checkpoint, wide, backend))
    return Pair(stored, found, swapped)


def _exchanged(checkpoint: Checkpoint, stored: StoredWeight, backend: Backend) -> Array:
    """Return the values of a weight with the codes of each byte exchanged."""
    arrays = [(content, read(checkpoint, checkpoint.tensors[content.entry.name])) for content in stored.contents]
    q = quantized_from(stored.weight, arrays)
    values = backend.dequantize(replace(q, packed=(q.packed << 4) | (q.packed >> 4)), "F32")
    return np.swapaxes(values, -1, -2) if stored.weight.axis == COLUMN else values


def _is_far(stored: StoredWeight, found: Distance) -> bool:
    error = found.relative_error
    return (error is None and found.noise > 0) or (error is not None and error > largest_error(stored.weight.format))


def _is_swapped(pair: Pair) -> bool:
    return pair.swapped is not None and pair.swapped.noise < SWAPPED_GAIN * pair.distance.noise


def _swapped(pair: Pair) -> Iterator[Finding]:
    if _is_swapped(pair) and pair.swapped is not None:
        yield Finding(
            pair.stored.contents[0].entry.name,
            f"relative error {_error(pair.distance)}, and {_error(pair.swapped)} with the codes of each byte exchanged",
            "the element with the even index in the low 4 bits",
            "Exchange the two codes of every byte.",
        )


def _far(pair: Pair) -> Iterator[Finding]:
    if not _is_far(pair.stored, pair.distance) or _is_swapped(pair):
        return
    gain = pair.distance.gain
    times = f"; its best fit is {gain:.4g} times the source" if gain is not None and abs(gain - 1) > 0.1 else ""
    yield Finding(
        pair.stored.weight.name,
        f"relative error {_error(pair.distance)}{times}",
        f"at most {largest_error(pair.stored.weight.format):g}, which every rounding to "
        f"{pair.stored.weight.format.name} stays below",
        "Check that it is the right source; else quantize the weight again.",
    )


def _error(found: Distance) -> str:
    return "without bound" if found.relative_error is None else f"{found.relative_error:.3g}"


def _not_finite(pair: Pair) -> Iterator[Finding]:
    if pair.distance.unmatched:
        yield Finding(
            pair.stored.weight.name,
            f"{pair.distance.unmatched:,} values are finite in one of the two only",
            "NaN and infinities where the source has them",
            "Quantize the weight again.",
        )


def _missing(beside: Beside) -> Iterator[Finding]:
    seen = beside.subject.seen
    there = set() if seen is None else seen.tensors.keys()
    for name, original in beside.originals.by_name.items():
        if name not in there and name not in beside.originals.tied and name not in beside.subject.misfits:
            if name.removesuffix(".weight") in beside.subject.misfits:
                continue
            yield Finding(
                name,
                "missing",
                f"{original.info.dtype} {list(original.shape)}, as the source has it",
                "Copy or quantize it.",
            )


def _extra(beside: Beside) -> Iterator[Finding]:
    seen = beside.subject.seen
    for name, info in (seen.tensors if seen is not None else {}).items():
        known = name in beside.originals.by_name or info.role in ("scale", "codes")
        if not known and name not in beside.originals.tied:
            yield Finding(name, f"{info.dtype} {list(info.shape)}", "nothing: the source has no such tensor")


def _shapes(beside: Beside) -> Iterator[Finding]:
    seen = beside.subject.seen
    for name, info in (seen.tensors if seen is not None else {}).items():
        original = beside.originals.by_name.get(name)
        if original is not None and original.shape != info.shape:
            yield Finding(
                name, f"{list(info.shape)}", f"{list(original.shape)}, as the source has it", "Quantize it again."
            )


def _changed(beside: Beside) -> Iterator[Finding]:
    """Yield plain tensors that are not those of the source."""
    seen = beside.subject.seen
    for name, info in (seen.tensors if seen is not None else {}).items():
        original = beside.originals.by_name.get(name)
        told = seen is not None and (name in seen.weights or name in seen.foreign)
        if original is None or told or original.shape != info.shape or original.info.dtype != info.dtype:
            continue
        if not same_bytes(read(beside.subject.checkpoint, info), original.read()):
            yield Finding(
                name, "other values than in the source", "the same, unless it was meant to change", "Compare."
            )


def _retyped(beside: Beside) -> Iterator[Finding]:
    seen = beside.subject.seen
    for name, info in (seen.tensors if seen is not None else {}).items():
        original = beside.originals.by_name.get(name)
        if original is not None and name not in (seen.weights if seen else {}) and original.info.dtype != info.dtype:
            yield Finding(name, info.dtype, f"{original.info.dtype}, as the source has it")


SOURCE_CHECKS: tuple[Check[Beside], ...] = (
    Check("missing", PROBLEM, "tensors of the source that are not there", "names, experts of stacks by each", _missing),
    Check("shape", PROBLEM, "tensors of another shape than in the source", "plain shapes", _shapes),
    Check(
        "extra", WARNING, "tensors that the source has not", "names; scales and codes have checks of their own", _extra
    ),
    Check("changed", WARNING, "plain tensors with other values than in the source", "byte by byte", _changed),
    Check("retyped", NOTE, "plain tensors of another dtype than in the source", "dtypes", _retyped),
)
PAIR_CHECKS: tuple[Check[Pair], ...] = (
    Check(
        "swapped_codes",
        PROBLEM,
        "4-bit codes in the wrong order within a byte",
        "the squared error drops to a quarter or less when the codes of each byte are exchanged",
        _swapped,
    ),
    Check(
        "far_from_source",
        PROBLEM,
        "weights that are not those of the source",
        "relative error above 2^-(mantissa bits of the element), which rounding stays below",
        _far,
    ),
    Check(
        "finite_elsewhere",
        PROBLEM,
        "values that are NaN or infinite in the one and finite in the other",
        "element by element",
        _not_finite,
    ),
)
