"""The size of a step: the rows of each layer, next to what is on the disk already."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mxcli
from mxcli.errors import EnvironmentFailure
from mxcli.flows.capture.budget import Growth, Limits, Size, WrittenSteps, check_size
from mxcli.flows.capture.layers import Layer, linear_layers


class Experts(nn.Module):
    """A layer that sees all tokens, and ten experts that see one each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return torch.stack([expert(y[at : at + 1]) for at, expert in enumerate(self.experts)])


ROWS = ("activation", "gradient")
HELD = 64 * 64 + 10 * 64
"""Bytes of the rows of all layers: 64 of one and one of the others, of 8 inputs and 8 outputs in binary32."""


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize(
    ("limit", "enough", "sentence"),
    [
        ("max_memory", HELD + 64 * 32, "the rows of a step take 6,784 bytes of memory, and 6,783 are allowed"),
        ("max_disk", HELD, "a step of 4,736 bytes would be 4,736 bytes on the disk, and 4,735 are allowed"),
    ],
)
def test_experts_take_what_they_see(tmp_path: Path, limit: str, enough: int, sentence: str) -> None:
    """The largest tensor, of 64 rows, is in memory twice."""
    model = Experts()
    with mxcli.capture(model, tmp_path / "out", roles=ROWS, on_error="raise", **{limit: enough}) as recorder:
        model(torch.ones(64, 8)).sum().backward()
        assert recorder.step() is not None
    less: dict[str, Any] = {limit: enough - 1}
    with (
        pytest.raises(EnvironmentFailure, match=sentence),
        mxcli.capture(model, tmp_path / "less", roles=ROWS, on_error="raise", **less),
    ):
        model(torch.ones(64, 8))


def test_a_step_grows_with_its_rows() -> None:
    layers = linear_layers(Experts())
    growth = Growth(layers, ("activation", "weight"), max_rows=3)
    weights = 11 * 256
    assert growth.after(layers[0], 2) == Size(weights + 64, 64 + 256)
    assert growth.after(layers[1], 1) == Size(weights + 96, 96 + 256)
    assert growth.after(layers[0], 500) == Size(weights + 128, 128 + 256)
    assert growth.after(layers[0], 500, waiting=2) == Size(weights + 128, 128 + 256 + 64)
    assert growth.after(layers[1], 2, waiting=1) == Size(weights + 160, 160 + 256 + 96)
    assert growth.after(layers[0], 501) == Size(weights + 160, 160 + 256 + 32)


def test_what_is_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(free: int, there: WrittenSteps) -> None:
        monkeypatch.setattr("mxcli.flows.capture.budget.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
        check_size(Size(100, 0), Limits(steps=5), tmp_path, there)

    check(0, WrittenSteps(steps=5))
    check(200, WrittenSteps(steps=3))
    check(160, WrittenSteps(steps=3, begun=40))
    check(350, WrittenSteps(replaced=150))
    check(100, WrittenSteps(replaced=10_000))
    for free, there, needed in [
        (199, WrittenSteps(steps=3), 200),
        (159, WrittenSteps(steps=3, begun=40), 160),
        (349, WrittenSteps(replaced=150), 350),
        (99, WrittenSteps(replaced=10_000), 100),
    ]:
        with pytest.raises(EnvironmentFailure, match=f"would take {needed} more bytes on the disk, and {free} are"):
            check(free, there)


def test_experts_are_known_by_their_names() -> None:
    names = {"model.layers.0.mlp.experts.7.up_proj": True, "block_sparse_moe.experts.0.w1": True}
    names |= {"mlp.shared_experts.up_proj": False, "mlp.gate": False, "mlp.up_proj": False}
    assert {name: Layer(name, 2, 2, "F32", None).is_routed for name in names} == names
