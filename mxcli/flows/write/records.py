"""The record in an output (`mxcli.json`): its source, its options, and the decision on every tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from mxcli.files.accounting import ACCOUNTING
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.complete import check_files, is_complete, refuse_unverified
from mxcli.files.layouts import COLUMN
from mxcli.files.merge import Merging
from mxcli.files.output_dir import Check
from mxcli.files.record import as_written
from mxcli.files.record_schema import ALL_QUANTIZED, QUANTIZED, REQUANTIZED_FROM
from mxcli.files.source_watch import fingerprint_of
from mxcli.flows.doctor import own_version
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, Plan, TensorPlan
from mxcli.flows.write.accounting import KEPT, TIED, accounting_of, quantized_tensors
from mxcli.flows.write.accounting import QUANTIZED as QUANTIZED_TENSORS
from mxcli.flows.write.arrange import Arrangement
from mxcli.flows.write.names import place_of
from mxcli.numerics.formats import find_format
from mxcli.numerics.hadamard import hadamard_record
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import measured
from mxcli.numerics.scheme import RULE_NAMES, Scheme, tensor_rules
from mxcli.numerics.stats import Stats, stats_of, stats_record


def fingerprint(checkpoint: Checkpoint) -> dict[str, object]:
    """Return size and fingerprint of each weight file by its name in the source."""
    return {place_of(checkpoint, file): fingerprint_of(file) for file in checkpoint.files}


_LAST = ("seed", "hadamard")
"""Rules that the record of options lists last."""


def planned_record(
    checkpoint: Checkpoint, plan: Plan, arrangement: Arrangement, command: Sequence[str]
) -> dict[str, object]:
    """Return the record of a quantized checkpoint without statistics. It has no time, host or path: the same work gives
    the same bytes."""
    return {
        "schema": QUANTIZED,
        "version": own_version(),
        "command": list(command),
        "options": options_record(plan.options),
        "input": fingerprint(checkpoint),
        REQUANTIZED_FROM: checkpoint.restored_from,
        "layout": arrangement.layout.name,
        "engines": list(arrangement.engines),
        "tensor_parallel": arrangement.devices,
        "notes": list(arrangement.notes),
        ACCOUNTING: accounting_of(checkpoint).record(
            quantized_tensors(checkpoint, ((each.tensor.name, _decision(each)) for each in arrangement.tensors))
        ),
        "tensors": {each.tensor.name: _tensor(each) for each in arrangement.tensors},
    }


def with_statistics(record: Mapping[str, Any], stats: Mapping[str, Stats]) -> dict[str, object]:
    """Return the planned record completed with the statistics of every quantized tensor."""
    tensors = {
        name: {**tensor, "statistics": _measured(tensor, stats[name])} if tensor["decision"] == "quantized" else tensor
        for name, tensor in record["tensors"].items()
    }
    return {**record, "tensors": tensors}


def options_record(options: Options) -> dict[str, object]:
    """Return the options by name, with selectors as typed."""
    rules = {name: getattr(options.rules, name) for name in RULE_NAMES}
    rules["hadamard"] = None if options.rules.hadamard is None else hadamard_record(options.rules.hadamard)
    return {
        "format": options.format,
        **{name: value for name, value in rules.items() if name not in _LAST},
        "on_indivisible": options.on_indivisible,
        "selection": [{"include" if rule.include else "exclude": rule.selector} for rule in options.selection],
        "overrides": [_override(each) for each in options.overrides],
        "layout": options.layout,
        "axis": options.axis,
        "fuse": options.fuse,
        **{name: rules[name] for name in _LAST},
    }


def _override(override: Override) -> dict[str, object]:
    """Return the settings of an override by name."""
    fields = {"selector": override.selector, "format": override.format, "keep": override.keep}
    record = fields | tensor_rules(override.rules)
    return {key: value for key, value in record.items() if value not in (None, False)}


def _decision(planned: TensorPlan) -> str:
    return QUANTIZED_TENSORS if planned.scheme else TIED if planned.tied_to else KEPT


def _tensor(planned: TensorPlan) -> dict[str, object]:
    info = planned.tensor
    record: dict[str, object] = {
        "decision": _decision(planned),
        "reason": planned.reason,
        "role": info.role,
        "dtype": info.dtype,
        "shape": list(info.shape),
    }
    if planned.scheme is not None:
        record |= scheme_record(planned.scheme)
        record |= {"axis": planned.axis, "padded": planned.padded, "shares_tensor_scale_with": planned.group}
    if planned.input_scale is not None:
        record["input_scale"] = asdict(planned.input_scale)
    return record


def _measured(record: Mapping[str, Any], stats: Stats) -> dict[str, Value]:
    shape = record["shape"]
    if record["axis"] == COLUMN:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return measured(stats, find_format(record["format"]), tuple(shape))


def scheme_record(scheme: Scheme) -> dict[str, object]:
    """Return a scheme by its names."""
    return {
        "format": scheme.format.name,
        "scale_rounding": scheme.scale_rule.name,
        "rounding": scheme.rounding.name,
        "dialect": scheme.dialect.name,
        **({"seed": scheme.seed} if scheme.rounding.is_random else {}),
        **({"hadamard": hadamard_record(scheme.hadamard)} if scheme.hadamard else {}),
    }


Counted = dict[str, object]


def counted_record(tensor: str, first: int, stats: Sequence[Stats]) -> Counted:
    """Return statistics of pieces of a tensor, from the `first` on, as a run logs them."""
    return {"tensor": tensor, "first_piece": first, "stats": [stats_record(each) for each in stats]}


def counted_of(memo: Mapping[str, Any]) -> list[Stats]:
    """Return the statistics that a run logged for pieces of a tensor."""
    return [stats_of(record) for record in memo["stats"]]


def add_counted(total: dict[str, Stats], tensor: str, stats: Iterable[Stats]) -> None:
    """Add the next pieces of a tensor."""
    for each in stats:
        total[tensor] = total[tensor] + each if tensor in total else each


def gathered(memos: Iterable[Any]) -> dict[str, Stats]:
    """Return the statistics of all tensors from those logged by several runs, in any order; empty entries are
    skipped."""
    parts = [(memo["first_piece"], memo["tensor"], counted_of(memo)) for memo in memos if memo is not None]
    total: dict[str, Stats] = {}
    for _, tensor, stats in sorted(parts, key=itemgetter(0)):
        add_counted(total, tensor, stats)
    return total


FINISHING: Mapping[str, Callable[[dict[str, Any], Sequence[str]], dict[str, object]]] = {
    schema: lambda record, memos: with_statistics(record, gathered(map(json.loads, memos))) for schema in ALL_QUANTIZED
}
"""Functions that complete the record of a kind of output from the per-tensor statistics
logged by each run; others are complete."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge: the directory, the number of shares (0: it was complete already), its files, and those of
    the output before it that were changed since, and so were not removed."""

    folder: Path
    shares: int
    files: tuple[str, ...]
    stayed: tuple[str, ...] = ()


def merge_shares(folder: str | Path, *, force: bool = False, check: Check | None = None) -> Merged:
    """Complete the output whose shares are all in a directory; of a complete one, check every file.

    `force` replaces an earlier output there; `check` looks at the output before it has its final names. Raises
    InputError unless it is a directory, and for files of a complete output that are not as recorded; RefusedError with
    every share that is missing, unfinished, of another output or source than the first, or damaged; and
    EnvironmentFailure if the disk fails, after which the merge can be repeated.
    """
    if is_complete(Path(folder)):
        if check is not None:
            refuse_unverified(Path(folder))
        return Merged(Path(folder), 0, check_files(Path(folder)))
    with Merging(Path(folder), force=force) as merging:
        with as_written(folder, "a progress log there"):
            finish = FINISHING.get(merging.record["schema"])
            record = merging.record if finish is None else finish(merging.record, merging.memos)
        merging.publish(record, check)
        return Merged(merging.folder, len(merging.shares), tuple(merging.files), merging.stayed)
