"""The split of a tensor for a layout: usually one weight; for a stack of experts one or two per expert."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN, Content, Entry, Layout, Weight, refusal
from mxcli.files.models.stacks import alternates
from mxcli.files.outline import Destination
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.plan.plan import TensorPlan

_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(\.weight)?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A weight, the tensors that store it, and its place in the tensor as quantized: rows `begin` to `end` of an
    `expert` of a stack, or (`expert` None) all of it, with rows permuted by `reorder` unless that is None. Pieces with
    the same `shared` have one tensor scale.
    """

    weight: Weight
    contents: tuple[Content, ...]
    shared: str | None
    expert: int | None = None
    begin: int = 0
    end: int = 0
    reorder: Callable[[Array], Array] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors to write."""
        return tuple(content.entry for content in self.contents)

    @property
    def nbytes(self) -> int:
        """Size of the tensors to write in bytes."""
        return sum(entry.nbytes for entry in self.entries)

    def of(self, x: Array, axis: str) -> Array:
        """Return the piece of a tensor."""
        ordered = x if self.reorder is None else self.reorder(x)
        oriented = np.swapaxes(ordered, -1, -2) if axis == COLUMN else ordered
        return oriented if self.expert is None else oriented[self.expert, self.begin : self.end]


def read_piece(checkpoint: Checkpoint, info: TensorInfo, piece: Piece, axis: str) -> Array:
    """Read a piece of a tensor; of a stack of experts only the expert it is in."""
    if piece.expert is None:
        return piece.of(read(checkpoint, info), axis)
    x = read(checkpoint, info, piece.expert)
    return (x.T if axis == COLUMN else x)[piece.begin : piece.end]


def stack_module(name: str) -> str | None:
    """Return the module that a stack of experts belongs to; None for any other tensor."""
    stack = _STACK.fullmatch(name)
    return stack[1] if stack else None


def pieces_of(
    planned: TensorPlan, layout: Layout, config: Mapping[str, object] | None, target: Destination | None = None
) -> tuple[Piece, ...] | str:
    """Return the pieces of a quantized tensor, or the reason why the layout cannot hold it; `target` is its destination
    (None: its own name)."""
    assert planned.scheme is not None
    name, reorder = (planned.tensor.name, None) if target is None else (target.name, target.reorder)
    whole = Weight(
        name, planned.shape, planned.scheme, planned.tensor.dtype, planned.axis, input_scale=planned.input_scale
    )
    refused = refusal(layout, whole)
    if refused is None:
        return (Piece(whole, layout.contents(whole), planned.group, reorder=reorder),)
    pieces = _experts(planned, layout, config)
    return refused if pieces is None else pieces


def _experts(
    planned: TensorPlan, layout: Layout, config: Mapping[str, object] | None
) -> tuple[Piece, ...] | str | None:
    """Return the matrices of each expert of a stack; None for any other tensor."""
    stack = _STACK.fullmatch(planned.tensor.name)
    if stack is None or len(planned.shape) != 3 or planned.scheme is None:
        return None
    if planned.summed is None or planned.summed != planned.axis:
        return (
            "an expert stack that is either [expert, out, in] or [expert, in, out]: the configuration does not decide, "
            "and only the former is supported"
        )
    if alternates(planned.tensor, config):
        return "a stack of experts in which gate and up alternate"
    experts, rows, columns = planned.shape
    names = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
    if rows % len(names):
        return f"stacked {stack[2]} has {rows} rows; expected an even number"
    height = rows // len(names)
    pieces = []
    for expert in range(experts):
        module = f"{stack[1]}.{expert}"
        shared = f"{module}.{'+'.join(names)}" if len(names) > 1 and planned.scheme.format.scales_whole_tensor else None
        for place, name in enumerate(names):
            weight = Weight(f"{module}.{name}.weight", (height, columns), planned.scheme, planned.tensor.dtype)
            refused = refusal(layout, weight)
            if refused is not None:
                return refused
            begin = place * height
            pieces.append(Piece(weight, layout.contents(weight), shared, expert, begin, begin + height))
    return tuple(pieces)
