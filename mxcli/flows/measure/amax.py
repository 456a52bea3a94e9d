"""The amax that a tensor scale is made for: of a tensor, or of the set of tensors that share the scale."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.files.tensors import Array
from mxcli.flows.plan.plan import TensorPlan
from mxcli.numerics.blocks import COLUMN, ROW
from mxcli.numerics.hadamard import Hadamard

AmaxKey = tuple[str, Hadamard | None]
"""What the amax of a tensor depends on: the axis, where a transform runs along it, and the transform."""

T = TypeVar("T", bound=Hashable)


class SharedAmax(Generic[T]):
    """The amax of members, each found once, and of the sets that share a tensor scale.

    `find` returns the largest finite magnitude of a member; a member of none of the `sets` has a scale of its own.
    """

    def __init__(self, sets: Iterable[Sequence[T]], find: Callable[[T], float]) -> None:
        self._sets = {member: members for members in sets for member in members}
        self._find = find
        self._known: dict[T, float] = {}

    def own(self, member: T) -> float:
        """Return the amax of a member alone."""
        if member not in self._known:
            self._known[member] = self._find(member)
        return self._known[member]

    def of(self, member: T) -> float:
        """Return the amax that the member's tensor scale is made for: of its whole set."""
        return max(map(self.own, self._sets.get(member, (member,))))


def oriented(x: Array, axis: str) -> Array:
    """Return the tensor with blocks along its last dimension: for COLUMN its last two dimensions are exchanged."""
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)) if axis == COLUMN else x


def has_tensor_scale(planned: TensorPlan) -> bool:
    """Return whether the tensor gets a scale of the whole tensor: next to those of its blocks, or as its only one."""
    if planned.scheme is None:
        return False
    fmt = planned.scheme.format
    return fmt.tensor_scale is not None or fmt.block == (None, None)


def amax_key(axis: str, hadamard: Hadamard | None) -> AmaxKey:
    """Return the key of an amax; without a transform both axes have the same."""
    return (ROW if hadamard is None else axis), hadamard


def amax_key_of(planned: TensorPlan) -> AmaxKey:
    """Return the key of the amax that a tensor's scale is made for."""
    return amax_key(planned.axis, None if planned.scheme is None else planned.scheme.hadamard)


def largest(backend: Backend, arrays: Iterable[tuple[str, Array]], key: AmaxKey) -> float:
    """Return the largest finite magnitude of arrays, each with its safetensors dtype."""
    axis, hadamard = key
    return max(backend.amax(oriented(x, axis), dtype, hadamard).value for dtype, x in arrays)
