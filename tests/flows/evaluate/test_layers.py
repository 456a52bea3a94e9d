"""Layers, blocks and kinds evaluated one by one, against recipes that quantize only them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import SAMPLE

from mxcli.errors import UsageError
from mxcli.flows.capture.model import parse_text
from mxcli.flows.evaluate.candidates import Candidate, of_checkpoint, of_formats, of_recipe
from mxcli.flows.evaluate.evaluate import EvaluationPlan, evaluate_plan, plan_evaluation
from mxcli.flows.evaluate.layers import UNITS, evaluate_parts, part_of
from mxcli.flows.evaluate.windows import Reading

TEXT = parse_text("text", b"the quick brown fox jumps over the lazy dog and the small cat. " * 3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def planned(*candidates: Candidate) -> EvaluationPlan:
    return plan_evaluation(str(SAMPLE), TEXT, candidates, Reading(tokens=128, context=64))


def recipe(path: Path, kept: str) -> Candidate:
    path.write_text(f'format = "mxfp4"\n{kept}\n')
    return of_recipe(str(path), "none", {})


@pytest.mark.parametrize("left", [False, True])
def test_a_block_is_that_of_a_recipe(left: bool, tmp_path: Path) -> None:
    found = evaluate_parts(planned(*of_formats(["mxfp4"], ["none"], {})), "block", left=left)
    selection = 'exclude = "*layers.2.*"' if left else 'selection = [{exclude = "*"}, {include = "*layers.2.*"}]'
    (expected,) = evaluate_plan(planned(recipe(tmp_path / "r.toml", selection))).evaluated
    (same,) = (each for each in found.evaluated if each.name == "model.layers.2")
    for one, other in zip(same.scores.windows, expected.scores.windows, strict=True):
        assert np.array_equal(one.nll, other.nll)
        assert np.array_equal(one.kl, other.kl)
    divergences = [each.scores.kl_mean for each in found.evaluated]
    assert divergences == sorted(divergences, reverse=not left)
    assert {each.name for each in found.evaluated} == {f"model.layers.{at}" for at in range(4)}
    assert found.is_by_parts


def test_kinds_and_layers() -> None:
    plan = planned(*of_formats(["nvfp4"], ["none"], {}))
    kinds = [each.name for each in evaluate_parts(plan, "kind").evaluated]
    assert sorted(kinds) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    layers = [each.name for each in evaluate_parts(plan, "layer").evaluated]
    assert len(layers) == 28
    assert "model.layers.3.mlp.down_proj" in layers


def test_names_of_parts() -> None:
    name = "model.layers.12.mlp.down_proj"
    assert [part_of(unit)(name) for unit in UNITS] == [name, "model.layers.12", "down_proj"]
    assert part_of("block")("lm_head") == "lm_head"
    with pytest.raises(UsageError, match="--per row: it takes layer, block, kind"):
        part_of("row")


def test_what_has_no_parts_is_refused() -> None:
    for candidates in ((), (of_checkpoint(str(SAMPLE)),), tuple(of_formats(["mxfp4", "mxfp8"], ["none"], {}))):
        with pytest.raises(UsageError, match="--per: name one format or recipe"):
            evaluate_parts(planned(*candidates), "block")


def test_a_run_that_is_stopped_says_what_is_left() -> None:
    stops = iter([False] * 4 + [True] * 9)
    found = evaluate_parts(planned(*of_formats(["mxfp8"], ["none"], {})), "block", stop=lambda: next(stops))
    assert (len(found.evaluated), found.unfinished) == (2, 2)
