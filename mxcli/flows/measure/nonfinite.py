"""Refusal of NaN and infinities: the policy `error` for non-finite input, in one sentence for every verb."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mxcli.errors import RefusedError, printable, together
from mxcli.flows.plan.plan import TensorPlan
from mxcli.numerics.blocks import COLUMN
from mxcli.numerics.estimates import Counted
from mxcli.numerics.stats import Stats

CORRECT = "Correct it in the source, or use --no-verify to write it as it is."
"""The ways out for plain tensors."""


def nonfinite_values(
    count: int, elements: int, shape: Sequence[int], first: int, part: str = "", *, dtype: str = ""
) -> str:
    """Return how many of a tensor's elements are NaN or infinite, or too large for binary32, in which all are
    quantized, and the index of the first in `shape`.

    `first` is its flat index (negative: unknown), `part` says what the elements are ("of its sample ").
    """
    what = "NaN, infinite or, as F64 can be, beyond binary32 (3.4e38)" if dtype == "F64" else "NaN or infinite"
    where = f", the first at {[int(at) for at in np.unravel_index(first, tuple(shape))]}" if first >= 0 else ""
    return f"{count:,} of {elements:,} values {part}are {what}{where}"


def nonfinite_refusal(name: str, values: str) -> str:
    """Return the refusal of a tensor with such `values`, with the ways out."""
    return f"{printable(name)}: {values}. Use --nonfinite saturate or nan-block, or --exclude '{printable(name)}'."


def unsound_refusal(name: str, values: str, *, has_nan: bool) -> str:
    """Return the refusal of a tensor to quantize whose `values` would leave an output that `mxcli verify` calls not
    sound, with the ways out."""
    shown = printable(name)
    if not has_nan:
        return f"{shown}: {values}. Use --nonfinite saturate, which stores infinities as the largest value."
    return (
        f"{shown}: {values}. No code stands for NaN: correct it in the source, or use --no-verify with --nonfinite "
        f"saturate or nan-block, or with --exclude '{shown}', for an output that `mxcli verify` calls not sound."
    )


def plain_refusal(name: str, values: str, way_out: str = CORRECT) -> str:
    """Return the refusal of a plain tensor with such `values`, with the ways out."""
    return f"{printable(name)}: {values}, and `mxcli verify` would call the output not sound. {way_out}"


def nonfinite_refusals(planned: TensorPlan, counted: Counted) -> list[str]:
    """Return the refusal of a measured tensor, if its scheme refuses the non-finite values counted."""
    stats = counted if isinstance(counted, Stats) else counted.counted
    if planned.scheme is None or planned.scheme.nonfinite != "error" or not stats.nan + stats.infinite:
        return []
    part = "of its sample " if stats.first_nonfinite < 0 else ""
    if planned.scheme.hadamard:
        part += f"under the {planned.scheme.hadamard.name} transform "
    first = stats.first_nonfinite
    if first >= 0 and planned.axis == COLUMN:
        *outer, row, column = np.unravel_index(first, planned.shape)
        first = int(np.ravel_multi_index((*outer, column, row), planned.tensor.shape))
    shape, dtype = planned.tensor.shape, planned.tensor.dtype
    values = nonfinite_values(stats.nan + stats.infinite, stats.elements, shape, first, part, dtype=dtype)
    return [nonfinite_refusal(planned.tensor.name, values)]


def refuse_nonfinite(refusals: Sequence[str]) -> None:
    """Raise RefusedError with all refusals, if there are any."""
    if refusals:
        raise together(RefusedError, "Values that are not finite", refusals)
