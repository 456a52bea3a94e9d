"""Estimates from a sample of one or several tensors: sums, the factors that extrapolate them, and their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from mxcli.numerics.stats import Stats

GROUPS = 16
"""Parts of a sample that are measured separately, so that their differences show the sampling error."""
CONFIDENCE_PERCENT = 95
_QUANTILE = 2.1314495455597742
"""Of Student's t with GROUPS - 1 degrees of freedom, at 97.5 %."""
_ALIKE = 1e-12
"""Relative differences this small are those of sums in binary64."""

ELEMENT_SUMS = (
    *("elements", "saturated", "underflowed", "nan", "infinite", "measured"),
    *("signal", "noise", "cross", "error", "code_bins"),
)
BLOCK_SUMS = ("blocks", "zero_blocks", "nan_blocks", "saturated_blocks", "scale_underflowed_blocks", "block_code_bins")
"""The sums over elements and over blocks that means and ratios are made of."""

Term = tuple[Stats, float, float]
"""Sums, with what those over elements and those over blocks are multiplied by."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A tensor with `elements` and `blocks` of which only a part was `counted`; samples add up with `+`.

    `estimate` holds the sums that the counted ones stand for in the whole. `deviations` holds by how much that of each
    group differs from an equal share, made smaller by as much as the sample is surer for being a good part of the
    whole; what was read whole has none.
    """

    elements: int
    blocks: int
    counted: Stats
    estimate: Stats
    deviations: tuple[Stats, ...] = ()

    def __add__(self, other: Sample) -> Sample:
        counted = self.counted + other.counted
        both = zip(self.deviations, other.deviations, strict=False)
        return Sample(
            self.elements + other.elements,
            self.blocks + other.blocks,
            counted,
            _sum(self.estimate, other.estimate) if self.deviations or other.deviations else counted,
            tuple(_sum(a, b) for a, b in both) or self.deviations or other.deviations,
        )

    @property
    def without_each(self) -> Iterator[Stats]:
        """The estimates without each of the groups in turn, extrapolated from the others."""
        share = GROUPS / (GROUPS - 1)
        return (combined([(self.estimate, 1, 1), (part, -share, -share)]) for part in self.deviations)


def read_whole(stats: Stats) -> Sample:
    """Return a tensor of which nothing was left out."""
    return Sample(stats.elements, stats.blocks, stats, stats)


def sample_of(counted: Stats, groups: Sequence[Stats], elements: int, blocks: int) -> Sample:
    """Return the sample of a tensor with `elements` and `blocks`, from what was `counted` in all of it and in its
    GROUPS.

    Of a tensor that is a single block, groups have no say in what is counted by block.
    """
    by_element, by_block = elements / counted.elements, blocks / counted.blocks
    surer = math.sqrt(1 - counted.elements / elements)
    a, b = surer * by_element, surer * by_block if blocks > 1 else 0.0
    mean = combined([(group, 1 / GROUPS, 1 / GROUPS) for group in groups])
    return Sample(
        elements,
        blocks,
        counted,
        combined([(counted, by_element, by_block)]),
        tuple(combined([(group, a, b), (mean, -a, -b)]) for group in groups),
    )


def combined(terms: Sequence[Term]) -> Stats:
    """Return a linear combination of sums, without the fields that do not add up."""
    result = Stats()
    for at, names in ((1, ELEMENT_SUMS), (2, BLOCK_SUMS)):
        for name in names:
            parts = (getattr(term[0], name) if term[at] == 1 else getattr(term[0], name) * term[at] for term in terms)
            setattr(result, name, reduce(add, parts))
    return result


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the CONFIDENCE_PERCENT interval, from the values `without_each` group in turn (a jackknife); None
    if the groups do not differ, so that nothing is known of the rest."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    half = _QUANTILE * math.sqrt((len(values) - 1) / len(values) * squares)
    return half if half > _ALIKE * abs(mean) else None


def _sum(a: Stats, b: Stats) -> Stats:
    return combined([(a, 1, 1), (b, 1, 1)])
