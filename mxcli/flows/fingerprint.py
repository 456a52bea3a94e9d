"""What identifies a source without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from mxcli.errors import InputError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.safetensors_file import LENGTH_BYTES

END_BYTES = 1 << 16


def fingerprint(checkpoint: Checkpoint) -> dict[str, object]:
    """Per weight file, its size and the SHA-256 of its header, or of its first and last 64 KiB, under its name."""
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
