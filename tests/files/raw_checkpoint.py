"""Tiny checkpoints written byte by byte, so that broken ones can be written too."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

Entry = tuple[str, list[int], bytes]


def safetensors_bytes(
    tensors: Mapping[str, Entry],
    metadata: Mapping[str, str] | None = None,
    pad_to: int = 8,
    shift: int = 0,
) -> bytes:
    """A file of (dtype, shape, data) entries; its data starts at `shift` modulo `pad_to`."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return with_header(header, b"".join(data for _, _, data in tensors.values()), pad_to, shift)


def with_header(header: object, data: bytes = b"", pad_to: int = 8, shift: int = 0) -> bytes:
    """A file of any JSON header, or header text, and any data."""
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    encoded = text.encode()
    encoded += b" " * ((shift - 8 - len(encoded)) % pad_to)
    return struct.pack("<Q", len(encoded)) + encoded + data


def zeros(dtype: str, *shape: int) -> Entry:
    """An entry of zero bytes."""
    bits = {"F64": 64, "F32": 32, "I64": 64, "BF16": 16, "F16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    elements = 1
    for size in shape:
        elements *= size
    return dtype, list(shape), bytes(elements * bits.get(dtype, 8) // 8)
