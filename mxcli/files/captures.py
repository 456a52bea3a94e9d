"""What a capture file says about its tensors: which layer they were recorded at and as what."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.files.tensors import TensorInfo

CAPTURE_KEY = "mxcli.capture"
CAPTURE_VERSION = 1
CAPTURED_ROLES = (ACTIVATION, GRADIENT, WEIGHT)

Capture = Mapping[str, object]


def captured(path: Path, metadata: Mapping[str, str], names: Collection[str]) -> dict[str, Capture]:
    """Record (`role`, `layer`, `axis`, …) of each captured tensor of a file; empty when it is not a capture.

    Raises InputError when the entry is not JSON of the known version, or names tensors or roles that do not
    exist.
    """
    if CAPTURE_KEY not in metadata:
        return {}
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
    problems = []
    for name, record in records.items():
        role = record.get("role") if isinstance(record, dict) else None
        if name not in names:
            problems.append(f"{where} describes '{printable(name)}', which the file does not hold.")
        if role not in CAPTURED_ROLES:
            known = ", ".join(CAPTURED_ROLES)
            problems.append(f"{where}: role {printable(role)} of '{printable(name)}' is unknown; known are {known}.")
    if problems:
        raise together(InputError, where, problems)
    return records


def captured_by_layer(
    tensors: Mapping[str, TensorInfo], records: Mapping[str, Capture], role: str
) -> dict[str, list[TensorInfo]]:
    """The tensors of a role by the layer they were captured at: as their records say, else by the name LAYER.ROLE."""
    found: dict[str, list[TensorInfo]] = {}
    for name, info in tensors.items():
        record = records.get(name)
        if info.role == role or (record is None and name.endswith(f".{role}")):
            layer = str((record or {}).get("layer", name.removesuffix(f".{role}")))
            found.setdefault(layer, []).append(info)
    return found
