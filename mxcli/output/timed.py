"""What tables and records of benchmarks have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from mxcli.flows.timing import Timing
from mxcli.output.numbers import ABSENT, significant

TIMING_NAMES = ("seconds_median", "seconds_p10", "seconds_p90", "rounds")


class TimedRow(Protocol):
    """A row of a benchmark, a frozen record."""

    @property
    def timing(self) -> Timing | None:
        """How long it took; None where it could not be timed."""

    @property
    def elements_per_second(self) -> float | None:
        """From the median."""

    @property
    def bytes_per_second(self) -> float | None:
        """From the median."""

    @property
    def bytes_equal(self) -> bool | None:
        """Whether another package's bytes are ours."""


def settings_record(report: Any, rows: list[dict[str, object]]) -> dict[str, object]:
    """A benchmark for JSON: its settings and checks as they are, and its rows as records."""
    return {**asdict(report), "rows": rows}


def flat_records(rows: Iterable[Any], names: Sequence[str]) -> list[dict[str, object]]:
    """One flat record per row, with `names` for keys; times under TIMING_NAMES."""
    return [_record(row, names) for row in rows]


def spread_percent(row: TimedRow) -> float:
    """From the 10th to the 90th percentile, against the median."""
    assert row.timing is not None
    return 100.0 * (row.timing.p90 - row.timing.p10) / row.timing.median


def rate_cells(row: TimedRow) -> list[str]:
    """Billions of elements and of bytes a second."""
    rates = (row.elements_per_second, row.bytes_per_second)
    return [significant(None if rate is None else rate / 1e9) for rate in rates]


def equal_cell(row: TimedRow) -> str:
    """Whether bytes are ours, where there was anything to compare."""
    return ABSENT if row.bytes_equal is None else "yes" if row.bytes_equal else "no"


def _record(row: Any, names: Sequence[str]) -> dict[str, object]:
    values = asdict(row)
    timing = values.pop("timing") or {}
    values |= {f"seconds_{name}": timing.get(name) for name in ("median", "p10", "p90")}
    values["rounds"] = timing.get("rounds")
    return {name: values[name] for name in names}
