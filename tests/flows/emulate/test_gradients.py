"""Outputs and gradients of emulated layers equal products, in binary64, of operands that are quantized apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_transformers import tiny, tokens
from torch import nn

import mxcli
from mxcli.numerics.streams import stream_of
from mxcli.numerics.training import TRAINING_RECIPES

TOKENS, INPUTS, OUTPUTS = 48, 64, 96


class Blocks(nn.Module):
    """A model of one block, whose layer has the name `blocks.1.proj` in files; the other blocks are not used."""

    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(INPUTS, OUTPUTS, bias=bias)}) for _ in range(8))
        self.to(dtype)

    @property
    def proj(self) -> nn.Linear:
        found = self.blocks[1]["proj"]  # type: ignore[index]
        assert isinstance(found, nn.Linear)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.proj(x)
        return found


def values(x: torch.Tensor, format: str, **rules: Any) -> torch.Tensor:
    """What the codes of a tensor stand for, in binary64."""
    found: Any = mxcli.quantize(x.detach(), format, **rules).dequantize()
    return torch.as_tensor(found).double()


def drawn(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, TOKENS // 2, INPUTS, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(2, TOKENS // 2, OUTPUTS, generator=generator).to(dtype)


def close(found: torch.Tensor | None, expected: torch.Tensor, bits: int = 21) -> bool:
    """Whether a result is the expected one but for rounding to so many bits."""
    assert found is not None
    error = (found.double() - expected.reshape(found.shape)).abs().max()
    return bool(error <= expected.abs().max() * 2.0**-bits)


@pytest.mark.parametrize("activations", ["same", "none", "mxfp8"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_e4m3", "mxint8", "fp8_e4m3_128x128"])
def test_gradients_pass_straight_through(format: str, activations: str) -> None:
    model = Blocks()
    x, dy = drawn()
    with mxcli.emulate(model, format=format, activations=activations):
        y = model(x)
        y.backward(dy)
    rows = x.detach().reshape(-1, INPUTS)
    own = {"fp8_e4m3_128x128": "fp8_e4m3_1x128"}.get(format, format)
    used = rows.double() if activations == "none" else values(rows, own if activations == "same" else activations)
    weight, bias = values(model.proj.weight, format), model.proj.bias.detach().double()
    flat = dy.reshape(-1, OUTPUTS).double()
    assert close(y, used @ weight.T + bias)
    assert close(x.grad, flat @ weight)
    assert close(model.proj.weight.grad, flat.T @ used)
    assert close(model.proj.bias.grad, flat.sum(0))


RECIPES = {
    "mxfp8": [("mxfp8", "rceil", "mxfp8", "rceil")] * 3,
    "mxfp8_floor": [("mxfp8", "floor", "mxfp8", "floor")] * 3,
    "nvfp4_nearest": [("nvfp4", None, "nvfp4_2d", None)] * 2 + [("nvfp4", None, "nvfp4", None)],
    "nvfp4_1d_weights": [("nvfp4", None, "nvfp4", None)] * 3,
    "fp8_subchannel": [("fp8_e4m3_1x128", "amax", "fp8_e4m3_128x128", "amax")] * 2
    + [("fp8_e4m3_1x128", "amax", "fp8_e4m3_1x128", "amax")],
    "fp8_current": [
        ("fp8_e4m3", "amax", "fp8_e4m3", "amax"),
        ("fp8_e5m2", "amax", "fp8_e4m3", "amax"),
        ("fp8_e5m2", "amax", "fp8_e4m3", "amax"),
    ],
    "mxfp4": [("mxfp4", "rceil", "e2m1:e8m0:32x32", "rceil")] * 2 + [("mxfp4", "rceil", "mxfp4", "rceil")],
}
"""Formats and scale rules of the operands of the three products, as the papers state them."""
RANDOM = ("nvfp4_1d_weights", "mxfp4")
TRANSFORMS = {"nvfp4_nearest": 16, "nvfp4_1d_weights": 16, "mxfp4": 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in RANDOM])
def test_training_recipes(name: str, dtype: torch.dtype) -> None:
    model = Blocks(dtype=dtype)
    x, dy = drawn(dtype)
    with mxcli.emulate(model, training=name) as emulation:
        y = model(x)
        y.backward(dy)
    assert emulation.layers["blocks.1.proj"] == name
    fprop, dgrad, wgrad = RECIPES[name]
    rows, flat = x.detach().reshape(-1, INPUTS), dy.reshape(-1, OUTPUTS)
    weight, bias = model.proj.weight, model.proj.bias.detach().double()
    rht: dict[str, Any] = {"hadamard": TRANSFORMS[name]} if name in TRANSFORMS else {}

    def pair(a: torch.Tensor, b: torch.Tensor, how: Any, **more: Any) -> torch.Tensor:
        left, right = (
            values(t.contiguous(), f, scale_rounding=r, **more) for t, f, r in ((a, *how[:2]), (b, *how[2:]))
        )
        return left @ right.T

    bits = 21 if dtype == torch.float32 else 8
    assert close(y, pair(rows, weight, fprop) + bias, bits)
    assert close(x.grad, pair(flat, weight.T, dgrad), bits)
    assert close(model.proj.weight.grad, pair(flat.T, rows.T, wgrad, **rht), bits)
    assert close(model.proj.bias.grad, flat.double().sum(0), bits)


@pytest.mark.parametrize("name", RANDOM)
def test_random_gradients_are_draws_of_their_operand(name: str) -> None:
    """Each call draws again; all draws of a gradient have the values next to it, and their mean is the exact one."""
    model = Blocks(bias=False)
    x, dy = drawn()
    found = []
    with mxcli.emulate(model, training=name, seed=5):
        for _ in range(24):
            x.grad = None
            model(x).backward(dy)
            assert x.grad is not None
            found.append(x.grad.reshape(-1, INPUTS).double())
    assert not torch.equal(found[0], found[1])
    how = RECIPES[name][1]
    weight = values(model.proj.weight.T.contiguous(), how[2], scale_rounding=how[3])
    exact = dy.reshape(-1, OUTPUTS).double() @ weight.T
    mean = torch.stack(found).mean(0)
    assert (mean - exact).norm() < 0.3 * (found[0] - exact).norm()


def test_random_numbers_are_those_of_the_report_on_training() -> None:
    from mxcli.backends.cpu import Cpu
    from mxcli.numerics.training import rules_of

    model = Blocks(bias=False)
    x, dy = drawn()
    with mxcli.emulate(model, training="nvfp4", seed=5):
        model(x).backward(torch.zeros_like(dy))
        x.grad = None
        model(x).backward(dy)
    operand = TRAINING_RECIPES["nvfp4"].dgrad[0]
    assert operand is not None
    stream = stream_of("blocks.1.proj.dY.dgrad.1.None")
    rows = dy.reshape(-1, OUTPUTS).numpy()
    made = torch.from_numpy(Cpu(1).dequantize(Cpu(1).quantize(rows, "F32", rules_of(operand, 5), stream=stream)))
    weight = values(model.proj.weight.T.contiguous(), "nvfp4_2d")
    assert close(x.grad, made.double() @ weight.T)


def test_delayed_scales_come_from_the_calls_before() -> None:
    model = Blocks(bias=False)
    x, dy = drawn()
    with mxcli.emulate(model, training="fp8_delayed"):
        first = model(1000 * x)
        first.backward(dy)
        second = model(x)
    weight = model.proj.weight
    # The first call has scale 1, that of the maximum: 448; what is above it saturates.
    rows = (1000 * x.detach()).reshape(-1, INPUTS).clamp(-448, 448)
    rounded = rows.to(torch.float8_e4m3fn).double() @ weight.detach().to(torch.float8_e4m3fn).double().T
    assert close(first, rounded)
    scale = float((1000 * x.detach()).abs().max()) / 448
    small = (x.detach().reshape(-1, INPUTS) / scale).to(torch.float8_e4m3fn).double() * scale
    assert close(second, small @ values(weight, "fp8_e4m3").T, 18)


def test_tokens_are_completed_to_whole_transforms() -> None:
    model = Blocks(bias=False)
    x, dy = drawn()
    some, gradient = x.detach()[0, :11].requires_grad_(), dy[0, :11]
    with mxcli.emulate(model, training="nvfp4_nearest"):
        model(some).backward(gradient)
    pad = nn.functional.pad
    left = values(pad(gradient.T, (0, 5)).contiguous(), "nvfp4", hadamard=16)
    right = values(pad(some.detach().T, (0, 5)).contiguous(), "nvfp4", hadamard=16)
    assert close(model.proj.weight.grad, left @ right.T)


def test_blocks_stay_high() -> None:
    model, (x, _) = Blocks(bias=False), drawn()
    with mxcli.emulate(model, training="nvfp4") as emulation:  # the last 15 % of 8 blocks, rounded up: two
        last = model.blocks[7]["proj"](x)  # type: ignore[index]
    assert torch.equal(last, model.blocks[7]["proj"](x))  # type: ignore[index]
    high = [name for name, what in emulation.layers.items() if what == "high under nvfp4"]
    assert high == ["blocks.6.proj", "blocks.7.proj"]
    assert emulation.layers["blocks.5.proj"] == "nvfp4"
    assert "2 of 8 blocks stay high" in emulation.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("options", [{"format": "mxfp8"}, {"training": "mxfp8"}])
def test_models_train(name: str, options: dict[str, Any]) -> None:
    """The loss of a model falls when it is trained on one batch, and its weights are quantized again at each step."""
    model = tiny(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    with mxcli.emulate(model, **options):
        for _ in range(4):
            loss = model(tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    model = Blocks(dtype=dtype)
    x, dy = drawn(dtype)
    with mxcli.emulate(model, format="nvfp4"):
        y = model(x)
        y.backward(dy)
    used, weight = values(x.detach().reshape(-1, INPUTS), "nvfp4"), values(model.proj.weight, "nvfp4")
    assert y.dtype == dtype
    assert close(y, used @ weight.T + model.proj.bias.detach().double(), {torch.float16: 10, torch.float64: 48}[dtype])


def test_autocast_rounds_inputs_first() -> None:
    model = Blocks()
    x, _ = drawn()
    with mxcli.emulate(model, format="mxfp8"), torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    used = values(x.detach().to(torch.bfloat16).reshape(-1, INPUTS), "mxfp8")
    assert y.dtype == torch.bfloat16
    assert close(y, used @ values(model.proj.weight, "mxfp8").T + model.proj.bias.detach().double(), 8)


def test_experts_in_training() -> None:
    """The gradients of an expert's matrices are products of the tokens that are routed to it."""
    model = tiny("mixtral")
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 64, generator=generator, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 3], [0, 3]] * 4)
    weights = torch.rand(12, 2, generator=generator)
    with mxcli.emulate(model, training="mxfp8") as emulation:
        y = experts(x, index, weights)
        y.sum().backward()
    assert emulation.layers["model.layers.0.mlp.experts.down_proj"] == "mxfp8"
    up, down, how = experts.gate_up_proj, experts.down_proj, {"scale_rounding": "rceil"}
    expected, gradient = torch.zeros(12, 64).double(), torch.zeros_like(down).double()
    for expert in (0, 1, 3):
        tokens_of, places = torch.where(index == expert)
        rows = values(x[tokens_of], "mxfp8", **how) @ values(up[expert], "mxfp8", **how).T
        gate, other = rows.float().chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * other
        shares = weights[tokens_of, places, None].double()
        found = values(inner, "mxfp8", **how) @ values(down[expert], "mxfp8", **how).T
        expected.index_add_(0, tokens_of, found * shares)
        dy = shares.float().expand(-1, 64)
        left, right = values(dy.T.contiguous(), "mxfp8", **how), values(inner.T.contiguous(), "mxfp8", **how)
        gradient[expert] = left @ right.T
    assert close(y, expected, 12)  # values next to the middle of two codes may round either way
    assert down.grad[2].abs().max() == 0
    assert (down.grad.double() - gradient).norm() < 2.0**-10 * gradient.norm()
