"""Destinations of tensors in an output that renames, retypes or reorders them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mxcli.files.reading import as_floats
from mxcli.files.tensors import Array, TensorInfo


@dataclass(frozen=True, slots=True)
class Destination:
    """The name and dtype of a tensor in the output, and the function that reorders its rows (None: same order)."""

    name: str
    dtype: str
    reorder: Callable[[Array], Array] | None = None

    def of(self, x: Array, dtype: str) -> Array:
        """Return the array to store, given one of `dtype`: the destination's dtype, or one that binary32 holds
        exactly."""
        ordered = x if self.reorder is None else self.reorder(x)
        return ordered if dtype == self.dtype else _widened(ordered, dtype)


@dataclass(frozen=True, slots=True)
class OutputOutline:
    """A model in its output: the destination of each tensor by source name (None: left out), binary32 tensors that the
    source lacks, functions that add header settings, and remarks for the user."""

    targets: Mapping[str, Destination | None]
    constants: Mapping[str, Array] = field(default_factory=dict)
    architecture: str = ""
    settings: tuple[Callable[[Any], None], ...] = ()
    remarks: tuple[str, ...] = ()


def unchanged_outline(infos: Iterable[TensorInfo]) -> OutputOutline:
    """Return the outline that keeps every name and dtype."""
    return OutputOutline({info.name: Destination(info.name, info.dtype) for info in infos})


def _widened(x: Array, dtype: str) -> Array:
    """Convert F16 or BF16 values to binary32, exactly."""
    return as_floats(x, dtype).astype(np.float32, copy=False)
