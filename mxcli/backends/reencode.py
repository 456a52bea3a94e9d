"""Codes of one format as codes of another that stand for the same values, and a count of those that do not."""

from __future__ import annotations

from dataclasses import dataclass

from mxcli.backends.backend import Backend
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Stats


@dataclass(frozen=True, slots=True)
class Reencoded:
    """The codes, how many elements stand for another value than before, and what was measured against those before.

    A NaN that stays one is no other value; the elements that it makes NaN with it are.
    """

    quantized: Quantized
    inexact: int
    stats: Stats


def reencode(q: Quantized, scheme: Scheme, backend: Backend) -> Reencoded:
    """Return `q` under another recipe, through its values as binary32, which hold every element times its scale
    exactly.

    `q` lies where the backend computes. Takes memory for two binary32 copies of the tensor.
    """
    before = backend.dequantize(q)
    again = backend.quantize(before, "F32", scheme)
    assert again.stats is not None
    after = backend.dequantize(again)
    other = (after != before) & ~((after != after) & (before != before))
    return Reencoded(again, int(other.sum()), again.stats)
