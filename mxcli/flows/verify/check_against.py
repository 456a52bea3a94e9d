"""Checks of a quantized checkpoint against its source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.verify.check import NOTE, PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.errors import Distance, distance, same_bytes, widened
from mxcli.flows.verify.judgement import (
    FAR,
    OTHER_BYTES,
    OTHER_CHOICE,
    RESCALED,
    SWAPPED,
    Judged,
    is_rotated,
)
from mxcli.flows.verify.subject import Original, Originals, Subject
from mxcli.flows.write.restore import StoredWeight, values_of

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
WILD = 0.5
"""The relative error from which on a plain tensor is another one: a cast, or a change that trained on, is far below."""


@dataclass(frozen=True, slots=True)
class AgainstSource:
    """A checkpoint with the originals of its tensors."""

    subject: Subject
    originals: Originals


@dataclass(frozen=True, slots=True)
class AgainstOriginal:
    """A weight with its distance from the original."""

    stored: StoredWeight
    distance: Distance


def compare_weight(
    checkpoint: Checkpoint, stored: StoredWeight, dtype: str, x: Array, backend: Backend
) -> AgainstOriginal:
    """Compare a weight with its original `x`."""
    wide = replace(stored, weight=replace(stored.weight, dtype="F32"))
    return AgainstOriginal(stored, distance(x, dtype, values_of(checkpoint, wide, backend)))


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
            if name.removesuffix(".weight") in against.subject.misfits or _in_unread_codes(against.subject, name):
                continue
            yield Finding(
                name,
                "missing",
                f"{original.info.dtype} {list(original.shape)}, as in the source",
                "Copy or quantize it.",
            )


def _stacked_experts(subject: Subject, layer: str) -> bool:
    """Return whether the experts of a layer are there as stacks of all of them."""
    names = subject.checkpoint.tensors if subject.view is None else subject.view.tensors
    parts = (name.rpartition(".experts.") for name in names if name.startswith(f"{layer}."))
    return any(experts and not after[:1].isdigit() for _, experts, after in parts)


def _in_unread_codes(subject: Subject, name: str) -> bool:
    """Return whether a weight is there in codes of an unknown kind, as tensors that begin with its name, or in a stack
    of experts."""
    module = name.removesuffix(".weight")
    before, is_expert, after = name.rpartition(".experts.")
    if is_expert and after[:1].isdigit() and _stacked_experts(subject, before.rpartition(".")[0]):
        return True
    beginnings = (f"{name}_", f"{name}.", f"{module}._weight_", f"{module}.qweight")
    return any(other.startswith(beginnings) for other in subject.checkpoint.tensors)


def _extra(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        known = name in against.originals.by_name or info.role in ("scale", "codes")
        known = known or name.rpartition("_")[0] in against.originals.by_name
        if not known and name not in against.originals.tied:
            yield Finding(name, f"{info.dtype} {list(info.shape)}", "no tensor: the source has none of this name")


def _are_codes(info: TensorInfo, original: Original) -> bool:
    """Return whether a tensor has codes of an unknown kind where the source has floats."""
    return original.info.dtype in _FLOATS and info.dtype not in _FLOATS


def _shapes(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        if original is not None and original.shape != info.shape and not _are_codes(info, original):
            yield Finding(name, f"{list(info.shape)}", f"{list(original.shape)}, as in the source", "Requantize it.")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A plain tensor and its original, read; `same` if their bytes are equal."""

    name: str
    x: Array
    dtype: str
    y: Array
    y_dtype: str

    @property
    def same(self) -> bool:
        return self.dtype == self.y_dtype and same_bytes(self.x, self.y)


def _plain_pairs(against: AgainstSource) -> Iterator[_Pair]:
    """Yield the plain tensors with an original of their shape, and that."""
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        quantized = view is not None and (name in view.weights or name in view.foreign)
        if original is not None and not quantized and original.shape == info.shape:
            yield _Pair(name, original.read(), original.info.dtype, read(against.subject.checkpoint, info), info.dtype)


def _changed(against: AgainstSource) -> Iterator[Finding]:
    """Yield plain tensors that differ from the source, unless that is a problem or a cast."""
    for pair in _plain_pairs(against):
        if pair.dtype == pair.y_dtype and not pair.same and not _wrong(against, pair):
            yield Finding(
                pair.name,
                "values differ from the source",
                "equal values, unless the change was intended",
                "Compare both.",
            )


def _damaged(against: AgainstSource) -> Iterator[Finding]:
    for pair in _plain_pairs(against):
        if not pair.same and (value := _wrong(against, pair)):
            yield Finding(
                pair.name, value, "the values of the source", "Copy the tensor: --repair does where a record proves it."
            )


