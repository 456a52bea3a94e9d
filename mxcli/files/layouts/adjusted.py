"""Tensors next to codes that change the decoded values: a scale of each input, and a product of two thin matrices.

A layer then computes `(codes + b @ a) * scale`: ModelOpt multiplies its inputs by `pre_quant_scale`, and adds what
`svdquant_lora_b @ svdquant_lora_a` make of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mxcli.files.layouts.layout import Content, Entry
from mxcli.files.layouts.parts import Part
from mxcli.files.reading import as_floats, from_floats
from mxcli.files.tensors import Array


def _part(name: str) -> Part:
    """Return a part that is only read: nothing of it is among codes and scales."""

    def store(quantized: object, dtype: str) -> Array:
        raise NotImplementedError(f"{name} is read only")

    return Part(name, store, lambda array, fmt, shape: {}, adjusts=True)


INPUTS, DOWN, UP = _part("scale of the inputs"), _part("low-rank matrix of the inputs"), _part("low-rank matrix")
"""A factor for each column, and the two matrices [rank, columns] and [rows, rank] of a product that is added."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the name of such a tensor, after its module, and the part that it holds."""

    name: str
    part: Part


def contents_of(module: str, entries: Iterable[Entry], endings: Iterable[Ending]) -> tuple[Content, ...]:
    """Return the contents of the entries of a module that change its decoded weight."""
    parts = {module + ending.name: ending.part for ending in endings}
    return tuple(Content(entry, parts[entry.name]) for entry in entries)


def fault(shape: tuple[int, ...], stored: Mapping[Part, Entry]) -> str | None:
    """Return why tensors do not change the decoded values of a matrix of that shape; None if they do."""
    rows, columns = shape
    down, up = stored.get(DOWN), stored.get(UP)
    if (down is None) != (up is None):
        return f"{(down or up or stored[INPUTS]).name} has no other half"
    rank = down.shape[0] if down is not None and down.shape else 0
    for part, needed in ((INPUTS, (columns,)), (DOWN, (rank, columns)), (UP, (rows, rank))):
        entry = stored.get(part)
        if entry is not None and (entry.dtype not in _FLOATS or entry.shape != needed):
            return f"{entry.name} is {entry.dtype} {list(entry.shape)}; it needs floats {list(needed)}"
    return None


_FLOATS = ("BF16", "F16", "F32")


def adjusted(values: Array, dtype: str, stored: Iterable[tuple[Content, Array]]) -> Array:
    """Return binary32 values of codes with what the contents that change them do, computed in binary64, in a
    dtype."""
    given = {content.holds: as_floats(array, content.entry.dtype) for content, array in stored if content.holds.adjusts}
    wide = np.asarray(values, np.float64)
    if DOWN in given and UP in given:
        wide = wide + np.asarray(given[UP], np.float64) @ np.asarray(given[DOWN], np.float64)
    if INPUTS in given:
        wide = wide * np.asarray(given[INPUTS], np.float64)
    return from_floats(wide, dtype)
