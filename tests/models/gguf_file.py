"""Reads a GGUF file as it lies on disk: seconds faster than the package gguf, which has an array for every token."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _ALIGNMENT = 8, 9, 32


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Settings by key, and for each tensor a function that decodes it to binary32."""

    settings: dict[str, Any]
    tensors: dict[str, Callable[[], F32]]


def read_gguf(path: Path) -> GgufFile:
    """A little-endian file of types F32, Q4_1 and Q8_0."""
    content = np.memmap(path, np.uint8, "r")
    cursor = _Cursor(content)
    _, _, count, pairs = cursor.take("<4sIQQ")
    settings = {cursor.text(): cursor.value(cursor.take("<I")[0]) for _ in range(pairs)}
    places = {cursor.text(): (cursor.shape(), *cursor.take("<IQ")) for _ in range(count)}
    data = content[-(-cursor.at // _ALIGNMENT) * _ALIGNMENT :]
    return GgufFile(settings, {name: _decoder(data, *place) for name, place in places.items()})


def _decoder(data: U8, shape: tuple[int, ...], kind: int, offset: int) -> Callable[[], F32]:
    decode, block, nbytes = _KINDS[kind]
    stored = data[offset : offset + prod(shape) // block * nbytes]
    return lambda: decode(stored.reshape(-1, nbytes)).reshape(shape)


def _f32(rows: U8) -> F32:
    return rows.copy().view(np.float32)


def _q8_0(rows: U8) -> F32:
    """A binary16 scale, then 32 integers."""
    return rows[:, :2].copy().view(np.float16).astype(np.float32) * rows[:, 2:].view(np.int8)


def _q4_1(rows: U8) -> F32:
    """A binary16 scale and minimum, then 16 bytes: element j in the low half of byte j, element j + 16 in the high."""
    scale, minimum = rows[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
    values: F32 = scale * np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1) + minimum
    return values


_KINDS: dict[int, tuple[Callable[[U8], F32], int, int]] = {0: (_f32, 1, 4), 3: (_q4_1, 32, 20), 8: (_q8_0, 32, 34)}
"""By number of the type: the decoder, elements of a block, bytes of a block."""


class _Cursor:
    """Reads the head of the file from front to back."""

    def __init__(self, content: U8) -> None:
        self._content = content.data
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._content, self.at)
        self.at += struct.calcsize(layout)
        return values

    def text(self) -> str:
        (length,) = self.take("<Q")
        self.at += length
        return str(self._content[self.at - length : self.at], "utf-8")

    def shape(self) -> tuple[int, ...]:
        """Rows first; the file has them last."""
        (dimensions,) = self.take("<I")
        return self.take(f"<{dimensions}Q")[::-1]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.take("<IQ")
            return [self.value(kind) for _ in range(count)]
        return self.take("<" + _SCALARS[kind])[0]
