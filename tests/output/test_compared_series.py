"""Comparisons over the steps of a capture: each combination at each step has the numbers of its own report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from captured_steps import ROLES, STEPS, write_steps

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.compare import Comparison, make_comparison, plan_comparison
from mxcli.flows.measure.findings import StepWins
from mxcli.flows.measure.report import make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.numerics.combinations import combine
from mxcli.numerics.scheme import Rules
from mxcli.output.comparison import comparison_json, comparison_text
from mxcli.output.conclusion import sentences
from mxcli.output.screen import Screen
from mxcli.output.series import compared_series_lines
from mxcli.output.study import study_of_comparison
from mxcli.output.study_charts import study_charts


def asked(format: str = "nvfp4") -> Options:
    return Options(format, Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True)


def compared(source: Path) -> Comparison:
    checkpoint = open_checkpoint(source)
    planned = plan_comparison(checkpoint, combine(["nvfp4", "mxfp4"]), asked())
    return make_comparison("x", checkpoint, planned, backend=Cpu(2))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_steps(tmp_path_factory.mktemp("captured") / "steps")


def test_the_numbers_are_those_of_reports(source: Path) -> None:
    comparison, checkpoint = compared(source), open_checkpoint(source)
    for at, format in enumerate(("nvfp4", "mxfp4")):
        report = make_report("x", checkpoint, make_plan(checkpoint, asked(format)), backend=Cpu())
        assert comparison.by_step[at] == report.by_step
    records: Any = json.loads(comparison_json(comparison))["by_step"]
    assert [(each["step"], each["role"]) for each in records] == [(step, role) for step in STEPS for role in ROLES]
    last = comparison.by_step[1][-1].metrics
    assert records[-1]["metrics"]["mxfp4_e2m1 rceil"]["sqnr_db"] == last["sqnr_db"]


def test_the_table_has_a_row_for_each_role_and_combination(source: Path) -> None:
    comparison = compared(source)
    lines = [line for line in compared_series_lines(comparison, Screen()) if not line.startswith("-")]
    assert lines[1].startswith("over 3 steps")
    assert [line.partition("  ")[0] for line in lines[2:]] == [
        f"{role}: {name}" for role in ROLES for name in ("nvfp4 te", "mxfp4_e2m1 rceil")
    ]
    assert all(int(line.split()[-2].replace(",", "")) in STEPS for line in lines[2:])
    assert [line.split()[-1] for line in lines[2:]] == ["3", "0", "3", "0"]
    last = sentences(comparison.findings)[-len(ROLES) :]
    assert last == [f"{role}: of 3 steps best is nvfp4 te at 3." for role in ROLES]
    assert comparison.findings[-1] == StepWins("gradient", 3, (("nvfp4 te", 3),))
    assert "over 3 steps" in comparison_text(comparison, Screen())


def test_the_page_has_a_line_for_each_role_and_combination(source: Path) -> None:
    (chart, *_) = (
        chart for chart in study_charts(study_of_comparison(compared(source))) if chart.key == "sqnr_by_step"
    )
    _, rows = chart.table
    assert {row[0] for row in rows} == {
        f"{role} {title}" for role in ROLES for title in ("nvfp4 te", "mxfp4_e2m1 rceil")
    }
    assert len(rows) == 2 * 2 * 3


def test_of_one_step_nothing_is_added(source: Path) -> None:
    comparison = compared(source / "step-000100.safetensors")
    assert comparison.by_step == ()
    assert compared_series_lines(comparison, Screen()) == []
    assert comparison.findings == comparison.conclusion
    assert "by_step" not in json.loads(comparison_json(comparison))
