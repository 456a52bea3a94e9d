"""Memory and disk that recording takes, and the refusal of more than is allowed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcli.errors import EnvironmentFailure, printable
from mxcli.files.capture_writer import CapturedTensor
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.files.tensors import DTYPES
from mxcli.flows.capture.layers import Layer

_WIDEST = "F32"
"""The widest input of a layer whose weight has a dtype that files do not hold."""
_LESS = "record fewer rows (--sample-rows), fewer layers (--layers) or fewer roles (--roles)"


@dataclass(frozen=True, slots=True)
class Limits:
    """The most bytes of files, for `steps` steps to record (None: unknown), and of memory for rows; None: unlimited."""

    steps: int | None = None
    max_disk: int | None = None
    max_memory: int | None = None


@dataclass(frozen=True, slots=True)
class WrittenSteps:
    """The state of the disk: complete steps and their bytes, bytes of the step being written, and those of files that
    are replaced before the last step is written."""

    steps: int = 0
    nbytes: int = 0
    begun: int = 0
    replaced: int = 0


_EMPTY = WrittenSteps()


@dataclass(frozen=True, slots=True)
class Size:
    """A step's bytes in its file, and in memory until it is written."""

    disk: int
    memory: int


def expected(layers: Sequence[Layer], roles: Sequence[str], rows: int) -> list[CapturedTensor]:
    """Return the tensors of a step in which every layer keeps that many rows, in its weight's dtype."""
    tensors = []
    for layer in layers:
        dtype = layer.dtype if layer.dtype in DTYPES else _WIDEST
        shapes = {
            ACTIVATION: (rows, layer.inputs),
            GRADIENT: (rows, layer.outputs),
            WEIGHT: (layer.outputs, layer.inputs),
        }
        tensors += [
            CapturedTensor(layer.name, role, dtype, shapes[role], *(() if role == WEIGHT else (rows, rows)))
            for role in roles
        ]
    return tensors


def size_of(tensors: Sequence[CapturedTensor]) -> Size:
    """Return the size of tensors: rows are in memory until the step ends, weights one at a time; incoming rows are
    held in two copies."""
    sizes = [(tensor.nbytes, tensor.role == WEIGHT) for tensor in tensors]
    held = sum(nbytes for nbytes, is_weight in sizes if not is_weight)
    return Size(sum(nbytes for nbytes, _ in sizes), held + max((nbytes for nbytes, _ in sizes), default=0))


class Growth:
    """The size of a step as the rows of its layers arrive, `max_rows` of each at most (None: all), in their weights'
    dtypes."""

    def __init__(self, layers: Sequence[Layer], roles: Sequence[str], max_rows: int | None) -> None:
        self._roles, self._most = [role for role in roles if role != WEIGHT], max_rows
        weights = [tensor.nbytes for tensor in expected(layers, [WEIGHT] if WEIGHT in roles else [], 0)]
        self._weights, self._largest = sum(weights), max(weights, default=0)
        self._rows = 0
        self._held: dict[str, int] = {}
        self._waiting: dict[str, int] = {}

    def after(self, layer: Layer, seen: int, waiting: int = 0) -> Size:
        """Return the size once that layer has seen `seen` tokens, with the inputs of `waiting` of them in memory in
        addition to those kept."""
        rows = seen if self._most is None else min(seen, self._most)
        sizes = [tensor.nbytes for tensor in expected([layer], self._roles, rows)]
        inputs = [ACTIVATION] if ACTIVATION in self._roles else []
        self._waiting[layer.name] = sum(tensor.nbytes for tensor in expected([layer], inputs, waiting))
        self._rows += sum(sizes) - self._held.get(layer.name, 0)
        self._held[layer.name] = sum(sizes)
        self._largest = max(self._largest, *sizes, 0)
        return Size(self._weights + self._rows, self._rows + sum(self._waiting.values()) + self._largest)


def check_size(size: Size, limits: Limits, folder: Path, written: WrittenSteps = _EMPTY) -> None:
    """Raise EnvironmentFailure if steps of this size exceed the limits or the disk, given what is written."""
    if limits.max_memory is not None and size.memory > limits.max_memory:
        raise EnvironmentFailure(
            f"{printable(folder)}: the rows of a step take {size.memory:,} bytes of memory, and {limits.max_memory:,} "
            f"are allowed (--max-memory): {_LESS}."
        )
    left = 1 if limits.steps is None else limits.steps - written.steps
    if left < 1:
        return
    total = written.nbytes + left * size.disk
    of = f"{left:,} steps of {size.disk:,} bytes" if left > 1 else f"a step of {size.disk:,} bytes"
    if limits.max_disk is not None and total > limits.max_disk:
        before = f" after {written.nbytes:,} bytes" if written.nbytes else ""
        raise EnvironmentFailure(
            f"{printable(folder)}: {of}{before} would be {total:,} bytes on the disk, and {limits.max_disk:,} are "
            f"allowed (--max-disk): {_LESS}, or fewer steps (--steps)."
        )
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    needed = max(size.disk, left * size.disk - written.replaced) - written.begun
    if needed > free:
        raise EnvironmentFailure(
            f"{printable(folder)}: {of} would take {needed:,} more bytes on the disk, and {free:,} are available: "
            f"{_LESS}, or fewer steps (--steps), or free some space."
        )
