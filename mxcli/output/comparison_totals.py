"""The totals of a comparison: a row for each combination, and what is worth a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.flows.measure.compare import Comparison, best_of
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import number_of
from mxcli.output.numbers import ABSENT, noise_cell, number_cell, significant
from mxcli.output.screen import Screen
from mxcli.output.table import Column, Row, aligned

Metrics = Mapping[str, Value]

BEST, TINY = "*", "~0"


@dataclass(frozen=True, slots=True)
class _Measure:
    """A column, and what stands in it of the metrics of a combination beside those of the first. `special`: only where
    roundings, transforms or axes are compared, which change what it tells."""

    column: Column
    cell: Callable[[Metrics, Metrics], str]
    special: bool = False


def _number(name: str) -> Callable[[Metrics, Metrics], str]:
    return lambda metrics, first: number_cell(metrics, name)


def _range(metrics: Metrics) -> str:
    """The range of the median block, and of one in a hundred."""
    quantiles = metrics["block_dynamic_range"]
    found = quantiles if isinstance(quantiles, dict) else {}
    known = [found.get("p50"), found.get("p99")]
    return "/".join(ABSENT if value is None else f"{value:.1f}" for value in known)


_BITS = _Measure(Column("bits per\nelement", drop=4), _number("bits_per_element"))
_MEASURES = (
    _Measure(Column("+/-\ndB", drop=1), lambda metrics, first: "" if metrics is first else delta_cell(metrics, first)),
    _Measure(Column("relative\nerror", drop=6), lambda metrics, first: noise_cell(metrics, "relative_error")),
    _Measure(Column("bias", drop=2), _number("bias"), special=True),
    _Measure(Column("shrunk\n%", drop=2), _number("shrunk_percent"), special=True),
    _Measure(Column("saturated\n% of elements", drop=3), _number("saturated_percent")),
    _Measure(Column("saturated\n% of blocks", drop=5), _number("saturated_blocks_percent")),
    _Measure(Column("underflowed\n% of elements", drop=3), _number("underflowed_percent")),
    _Measure(Column("binades\nused", drop=4), _number("binades_used"), special=True),
    _Measure(Column("block range\np50/p99", drop=4), lambda metrics, first: _range(metrics), special=True),
)
_SQNR, _WON = Column("SQNR \ndB "), Column("best on\ntensors", drop=2)


def total_lines(comparison: Comparison, screen: Screen) -> list[str]:
    """The table of totals; where more is compared than formats and scale rules, of each role too, since what rounding,
    transforms and axes do is not the same to weights, activations and gradients."""
    special = comparison.combinations.varies
    measures = [each for each in _MEASURES if special or not each.special]
    columns = [Column("", right=False), _BITS.column, _SQNR, *(each.column for each in measures), _WON]
    rows = list[Row](_rows(comparison, measures, comparison.sums, [f"{won:,}" for won in wins(comparison)]))
    if special and comparison.by == "role" and len(comparison.groups) > 1:
        nothing = [""] * len(comparison.sums)
        for label, group in comparison.groups.items():
            rows += [None, *_rows(comparison, measures, group, nothing, f"{printable(label)}: ")]
    return aligned(columns, rows, screen)


def wins(comparison: Comparison) -> list[int]:
    """On how many tensors each combination is best."""
    best = Counter(layer.best for layer in comparison.layers)
    return [best[at] for at in range(len(comparison.combinations.names))]


def delta(name: str, metrics: Metrics, first: Metrics) -> float | None:
    """By how much a metric is more than under the first combination; None where either is absent."""
    value, start = number_of(metrics, name), number_of(first, name)
    return None if value is None or start is None else value - start


def delta_cell(metrics: Metrics, first: Metrics) -> str:
    """By how many dB the SQNR is above that under the first combination."""
    more = delta("sqnr_db", metrics, first)
    if more is None:
        return ABSENT
    return TINY if 0 < abs(more) < 0.001 else f"{'+' if more > 0 else ''}{significant(more)}"


def _rows(
    comparison: Comparison, measures: Sequence[_Measure], sums: Sequence[Metrics], won: Sequence[str], label: str = ""
) -> Iterator[list[str]]:
    """A row per combination, the best one marked."""
    best = best_of(sums)
    for at, (name, total) in enumerate(zip(comparison.combinations.names, sums, strict=True)):
        yield [
            label + name,
            _BITS.cell(total, sums[0]),
            noise_cell(total, "sqnr_db") + (BEST if at == best else " "),
            *(each.cell(total, sums[0]) for each in measures),
            won[at],
        ]
