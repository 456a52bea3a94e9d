"""Series over steps: a short table and sentences, however many steps there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mxcli.flows.measure.findings import step_series, step_trends
from mxcli.flows.measure.totals import TrainingStepTotal, totals_over_steps
from mxcli.numerics.metrics import NUMBERS
from mxcli.output.charts import LineChart
from mxcli.output.conclusion import sentences
from mxcli.output.plots import write_plots
from mxcli.output.screen import Screen
from mxcli.output.series import STEP_TOTAL, series_name
from mxcli.output.series import series_lines as table
from mxcli.output.step_charts import POINTS, step_charts
from mxcli.output.svg import draw


def total(
    step: int, sqnr: float | None, role: str = "gradient", axis: str | None = None, **more: Any
) -> TrainingStepTotal:
    metrics = {
        "tensors": 2, "mse": 1.0, "rmse": 1.0, "sqnr_db": sqnr, "saturated_percent": 0.5, "underflowed_percent": 2.0,
        "amax": 8.0, "bias": 0.001, **more,
    }  # fmt: skip
    return TrainingStepTotal(step, role, axis, metrics)


def charted(totals: list[TrainingStepTotal]) -> list[LineChart]:
    return step_charts({series_name(*key): found for key, found in totals_over_steps(totals).items()})


def series_lines(totals: list[TrainingStepTotal], screen: Screen) -> list[str]:
    return table(step_series(totals), screen)


def series_sentences(totals: list[TrainingStepTotal]) -> list[str]:
    return sentences(step_trends(step_series(totals)))


THREE = [total(100, 20.5), total(200, 18.25), total(300, 19.0)]


def test_first_worst_and_last() -> None:
    lines = series_lines(THREE, Screen())
    assert [line.split() for line in lines[1:]] == [
        ["over", "3", "steps", "step", "dB", "%", "of", "elements", "%", "of", "elements", "amax", "bias"],
        ["gradient,", "first", "100", "20.5", "0.500", "2.00", "8.00", "0.00100"],
        ["gradient,", "worst", "200", "18.2", "0.500", "2.00", "8.00", "0.00100"],
        ["gradient,", "last", "300", "19.0", "0.500", "2.00", "8.00", "0.00100"],
    ]
    assert series_sentences(THREE) == [
        "gradient: SQNR goes from 20.5 dB at step 100 to 19.0 dB at step 300; the lowest of 3 steps is 18.2 dB at step "
        "200."
    ]
    assert series_lines([], Screen()) == []
    assert series_sentences([]) == []


def test_a_step_is_shown_once() -> None:
    two = [total(1, 20.0, axis="column"), total(2, 19.0, axis="column")]
    shown = [line.partition("  ")[0] for line in series_lines(two, Screen())[2:]]
    assert shown == ["gradient column, first", "gradient column, last and worst"]
    absent = [total(1, None), total(2, None)]
    assert [line.split()[1] for line in series_lines(absent, Screen())[2:]] == ["first", "last"]
    assert series_sentences(absent) == []


def test_thousands_of_steps_stay_short() -> None:
    many = [total(step, 20.0 + step % 7, role) for step in range(5000) for role in ("activation", "gradient")]
    lines = series_lines(many, Screen())
    assert lines[1].startswith("over 5,000 steps")
    assert len(lines) == 2 + 2 * 2
    for chart in charted(many):
        assert all(len(line.points) <= POINTS for line in chart.lines)
    sqnr = charted(many)[0]
    assert {y for line in sqnr.lines for _, y in line.points} == {20.0}
    assert sqnr.caption.endswith("Of every 13 steps the worst is drawn.")


def test_records() -> None:
    numbers = dict.fromkeys(NUMBERS) | total(7, 20.0).metrics
    assert STEP_TOTAL.record(total(7, 20.0, axis="row", **numbers)) == {
        "step": 7, "role": "gradient", "axis": "row", **numbers
    }  # fmt: skip
    assert "axis" not in STEP_TOTAL.record(total(7, 20.0))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plots(charted(THREE)[:1], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sqnr_by_step.png", "sqnr_by_step.svg"}


def test_charts_have_a_line_for_each_role_and_axis() -> None:
    totals = [
        total(step, 20.0 - step / 100, role, axis, underflowed_percent=0.0)
        for step in (0, 50)
        for role in ("activation", "gradient")
        for axis in ("row", "column")
    ]
    charts = {chart.key: chart for chart in charted(totals)}
    assert list(charts) == ["sqnr_by_step", "saturated_by_step", "amax_by_step", "bias_by_step"]
    lines = charts["sqnr_by_step"].lines
    assert [line.name for line in lines] == ["activation row", "activation column", "gradient row", "gradient column"]
    assert lines[0].points == ((0, 20.0), (50, 19.5))
    assert charts["amax_by_step"].lines[0].points == ((0, 3.0), (50, 3.0))
    assert charts["bias_by_step"].lines[0].points == ((0, 0.1), (50, 0.1))
    assert "gradient row, step 50: 0.500 % of elements" in draw(charts["saturated_by_step"])
    assert charted([]) == []
    many = step_charts({str(number): [total(0, 20.0), total(1, 19.0)] for number in range(20)})[0]
    assert (len(many.lines), len(many.others)) == (8, 12)
    assert draw(many)
