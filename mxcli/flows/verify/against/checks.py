"""Checks of a quantized checkpoint against its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mxcli.backends.backend import Backend
from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.model_files import RECORD
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.verify.against.judgement import (
    FAR,
    OTHER_BYTES,
    OTHER_CHOICE,
    RESCALED,
    SWAPPED,
    Judged,
    is_rotated,
)
from mxcli.flows.verify.against.originals import Original, Originals
from mxcli.flows.verify.against.plain import FLOATS, PlainDifference, plain_differences
from mxcli.flows.verify.checks.check import NOTE, PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.errors import Distance, distance, far_rows
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.restore import StoredWeight, values_of


@dataclass(frozen=True, slots=True)
class AgainstSource:
    """A checkpoint with the originals of its tensors, and the plain tensors that are not copies of theirs, and that
    are. `other_tensors` are those of the source that are not what the record says was read."""

    subject: Subject
    originals: Originals
    plain: tuple[PlainDifference, ...] = ()
    other_tensors: tuple[str, ...] = ()
    copies: frozenset[str] = frozenset()

    @classmethod
    def of(cls, subject: Subject, originals: Originals, hashes: Mapping[str, str]) -> AgainstSource:
        """Compare the plain tensors; `hashes` are those of all tensors that are read of the source until then."""
        pairs = list(_plain_pairs(subject, originals))
        plain = plain_differences(
            subject.checkpoint,
            pairs,
            subject.record.tensors,
            rotated=is_rotated(subject),
        )
        others = tuple(name for name, found in hashes.items() if not _may_be_recorded(subject, name, found))
        if others:
            return cls(subject, originals, (), others)
        copies = frozenset(info.name for info, _ in pairs) - {each.name for each in plain}
        return cls(subject, originals, tuple(plain), copies=copies)


def _may_be_recorded(subject: Subject, name: str, found: str) -> bool:
    """Return whether a tensor of the source can be what was read: of a converted checkpoint, now or when its codes were
    made. If that is not known, weights may be others than those that were read as codes."""
    record = subject.record
    if record.is_converted and not record.origin_hashes and name in subject.weights:
        return True
    stated = [hashes[name] for hashes in (record.source_hashes, record.origin_hashes) if name in hashes]
    return not stated or found in stated


def _plain_pairs(subject: Subject, originals: Originals) -> Iterator[tuple[TensorInfo, Original]]:
    """Yield the plain tensors that have an original of their shape, and that."""
    view = subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = originals.by_name.get(name)
        quantized = view is not None and (name in view.weights or name in view.foreign)
        if original is not None and not quantized and original.shape == info.shape:
            yield info, original


@dataclass(frozen=True, slots=True)
class AgainstOriginal:
    """A weight with its distance from the original; `by_rule` if its bytes are those that a rule makes of it."""

    stored: StoredWeight
    distance: Distance
    by_rule: bool = False


def distance_of(checkpoint: Checkpoint, stored: StoredWeight, dtype: str, x: Array, backend: Backend) -> Distance:
    """Return the distance of a weight from its original `x`."""
    wide = replace(stored, weight=replace(stored.weight, dtype="F32"))
    return distance(x, dtype, values_of(checkpoint, wide, backend))


def _not_finite(compared: AgainstOriginal) -> Iterator[Finding]:
    if compared.distance.unmatched and not compared.by_rule:
        yield Finding(
            compared.stored.weight.name,
            f"{compared.distance.unmatched:,} values are finite in only one of the two",
            "NaN and infinities only where the source has them",
            "Requantize the weight.",
        )


def _overflowing(compared: AgainstOriginal) -> Iterator[Finding]:
    if compared.distance.unmatched and compared.by_rule:
        yield Finding(
            compared.stored.weight.name,
            f"{compared.distance.unmatched:,} values overflow when decoded, or are NaN or infinite in the source",
            "smaller values: the bytes are those that the rule makes of the source",
            "Keep the weight plain (--exclude).",
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
        known = known or name in against.subject.transforms.tensors
        known = known or name.rpartition("_")[0] in against.originals.by_name
        if not known and name not in against.originals.tied:
            yield Finding(name, f"{info.dtype} {list(info.shape)}", "no tensor: the source has none of this name")


def _are_codes(info: TensorInfo, original: Original) -> bool:
    """Return whether a tensor has codes of an unknown kind where the source has floats."""
    return original.info.dtype in FLOATS and info.dtype not in FLOATS


def _shapes(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        if original is not None and original.shape != info.shape and not _are_codes(info, original):
            yield Finding(name, f"{list(info.shape)}", f"{list(original.shape)}, as in the source", "Requantize it.")


def _changed(against: AgainstSource) -> Iterator[Finding]:
    for each in against.plain:
        if not each.reason:
            yield Finding(each.name, each.value, "equal values, unless the change was intended", "Compare both.")


def _damaged(against: AgainstSource) -> Iterator[Finding]:
    for each in against.plain:
        if each.reason:
            way_out = "Copy the tensor: --repair does where a record proves it."
            yield Finding(each.name, each.value, each.reason, way_out)


def _other_source(against: AgainstSource) -> Iterator[Finding]:
    names = against.other_tensors
    if names:
        others = f", and {len(names) - 1:,} more have not" if len(names) > 1 else ""
        yield Finding(
            printable(against.originals.checkpoint.where),
            f"SOURCE is not what this was made from: tensor '{printable(names[0])}' does not have the hash in {RECORD}"
            f"{others}",
            "the source of this output; nothing was compared by its bytes",
            "Give the source that it was made from.",
        )


def _far_foreign(against: AgainstSource) -> Iterator[Finding]:
    """Yield weights in third-party formats whose decoded values are other ones than those of the source."""
    view = against.subject.view
    for name, info in (view.tensors if view is not None and not against.other_tensors else {}).items():
        original = against.originals.by_name.get(name)
        if view is None or name not in view.foreign or original is None or original.shape != info.shape:
            continue
        found = far_rows(original.read(), original.info.dtype, view.read(info), info.dtype)
        if found:
            yield Finding(name, found, "values near those of the source", "Quantize the weight again.")


def _retyped(against: AgainstSource) -> Iterator[Finding]:
    view = against.subject.view
    quantized = set() if view is None else view.weights.keys() | view.foreign.keys()
    for name, info in (view.tensors if view is not None else {}).items():
        original = against.originals.by_name.get(name)
        if original is not None and name not in quantized and original.info.dtype != info.dtype:
            yield Finding(name, info.dtype, f"{original.info.dtype}, as in the source")


def _uncompared(against: AgainstSource) -> Iterator[Finding]:
    """Yield weights that have an original which is not comparable, and those in codes that are not read."""
    view = against.subject.view
    if view is None:
        return
    for name, stored in view.weights.items():
        original = against.originals.by_name.get(name)
        if original is None or (original.shape == stored.plain.shape and original.info.dtype not in FLOATS):
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
        "other_source", PROBLEM, "a source that is not the recorded one", "the hash of every tensor read", _other_source
    ),
    Check(
        "missing", PROBLEM, "tensors of the source that are missing", "names, with stacked experts one by one", _missing
    ),
    Check("shape", PROBLEM, "tensors whose shape differs from the source", "plain shapes", _shapes),
    Check(
        "damaged",
        PROBLEM,
        "plain tensors that are not those of the source",
        "byte by byte, after a cast, where the record says they were copied, or most of their kind are copies; values "
        "of another tensor; else values that are not finite, or far off",
        _damaged,
    ),
    Check(
        "far_foreign",
        PROBLEM,
        "weights in third-party formats that decode to other values than those of the source",
        "runs of 256 values of a row, as the package gguf decodes them",
        _far_foreign,
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
    Check(
        "overflow",
        WARNING,
        "values that are finite in only one of checkpoint and source, by the rule that made the bytes",
        "element by element, where the source quantized again has the same bytes",
        _overflowing,
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
