"""What was captured belongs together by layer, step and rank, and has to fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mxcli.errors import InputError
from mxcli.files.captured_layers import (
    CapturedLayer,
    by_layer,
    captured_layers,
    check_layers,
    check_pairs,
    steps_and_ranks,
    steps_of,
)
from mxcli.files.tensors import TensorInfo

WHERE = Path("captures")


def info(name: str, *shape: int, dtype: str = "F32") -> TensorInfo:
    return TensorInfo(name, dtype, shape, "other", WHERE, 0, 0)


def layer(
    name: str = "fc", step: int | None = None, rank: int | None = None, **shapes: tuple[int, ...]
) -> CapturedLayer:
    """A layer with tensors of these shapes by role."""
    tensors = {role: info(f"{name}.{role}", *shape) for role, shape in shapes.items()}
    return dataclasses.replace(CapturedLayer(name, step, rank), **tensors)  # type: ignore[arg-type]


def problems(layers: list[CapturedLayer], **more: dict[str, tuple[int, ...]]) -> list[str]:
    with pytest.raises(InputError) as caught:
        check_pairs(WHERE, layers, **more)
    return [reason.removeprefix("captures: ") for reason in caught.value.reasons]


def test_layers_are_in_the_order_of_the_source_then_step_then_rank() -> None:
    places = [("b", 10, 0), ("a", 2, 1), ("b", 2, 1), ("b", 2, 0), ("a", None, None)]
    records = {
        f"{at}.{role}": {"role": role, "layer": name, **({} if step is None else {"step": step, "rank": rank})}
        for at, (name, step, rank) in enumerate(places)
        for role in ("activation", "gradient", "weight")
    }
    tensors = {name: info(name, 4, 4) for name in records}
    found = captured_layers(tensors, records)
    assert [(each.layer, each.step, each.rank) for each in found] == [
        ("b", 2, 0),
        ("b", 2, 1),
        ("b", 10, 0),
        ("a", None, None),
        ("a", 2, 1),
    ]
    assert [each.name for each in (found[2].activation, found[2].gradient, found[2].weight) if each] == [
        *("0.activation", "0.gradient", "0.weight"),
    ]
    assert list(by_layer(found)) == ["b", "a"]
    assert steps_of(found) == (2, 10)
    assert steps_and_ranks(found) == "2 steps (2 to 10) and 2 ranks"
    assert (steps_and_ranks(found[:2]), steps_and_ranks(found[3:4])) == ("2 ranks", "")
    assert found[1].label == "b, step 2, rank 1"


def test_tensors_of_one_place_and_role_are_records_of_their_own() -> None:
    """In time that grows with their number, though each looks for its place."""
    records = {f"{at}.{role}": {"role": role, "layer": "fc"} for at in range(4000) for role in ("activation", "weight")}
    found = captured_layers({name: info(name, 4, 4) for name in records}, records)
    assert len(found) == 4000
    assert [each.name for each in (found[3999].activation, found[3999].weight) if each] == [
        *("3999.activation", "3999.weight"),
    ]


def test_pairs_that_fit() -> None:
    check_pairs(
        WHERE,
        [
            layer(step=0, activation=(2, 3, 8), gradient=(6, 16), weight=(16, 8)),
            layer(step=1, activation=(4, 8), gradient=(1, 4, 16)),
            layer("only.weight", weight=(4, 4)),
        ],
    )


def test_missing_partners_are_reported_all_at_once() -> None:
    assert problems([layer("a", activation=(4, 8)), layer("b", gradient=(4, 8), step=3)]) == [
        "a: its activation has no gradient; capture both.",
        "b, step 3: its gradient has no activation; capture both.",
    ]
    check_layers(WHERE, [layer("a", activation=(4, 8)), layer("b", gradient=(4, 8))])


def test_mixed_steps_and_ranks_are_reported() -> None:
    mixed = [layer(step=0, rank=0, activation=(4, 8)), layer(step=1, rank=0, gradient=(4, 16))]
    rule = "both must be of the same step and rank."
    assert problems(mixed) == [
        f"fc, step 0, rank 0: its activation has its gradient at fc, step 1, rank 0; {rule}",
        f"fc, step 1, rank 0: its gradient has its activation at fc, step 0, rank 0; {rule}",
    ]


def test_counts_of_tokens_have_to_agree() -> None:
    assert problems([layer(activation=(2, 4, 8), gradient=(7, 16))]) == [
        "fc: 8 tokens of activations and 7 of gradients; both must be of the same tokens."
    ]


@pytest.mark.parametrize("captured", [True, False])
def test_a_role_that_the_shape_contradicts(captured: bool) -> None:
    weight = (16, 8)
    exchanged = layer(activation=(4, 16), gradient=(4, 8), **({"weight": weight} if captured else {}))
    assert problems([exchanged], **({} if captured else {"weights": {"fc": weight}})) == [
        "fc.activation [4, 16] is not an input of fc, which has 8 features there.",
        "fc.gradient [4, 8] is not an output gradient of fc, which has 16 features there.",
    ]


def test_a_weight_captured_once_is_that_of_all_steps() -> None:
    steps = [layer(weight=(16, 8)), *(layer(step=step, activation=(4, 9), gradient=(4, 16)) for step in (0, 1))]
    assert problems(steps) == ["fc.activation [4, 9] is not an input of fc, which has 8 features there."] * 2


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((), "activation fc.activation has shape [], and captured tensors are [tokens, features] or [out, in]."),
        ((0, 8), "activation fc.activation [0, 8] has no tokens; leave its layer out."),
        ((4, 0), "activation fc.activation [4, 0] has no tokens; leave its layer out."),
    ],
)
def test_tensors_without_tokens(shape: tuple[int, ...], fault: str) -> None:
    assert problems([layer(activation=shape, gradient=(4, 16))]) == [fault]


def test_whole_numbers_are_not_captures() -> None:
    ints = dataclasses.replace(layer(activation=(4, 8)), gradient=info("fc.gradient", 4, 16, dtype="I32"))
    assert problems([ints]) == ["gradient fc.gradient holds I32, and captured tensors hold floats."]


def test_two_of_a_role_at_one_place_cannot_be_paired() -> None:
    names = ("first.x", "second.x", "fc.dy")
    records = {
        name: {"role": role, "layer": "fc", "step": 1}
        for name, role in zip(names, ("activation",) * 2 + ("gradient",), strict=True)
    }
    layers = captured_layers({name: info(name, 4, 8) for name in names}, records)
    assert problems(list(layers))[0] == (
        "first.x and second.x are both the activation of fc, step 1; give them a step or rank of their own."
    )
