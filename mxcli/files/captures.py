"""The metadata of a capture file: the layer, role, step and rank that its tensors were recorded at.

The form: a safetensors file whose metadata has the key `mxcli.capture`, a JSON object with `version` 1 and `tensors`,
from names to records. A record has a `role` (activation: a layer's input; gradient: that of the loss with respect to
the layer's output; weight) and may have `layer` (the module; else the name up to its last dot), `step` and `rank`
(integers from 0), `axis` ("row": a row of the tensor is a token), `tokens` (rows kept) and `tokens_seen` (rows there
were). Next to `tensors` there may be `layers_of_model`: the names of all linear layers of the model in order, captured
or not, which give the depth of the model. Other keys, in both places, are the writer's own. An activation or gradient
is [tokens, features], with any dimensions before the last; a weight is [out, in].
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.plain import read_json_object
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.files.tensors import DTYPES, TensorInfo
from mxcli.numerics.blocks import ROW

CAPTURE_KEY = "mxcli.capture"
CAPTURE_VERSION = 1
CAPTURED_ROLES = (ACTIVATION, GRADIENT, WEIGHT)
OF_TOKENS = (ACTIVATION, GRADIENT)
MODEL_KEY = "layers_of_model"
AXES = (ROW,)
INCOMPLETE_SCHEMA = "mxcli.capture.incomplete/1"
"""The schema of the file that says that a recording stopped before its last step."""
INCOMPLETE = re.compile(r"mxcli-incomplete(?:-rank-[0-9]+)?\.json")
"""The names of such files."""

Capture = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class CaptureMetadata:
    """The content of a capture file's metadata: the record of each captured tensor by its name, with its layer, and the
    names of all linear layers of the model (none: not listed)."""

    records: Mapping[str, Capture]
    layers_of_model: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a record may have, with a description of its value and a check of it."""

    name: str
    needs: str
    is_valid: Callable[[object], bool]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


KEYS = (
    Key("layer", "the name of a module", _is_name),
    Key("step", "an integer from 0", _is_count),
    Key("rank", "an integer from 0", _is_count),
    Key("axis", f"one of {', '.join(AXES)}", lambda value: value in AXES),
    Key("tokens", "an integer from 0", _is_count),
    Key("tokens_seen", "an integer from 0", _is_count),
)


def parse_captures(
    path: Path, metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> CaptureMetadata | None:
    """Parse the metadata of a file; None if the file is not a capture.

    Raises InputError naming every fault: an entry that is not JSON of the known version, tensors that the file does not
    hold, unknown roles and axes, keys of another type, token counts that are not those of the tensor, and tensors that
    hold no floats or no rows.
    """
    if CAPTURE_KEY not in metadata:
        return None
    where = f"{printable(path)}: {CAPTURE_KEY}"
    try:
        parsed = json.loads(metadata[CAPTURE_KEY])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {printable(error)}.") from error
    version = parsed.get("version") if isinstance(parsed, dict) else None
    if version != CAPTURE_VERSION:
        raise InputError(f"{where} has version {printable(version)}; this program reads {CAPTURE_VERSION}.")
    records = parsed.get("tensors")
    if not isinstance(records, dict):
        raise InputError(f"{where} needs a 'tensors' object.")
    problems = [
        f"{where}: {fault}." for name, record in records.items() for fault in _faults(name, record, tensors.get(name))
    ]
    layers = parsed.get(MODEL_KEY, [])
    if not isinstance(layers, list) or not all(map(_is_name, layers)):
        problems.append(f"{where}: {MODEL_KEY} must be a list of names of modules.")
    if problems:
        raise together(InputError, where, problems)
    return CaptureMetadata(
        {name: {"layer": module_of(name), **record} for name, record in records.items()}, tuple(layers)
    )


def incomplete_path(folder: Path, rank: int | None) -> Path:
    """Return the path of the file that says that a recording, or that of one of several ranks, stopped early."""
    part = "" if rank is None else f"-rank-{rank}"
    return folder / f"mxcli-incomplete{part}.json"


def incomplete_notes(folder: Path) -> list[str]:
    """Return a note for every such file in a directory of captures: steps are missing in it."""
    return [_incomplete_note(folder / name) for name in sorted(filter(INCOMPLETE.fullmatch, os.listdir(folder)))]


def _incomplete_note(path: Path) -> str:
    try:
        content = read_json_object(path)
    except InputError:
        content = {}
    step, reason = content.get("step"), content.get("reason")
    if content.get("schema") != INCOMPLETE_SCHEMA or not _is_count(step) or not isinstance(reason, str):
        return f"{printable(path)} says that the recording stopped early: later steps may be missing."
    return (
        f"The recording stopped in step {step}, which is missing like all later ones: {printable(reason).rstrip('.')} "
        f"({printable(path.name)})."
    )


def recorded_number(record: Capture | None, key: str) -> int | None:
    """Return the step or rank in a record; None without one."""
    value = (record or {}).get(key)
    return value if isinstance(value, int) else None


def module_of(name: str) -> str:
    """Return the module in the name of one of its tensors: all up to the last dot, or the whole name."""
    return name.rpartition(".")[0] or name


def rows_of(info: TensorInfo) -> int:
    """Return the tokens in a tensor: its last dimension holds the features of one, the others are tokens."""
    return info.elements // info.shape[-1] if info.shape and info.shape[-1] else 0


def shape_fault(info: TensorInfo) -> str | None:
    """Return why a tensor cannot be a captured one, to follow its name, or None: it must hold rows of floats."""
    if not DTYPES[info.dtype].is_float:
        return f"holds {info.dtype}, and captured tensors hold floats"
    if len(info.shape) < 2:
        return f"has shape {list(info.shape)}, and captured tensors are [tokens, features] or [out, in]"
    return None


def _faults(name: str, record: object, info: TensorInfo | None) -> Iterator[str]:
    """Yield the faults of a record, as sentences without their end."""
    shown = f"'{printable(name)}'"
    if info is None:
        yield f"describes {shown}, which the file does not hold"
    role = record.get("role") if isinstance(record, dict) else None
    if role not in CAPTURED_ROLES:
        yield f"role {printable(role)} of {shown} is unknown; known are {', '.join(CAPTURED_ROLES)}"
    if not isinstance(record, dict):
        return
    wrong = {key.name: key.needs for key in KEYS if key.name in record and not key.is_valid(record[key.name])}
    yield from (f"{key} {printable(record[key])} of {shown} must be {needs}" for key, needs in wrong.items())
    if info is None or role not in CAPTURED_ROLES:
        return
    fault = shape_fault(info)
    if fault:
        yield f"{shown} {fault}"
    elif role in OF_TOKENS and not wrong:
        rows = rows_of(info)
        if "tokens" in record and record["tokens"] != rows:
            yield f"tokens {record['tokens']:,} of {shown} are not the {rows:,} rows of {list(info.shape)}"
        if record.get("tokens_seen", rows) < rows:
            yield f"tokens_seen {record['tokens_seen']:,} of {shown} are fewer than its {rows:,} rows"
