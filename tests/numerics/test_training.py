"""Training recipes: what their names mean, which blocks stay high, and where delayed scales come from."""

from __future__ import annotations

import pytest

from mxcli.errors import UsageError
from mxcli.numerics.floats import E4M3, E5M2
from mxcli.numerics.training import TRAINING_RECIPES, High, History, delayed_amax, find_training, high_blocks, rules_of


@pytest.mark.parametrize(
    ("high", "blocks", "stay"),
    [
        (High(), 4, set()),
        (High(first=1, last=1), 32, {0, 31}),
        (High(first=1, last=1), 1, {0}),
        (High(last_percent=15), 4, {3}),
        (High(last_percent=15), 52, {44, 45, 46, 47, 48, 49, 50, 51}),
        (High(last_percent=15), 20, {17, 18, 19}),
        (High(last_percent=15), 0, set()),
    ],
)
def test_which_blocks_stay_high(high: High, blocks: int, stay: set[int]) -> None:
    assert high_blocks(high, blocks) == stay


def test_the_share_of_blocks_is_that_of_the_papers_larger_model() -> None:
    assert len(high_blocks(TRAINING_RECIPES["nvfp4"].high, 62)) == 10


def scales(amaxes: list[float], history: History) -> list[float]:
    """The scales of E4M3, by which elements are divided, at each step and at the one after the last."""
    return [delayed_amax(amaxes[:step], E4M3, history) / 448 for step in range(len(amaxes) + 1)]


def test_delayed_scales_come_from_earlier_steps() -> None:
    amaxes = [224.0, 896.0, 448.0, 112.0]
    assert scales(amaxes, History(1024)) == [1.0, 0.5, 2.0, 2.0, 2.0]
    assert scales(amaxes, History(2)) == [1.0, 0.5, 2.0, 2.0, 1.0]
    assert scales(amaxes, History(1)) == [1.0, 0.5, 2.0, 1.0, 0.25]
    assert scales(amaxes, History(1, margin=1)) == [1.0, 1.0, 4.0, 2.0, 0.5]


def test_a_step_of_zeros_leaves_a_delayed_scale_as_it_was() -> None:
    assert scales([0.0, 224.0, 0.0, 0.0], History(1)) == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert delayed_amax([], E5M2, History(1024)) == 57344


def test_names_separated_by_commas() -> None:
    assert [recipe.name for recipe in find_training(" mxfp8, NVFP4 ,mxfp8")] == ["mxfp8", "nvfp4"]
    assert find_training("all") == find_training("mxfp4,all") == list(TRAINING_RECIPES.values())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("mxfp8,nvfp5", "unknown training recipe 'nvfp5': .* Did you mean nvfp4"),
        (" , ", "no training recipe named: known are mxfp8"),
        ("all,nvfp5", "unknown training recipe 'nvfp5'"),
    ],
)
def test_names_that_mean_nothing(names: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_training(names)


def rules(name: str, passes: str) -> list[tuple[str, str, str, int | None]]:
    """Format, scale rule, rounding and transform of both operands."""
    found = []
    for operand in TRAINING_RECIPES[name].pairs[passes]:
        assert operand is not None
        recipe = rules_of(operand)
        found.append((recipe.format.name, recipe.scale_rule.name, recipe.rounding.name, operand.hadamard))
    return found


def test_nvfp4_is_the_papers() -> None:
    nearest, weight = ("nvfp4", "te", "nearest-even", None), ("nvfp4_2d", "te", "nearest-even", None)
    assert rules("nvfp4", "fprop") == [nearest, weight]
    assert rules("nvfp4", "dgrad") == [("nvfp4", "te", "stochastic", None), weight]
    assert rules("nvfp4", "wgrad") == [("nvfp4", "te", "stochastic", 16), ("nvfp4", "te", "nearest-even", 16)]


def test_gradients_of_per_tensor_recipes_are_e5m2() -> None:
    for name in ("fp8_current", "fp8_delayed"):
        assert [row[0] for row in rules(name, "dgrad")] == ["fp8_e5m2", "fp8_e4m3"]
        assert [row[0] for row in rules(name, "fprop")] == ["fp8_e4m3", "fp8_e4m3"]


@pytest.mark.parametrize("name", TRAINING_RECIPES)
def test_rows_say_where_they_come_from(name: str) -> None:
    row = TRAINING_RECIPES[name]
    assert row.name == name
    assert row.meaning
    assert row.source
    for a, b in row.pairs.values():
        assert a is not None
        assert b is not None
        assert a.hadamard == b.hadamard, "a transform cancels only where both operands have it"
