"""The benchmark: what is timed was checked, and every number is one of this run."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mxcli.backends import cpu
from mxcli.errors import LimitError, UsageError
from mxcli.flows.bench.quantize import run_quantize_bench, time_together
from mxcli.numerics.blocks import Quantized


def test_a_row_for_everything_that_was_timed() -> None:
    report = run_quantize_bench(["mxfp8", "nvfp4"], size=256, threads=[1, 2], rounds=3)
    assert [(row.name, row.format, row.threads, row.statistics) for row in report.rows] == [
        (name, format, threads, statistics)
        for threads in (1, 2)
        for name, format, statistics in [
            ("copy", None, False),
            ("mxcli", "mxfp8_e4m3", False),
            ("mxcli", "mxfp8_e4m3", True),
            ("mxcli", "nvfp4", False),
            ("mxcli", "nvfp4", True),
        ]
    ]
    assert report.shape == (256, 256)
    assert report.instruction_set == cpu.instruction_set()
    assert len(report.checks) == 2


def test_rates_follow_from_the_median() -> None:
    report = run_quantize_bench(["mxfp4"], size=256, rounds=3)
    copy, ours, _ = report.rows
    for row in (copy, ours):
        assert row.timing is not None
        assert row.timing.rounds == 3
        assert row.timing.p10 <= row.timing.median <= row.timing.p90
    assert ours.timing is not None
    assert ours.elements_per_second == 65536 / ours.timing.median
    # 2 bytes read and half a byte written per element, and a scale byte per 32
    assert ours.bytes_per_second == pytest.approx((65536 * 2.5 + 65536 / 32) / ours.timing.median)
    assert copy.copy_percent == pytest.approx(100, rel=1e-12)
    assert ours.copy_percent == pytest.approx(100 * (ours.bytes_per_second or 0) / (copy.bytes_per_second or 1))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed: it is timed")
def test_a_peer_that_is_missing_stays_in_the_report_with_the_reason() -> None:
    report = run_quantize_bench(["mxfp8"], size=256, rounds=1, peers=["torchao"])
    missing = report.rows[-1]
    assert (missing.name, missing.timing, missing.elements_per_second) == ("torchao", None, None)
    assert missing.problem == "No module named 'torchao'"


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_a_peer_has_our_bytes() -> None:
    rows = run_quantize_bench(["mxfp8", "mxfp4", "nvfp4"], size=256, rounds=1, peers=["torchao"]).rows
    assert [(row.format, row.bytes_equal) for row in rows if row.name == "torchao"] == [
        ("mxfp8_e4m3", True),
        ("mxfp4_e2m1", True),
        ("nvfp4", True),
    ]


def test_nothing_is_timed_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Any, dtype: str, recipe: Any, **options: Any) -> Quantized:
        q = right(x, dtype, recipe, **options)
        return replace(q, packed=np.zeros_like(q.packed)) if options.get("threads") == 2 else q

    right = cpu.quantize
    monkeypatch.setattr(cpu, "quantize", wrong)
    with pytest.raises(LimitError, match="mxfp8_e4m3 rceil: one thread and two threads gave different results"):
        run_quantize_bench(["mxfp8"], size=256, rounds=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": 100}, "--size 100 is not a multiple of 128"),
        ({"rounds": 0}, "--rounds 0 is not a positive number"),
        ({"peers": ["torcha"]}, "unknown peer 'torcha': known are torchao, torchao-compiled. Did you mean torchao"),
    ],
)
def test_refusals(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        run_quantize_bench(["mxfp8"], **options)
    assert sentence in str(refused.value)


def test_every_call_runs_once_more_than_it_is_counted() -> None:
    ran: list[str] = []
    timings = time_together({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=4)
    assert (ran.count("a"), ran.count("b")) == (5, 5)
    assert {name: timing.rounds for name, timing in timings.items()} == {"a": 4, "b": 4}
    assert {tuple(sorted(ran[at : at + 2])) for at in range(0, 10, 2)} == {("a", "b")}
