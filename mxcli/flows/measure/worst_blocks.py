"""The blocks with the largest error, element by element: only they are read and quantized again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from mxcli.backends import cpu
from mxcli.files.checkpoint import Checkpoint, read, read_rows
from mxcli.files.layouts import COLUMN
from mxcli.files.reading import as_floats
from mxcli.files.tensors import IN_MEMORY, Array
from mxcli.flows.measure.amax import SharedAmax, oriented
from mxcli.flows.measure.report import LayerReport
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.numerics.metric_formulas import Measurement, Value, decibels
from mxcli.numerics.metric_formulas import worst_blocks as worst_places
from mxcli.numerics.metrics import number_of
from mxcli.numerics.scheme import Scheme

TENSORS, ELEMENTS, COMPARED = 6, 32, 8
"""Numbers of tensors shown, of elements shown of a block, and of plans compared."""

Metrics = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class BlockElement:
    """An element of a block by row and column: its value, its code, and the dequantized value."""

    row: int
    column: int
    value: float
    code: int
    quantized: float


@dataclass(frozen=True, slots=True)
class WorstBlock:
    """A block of a tensor as quantized (`index` of the batch, first `row` and `column`), `under` the plan at that place
    where there are several.

    `sqnr_db` is None where the block has no signal. `noise_percent` is its share of the tensor's noise. `scale` is what
    codes are multiplied with, a tensor scale included. Of a block with more than ELEMENTS elements, `elements` holds
    those with most error, in their order; `size` counts all of them.
    """

    tensor: str
    scheme: Scheme
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
    under: int = 0


def worst_blocks(
    checkpoint: Checkpoint, plans: Sequence[Plan], layers: Sequence[LayerReport], tensors: int = TENSORS
) -> tuple[WorstBlock, ...]:
    """Return the worst block of each of the `tensors` with the lowest SQNR, lowest first; fewer where fewer have noise,
    and none of a tensor that is one block. Of the plans for both axes, each has its share of the tensors.

    Computed on the CPU from what `layers` say of the plans' tensors. Raises InputError when a file has changed.
    """
    found: list[WorstBlock] = []
    for under, plan in enumerate(plans):
        measured = {layer.name: layer.metrics for layer in layers if plan.axis in (None, layer.axis)}
        worst = _worst_of(checkpoint, plan, measured)
        found += [replace(block, under=under) for block in islice(worst, max(1, tensors // len(plans)))]
    return tuple(found)


def _worst_of(checkpoint: Checkpoint, plan: Plan, measured: Mapping[str, Metrics]) -> Iterator[WorstBlock]:
    """Yield the worst block of each tensor, at the place that the metrics say."""
    for planned, amax in _lowest_first(plan, measured):
        places = measured[planned.tensor.name]["worst_blocks"]
        if isinstance(places, list) and places:
            yield _block(checkpoint, planned, places[0], amax)


def worst_blocks_compared(
    checkpoint: Checkpoint, plans: Sequence[Plan], measured: Sequence[Mapping[str, Metrics]]
) -> tuple[WorstBlock, ...]:
    """Return the worst block of the tensors with the lowest SQNR under each plan, given what was `measured` under it by
    tensor: of several plans fewer tensors each, and of more than COMPARED plans the first ones only.

    Where blocks are worst was not kept, so these few tensors are quantized once more, on the CPU. Raises like
    `worst_blocks`.
    """
    found: list[WorstBlock] = []
    for under, (plan, metrics) in enumerate(zip(plans[:COMPARED], measured, strict=False)):
        tensors = max(1, TENSORS // len(plans))
        for planned, amax in islice(_lowest_first(plan, metrics), tensors):
            found += [
                replace(_block(checkpoint, planned, place, amax), under=under)
                for place in _worst(checkpoint, planned, amax)
            ]
    return tuple(found)


def _lowest_first(plan: Plan, measured: Mapping[str, Metrics]) -> Iterator[tuple[TensorPlan, float]]:
    """Yield measured tensors with several blocks, each with the amax of those that share a tensor scale, the lowest
    SQNR first; tensors without noise are skipped.

    None under a transform, which mixes elements of several blocks, or a random rounding, which draws by the place in
    the tensor: such a block cannot be requantized in isolation.
    """
    steps = {planned.tensor.name: planned for planned in plan.quantized}
    amaxes = {name: number_of(metrics, "amax") for name, metrics in measured.items()}
    complete = {name for name, amax in amaxes.items() if amax is not None}
    sets = [[planned.tensor.name for planned in group] for group in plan.groups.values()]
    members = {name: names for names in sets for name in names}
    shared = SharedAmax(sets, lambda name: amaxes[name] or 0.0)
    known = [(sqnr, name) for name, each in measured.items() if (sqnr := number_of(each, "sqnr_db")) is not None]
    for _, name in sorted(known, key=lambda pair: pair[0]):
        planned = steps[name]
        scheme = planned.scheme
        if scheme is None or scheme.format.block == (None, None) or scheme.hadamard or scheme.rounding.is_random:
            continue
        # An interruption may have left out tensors whose magnitudes the tensor scale depends on.
        if complete.issuperset(members.get(name, (name,))):
            yield planned, shared.of(name)


def _worst(checkpoint: Checkpoint, planned: TensorPlan, amax: float) -> list[dict[str, object]]:
    """Return the place of a tensor's worst block as the metric gives it; empty if no block has noise."""
    assert planned.scheme is not None
    x, row = read(checkpoint, planned.tensor), planned.scheme.format
    transposed = oriented(x, planned.axis)
    tensor_amax = amax if row.tensor_scale is not None else None
    stats = cpu.quantize(transposed, planned.tensor.dtype, planned.scheme, tensor_amax=tensor_amax, codes=False).stats
    assert stats is not None
    return worst_places(Measurement(stats, row, planned.shape))[:1]


