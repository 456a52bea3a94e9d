"""What a layer's calls leave: calls that checkpointed segments repeat, inputs that are changed, roles left out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxcli
from mxcli.flows.capture.layer_step import LayerStep, OnRows, Rows, RowSampling, sampled_rows
from mxcli.flows.capture.layers import linear_layers

pytestmark = pytest.mark.filterwarnings("ignore:capture")
ROLES = [("activation", "gradient", "weight"), ("activation",), ("gradient",), ("weight",)]


class Segment(nn.Module):
    """y = b(a(x)), a in a segment that is checkpointed and zeroes the input of a after its call."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.a.weight.requires_grad_(False)
        self.reentrant = reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        y = self.a(h)
        h.mul_(0)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.b(self.part(x))
        return self.b(checkpoint(self.part, x, use_reentrant=self.reentrant))


def train(model: nn.Module, *tokens: int) -> None:
    """Micro-batches of so many tokens; all elements of the n-th token are n."""
    for count in tokens:
        x = torch.arange(1.0, count + 1)[:, None].expand(count, 4).requires_grad_()
        model(x).sum().backward()


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_every_token_counts_once(tmp_path: Path, reentrant: bool | None, roles: tuple[str, ...]) -> None:
    """For all roles, over micro-batches, with and without a validation that is left out."""
    model = Segment(reentrant)
    with mxcli.capture(model, tmp_path, roles=roles) as recorder:
        train(model, 3, 2)
        one = recorder.step()
        assert recorder.notes == []
        train(model, 3, 2)
        with torch.no_grad():
            model(torch.ones(7, 4))
        two = recorder.step()
        assert recorder.notes == [
            "2 of 2 layers were also called without gradients; those calls are not recorded: a, b (step 1)"
        ]
    assert one is not None
    assert two is not None
    for written in (one, two):
        tensors = load_file(written.path)
        assert sorted(tensors) == sorted(f"{layer}.{role}" for layer in "ab" for role in roles)
        assert {len(rows) for name, rows in tensors.items() if not name.endswith("weight")} <= {5}
        if "activation" in roles:
            assert tensors["a.activation"][:, 0].tolist() == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("roles", ROLES[:2])
