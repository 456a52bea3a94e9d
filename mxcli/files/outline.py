"""Where the tensors of a source go in an output that has names, dtypes or orders of rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mxcli.files.reading import as_floats
from mxcli.files.tensors import Array, TensorInfo


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a tensor goes: its name and dtype there, and what puts its rows in order where that is another one."""

    name: str
    dtype: str
    reorder: Callable[[Array], Array] | None = None

    def of(self, x: Array, dtype: str) -> Array:
        """The tensor as it is stored, from an array of `dtype`: that of the target, or one that binary32 holds."""
        ordered = x if self.reorder is None else self.reorder(x)
        return ordered if dtype == self.dtype else _widened(ordered, dtype)


@dataclass(frozen=True, slots=True)
class OutputOutline:
    """A model in its output: the target of each tensor by its name in the source (None: it has no place there),
    binary32 tensors that the source lacks, what adds settings to the header, and what a user should know."""

    targets: Mapping[str, Destination | None]
    constants: Mapping[str, Array] = field(default_factory=dict)
    architecture: str = ""
    settings: tuple[Callable[[Any], None], ...] = ()
    remarks: tuple[str, ...] = ()


def unchanged_outline(infos: Iterable[TensorInfo]) -> OutputOutline:
    """Every tensor under its own name."""
    return OutputOutline({info.name: Destination(info.name, info.dtype) for info in infos})


def _widened(x: Array, dtype: str) -> Array:
    """F16 or BF16 values as binary32, which holds them all."""
    return as_floats(x, dtype).astype(np.float32, copy=False)
