"""The record an output carries (`mxcli.json`): from what it was made, how, and what became of every tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from mxcli.errors import InputError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import COLUMN
from mxcli.files.merge import Merging
from mxcli.files.safetensors import LENGTH_BYTES
from mxcli.flows.doctor import own_version
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, Plan, TensorPlan
from mxcli.flows.write.arrange import Arrangement
from mxcli.numerics.formats import find_format
from mxcli.numerics.hadamard import Hadamard, signs_text
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import measured
from mxcli.numerics.scheme import RULE_NAMES, Scheme, tensor_rules
from mxcli.numerics.stats import Stats, stats_of, stats_record

END_BYTES = 1 << 16


def fingerprint(checkpoint: Checkpoint) -> dict[str, object]:
    """Return per weight file, its size and the SHA-256 of its header, or of its first and last 64 KiB, under its
    name."""
    return {file.name: _of_file(file) for file in checkpoint.files}


def _of_file(file: Path) -> dict[str, object]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            identifying = _identifying(opened, size)
    except OSError as error:
        raise InputError(f"{printable(file)}: cannot be read: {printable(error)}.") from error
    return {"bytes": size, "sha256": hashlib.sha256(identifying).hexdigest()}


def _identifying(opened: BinaryIO, size: int) -> bytes:
    start = opened.read(LENGTH_BYTES + 1)
    if start.endswith(b"{"):
        return start + opened.read(int.from_bytes(start[:LENGTH_BYTES], "little") - 1)
    head = start + opened.read(END_BYTES)
    opened.seek(max(0, size - END_BYTES))
    return head + opened.read()


QUANTIZED = "mxcli.quantized/1"
_LAST = ("seed", "hadamard")
"""Rules that the record of options lists last."""


def planned_record(
    checkpoint: Checkpoint, plan: Plan, arrangement: Arrangement, command: Sequence[str]
) -> dict[str, object]:
    """Return the record of a quantized checkpoint before anything is measured: no time, host or path, so that the same
    work has the same bytes."""
    return {
        "schema": QUANTIZED,
        "version": own_version(),
        "command": list(command),
        "options": options_record(plan.options),
        "input": fingerprint(checkpoint),
        "requantized_from": checkpoint.restored_from,
        "layout": arrangement.layout.name,
        "notes": list(arrangement.notes),
        "tensors": {task.step.tensor.name: _tensor(task.step) for task in arrangement.tasks},
    }


def with_statistics(record: Mapping[str, Any], stats: Mapping[str, Stats]) -> dict[str, object]:
    """Return the record of a quantized checkpoint from the planned one; for every quantized tensor there are
    statistics."""
    tensors = {
        name: {**told, "statistics": _measured(told, stats[name])} if told["decision"] == "quantized" else told
        for name, told in record["tensors"].items()
    }
    return {**record, "tensors": tensors}


def options_record(options: Options) -> dict[str, object]:
    """Return the options by their names, with selectors as typed."""
    rules = {name: getattr(options.rules, name) for name in RULE_NAMES}
    rules["hadamard"] = hadamard_record(options.rules.hadamard)
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


def hadamard_record(hadamard: Hadamard | None) -> dict[str, object] | None:
    """Return a transform by its size, the seed of its signs where it has one, and these."""
    if hadamard is None:
        return None
    return {"size": hadamard.size, "seed": hadamard.seed, "signs": signs_text(hadamard)}


def _override(override: Override) -> dict[str, object]:
    """Return what an override sets, by name."""
    fields = {"selector": override.selector, "format": override.format, "keep": override.keep}
    record = fields | tensor_rules(override.rules)
    return {key: value for key, value in record.items() if value not in (None, False)}


def _tensor(step: TensorPlan) -> dict[str, object]:
    info = step.tensor
    record: dict[str, object] = {
        "decision": "quantized" if step.scheme else "tied" if step.tied_to else "kept",
        "reason": step.reason,
        "role": info.role,
        "dtype": info.dtype,
        "shape": list(info.shape),
    }
    if step.scheme is not None:
        record |= scheme_record(step.scheme)
        record |= {"axis": step.axis, "padded": step.padded, "shares_tensor_scale_with": step.group}
    if step.input_scale is not None:
        record["input_scale"] = asdict(step.input_scale)
    return record


def _measured(told: Mapping[str, Any], stats: Stats) -> dict[str, Value]:
    shape = told["shape"]
    if told["axis"] == COLUMN:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return measured(stats, find_format(told["format"]), tuple(shape))


def scheme_record(scheme: Scheme) -> dict[str, object]:
    """Return a recipe by the names that mean it."""
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
    """Return what is remembered of pieces of a tensor, from the `first` on."""
    return {"tensor": tensor, "first_piece": first, "stats": [stats_record(each) for each in stats]}


def counted_of(memo: Mapping[str, Any]) -> list[Stats]:
    """Return the statistics that were remembered."""
    return [stats_of(record) for record in memo["stats"]]


def add_counted(total: dict[str, Stats], tensor: str, stats: Iterable[Stats]) -> None:
    """Count the next pieces of a tensor in."""
    for each in stats:
        total[tensor] = total[tensor] + each if tensor in total else each


def gathered(memos: Iterable[Any]) -> dict[str, Stats]:
    """Return the statistics of all tensors from what several runs remembered, in any order; what is no record is left
    out."""
    parts = [(memo["first_piece"], memo["tensor"], counted_of(memo)) for memo in memos if memo is not None]
    total: dict[str, Stats] = {}
    for _, tensor, stats in sorted(parts, key=itemgetter(0)):
        add_counted(total, tensor, stats)
    return total


FINISHING: Mapping[str, Callable[[dict[str, Any], Sequence[str]], dict[str, object]]] = {
    QUANTIZED: lambda record, memos: with_statistics(record, gathered(map(json.loads, memos))),
}
"""How the record of a kind of output is completed from what was remembered of its tensors; others are complete."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What was merged: where, from how many shares, and the files there are now."""

    folder: Path
    shares: int
    files: tuple[str, ...]


def merge_shares(folder: str | Path, *, force: bool = False) -> Merged:
    """Complete the output of which all shares are in a directory.

    With `force` it replaces an earlier output there. Raises InputError for what is no directory, RefusedError naming
    every share that is missing, unfinished, or of another output than the first, and EnvironmentFailure where the disk
    fails; then it can be done again.
    """
    with Merging(Path(folder), force=force) as merging:
        finish = FINISHING.get(merging.record["schema"])
        merging.publish(merging.record if finish is None else finish(merging.record, merging.memos))
        return Merged(merging.folder, len(merging.shares), tuple(merging.files))
