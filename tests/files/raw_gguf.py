"""Tiny GGUF files written byte by byte, so that broken ones can be written too."""

from __future__ import annotations

import struct
from collections.abc import Sequence

Setting = tuple[str, int, bytes]
Tensor = tuple[str, Sequence[int], int, bytes]

F32, F16, Q4_0, Q8_0, BF16, MXFP4, NVFP4 = 0, 1, 2, 8, 30, 39, 40
U32, TEXT, LIST = 4, 8, 9


def text(content: str | bytes) -> bytes:
    encoded = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(encoded)) + encoded


def u32(key: str, number: int) -> Setting:
    return key, U32, struct.pack("<I", number)


def gguf_bytes(
    tensors: Sequence[Tensor],
    settings: Sequence[Setting] = (),
    *,
    version: int = 3,
    tensor_count: int | None = None,
    setting_count: int | None = None,
    offsets: Sequence[int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of (name, shape with rows first, type, data) tensors; counts and offsets are right unless given."""
    ends = [0]
    for *_, data in tensors:
        ends.append(-(-(ends[-1] + len(data)) // alignment) * alignment)
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(settings) if setting_count is None else setting_count,
    )
    header += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in settings)
    for (name, shape, kind, _), offset in zip(tensors, offsets or ends, strict=False):
        sizes = tuple(reversed(shape))
        header += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    header += bytes(-len(header) % alignment)
    return header + b"".join(data + bytes(-len(data) % alignment) for *_, data in tensors)
