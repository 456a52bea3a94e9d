"""`mxcli.evaluate` on models that are not of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mxcli
from mxcli.errors import RefusedError, UsageError


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()


@pytest.fixture
def batches() -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(4, 64), torch.randn(4, 32)) for _ in range(3)]


def per_sample(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(1)


def test_the_losses_of_a_format_are_those_of_its_weights(model: Any, batches: list[Any]) -> None:
    found = mxcli.evaluate(model, batches, per_sample, formats=["mxfp4"])
    assert list(found) == ["original", "mxfp4_e2m1"]
    expected = torch.cat([per_sample(model, batch) for batch in batches]).double()
    assert found["original"]["loss"] == pytest.approx(expected.mean().item(), rel=1e-12)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.as_tensor(mxcli.quantize(layer.weight, "mxfp4").dequantize()))
    changed = torch.cat([per_sample(model, batch) for batch in batches]).double()
    assert found["mxfp4_e2m1"]["loss"] == pytest.approx(changed.mean().item(), rel=1e-6)
    change = changed - expected
    assert found["mxfp4_e2m1"]["loss_change"] == pytest.approx(change.mean().item(), rel=1e-4)
    assert found["mxfp4_e2m1"]["loss_change_error"] == pytest.approx(change.std().item() / 12**0.5, rel=1e-4)


def test_inputs_and_recipes(model: Any, batches: list[Any], tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('format = "mxfp8"\n')
    found = mxcli.evaluate(model, batches, per_sample, formats="mxfp8", activations=["none", "same"], recipes=[recipe])
    assert list(found) == [
        "original",
        "mxfp8_e4m3",
        "mxfp8_e4m3, inputs mxfp8_e4m3",
        "r.toml",
        "r.toml, inputs same",
    ]
    assert found["mxfp8_e4m3"] == found["r.toml"]
    assert found["mxfp8_e4m3, inputs mxfp8_e4m3"] == found["r.toml, inputs same"]


def test_the_model_is_given_back(model: Any, batches: list[Any]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mxcli.evaluate(model, batches, per_sample, formats=["nvfp4"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert type(model[0]) is torch.nn.Linear


def test_a_number_for_a_batch(model: Any, batches: list[Any]) -> None:
    found = mxcli.evaluate(model, batches[:1], lambda m, b: float(per_sample(m, b).mean()), formats=["mxfp8"])
    assert found["mxfp8_e4m3"]["loss_change_error"] is None


@pytest.mark.parametrize(
    ("arguments", "error", "fault"),
    [
        ({"formats": []}, UsageError, "nothing to evaluate"),
        ({"formats": ["mxfp9"]}, UsageError, "mxfp9"),
        ({"formats": ["mxfp8"], "activations": ["x"]}, UsageError, "x"),
    ],
)
def test_what_means_nothing_is_refused(
    arguments: dict[str, Any], error: type[Exception], fault: str, model: Any, batches: list[Any]
) -> None:
    with pytest.raises(error, match=fault):
        mxcli.evaluate(model, batches, per_sample, **arguments)


def test_losses_that_cannot_be_compared_are_refused(model: Any, batches: list[Any]) -> None:
    losses = iter([1.0, float("nan"), 2.0])
    with pytest.raises(RefusedError, match="original: 1 of 3 losses are not finite"):
        mxcli.evaluate(model, batches, lambda m, b: next(losses), formats=["mxfp8"])
    counts = iter([2, 2, 2, 2, 1, 2])
    uneven: Callable[[Any, Any], Any] = lambda m, b: torch.zeros(next(counts))  # noqa: E731
    with pytest.raises(RefusedError, match="loss_fn returned 5 losses, and 6 for the original"):
        mxcli.evaluate(model, batches, uneven, formats=["mxfp8"])
