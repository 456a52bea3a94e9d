"""FP8 weights without scales: plain casts, whose values are those of their codes.

Nothing in such a file says that its scales are not just missing, so it is read by request only.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from mxcli.errors import printable
from mxcli.files.dialect import FP8
from mxcli.files.layouts.layout import Entry, ForeignWeight, Layout, OnDisk, Unread
from mxcli.files.tensors import DTYPES, Array
from mxcli.numerics.floats import E4M3, E5M2

DIALECT = "fp8-casts"
ELEMENTS = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}


def _foreign(disk: OnDisk) -> list[ForeignWeight]:
    """Return every tensor of FP8 codes. Raises Unread for elements that are not read."""
    found = [info for info in disk.tensors.values() if info.dtype in FP8]
    other = next((info for info in found if info.dtype not in ELEMENTS), None)
    if other is not None:
        raise Unread(f"{printable(other.name)}: is {other.dtype}; mxcli reads casts to {', '.join(ELEMENTS)}.")
    return [ForeignWeight(Entry(info.name, disk.dtype, info.shape), partial(_decoded, info.dtype)) for info in found]


def _decoded(codes_dtype: str, codes: Array, dtype: str) -> Array:
    return _table(codes_dtype, dtype)[codes.view(np.uint8)]


@cache
def _table(codes_dtype: str, dtype: str) -> Array:
    """Return the value of each code in a dtype, which holds all of them exactly."""
    values = np.array([ELEMENTS[codes_dtype].value(code) for code in range(256)], np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype].storage)


CASTS = Layout(
    name=DIALECT,
    meaning="FP8 weights without scales, read as casts",
    source="OCP 8-bit Floating Point Specification 1.0, section 5",
    formats=(),
    refusal=lambda weight: "it is only read",
    contents=lambda weight: (),
    settings=lambda weights, ignored: {},
    weights=lambda disk: [],
    foreign=_foreign,
    dialects=(DIALECT,),
)
