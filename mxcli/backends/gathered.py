"""What GPU kernels counted, as the record every device gives (`kernels/measure.h` has the order of the numbers)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mxcli.numerics import stats
from mxcli.numerics.stats import Histogram, Stats

Array = np.ndarray
_COUNTED = (
    *("zero_blocks", "nan_blocks", "saturated", "saturated_blocks", "underflowed"),
    *("scale_underflowed_blocks", "nan", "infinite", "excluded"),
)
_LEAST = ("first_nonfinite", "min_block_sqnr", "min_block_range")
_LARGEST = ("amax", "max_abs_error", "max_rel_error")
_BINS = {
    "scale_bins": stats.SCALE_BINS,
    "code_bins": stats.CODE_BINS,
    "block_code_bins": stats.CODE_BINS,
    "sqnr_bins": stats.SQNR_BINS,
    "range_bins": stats.RANGE_BINS,
}
_NUMBERS = (*_COUNTED, *_LEAST, *_LARGEST)
TOTALS = len(_NUMBERS) + sum(_BINS.values())
"""64-bit numbers of a tensor's totals."""
LEAST = (len(_COUNTED), len(_COUNTED) + len(_LEAST))
"""Those of them that begin with all bits set."""


def merged(totals: Iterable[Array]) -> Array:
    """Totals of parts of a tensor as those of all of it."""
    each = np.stack(list(totals))
    all_of_it: Array = each.sum(0, dtype=np.uint64)
    all_of_it[slice(*LEAST)] = each[:, slice(*LEAST)].min(0)
    largest = slice(LEAST[1], len(_NUMBERS))
    all_of_it[largest] = each[:, largest].max(0)
    return all_of_it


def stats_of(totals: Array, sums: Array, *, elements: int, blocks: int, worst: tuple[tuple[float, int], ...]) -> Stats:
    """Statistics from a tensor's totals and its chunks' sums, [chunks, 4], which are added in their order."""
    numbers = dict(zip(_NUMBERS, totals.tolist(), strict=False))
    values: dict[str, object] = {name: numbers[name] for name in _COUNTED if name != "excluded"}
    least = totals[slice(*LEAST)]
    values["first_nonfinite"] = int(least[:1].view(np.int64)[0])  # all bits set: -1
    for name, value in zip(_LEAST[1:], least[1:], strict=True):
        # A negative double marks one that nothing set, as all bits set do: neither is the least of anything.
        values[name] = -1.0 if int(value) >> 63 else float(np.array(value).view(np.float64))
    for name in _LARGEST:
        values[name] = float(np.array(numbers[name], np.uint32).view(np.float32))
    at = len(_NUMBERS)
    for name, count in _BINS.items():
        values[name] = Histogram.of(totals[at : at + count].tobytes())
        at += count
    in_order = np.add.accumulate(sums, axis=0)[-1].tolist() if len(sums) else [0.0] * 4
    signal, noise, cross, error = in_order
    return Stats(
        elements=elements,
        blocks=blocks,
        measured=elements - numbers["excluded"],
        signal=signal,
        noise=noise,
        cross=cross,
        error=error,
        worst=worst,
        **values,  # type: ignore[arg-type]
    )


def noisiest(found: Iterable[tuple[Array, Array]]) -> tuple[tuple[float, int], ...]:
    """The blocks with the most noise, of candidates: (noise, block), of equals the one that stands first."""
    both = list(found)
    noise = np.concatenate([each for each, _ in both]) if both else np.empty(0)
    place = np.concatenate([each for _, each in both]) if both else np.empty(0, np.int64)
    order = np.lexsort((place, -noise))[: stats.WORST_BLOCKS]
    return tuple((float(noise[at]), int(place[at])) for at in order if noise[at] > 0)
