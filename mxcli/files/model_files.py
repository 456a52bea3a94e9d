"""The files next to a model's weights: its configuration, and those that an output must carry along."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mxcli.errors import printable
from mxcli.files.plain import read_json_object

CONFIG = "config.json"
PRODUCER_CONFIG = "hf_quant_config.json"
RECORD = "mxcli.json"

# Files that an output does not carry along, by name, and why; no reason if the output gets its own.
NOT_CARRIED = (
    (
        r"\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|onnx|onnx_data|h5|msgpack|ot|tflite|mlmodel|jit)$",
        "other weights",
    ),
    (rf"^({PRODUCER_CONFIG}|quant_config\.json|quantize_config\.json)$", "an old quantization config"),
    (rf"^({CONFIG}|{RECORD})$|\.index\.json$|\.partial$", ""),
    (r"\.(incomplete|lock|tmp)$", "unfinished"),
)


@dataclass(frozen=True, slots=True)
class Configs:
    """The parsed config.json and hf_quant_config.json of a directory; None for a missing one."""

    model: Mapping[str, object] | None = None
    producer: Mapping[str, object] | None = None


def read_config(root: Path) -> dict[str, object] | None:
    """Read config.json of a directory, None without one. Raises InputError if it is not a JSON object."""
    return _optional(root / CONFIG)


def read_producer_config(root: Path) -> dict[str, object] | None:
    """Read hf_quant_config.json of a directory like read_config."""
    return _optional(root / PRODUCER_CONFIG)


def side_files(root: Path, used: Mapping[Path, object]) -> tuple[tuple[Path, ...], list[str]]:
    """Return every other regular file under the directory, sorted, and a note per kind of file that is left out.

    Subfolders are included (pooling modules, chat templates, code), except hidden ones and links to directories; links
    to files are carried. Weights, indexes, old quantization configs and unfinished files are left out; config.json and
    our own record are not listed because an output gets its own.
    """
    carried: list[Path] = []
    left_out: dict[str, list[str]] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or path in used:
                continue
            reason = next((why for pattern, why in NOT_CARRIED if re.search(pattern, name)), None)
            in_subfolder = path.parent != root and name == CONFIG
            if reason is None or in_subfolder:
                if path.is_file():
                    carried.append(path)
                else:
                    left_out.setdefault("not a regular file", []).append(str(path.relative_to(root)))
            elif reason:
                left_out.setdefault(reason, []).append(str(path.relative_to(root)))
    notes = [f"Not carried to an output, {reason}: {_listed(names)}." for reason, names in sorted(left_out.items())]
    return tuple(sorted(carried)), notes


def _optional(path: Path) -> dict[str, object] | None:
    if not os.path.lexists(path):
        return None
    return read_json_object(path)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return ", ".join(map(printable, names[:5])) + more
