"""Statistics that outlive the run that counted them, by tensor and piece: they add up in order, so to the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from mxcli.numerics.stats import Stats
from mxcli.numerics.stats_record import stats_of, stats_record

Counted = dict[str, object]


def counted_record(tensor: str, first: int, stats: Sequence[Stats]) -> Counted:
    """What is remembered of pieces of a tensor, from the `first` on."""
    return {"tensor": tensor, "first_piece": first, "stats": [stats_record(each) for each in stats]}


def counted_of(memo: Mapping[str, Any]) -> list[Stats]:
    """The statistics that were remembered."""
    return [stats_of(record) for record in memo["stats"]]


def add_counted(total: dict[str, Stats], tensor: str, stats: Iterable[Stats]) -> None:
    """Counts the next pieces of a tensor in."""
    for each in stats:
        total[tensor] = total[tensor] + each if tensor in total else each


def gathered(memos: Iterable[Any]) -> dict[str, Stats]:
    """The statistics of all tensors from what several runs remembered, in any order; what is no record is left out."""
    parts = [(memo["first_piece"], memo["tensor"], counted_of(memo)) for memo in memos if memo is not None]
    total: dict[str, Stats] = {}
    for _, tensor, stats in sorted(parts, key=itemgetter(0)):
        add_counted(total, tensor, stats)
    return total
