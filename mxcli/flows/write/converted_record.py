"""The record of a converted checkpoint: what the source's record states, as far as it is of these codes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mxcli.errors import UsageError
from mxcli.files.record import SOURCE_HASHES, OutputRecord, read_record
from mxcli.files.record_schema import CONVERTED_FROM, ORIGIN, REQUANTIZED_FROM
from mxcli.flows.write.accounting import KEPT, QUANTIZED
from mxcli.flows.write.arrange import Task
from mxcli.flows.write.restack import recorded_of
from mxcli.flows.write.restore import PlainView
from mxcli.numerics.formats import find_format
from mxcli.numerics.scheme import TENSOR_RULES, Rules, Scheme, overlaid, resolve

ROUNDED = "rounded_tensor_scales"
_OF_ORIGIN = ("version", "command", "options", REQUANTIZED_FROM, "layout", SOURCE_HASHES)
_STATISTICS = "statistics"


def source_record(view: PlainView) -> OutputRecord | None:
    """Return the record of a source if every weight is one that it states as quantized in this format; None without
    such a record: the rules are not known then."""
    record = read_record(view.source.root)
    if record is None or not record.tensors:
        return None
    for name, stored in view.weights.items():
        stated = recorded_of(record.tensors, name) or {}
        if stated.get("decision") != QUANTIZED or not _is_format(stated, stored.weight.format.name):
            return None
    return record


def _is_format(stated: Mapping[str, object], name: str) -> bool:
    try:
        recorded = find_format(str(stated.get("format"))).name
    except UsageError:
        return False
    return recorded == name


def recorded_scheme(record: OutputRecord | None, name: str) -> Scheme | None:
    """Return the scheme that a record states for a weight; None if it states none."""
    stated = None if record is None else recorded_of(record.tensors, name)
    if not stated or stated.get("scale_rounding") is None:
        return None
    try:
        return resolve(str(stated["format"]), overlaid(Rules(), {rule: str(stated.get(rule)) for rule in TENSOR_RULES}))
    except UsageError:
        return None


def rounded_before(record: OutputRecord | None) -> dict[str, float]:
    """Return the tensor scales, by weight, that an earlier conversion rounded, as they were."""
    stated = None if record is None else record.content.get(ROUNDED)
    numbers = stated.items() if isinstance(stated, Mapping) else ()
    return {name: number for name, number in numbers if isinstance(number, float)}


def origin_of(record: OutputRecord | None) -> dict[str, object] | None:
    """Return how the codes were made: the version, command and options of the run and the hashes of what it read,
    through earlier conversions; None if it is not known."""
    if record is None:
        return None
    if CONVERTED_FROM in record.content:
        earlier = record.content.get(ORIGIN)
        return dict(earlier) if isinstance(earlier, Mapping) else None
    return {key: record.content[key] for key in _OF_ORIGIN if key in record.content}


def tensor_records(
    tasks: Sequence[Task],
    formats: Mapping[str, str],
    record: OutputRecord | None,
    made_of: Mapping[str, str] | None = None,
    replaced: Collection[str] = (),
) -> dict[str, dict[str, object]]:
    """Return the records of the tensors: those of the source's record in the `formats` of weights as they are stored
    now, else what the headers show, without rules. `replaced` are tensors of the source that are others now, and
    `made_of` has, for each of those, the name by which the source's record knows it or a part of it."""
    if record is None:
        return {task.planned.tensor.name: _unknown(task, formats) for task in tasks}
    found = {}
    now = {id(recorded_of(record.tensors, name)): format for name, format in formats.items()}
    for name, stated in record.tensors.items():
        kept = {key: value for key, value in stated.items() if key != _STATISTICS}
        if name not in replaced:
            found[name] = kept | ({"format": now[id(stated)]} if id(stated) in now else {})
    by_name = {task.planned.tensor.name: task for task in tasks}
    for name, origin in (made_of or {}).items():
        own, stated = _unknown(by_name[name], formats), recorded_of(record.tensors, origin) or {}
        found[name] = own | {rule: stated[rule] for rule in TENSOR_RULES if rule in own and rule in stated}
    return found


def _unknown(task: Task, formats: Mapping[str, str]) -> dict[str, object]:
    info = task.planned.tensor
    quantized = task.planned.scheme is not None
    record: dict[str, object] = {
        "decision": QUANTIZED if quantized else KEPT,
        "reason": task.planned.reason,
        "role": info.role,
        "dtype": info.dtype,
        "shape": list(info.shape),
    }
    if quantized:
        record |= {"format": formats[info.name], **dict.fromkeys(TENSOR_RULES), "axis": task.planned.axis}
    return record
