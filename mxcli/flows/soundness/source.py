"""The plain tensors that a quantized checkpoint was made from, as far as a source holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN, ROW
from mxcli.files.orientation import LAST, reduction_axis
from mxcli.files.reading import release_pages
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.pieces import pieces_of, stack_module
from mxcli.flows.plan import Step
from mxcli.flows.restoring import Restoring


@dataclass(frozen=True, slots=True)
class Original:
    """One plain tensor, or the part of one, as a weight of its own: its shape, and how to read it."""

    info: TensorInfo
    shape: tuple[int, ...]
    read: Callable[[], Array]


@dataclass(frozen=True, slots=True)
class Originals:
    """The originals by the name that the quantized checkpoint has for each; names that a tie leaves out are not
    `stored`."""

    checkpoint: Checkpoint
    by_name: Mapping[str, Original]
    tied: frozenset[str]


def originals_of(source: Checkpoint, seen: Restoring) -> Originals:
    """The tensors of a source by the names they have in a checkpoint made from it: stacks of experts are split where
    the checkpoint has each expert by itself."""
    found: dict[str, Original] = {}
    for name, info in source.tensors.items():
        pieces = {} if name in seen.tensors else _experts(source, info, seen)
        found |= pieces or {name: Original(info, info.shape, partial(read, source, info))}
    return Originals(source, found, frozenset(source.tied) | frozenset(seen.source.tied))


def _experts(source: Checkpoint, info: TensorInfo, seen: Restoring) -> dict[str, Original]:
    """The experts of a stack by their names in the checkpoint; none for another tensor, or in another order."""
    module = stack_module(info.name)
    some = next((s.weight for name, s in seen.weights.items() if module and name.startswith(f"{module}.")), None)
    if some is None or len(info.shape) != 3:
        return {}
    axis = ROW if reduction_axis(info, source.config) == LAST else COLUMN
    pieces = pieces_of(Step(info, some.recipe, "", axis), seen.layout, source.config)
    if isinstance(pieces, str):
        return {}

    def piece_of(at: int) -> Array:
        x = read(source, info)
        part = np.ascontiguousarray(pieces[at].of(x, axis))
        release_pages(x)
        return part

    return {
        piece.weight.name: Original(info, piece.weight.shape, partial(piece_of, at)) for at, piece in enumerate(pieces)
    }