def _block(checkpoint: Checkpoint, planned: TensorPlan, place: Mapping[str, object], amax: float) -> WorstBlock:
    scheme, dtype = planned.scheme, planned.tensor.dtype
    assert scheme is not None
    index, row, column = (int(str(place[key])) for key in ("index", "row", "column"))
    block = _read_block(checkpoint, planned, index, row, column)
    tensor_amax = amax if scheme.format.tensor_scale is not None else None
    q = cpu.quantize(block, dtype, scheme, tensor_amax=tensor_amax, per_block=True)
    stats, per_block = q.stats, q.per_block
    assert stats is not None
    assert per_block is not None
    values, quantized, codes = _values(block, dtype), cpu.dequantize(q, "F64"), cpu.unpack(q)
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(quantized - values).ravel(), nan=np.inf)
    shown = np.sort(np.argsort(-error, kind="stable")[:ELEMENTS])
    return WorstBlock(
        tensor=planned.tensor.name,
        scheme=scheme,
        index=index,
        row=row,
        column=column,
        size=block.size,
        sqnr_db=decibels(stats.signal, stats.noise),
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


def _read_block(checkpoint: Checkpoint, planned: TensorPlan, index: int, row: int, column: int) -> Array:
    """Read the block that begins at a row and column of a matrix of the tensor as quantized: its rows alone if the
    bytes are in place."""
    info, turned = planned.tensor, planned.axis == COLUMN
    assert planned.scheme is not None
    rows, columns = planned.scheme.format.block
    if len(info.shape) < 2 or info.offset == IN_MEMORY:
        x = read(checkpoint, info)
        oriented_x = np.swapaxes(x, -1, -2) if turned else x
        matrix = x[None] if x.ndim == 1 else oriented_x[np.unravel_index(index, x.shape[:-2])]
        first = (row, column)
    else:
        height, begin, count = info.shape[-2], *((column, columns) if turned else (row, rows))
        stored = read_rows(checkpoint, info, [index * height + begin], min(count or height, height - begin))[0]
        matrix, first = (stored.T, (row, 0)) if turned else (stored, (0, column))
    tall, wide = matrix.shape
    return np.ascontiguousarray(matrix[first[0] : first[0] + (rows or tall), first[1] : first[1] + (columns or wide)])


def _values(x: Array, dtype: str) -> Array:
    """Return the elements in binary64; BF16 arrives as its bits."""
    return as_floats(x, dtype).astype(np.float64)
