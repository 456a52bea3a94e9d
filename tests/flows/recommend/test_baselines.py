"""Simple choices within a target."""

from __future__ import annotations

import math

import pytest

from mxcli.files.tensors import TensorInfo
from mxcli.flows.recommend.baselines import baselines
from mxcli.flows.recommend.candidates import BITS, KEEP, KEEP_PERCENT, MIN_SQNR, Effect, Group, Option, Target

NAMES = [f"model.layers.{at}.mlp.down_proj.weight" for at in range(4)]


@pytest.fixture
def groups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, ...]:
    file = tmp_path_factory.mktemp("m") / "x"
    return tuple(Group(name, (TensorInfo(name, "BF16", (10, 10), "weight", file, 0, 200),)) for name in NAMES)


def options(harms: list[float]) -> list[tuple[Option, ...]]:
    """Four bits with a harm, eight with a tenth of it, and keeping."""
    return [
        (
            Option("four", (Effect(400, harm, 20.0),)),
            Option("eight", (Effect(800, harm / 10, 30.0),)),
            Option(KEEP, (Effect(1600, 0.0, math.inf),)),
        )
        for harm in harms
    ]


def test_a_budget_of_bits(groups: tuple[Group, ...]) -> None:
    found = {each.name: each for each in baselines(Target(BITS, 6.0), groups, options([1.0, 2.0, 3.0, 4.0]))}
    assert list(found) == ["four throughout", "dealt at random", "first and last blocks high"]
    assert (found["four throughout"].bits_per_element, found["four throughout"].harm) == (4.0, 10.0)
    # The budget is 2,400 bits: two groups get eight bits, or none is left for the others after one is kept.
    outer = found["first and last blocks high"]
    assert outer.bits_per_element <= 6.0
    assert outer.harm == pytest.approx(0.1 + 0.4 + 2.0 + 3.0)
    assert 0.7 <= found["dealt at random"].harm <= 10.0


def test_a_share_that_is_kept(groups: tuple[Group, ...]) -> None:
    only = [(four, kept) for four, _, kept in options([1.0, 2.0, 3.0, 4.0])]
    found = {each.name: each.harm for each in baselines(Target(KEEP_PERCENT, 50.0), groups, only)}
    assert found["four throughout"] == 10.0
    assert found["first and last blocks high"] == 2.0 + 3.0
    assert found["dealt at random"] == pytest.approx(5.0, abs=0.5)


def test_no_budget_has_no_baselines(groups: tuple[Group, ...]) -> None:
    assert baselines(Target(MIN_SQNR, 20.0), groups, options([1.0] * 4)) == ()
