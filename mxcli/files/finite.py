"""Values that are not finite, found in the bits of plain tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mxcli.files.roles import role_of
from mxcli.files.tensors import Array

PIECE_ELEMENTS = 1 << 17
"""Elements looked at at a time."""
_LOGIT_BIASES = re.compile(r"(^|[._])logits?_bias$|(^|\.)(\w*_)?(lm_head|output_projection|score)\.bias$")
"""Biases of logits: -inf forbids a token, or pads the vocabulary."""


@dataclass(frozen=True, slots=True)
class FloatBits:
    """A float dtype as bits: its unsigned integer, the number of bits of a magnitude, and how many of these are its
    fraction."""

    unsigned: type[np.unsignedinteger]
    magnitude: int
    fraction: int

    @property
    def mask(self) -> int:
        """The bits of a magnitude."""
        return (1 << self.magnitude) - 1

    @property
    def infinity(self) -> int:
        """The bits of infinity; those of NaN are larger."""
        return ((1 << (self.magnitude - self.fraction)) - 1) << self.fraction


FLOAT_BITS: Mapping[str, FloatBits] = {
    "F64": FloatBits(np.uint64, 63, 52),
    "F32": FloatBits(np.uint32, 31, 23),
    "F16": FloatBits(np.uint16, 15, 10),
    "BF16": FloatBits(np.uint16, 15, 7),
}
"""The dtypes of plain tensors."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Values of a tensor that may not stand there: how many are NaN and infinite, and the first, by its flat index and
    in words."""

    nan: int
    infinite: int
    first: int
    value: str

    def text(self, shape: Sequence[int]) -> str:
        """Return how many of a tensor's values they are, and where the first one is."""
        counts = [f"{count:,} {what}" for count, what in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        elements = int(np.prod(shape, dtype=np.int64))
        index = [int(at) for at in np.unravel_index(self.first, tuple(shape))] if shape else []
        return f"{' and '.join(counts)} of {elements:,} values, the first ({self.value}) at {index}"


def may_be_infinite(name: str, role: str) -> bool:
    """Return whether a tensor of a sound model may hold infinities: a buffer such as a mask, or a bias of logits."""
    return role == "buffer" or _LOGIT_BIASES.search(name) is not None


def not_finite(x: Array, name: str, dtype: str, shape: Sequence[int]) -> NotFinite | None:
    """Return the values of a plain tensor, as it is read or written, that are not finite and may not stand there; None
    if there are none."""
    row = FLOAT_BITS.get(dtype)
    if row is None or not x.size:
        return None
    bits = np.ascontiguousarray(x).reshape(-1).view(row.unsigned)
    mask = np.asarray(row.mask, row.unsigned)
    pieces = (bits[at : at + PIECE_ELEMENTS] for at in range(0, bits.size, PIECE_ELEMENTS))
    if all((piece & mask).max() < row.infinity for piece in pieces):
        return None
    magnitudes = bits & mask
    nan = magnitudes > row.infinity
    allowed = may_be_infinite(name, role_of(name, tuple(shape), dtype))
    bad = nan if allowed else magnitudes >= row.infinity
    if not bad.any():
        return None
    first = int(bad.argmax())
    negative = bool(bits[first] >> np.asarray(row.magnitude, row.unsigned))
    value = "NaN" if nan[first] else "-inf" if negative else "inf"
    counted = int(np.count_nonzero(nan))
    return NotFinite(counted, int(np.count_nonzero(bad)) - counted, first, value)
