"""The estimated change of the loss, against its plain formula in binary64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import CAPTURES, SAMPLE
from tiny_models import noise, write_model

import mxcli
from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.measure import measure
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.products.loss_error import MOST_ROWS, CapturedGradients, served

NAME = "model.layers.0.mlp.down_proj"


def changes(weight: Any, captures: Path, format: str, folder: Path) -> list[float]:
    checkpoint = open_checkpoint(write_model(folder, {f"{NAME}.weight": weight}))
    plan = make_plan(checkpoint, Options(format))
    (planned,) = plan.quantized
    ((_, made),) = measure(checkpoint, [plan], Cpu(), codes=True)
    return CapturedGradients(open_checkpoint(captures)).changes(checkpoint, planned, made, Cpu())


def captured(folder: Path, x: np.ndarray[Any, Any], dy: np.ndarray[Any, Any], step: int = 0) -> Path:
    write_model(folder, {f"{NAME}.activation": ("F32", x), f"{NAME}.gradient": ("F32", dy)})
    (folder / "model.safetensors").rename(folder / f"step-{step}.safetensors")
    return folder


def expected(weight: np.ndarray[Any, Any], format: str, steps: list[tuple[Any, Any]]) -> float:
    """1/2 mean over all tokens of (n dY . X dW^T)^2, with n tokens in a token's own step."""
    error = np.asarray(mxcli.quantize(weight, format).dequantize(), np.float64) - weight
    squares = [np.square(len(x) * np.einsum("to,ti,oi->t", dy.astype(np.float64), x, error)) for x, dy in steps]
    return float(0.5 * np.concatenate(squares).mean())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_e4m3_128x128"])
def test_the_estimate_is_that_of_the_formula(format: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((48, 128)).astype(np.float32)
    steps = [
        (
            random.standard_normal((count, 128)).astype(np.float32),
            random.standard_normal((count, 48)).astype(np.float32),
        )
        for count in (20, 7)
    ]
    for step, (x, dy) in enumerate(steps):
        captured(tmp_path / "c", x, dy, step)
    (found,) = changes(("F32", weight), tmp_path / "c", format, tmp_path / "m")
    assert found == pytest.approx(expected(weight, format, steps), rel=1e-4)


def test_weights_that_are_exact_cost_nothing(tmp_path: Path) -> None:
    weight = np.full((32, 64), 0.5, np.float32)
    folder = captured(tmp_path / "c", np.ones((4, 64), np.float32), np.ones((4, 32), np.float32))
    assert changes(("F32", weight), folder, "mxfp8", tmp_path / "m") == [0.0]


def test_many_tokens_are_sampled_always_alike(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((2 * MOST_ROWS, 64)).astype(np.float32)
    dy = random.standard_normal((2 * MOST_ROWS, 32)).astype(np.float32) / len(x)
    weight = random.standard_normal((32, 64)).astype(np.float32)
    folder = captured(tmp_path / "c", x, dy)
    one = changes(("F32", weight), folder, "nvfp4", tmp_path / "m")
    assert one == changes(("F32", weight), folder, "nvfp4", tmp_path / "n")
    assert one[0] == pytest.approx(expected(weight, "nvfp4", [(x, dy)]), rel=0.1)


def test_the_sample_has_gradients_of_every_layer() -> None:
    checkpoint, gradients = open_checkpoint(SAMPLE), CapturedGradients(open_checkpoint(CAPTURES))
    assert served(gradients, make_plan(checkpoint, Options("nvfp4")).quantized)


@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(64, 48, 4), (128, 32, 4), (128, 48, 5)])
def test_other_widths_and_tokens_do_not_serve(inputs: int, outputs: int, rows: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "m", {f"{NAME}.weight": noise(48, 128)}))
    folder = captured(tmp_path / "c", np.ones((4, inputs), np.float32), np.ones((rows, outputs), np.float32))
    gradients = CapturedGradients(open_checkpoint(folder))
    assert not served(gradients, make_plan(checkpoint, Options("nvfp4")).quantized)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    dy = np.ones((4, 32), np.float32)
    dy[1, 1] = np.nan
    folder = captured(tmp_path / "c", np.ones((4, 64), np.float32), dy)
    with pytest.raises(InputError, match=r"down_proj\.gradient holds NaN or infinities"):
        changes(noise(32, 64), folder, "mxfp8", tmp_path / "m")


def test_it_predicts_the_divergence_of_a_small_change(tmp_path: Path) -> None:
    """For one layer with a softmax, 1/2 of the Fisher matrix is the divergence itself, to second order."""
    torch.manual_seed(0)
    weight, x = torch.randn(32, 64) / 8, torch.randn(20_000, 64)
    logits = x @ weight.T
    drawn = torch.distributions.Categorical(logits=logits).sample()
    dy = (torch.softmax(logits, -1) - torch.nn.functional.one_hot(drawn, 32)) / len(x)
    folder = captured(tmp_path / "c", x.numpy(), dy.numpy())
    (found,) = changes(("F32", weight.numpy()), folder, "mxfp8", tmp_path / "m")
    other = x @ torch.as_tensor(mxcli.quantize(weight, "mxfp8").dequantize()).T
    divergence = torch.nn.functional.kl_div(
        torch.log_softmax(other, -1), torch.log_softmax(logits, -1), log_target=True, reduction="batchmean"
    )
    assert found == pytest.approx(divergence.item(), rel=0.15)
