"""What is known of a quantized weight when all of it has been read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mxcli.backends import unpacked
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import quantized_from
from mxcli.files.reading import release_pages
from mxcli.files.tensors import Array
from mxcli.flows.restoring import StoredWeight
from mxcli.flows.soundness.blocks import between_by_block, magnitudes, ranks_by_block, scale_values
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import FP32

_LOOK = 1 << 12
"""Units of codes that are looked at before all are, to see whether they are one code."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A weight and, over the grid of its blocks, its scales as stored and by value and the largest finite code value.

    `lost` counts blocks with scale 0 whose codes are not all zero or the largest: a scale that rounded to zero leaves
    no others. `emptied` counts the other blocks with scale 0 that have a code. `code` is the one code that all elements
    have; None where they have several.
    """

    stored: StoredWeight
    scales: Array
    scale_values: Array
    code_max: Array
    not_finite_codes: int
    lost: int
    emptied: int
    code: int | None
    tensor_scale: float | None
    tensor_encode: float

    @property
    def name(self) -> str:
        """The plain name of the weight."""
        return self.stored.weight.name

    @property
    def decode(self) -> float:
        """The factor of the whole tensor that scales back; 1 where there is none."""
        return decode_scale(self.tensor_scale, self.tensor_encode)

    @property
    def amax(self) -> float:
        """The largest magnitude that codes and scales stand for, NaN scales left out."""
        return _largest(self.code_max * self.scale_values) * self.decode

    @property
    def amax_inverted(self) -> float:
        """The same with every scale that could be stored the other way round inverted: the tensor's, or each block's
        where it is binary32; that of other scales is `amax`."""
        if self.tensor_scale is not None or self.tensor_encode != 1.0:
            return self.amax / self.decode**2 if self.decode else math.inf
        if self.stored.weight.format.scale is not FP32:
            return self.amax
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return _largest(self.code_max / self.scale_values)


@dataclass(frozen=True, slots=True)
class Summary:
    """What is kept of the facts of a weight: the one `scale` of the whole tensor, its tensor scale or that of a format
    with a single scale (NaN: it has none), and the largest magnitude."""

    scale: float
    amax: float


def facts_of(checkpoint: Checkpoint, stored: StoredWeight) -> Facts:
    """The facts of a weight; reads all of it."""
    arrays = [read(checkpoint, checkpoint.tensors[content.entry.name]) for content in stored.contents]
    facts = _facts(stored, quantized_from(stored.weight, list(zip(stored.contents, arrays, strict=True))))
    for array in arrays:
        release_pages(array)
    return facts


def summary_of(facts: Facts) -> Summary:
    """What is kept of facts."""
    row = facts.stored.weight.format
    scale = math.nan
    if row.tensor_scale is not None:
        scale = facts.decode
    elif row.block == (None, None):
        scale = float(facts.scale_values.reshape(-1)[0])
    return Summary(scale, facts.amax)


def decode_scale(tensor_scale: float | None, tensor_encode: float) -> float:
    """The factor that scales a whole tensor back, from whichever of its two directions is known."""
    if tensor_scale is not None:
        return tensor_scale
    return 1.0 / tensor_encode if tensor_encode else math.inf


def _facts(stored: StoredWeight, q: Quantized) -> Facts:
    row = stored.weight.format
    values = scale_values(row.scale, q.scales)
    ranks, not_finite = ranks_by_block(q)
    zero = (values == 0).reshape(ranks.shape)
    mixed = between_by_block(q) if zero.any() else np.zeros_like(zero)
    return Facts(
        stored,
        q.scales,
        values,
        magnitudes(row.element)[ranks].reshape(values.shape),
        not_finite,
        lost=int(np.count_nonzero(zero & mixed)),
        emptied=int(np.count_nonzero(zero & ~mixed & (ranks > 0))),
        code=_only_code(q),
        tensor_scale=q.tensor_scale,
        tensor_encode=q.tensor_encode,
    )


def _largest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _only_code(q: Quantized) -> int | None:
    """The code that every element has; None where there are several, or fewer than two elements."""
    size = {4: 1, 6: 3, 8: 1}[q.format.element.stored_bits]
    if math.prod(q.shape) < 2 or q.packed.size % size:
        return None
    units = q.packed.reshape(-1, size)
    if not (units[:_LOOK] == units[0]).all() or not (units == units[0]).all():
        return None
    first = unpacked(replace(q, shape=(1, q.shape[-1]), packed=q.packed.reshape(-1, q.packed.shape[-1])[:1]))[0]
    return int(first[0]) if (first == first[0]).all() else None
