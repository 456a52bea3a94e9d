"""Recommendations in words, as tables, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options
from mxcli.flows.recommend.candidates import BITS, KEEP_PERCENT, MIN_SQNR, Target
from mxcli.flows.recommend.recommend import Recommendation, plan_candidates, recommend
from mxcli.output.recommendation import (
    RECORD_KEYS,
    conclusion,
    recommendation_csv,
    recommendation_json,
    recommendation_text,
)
from mxcli.output.screen import Screen

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"


def recommended(formats: list[str], target: Target) -> Recommendation:
    checkpoint = open_checkpoint(SAMPLE)
    candidates = plan_candidates(checkpoint, formats, Options(formats[0], on_indivisible="keep"), target)
    return recommend("tiny", checkpoint, candidates, backend=Cpu())


@pytest.fixture(scope="module")
def result() -> Recommendation:
    return recommended(["mxfp4", "nvfp4"], Target(BITS, 5.5))


def test_groups_come_with_most_harm_per_tensor_first_and_totals_last(result: Recommendation) -> None:
    lines = recommendation_text(result, Screen()).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("model."))
    names = [line.split()[0] for line in lines[start : start + 16]]
    harms = {choice.group.name: choice.options[0].harm / len(choice.group.tensors) for choice in result.choices}
    assert names == sorted(harms, key=lambda name: -harms[name])
    assert lines[start + 17].startswith("all 16 groups")
    assert recommendation_text(result, Screen(), top=3).count("\nmodel.") == 3


def test_an_early_end_is_reported_with_its_bound(result: Recommendation) -> None:
    assert conclusion(result)[-1] == "No other choice within the target does less harm."
    early = replace(result, exact=False, bound=result.harm / 1.02)
    assert conclusion(early)[-1] == ("The search was ended early: this is within 2.00 % of the least harm possible.")


def test_conclusions_of_the_other_targets() -> None:
    worst = recommended(["mxfp8"], Target(MIN_SQNR, 30.0))
    assert conclusion(worst)[0].startswith("Recommended: 8.25 bits per element on average, mxfp8_e4m3 for 16; 0 of 16")
    assert conclusion(worst)[-1].startswith("No choice is smaller; the lowest SQNR of weights is 31.")
    nothing = recommended(["mxfp4"], Target(MIN_SQNR, 90.0))
    assert conclusion(nothing)[-1] == "None of the formats is good enough for any group; nothing is quantized."
    assert "all 16 groups" in recommendation_text(nothing, Screen())
    some = recommended(["mxfp4"], Target(KEEP_PERCENT, 5.0))
    assert conclusion(some)[0].endswith("1 of 16 groups kept, 4.17 % of the elements.")


def test_json_and_csv_say_the_same(result: Recommendation) -> None:
    parsed: dict[str, Any] = json.loads(recommendation_json(result, written=[]))
    assert parsed["schema"] == "mxcli.recommend/1"
    assert parsed["target"] == {"bits": 5.5}
    assert parsed["harm_lower_bound"] == pytest.approx(parsed["harm"])
    assert sum(len(group["tensors"]) for group in parsed["groups"]) == len(parsed["tensors"]) == 28
    assert sum(group["options"][group["chosen"]]["harm"] for group in parsed["groups"]) == pytest.approx(parsed["harm"])
    rows = list(csv.DictReader(io.StringIO(recommendation_csv(result))))
    assert tuple(rows[0]) == RECORD_KEYS
    by_name = {tensor["name"]: tensor for tensor in parsed["tensors"]}
    for row in rows:
        tensor = by_name[row["name"]]
        assert float(row["harm"]) == tensor["options"][row["option"]]["harm"]
        assert row["chosen"] == tensor["chosen"]
