"""Captures of several steps: each role at each step has the totals of a report on that step alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from captured_steps import ROLES, STEPS, write_steps
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.report import Report, make_report
from mxcli.flows.measure.totals import totals_over_steps
from mxcli.flows.plan.plan import Options, make_plans
from mxcli.numerics.blocks import BOTH
from mxcli.numerics.metrics import METRICS
from mxcli.numerics.scheme import Rules
from mxcli.numerics.streams import Sampling


def reported(source: Path, axis: str | None = None, sampling: Sampling | None = None) -> Report:
    checkpoint = open_checkpoint(source)
    asked = Options("nvfp4", Rules(nonfinite="saturate"), on_indivisible="pad", axis=axis, analysis=True)
    return make_report("x", checkpoint, *make_plans(checkpoint, asked), backend=Cpu(2), sampling=sampling)


def numbers(metrics: Any) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key == "tensors" or METRICS[key].number}


def test_a_step_has_the_totals_of_its_own_report(tmp_path: Path) -> None:
    report = reported(write_steps(tmp_path / "steps"))
    assert [(each.step, each.role, each.axis) for each in report.by_step] == [
        (step, role, None) for step in STEPS for role in ROLES
    ]
    for step in STEPS:
        alone = reported(tmp_path / "steps" / f"step-{step:06d}.safetensors")
        assert alone.by_step == ()
        for each in report.by_step:
            if each.step == step:
                assert dict(each.metrics) == numbers(alone.by_role[each.role])
                assert each.metrics["tensors"] == 2
    assert len(report.layers) == 12
    assert report.sum is not None
    assert report.sum["saturated"] == sum(int(str(each.metrics["saturated"])) for each in report.by_step)


def test_steps_are_reported_along_each_axis(tmp_path: Path) -> None:
    source = write_steps(tmp_path / "steps")
    both = reported(source, BOTH)
    assert list(totals_over_steps(both.by_step)) == [(role, axis) for role in ROLES for axis in ("row", "column")]
    for axis in ("row", "column"):
        alone = [dict(each.metrics) for each in reported(source, axis).by_step]
        assert [dict(each.metrics) for each in both.by_step if each.axis == axis] == alone


def test_samples_of_steps_are_estimates(tmp_path: Path) -> None:
    source = write_steps(tmp_path / "steps", layers=1, rows=512)
    report = reported(source, sampling=Sampling(0.25, 0, run_bytes=512, whole_bytes=4096))
    first = report.by_step[0].metrics
    assert first["elements"] == 512 * 48
    assert float(str(first["sqnr_db_uncertainty"])) > 0


def test_tensors_without_a_step_are_in_no_series(tmp_path: Path) -> None:
    x = np.ones((2, 32), np.float32)
    records = {"a.activation": {"role": "activation", "layer": "a", "step": 3}, "b.activation": {"role": "activation"}}
    save_file(
        {"a.activation": x, "b.activation": x},
        tmp_path / "x.safetensors",
        {"mxcli.capture": json.dumps({"version": 1, "tensors": records})},
    )
    assert reported(tmp_path / "x.safetensors").by_step == ()


@pytest.mark.parametrize("name", ["layer", "kind"])
@pytest.mark.parametrize("spelling", ["step-{}", "rank-0-iter-{}", "{}_of_run.5"])
def test_a_step_is_not_a_part_of_a_layer(tmp_path: Path, name: str, spelling: str) -> None:
    from mxcli.flows.measure.totals import labels

    for file in write_steps(tmp_path / "steps").iterdir():
        file.rename(file.with_stem(spelling.format(file.stem.removeprefix("step-"))))
    checkpoint = open_checkpoint(tmp_path / "steps")
    groups = set(labels(name, checkpoint.tensors.values()).values())
    wanted = {"layer": {f"model.layers.{at} {role}" for at in (0, 1) for role in ROLES},
              "kind": {f"mlp.down_proj {role}" for role in ROLES}}  # fmt: skip
    assert groups == wanted[name]
