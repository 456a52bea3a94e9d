"""Charts of tensors over the training steps of their captures: a line for each role."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mxcli.flows.measure.totals import Metrics, TrainingStepTotal
from mxcli.numerics.metrics import number_of
from mxcli.output.charts import COLOURS, COLUMNS, GREY, Line, LineChart

POINTS = COLUMNS


@dataclass(frozen=True, slots=True)
class _Measure:
    """A metric over the steps. Of steps that share a point, the one with the largest `worst` is drawn."""

    key: str
    title: str
    caption: str
    y: str
    of: Callable[[Metrics], float | None]
    worst: Callable[[float], float]


def _binades(metrics: Metrics) -> float | None:
    """Return the base 2 logarithm of amax, so that activations and gradients fit one chart."""
    amax = number_of(metrics, "amax")
    return math.log2(amax) if amax else None


def _relative_bias(metrics: Metrics) -> float | None:
    """Return the mean error in percent of the RMS error: the part of rounding errors that does not cancel."""
    bias, rmse = number_of(metrics, "bias"), number_of(metrics, "rmse")
    return None if bias is None or not rmse else 100.0 * bias / rmse


_MEASURES = (
    _Measure(
        "sqnr_by_step",
        "Error over the steps, by role",
        "The SQNR of all tensors of a role that were captured at a step: the lower, the more is lost.",
        "SQNR [dB]",
        lambda metrics: number_of(metrics, "sqnr_db"),
        lambda value: -value,
    ),
    _Measure(
        "saturated_by_step",
        "Saturation over the steps, by role",
        "Elements clamped at the largest value that their scale lets a code reach.",
        "saturated [% of elements]",
        lambda metrics: number_of(metrics, "saturated_percent"),
        abs,
    ),
    _Measure(
        "underflowed_by_step",
        "Underflow over the steps, by role",
        "Elements that are not zero, but became zero.",
        "underflowed [% of elements]",
        lambda metrics: number_of(metrics, "underflowed_percent"),
        abs,
    ),
    _Measure(
        "amax_by_step",
        "Largest magnitude over the steps, by role",
        "Its base 2 logarithm: a scale that was made at an earlier step is too small where this rises.",
        "amax [binades above 1]",
        _binades,
        lambda value: value,
    ),
    _Measure(
        "bias_by_step",
        "Bias over the steps, by role",
        "The mean error as a share of its root mean square: errors with a bias add up over steps, others cancel.",
        "bias [% of RMS error]",
        _relative_bias,
        abs,
    ),
)


def step_charts(series: Mapping[str, Sequence[TrainingStepTotal]]) -> list[LineChart]:
    """Return the charts of series, given by role (and axis or scheme), in a fixed order, without empty ones."""
    charts = (_chart(measure, series) for measure in _MEASURES)
    return [chart for chart in charts if any(y for line in chart.lines for _, y in line.points)]


def _chart(measure: _Measure, series: Mapping[str, Sequence[TrainingStepTotal]]) -> LineChart:
    lines, joined = [], 1
    for name, found in series.items():
        joined = max(joined, -(-len(found) // POINTS))
        points = [(each.step, measure.of(each.metrics)) for each in found]
        spans = [points[at : at + joined] for at in range(0, len(points), joined)]
        lines.append(Line(name, tuple(_worst(measure, span) for span in spans)))
    more = f" Of every {joined} steps the worst is drawn." if joined > 1 else ""
    more += f" The first {COLOURS} have colours." if len(lines) > COLOURS else ""
    coloured, others = tuple(lines[:COLOURS]), tuple(lines[COLOURS : COLOURS + GREY])
    return LineChart(measure.key, measure.title, measure.caption + more, "step", measure.y, coloured, others)


def _worst(measure: _Measure, span: Sequence[tuple[int, float | None]]) -> tuple[int, float | None]:
    known = [(measure.worst(y), step, y) for step, y in span if y is not None]
    return max(known)[1:] if known else span[0]
