"""The largest magnitudes that tensor scales are made for: of a tensor, or of all that share a scale."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mxcli.backends import Backend
from mxcli.files.tensors import Array
from mxcli.flows.plan import Step
from mxcli.numerics.blocks import COLUMN, ROW
from mxcli.numerics.hadamard import Hadamard

Way = tuple[str, Hadamard | None]
"""What a largest magnitude hangs on: a transform, and the axis that it runs along."""


def along(x: Array, axis: str) -> Array:
    """The tensor as it is quantized along an axis: with blocks along its last dimension."""
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)) if axis == COLUMN else x


def has_tensor_scale(step: Step) -> bool:
    """Whether a step gives its tensor a scale of the whole tensor beside those of blocks."""
    return step.recipe is not None and step.recipe.format.tensor_scale is not None


def way_of(step: Step) -> Way:
    """The way of a step; without a transform it is the same along both axes."""
    hadamard = None if step.recipe is None else step.recipe.hadamard
    return ROW if hadamard is None else step.axis, hadamard


def largest(backend: Backend, arrays: Iterable[tuple[str, Array]], way: Way) -> float:
    """The largest finite magnitude of arrays, each with its safetensors type."""
    axis, hadamard = way
    return max(backend.amax(along(x, axis), dtype, hadamard).value for dtype, x in arrays)
