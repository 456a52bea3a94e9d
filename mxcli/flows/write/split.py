"""How a tensor is cut for a layout: one weight as a rule, and two per expert where a stack of experts is split."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mxcli.files.layouts import COLUMN, ROW, Content, Entry, Layout, Weight, refusal
from mxcli.files.outline import Destination
from mxcli.files.structure import BEFORE_LAST, LAST, reduction_axis
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.plan.plan import TensorPlan

_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(\.weight)?")
INTERLEAVED = frozenset({"gpt_oss"})
"""Model types whose gate and up rows alternate, so that halves of the stack are neither."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A weight, how it is stored, and where it lies in the tensor as quantized: rows `begin` to `end` of one
    `expert` of a stack, or (`expert` None) all of it, its rows put in order by `reorder` if that is not None. Pieces
    with the same `shared` have one tensor scale.
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
        """The tensors written for it."""
        return tuple(content.entry for content in self.contents)

    @property
    def nbytes(self) -> int:
        """Bytes of what is written for it."""
        return sum(entry.nbytes for entry in self.entries)

    def of(self, x: Array, axis: str) -> Array:
        """Return the piece of a tensor."""
        ordered = x if self.reorder is None else self.reorder(x)
        turned = np.swapaxes(ordered, -1, -2) if axis == COLUMN else ordered
        return turned if self.expert is None else turned[self.expert, self.begin : self.end]


def stack_module(name: str) -> str | None:
    """Return the module that a stack of experts belongs to; None for any other tensor."""
    stack = _STACK.fullmatch(name)
    return stack[1] if stack else None


def pieces_of(
    step: TensorPlan, layout: Layout, config: Mapping[str, object] | None, target: Destination | None = None
) -> tuple[Piece, ...] | str:
    """Return the pieces of a quantized tensor, or why the layout cannot hold it; `target` is where it goes if not to
    its own name."""
    assert step.scheme is not None
    name, reorder = (step.tensor.name, None) if target is None else (target.name, target.reorder)
    whole = Weight(name, step.shape, step.scheme, step.tensor.dtype, step.axis, input_scale=step.input_scale)
    refused = refusal(layout, whole)
    if refused is None:
        return (Piece(whole, layout.contents(whole), step.group, reorder=reorder),)
    pieces = _experts(step, layout, config)
    return refused if pieces is None else pieces


def _experts(step: TensorPlan, layout: Layout, config: Mapping[str, object] | None) -> tuple[Piece, ...] | str | None:
    """Return a stack of experts as the matrices of each; None for any other tensor."""
    stack = _STACK.fullmatch(step.tensor.name)
    if stack is None or len(step.shape) != 3 or step.scheme is None:
        return None
    axis = ROW if reduction_axis(step.tensor, config) == LAST else COLUMN
    if not _is_decided(step.tensor, config) or axis != step.axis:
        return "a stack of experts of which the configuration does not tell whether it is stored [expert, out, in]"
    if config is not None and config.get("model_type") in INTERLEAVED:
        return "a stack of experts in which gate and up alternate"
    experts, rows, columns = step.shape
    names = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
    if rows % len(names):
        return f"a stack of experts whose {rows} rows are no two halves"
    height = rows // len(names)
    pieces = []
    for expert in range(experts):
        module = f"{stack[1]}.{expert}"
        shared = f"{module}.{'+'.join(names)}" if len(names) > 1 and step.scheme.format.tensor_scale else None
        for place, name in enumerate(names):
            weight = Weight(f"{module}.{name}.weight", (height, columns), step.scheme, step.tensor.dtype)
            refused = refusal(layout, weight)
            if refused is not None:
                return refused
            begin = place * height
            pieces.append(Piece(weight, layout.contents(weight), shared, expert, begin, begin + height))
    return tuple(pieces)


def _is_decided(stack: TensorInfo, config: Mapping[str, object] | None) -> bool:
    """Return whether the orientation of a stack is known, not assumed: then it would differ for the exchanged shape."""
    experts, rows, columns = stack.shape
    exchanged = replace(stack, shape=(experts, columns, rows))
    return BEFORE_LAST in (reduction_axis(stack, config), reduction_axis(exchanged, config))
