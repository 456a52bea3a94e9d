"""Codes of one format as codes of another that stand for the same values, and a count of those that do not."""

from __future__ import annotations

from dataclasses import dataclass

from mxcli.backends.backend import Backend
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Stats


@dataclass(frozen=True, slots=True)
class Reencoded:
    """The new codes, the number of elements whose value changed, and statistics against the values before.

    A NaN that stays NaN has not changed; elements that become NaN with its block have.
    """

    quantized: Quantized
    inexact: int
    stats: Stats


def reencode(q: Quantized, scheme: Scheme, backend: Backend) -> Reencoded:
    """Return `q` under another scheme, through its values as binary32, which hold every element times its scale
    exactly.

    `q` is on the device of the backend. Takes memory for two binary32 copies of the tensor.
    """
    before = backend.dequantize(q)
    again = backend.quantize(before, "F32", scheme)
    assert again.stats is not None
    after = backend.dequantize(again)
    other = (after != before) & ~((after != after) & (before != before))
    return Reencoded(again, int(other.sum()), again.stats)
