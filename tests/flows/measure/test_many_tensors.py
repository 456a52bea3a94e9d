"""What a further small tensor costs: counted in calls, which are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.compare import make_comparison, plan_comparison
from mxcli.flows.measure.report import make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.numerics.combinations import combine
from mxcli.numerics.scheme import Rules
from mxcli.output.comparison import comparison_json, comparison_text
from mxcli.output.report import report_json, report_text
from mxcli.output.screen import Screen

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj", "input_layernorm")
OPTIONS = Options("mxfp8", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True)


def reported(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    report = make_report("x", checkpoint, make_plan(checkpoint, OPTIONS), backend=Cpu(1))
    report_json(report)
    report_text(report, Screen(80), top=5)


def planned(source: Path) -> None:
    plan_comparison(open_checkpoint(source), combine(["mxfp8", "nvfp4"]), OPTIONS)


def compared(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    planned = plan_comparison(checkpoint, combine(["mxfp8", "nvfp4"]), OPTIONS)
    comparison = make_comparison("x", checkpoint, planned, backend=Cpu(1), by="layer")
    comparison_json(comparison)
    comparison_text(comparison, Screen(80), top=5)


def calls(done: Callable[[], None]) -> int:
    """Calls of functions, built-in ones included."""
    count = 0

    def counting(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        done()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("work", "most"), [(reported, 1000), (planned, 350), (compared, 2200)])
def test_it_does_not_grow_with_their_number(tmp_path: Path, work: Callable[[Path], None], most: int) -> None:
    """`most` is about a third more than it was when this was written."""
    noise = np.random.default_rng(0)
    counts = {}
    for layers in (1, 40, 80, 160):
        tensors = {
            f"model.layers.{layer}.{kind}.weight": noise.standard_normal((1, 32)).astype(np.float32)
            for layer in range(layers)
            for kind in KINDS
        }
        save_file(tensors, tmp_path / "x.safetensors")
        counts[layers] = calls(lambda: work(tmp_path / "x.safetensors"))
    first, second = (counts[80] - counts[40]) / 40, (counts[160] - counts[80]) / 80
    assert second < 1.1 * first
    assert second / len(KINDS) < most
