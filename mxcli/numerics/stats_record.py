"""Statistics as plain values that JSON holds to the last bit, and back."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mxcli.numerics.stats import Histogram, Stats

_EMPTY = Stats()


def stats_record(stats: Stats) -> dict[str, object]:
    """The fields by name; of a histogram its first bin in use, and the counts from it on."""
    return {each.name: _plain(getattr(stats, each.name)) for each in fields(Stats)}


def stats_of(record: Mapping[str, Any]) -> Stats:
    """The statistics that a record is of."""
    return Stats(**{name: _restored(value, getattr(_EMPTY, name)) for name, value in record.items()})


def _plain(value: Any) -> object:
    if not isinstance(value, Histogram):
        return value
    used = [at for at, _ in value.counted] or [0]
    return [used[0], *value[used[0] : used[-1] + 1]]


def _restored(value: Any, empty: object) -> Any:
    if isinstance(empty, Histogram):
        first, *counts = value
        after = len(empty) - first - len(counts)
        return Histogram.of(array("q", [0] * first + counts + [0] * after).tobytes())
    return tuple(map(tuple, value)) if isinstance(empty, tuple) else value
