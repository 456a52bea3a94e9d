"""Totals over the training steps of captures: short tables and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mxcli.numerics.metrics import NUMBERS
from mxcli.output.fields import (
    AXIS,
    COUNT,
    METRIC,
    NOTHING,
    TENSORS,
    TEXT,
    Field,
    Fields,
    mapping,
    metric_fields,
)
from mxcli.output.numbers import ABSENT, noise_cell
from mxcli.output.screen import Screen
from mxcli.output.table import Column, Row, aligned

if TYPE_CHECKING:
    from mxcli.flows.measure.compare import Comparison
    from mxcli.flows.measure.findings import StepSeries
    from mxcli.flows.measure.totals import TrainingStepTotal

FIRST, LAST, WORST = "first", "last", "worst"
BY_STEP = "of captures of several steps: the tensors of each role at each step taken together"
_METRICS = Fields(TENSORS, metric_fields(NUMBERS))
STEP_TOTAL: Fields[TrainingStepTotal] = Fields(
    Field("step", lambda total: total.step, COUNT, "step"),
    Field("role", lambda total: total.role, TEXT),
    Field("axis", lambda total: NOTHING if total.axis is None else total.axis, AXIS, optional=True),
    _METRICS.through(lambda total: total.metrics),
)
"""A role at a step of a report."""
COMPARED_STEP: Fields[tuple[Sequence[str], Sequence[TrainingStepTotal]]] = Fields(
    Field("step", lambda pair: pair[1][0].step, COUNT),
    Field("role", lambda pair: pair[1][0].role, TEXT),
    Field(
        "metrics",
        lambda pair: {name: _METRICS.record(total.metrics) for name, total in zip(*pair, strict=True)},
        mapping(_METRICS.object_schema()),
    ),
)
"""A role at a step of a comparison: the names of combinations, and the totals under each."""
_TABLE: Fields[TrainingStepTotal] = Fields(
    STEP_TOTAL["step"],
    Fields(
        METRIC["sqnr_db"],
        METRIC["saturated_percent"].at(drop=2),
        METRIC["underflowed_percent"].at(drop=2),
        METRIC["amax"].at(drop=3),
        METRIC["bias"].at(drop=1),
    ).through(lambda total: total.metrics),
)
_COMPARED_COLUMNS = (
    Column("first\nSQNR dB", drop=2),
    Column("last\nSQNR dB", drop=2),
    Column("worst\nSQNR dB"),
    Column("at step", drop=1),
    Column("best at\nsteps"),
)


def series_lines(series: Sequence[StepSeries], screen: Screen) -> list[str]:
    """Return a table with the first, the last and the worst step of each role, however many there are; nothing of a
    single step."""
    if not series:
        return []
    rows = list[Row]()
    for each in series:
        called = series_name(each.role, each.axis)
        rows += [[f"{called}, {' and '.join(words)}", *_TABLE.cells(each.totals[at])] for at, words in _shown(each)]
    steps = len({total.step for each in series for total in each.totals})
    return aligned((Column(f"over {steps:,} steps", right=False), *_TABLE.columns()), rows, screen)


def compared_series_lines(comparison: Comparison, screen: Screen) -> list[str]:
    """Return a table with the first, the last and the worst step of each role under each combination; nothing of a
    single step."""
    if not comparison.series:
        return []
    rows = list[Row]()
    for found in comparison.series:
        rows += [] if not rows else [None]
        for name, each, won in zip(comparison.combinations.names, found.under, found.wins, strict=True):
            worst = None if each.worst is None else each.totals[each.worst]
            lowest = [ABSENT, ABSENT] if worst is None else [_sqnr(worst), f"{worst.step:,}"]
            rows.append([f"{found.role}: {name}", _sqnr(each.totals[0]), _sqnr(each.totals[-1]), *lowest, f"{won:,}"])
    steps = len({total.step for total in comparison.by_step[0]})
    return aligned((Column(f"over {steps:,} steps", right=False), *_COMPARED_COLUMNS), rows, screen)


def series_name(role: str, other: str | None) -> str:
    """Return the name of a series: its role, and the axis or combination where there are several."""
    return role if other is None else f"{role} {other}"


def _shown(series: StepSeries) -> list[tuple[int, list[str]]]:
    """Return the places of the steps that are shown, in order, with what they are."""
    places: dict[int, list[str]] = {}
    for at, word in ((0, FIRST), (len(series.totals) - 1, LAST), (series.worst, WORST)):
        if at is not None:
            places.setdefault(at, []).append(word)
    return sorted(places.items())


def _sqnr(total: TrainingStepTotal) -> str:
    return noise_cell(total.metrics, "sqnr_db")