def _wrong(against: AgainstSource, pair: _Pair) -> str:
    """Return why a plain tensor that differs from its original is wrong; empty if it may have been intended."""
    floats = pair.dtype in _FLOATS and pair.y_dtype in _FLOATS
    if not floats:
        copied = pair.dtype == pair.y_dtype and pair.name in against.subject.record.tensors
        return _first_difference(pair) if copied else ""
    found = distance(pair.x, pair.dtype, pair.y, pair.y_dtype)
    if found.unmatched:
        return f"{found.unmatched:,} values are finite in only one of checkpoint and source"
    if pair.dtype == pair.y_dtype and pair.name in against.subject.record.tensors:
        return _first_difference(pair)
    error = found.relative_error
    wild = (error is None and found.noise > 0) or (error is not None and error > WILD)
    if wild and not is_rotated(against.subject):
        return f"relative error {_error(found)}: these are other values"
    return ""


def _first_difference(pair: _Pair) -> str:
    one, other = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (pair.x, pair.y))
    differing = np.flatnonzero(one != other)
    at = int(differing[0]) // pair.x.itemsize
    listed = ", ".join(map(str, map(int, np.unravel_index(at, pair.x.shape)))) if pair.x.ndim else ""
    values = f"; there {_value(pair.y, at, pair.y_dtype)}, in the source {_value(pair.x, at, pair.dtype)}"
    return f"{len(differing):,} of {one.size:,} bytes differ from the source, the first at [{listed}]{values}"


def _value(x: Array, at: int, dtype: str) -> str:
    single = x.reshape(-1)[at : at + 1]
    return f"{float(widened(single, dtype)[0]):g}" if dtype in _FLOATS else str(single[0])


def _error(found: Distance) -> str:
    return "infinite" if found.relative_error is None else f"{found.relative_error:.3g}"


def _retyped(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        if original is not None and name not in (view.weights if view else {}) and original.info.dtype != info.dtype:
            yield Finding(name, info.dtype, f"{original.info.dtype}, as in the source")


def _uncompared(against: AgainstSource) -> Iterator[Finding]:
    """Yield weights that have an original which is not comparable, and those in codes that are not read."""
    view = against.subject.view
    if view is None:
        return
    for name, stored in view.weights.items():
        original = against.originals.by_name.get(name)
        if original is None or (original.shape == stored.plain.shape and original.info.dtype not in _FLOATS):
            what = "the source has no tensor of this name" if original is None else f"there {original.info.dtype}"
            yield Finding(name, f"not compared: {what}", "a source with floats of the same name")
    for name, original in against.originals.by_name.items():
        info = view.tensors.get(name)
        if _are_codes(info, original) if info is not None else _in_unread_codes(against.subject, name):
            yield Finding(name, "not compared: stored in another way", "codes that are read")


def _judged(verdict: str, judged: Judged) -> Iterator[Finding]:
    if judged.verdict == verdict:
        yield judged.finding


SOURCE_CHECKS: tuple[Check[AgainstSource], ...] = (
    Check(
        "missing", PROBLEM, "tensors of the source that are missing", "names, with stacked experts one by one", _missing
    ),
    Check("shape", PROBLEM, "tensors whose shape differs from the source", "plain shapes", _shapes),
    Check(
        "damaged",
        PROBLEM,
        "plain tensors that are not those of the source",
        "byte by byte where the record says they were copied; else values that are not finite, or far off",
        _damaged,
    ),
    Check("extra", WARNING, "tensors missing in the source", "names; scales and codes have their own checks", _extra),
    Check("changed", WARNING, "plain tensors whose values differ from the source", "byte by byte", _changed),
    Check(
        "not_compared", WARNING, "weights that were not compared with the source", "names, shapes, dtypes", _uncompared
    ),
    Check("retyped", NOTE, "plain tensors whose dtype differs from the source", "dtypes", _retyped),
)
ORIGINAL_CHECKS: tuple[Check[AgainstOriginal], ...] = (
    Check(
        "finite_elsewhere",
        PROBLEM,
        "values that are finite in only one of checkpoint and source",
        "element by element",
        _not_finite,
    ),
)
JUDGED_CHECKS: tuple[Check[Judged], ...] = (
    Check(
        SWAPPED,
        PROBLEM,
        "4-bit codes in the wrong order within a byte",
        "exchanging the codes of each byte leaves less than a quarter of the squared error",
        partial(_judged, SWAPPED),
    ),
    Check(
        OTHER_BYTES,
        PROBLEM,
        "weights that are not what their rule makes of the source",
        "the source quantized again, by the rule that the record or the configuration names, else by that of most "
        "weights in this format",
        partial(_judged, OTHER_BYTES),
    ),
    Check(
        FAR,
        PROBLEM,
        "weights with errors that no choice of scales and rounding gives",
        "place by place, the error compared with that of every element rounded to the worse neighbour with a scale "
        "twice that of the nearest rule, and with the error that is left with the best scale for the codes",
        partial(_judged, FAR),
    ),
    Check(
        RESCALED,
        NOTE,
        "weights that cannot be compared: the producer rescaled their channels or transformed the model",
        "one factor for each column, and one for each row, leave the error of rounding; transform_config",
        partial(_judged, RESCALED),
    ),
    Check(
        OTHER_CHOICE,
        NOTE,
        "weights whose producer chose codes or scales by a rule of its own",
        "the squared error in multiples of the nearest rule's",
        partial(_judged, OTHER_CHOICE),
    ),
)
