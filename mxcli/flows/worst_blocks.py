"""The blocks with most error, element by element: only they are read again and quantized once more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mxcli.backends import cpu
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN
from mxcli.files.tensors import Array
from mxcli.flows.plan import Plan, Step
from mxcli.flows.report import LayerReport
from mxcli.numerics.metrics import number_of
from mxcli.numerics.recipe import Recipe

TENSORS, ELEMENTS = 6, 32
"""How many tensors are looked into, and the most elements of a block that are told of."""


@dataclass(frozen=True, slots=True)
class BlockElement:
    """An element by its row and column in the block: its value, the code it got, and what that stands for."""

    row: int
    column: int
    value: float
    code: int
    quantized: float


@dataclass(frozen=True, slots=True)
class WorstBlock:
    """A block of a tensor as quantized (`index` of the batch, first `row` and `column`).

    `sqnr_db` is None where the block has no signal. `noise_percent` is its share of the tensor's noise. `scale` is what
    codes are multiplied with, a tensor scale included. Of a block with more than ELEMENTS elements, `elements` holds
    those with most error, in their order; `size` counts all of them.
    """

    tensor: str
    recipe: Recipe
    index: int
    row: int
    column: int
    size: int
    sqnr_db: float | None
    noise_percent: float
    amax: float
    scale: float
    saturated: int
    underflowed: int
    elements: tuple[BlockElement, ...]


def worst_blocks(
    checkpoint: Checkpoint, plan: Plan, layers: Sequence[LayerReport], tensors: int = TENSORS
) -> tuple[WorstBlock, ...]:
    """The worst block of each of the `tensors` with the lowest SQNR, lowest first; fewer where fewer have noise, and
    none of a tensor that is one block.

    Computed on the CPU from what `layers` say of the plan's tensors. Raises InputError when a file has changed.
    """
    steps = {step.tensor.name: step for step in plan.quantized}
    amaxes = {layer.name: number_of(layer.metrics, "amax") for layer in layers}
    known = [(sqnr, layer) for layer in layers if (sqnr := number_of(layer.metrics, "sqnr_db")) is not None]
    found: list[WorstBlock] = []
    for _, layer in sorted(known, key=lambda pair: pair[0]):
        step, places = steps[layer.name], layer.metrics["worst_blocks"]
        sharing = (step,) if step.group is None else plan.groups[step.group]
        shared = [amaxes.get(each.tensor.name) for each in sharing]
        if step.recipe is None or step.recipe.format.block == (None, None):
            continue
        # An interruption may have left out tensors whose magnitudes the tensor scale depends on.
        if isinstance(places, list) and places and None not in shared and len(found) < tensors:
            found.append(_block(checkpoint, step, places[0], max(filter(None, shared), default=0.0)))
    return tuple(found)


def _block(checkpoint: Checkpoint, step: Step, place: Mapping[str, object], amax: float) -> WorstBlock:
    recipe, dtype = step.recipe, step.tensor.dtype
    assert recipe is not None
    index, row, column = (int(str(place[key])) for key in ("index", "row", "column"))
    x = read(checkpoint, step.tensor)
    block = _cut(np.swapaxes(x, -1, -2) if step.axis == COLUMN else x, recipe.format.block, index, row, column)
    tensor_amax = amax if recipe.format.tensor_scale is not None else None
    q = cpu.quantize(block, dtype, recipe, tensor_amax=tensor_amax, per_block=True)
    stats, per_block = q.stats, q.per_block
    assert stats is not None
    assert per_block is not None
    values, quantized, codes = _values(block, dtype), cpu.dequantize(q, "F64"), cpu.unpack(q)
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(quantized - values).ravel(), nan=np.inf)
    shown = np.sort(np.argsort(-error, kind="stable")[:ELEMENTS])
    return WorstBlock(
        tensor=step.tensor.name,
        recipe=recipe,
        index=index,
        row=row,
        column=column,
        size=block.size,
        sqnr_db=10.0 * math.log10(stats.signal / stats.noise) if stats.signal > 0 and stats.noise > 0 else None,
        noise_percent=float(str(place["noise_percent"])),
        amax=stats.amax,
        scale=float(per_block.decode.ravel()[0]),
        saturated=stats.saturated,
        underflowed=stats.underflowed,
        elements=tuple(
            BlockElement(
                int(at) // block.shape[-1],
                int(at) % block.shape[-1],
                float(values.flat[at]),
                int(codes.flat[at]),
                float(quantized.flat[at]),
            )
            for at in shown
        ),
    )


def _cut(x: Array, block: tuple[int | None, int | None], index: int, row: int, column: int) -> Array:
    """The block that begins at a row and column of a batch; of a mapped tensor no more than that is read."""
    rows, columns = block
    matrix = x[None] if x.ndim == 1 else x[np.unravel_index(index, x.shape[:-2])]
    height, width = matrix.shape
    return np.ascontiguousarray(matrix[row : row + (rows or height), column : column + (columns or width)])


def _values(x: Array, dtype: str) -> Array:
    """The elements in binary64; BF16 arrives as its bits."""
    wide = (x.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else x
    return wide.astype(np.float64)