def test_a_validation_before_the_step_is_reported(tmp_path: Path, roles: tuple[str, ...]) -> None:
    model = Segment(True)
    with mxcli.capture(model, tmp_path, roles=roles) as recorder:
        with torch.no_grad():
            model(torch.full((7, 4), 9.0))
        train(model, 3)
        recorder.step()
    assert load_file(tmp_path / "step-000000.safetensors")["a.activation"][:, 0].tolist() == [1, 2, 3]
    assert recorder.notes == [
        "2 of 2 layers were also called without gradients; those calls are not recorded: a, b (step 0)"
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_several_calls_in_a_segment_keep_their_order(tmp_path: Path, reentrant: bool) -> None:
    """Gradients come back from the last call first."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(1, 1, bias=False)
            self.a.weight.data.fill_(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: self.a(self.a(x)), x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = Twice()
    with mxcli.capture(model, tmp_path) as recorder:
        for first in (1.0, 10.0):
            model(torch.tensor([[first], [first + 1]], requires_grad=True)).sum().backward()
        recorder.step()
    captured = load_file(tmp_path / "step-000000.safetensors")
    assert captured["a.activation"].flatten().tolist() == [1, 2, 2, 4, 10, 11, 20, 22]
    assert captured["a.gradient"].flatten().tolist() == [2, 2, 1, 1, 2, 2, 1, 1]


def test_sampled_tokens_are_the_same_next_to_a_checkpointed_segment(tmp_path: Path) -> None:
    model = Segment(True)
    for layer in (model.a, model.b):
        layer.weight.data = torch.eye(4)
    with mxcli.capture(model, tmp_path, sample_rows=5) as recorder:
        train(model, 20, 30)
        written = recorder.step()
    assert written is not None
    assert (written.tokens, written.tokens_seen) == (5, 50)
    captured = load_file(written.path)
    assert torch.equal(captured["a.activation"], captured["b.activation"])


SEVERAL = (
    "1 of 1 layers received gradients of several backward passes through one call; the last is recorded: 0 (step 0)"
)


@pytest.mark.parametrize("sample_rows", [None, 2])
def test_of_several_passes_the_last_counts(tmp_path: Path, sample_rows: int | None) -> None:
    """Of two losses, and of a gradient that is computed before, plain and as a penalty."""

    def captured(name: str, run: Any) -> list[Any]:
        model = nn.Sequential(nn.Linear(8, 4))
        with mxcli.capture(model, tmp_path / name, sample_rows=sample_rows) as recorder:
            x = torch.ones(3, 8, requires_grad=True)
            run(x, model(x))
            recorder.step()
        assert recorder.notes == [SEVERAL]
        rows: list[Any] = load_file(tmp_path / name / "step-000000.safetensors")["0.gradient"].tolist()
        return rows

    def two_losses(x: torch.Tensor, y: torch.Tensor) -> None:
        y.sum().backward(retain_graph=True)
        (2 * y).sum().backward()

    def asked_before(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.sum().backward()

    def penalty(x: torch.Tensor, y: torch.Tensor) -> None:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + slope.square().sum()).backward()

    count = sample_rows or 3
    assert captured("losses", two_losses) == [[2.0] * 4] * count
    assert captured("asked", asked_before) == [[1.0] * 4] * count
    assert captured("penalty", penalty) == [[1.0] * 4] * count


@pytest.mark.parametrize("is_before", [False, True])
def test_a_validation_is_left_out_of_frozen_layers_too(tmp_path: Path, is_before: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)

    def validate() -> None:
        with torch.no_grad():
            model(torch.full((5, 4), 9.0))

    with mxcli.capture(model, tmp_path) as recorder:
        if is_before:
            validate()
        model(torch.ones(3, 4)).sum().backward()
        if not is_before:
            validate()
        recorder.step()
    captured = load_file(tmp_path / "step-000000.safetensors")
    assert captured["0.activation"].tolist() == [[1.0] * 4] * 3
    assert len(captured["2.activation"]) == 3
    assert recorder.notes == [
        "1 of 2 layers received no gradient: 0 (step 0)",
        "2 of 2 layers were also called without gradients; those calls are not recorded: 0, 2 (step 0)",
    ]


@pytest.mark.parametrize("roles", ROLES[:2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_validation_is_left_out_of_frozen_layers_of_segments(
    tmp_path: Path, reentrant: bool, roles: tuple[str, ...]
) -> None:
    """No gradient shows a repetition in the first layer: nothing before it needs any."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[0].requires_grad_(False)
    flag = torch.ones(1, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x, flag: layers(x) * flag, x, flag, use_reentrant=reentrant)  # type: ignore[no-any-return]

    with mxcli.capture(layers, tmp_path, roles=roles) as recorder:
        for number in (1.0, 2.0):
            run(torch.full((3, 4), number)).sum().backward()
            with torch.no_grad():
                run(torch.full((5, 4), 9.0))
        recorder.step()
    captured = load_file(tmp_path / "step-000000.safetensors")
    assert captured["0.activation"][:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert len(captured["1.activation"]) == 6
    told = "2 of 2 layers were also called without gradients; those calls are not recorded: 0, 1 (step 0)"
    assert recorder.notes == [
        *(["1 of 2 layers received no gradient: 0 (step 0)"] if "gradient" in roles else []),
        told,
    ]


def test_rows_are_chosen_of_those_with_gradients(tmp_path: Path) -> None:
    """One call before and one after that nothing comes back to, one of them still to be run backward."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    model[0].weight.data.fill_(1.0)
    with mxcli.capture(model, tmp_path, sample_rows=4) as recorder:
        model(torch.full((60, 1), -1.0))
        waiting = model(torch.full((60, 1), -1.0))
        (model(torch.arange(60.0)[:, None]).square().sum() / 2).backward()
        written = recorder.step()
        waiting = model(torch.arange(9.0)[:, None])
        model(torch.arange(9.0)[:, None])
        recorder.step()
        del waiting
    assert written is not None
    assert (written.tokens, written.tokens_seen) == (4, 180)
    captured = load_file(tmp_path / "step-000000.safetensors")
    assert captured["0.activation"].tolist() == captured["0.gradient"].tolist()
    assert len(set(captured["0.activation"].flatten().tolist())) == 4
    assert recorder.notes == [
        "1 of 1 layers received gradients for part of their tokens; only those are recorded: 0 (step 0)",
        "1 of 1 layers received no gradient: 0 (step 1)",
    ]
    assert {name: len(rows) for name, rows in load_file(tmp_path / "step-000001.safetensors").items()} == {
        "0.activation": 4,
        "0.weight": 1,
    }


def test_rows_that_no_gradient_can_come_to_do_not_wait() -> None:
    told: list[tuple[int, int]] = []
    step, module = layer_step(("activation", "gradient"), 2, lambda seen, waiting: told.append((seen, waiting)))
    outputs = []
    for is_held in (True, True, False, False, False):
        x = torch.ones(3, 4)
        y = module(x)
        step.called(x, y, with_grad=True, repeated=False)
        if is_held:
            outputs.append(y)
        del y
    assert told == [(3, 0), (6, 2), (9, 4), (12, 6), (15, 6)]
    outputs[0].sum().backward()
    inputs, gradients = step.rows()
    assert inputs is not None
    assert gradients is not None
    assert (len(inputs), len(gradients), step.tokens_without_gradient) == (2, 2, 12)


def layer_step(
    roles: tuple[str, ...], most: int | None = None, on_rows: OnRows = lambda seen, waiting: None
) -> tuple[LayerStep, nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    return LayerStep(linear_layers(model)[0], RowSampling(most, 0, 0), roles, on_rows, threading.RLock()), model[0]


@pytest.mark.parametrize(
    ("roles", "shapes"),
    [(("weight",), [(3, 0), None]), (("gradient",), [(3, 0), (3, 4)]), (("activation",), [(3, 4), None])],
)
def test_what_is_not_recorded_takes_no_memory(roles: tuple[str, ...], shapes: list[Any]) -> None:
    step, module = layer_step(roles)
    x = torch.ones(3, 4, requires_grad=True)
    y = module(x)
    step.called(x, y, with_grad=True, repeated=False)
    y.sum().backward()
    assert [None if rows is None else tuple(rows.shape) for rows in step.rows()] == shapes
    assert step.seen == 3


def test_a_repeated_call_holds_a_copy_of_the_rows_that_are_kept() -> None:
    rows = torch.arange(40.0).reshape(10, 4)
    held = sampled_rows(RowSampling(2, 0, 0), 5, rows)
    before = held.rows.clone()
    rows.zero_()
    assert held.rows.shape == (2, 4)
    assert held.rows.untyped_storage().nbytes() == 32
    assert torch.equal(held.rows, before)
    assert before[:, 0].tolist() == [4 * (token - 5) for token in held.tokens]


def test_rows_of_any_order_are_those_of_one_call() -> None:
    sampling, numbers = RowSampling(3, 1, 2), torch.arange(12.0)[:, None]
    whole, parts = Rows(sampling), Rows(sampling)
    whole.add(sampled_rows(sampling, 0, numbers))
    for first in (8, 0, 4):
        parts.add(sampled_rows(sampling, first, numbers[first : first + 4]))
    kept = sorted(whole.tokens)
    assert sorted(parts.tokens) == kept
    assert parts.of(whole.tokens).flatten().tolist() == kept
