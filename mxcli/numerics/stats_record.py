"""Statistics as plain values that JSON holds to the last bit, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mxcli.numerics.stats import Histogram, Stats

_EMPTY = Stats()


def stats_record(stats: Stats) -> dict[str, object]:
    """The fields that are not those of no tensor at all; of a histogram its first bin in use, and counts from it on."""
    found = {each.name: (getattr(stats, each.name), getattr(_EMPTY, each.name)) for each in fields(Stats)}
    return {name: _plain(value) for name, (value, empty) in found.items() if value != empty}


def stats_of(record: Mapping[str, Any]) -> Stats:
    """The statistics that a record is of."""
    return Stats(**{name: _restored(value, getattr(_EMPTY, name)) for name, value in record.items()})


def _plain(value: Any) -> object:
    if not isinstance(value, Histogram):
        return value
    used = [at for at, _ in value.counted]
    return [used[0], *value[used[0] : used[-1] + 1]]


def _restored(value: Any, empty: object) -> Any:
    if isinstance(empty, Histogram):
        first, *counts = value
        return Histogram(len(empty), [0] * first + counts)
    return tuple(map(tuple, value)) if isinstance(empty, tuple) else value
