"""Files that trained weights also come in: convolutions in old pickles, an LSTM without metadata, TorchScript."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models import packages
from models.measuring import run
from models.store import Models

pytestmark = [pytest.mark.network, pytest.mark.slow]


def _told(verb: str, *arguments: object) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(run(verb, *arguments, "--json"))
    return printed


@pytest.fixture
def lpips(models: Models) -> Path:
    return models.package(packages.LPIPS, "lpips/weights/v0.1") / "squeeze.pth"


@pytest.fixture
def facenet(models: Models) -> Path:
    return models.package(packages.FACENET, "facenet_pytorch/data") / "onet.pt"


@pytest.fixture
def silero(models: Models) -> Path:
    return models.package(packages.SILERO, "silero_vad/data")


def test_convolutions_alone_are_nothing_to_quantize(lpips: Path) -> None:
    found = _told("inspect", lpips)
    assert found["kind"] == "pytorch"
    assert {role: total["tensors"] for role, total in found["by_role"].items()} == {"conv": 7}
    assert [tensor["shape"] for tensor in found["tensors"]][-1] == [1, 512, 1, 1]
    refused = run("report", lpips, code=4)
    assert refused.startswith(f"error: {lpips}: nothing to quantize among 7 tensors (7 kept: conv")


def test_a_pickle_of_linears_and_convolutions(facenet: Path) -> None:
    found = _told("inspect", facenet)
    roles = {role: total["tensors"] for role, total in found["by_role"].items()}
    assert roles == {"weight": 4, "conv": 4, "bias": 8, "norm": 5}
    told = _told("report", facenet, "--format", "mxfp8")
    assert {layer["name"]: layer["shape"] for layer in told["layers"]} == {
        "dense5.weight": [256, 1152],
        "dense6_1.weight": [2, 256],
        "dense6_2.weight": [4, 256],
        "dense6_3.weight": [10, 256],
    }
    assert told["totals"]["sqnr_db"] == pytest.approx(32.0, abs=0.05)


def test_convolutions_are_measured_when_requested(facenet: Path) -> None:
    told = _told("report", facenet, "--format", "mxfp8", "--include", "@conv")
    assert [layer["name"] for layer in told["layers"]] == [f"conv{number}.weight" for number in (1, 2, 3, 4)]


def test_an_lstm_without_metadata(tmp_path: Path, silero: Path) -> None:
    source = silero / "silero_vad_16k.safetensors"
    found = _told("inspect", source)
    assert {role: total["tensors"] for role, total in found["by_role"].items()} == {"conv": 6, "weight": 2, "bias": 7}
    assert "without a format in __metadata__" in found["notes"][0]
    told = _told("report", source, "--format", "nvfp4")
    assert [layer["name"] for layer in told["layers"]] == ["lstm_cell.weight_ih", "lstm_cell.weight_hh"]
    assert 20.3 < told["totals"]["sqnr_db"] < 20.7
    refused = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "q", code=4)
    assert "compressed-tensors cannot hold it: it names the weights of modules only" in refused
    run("quantize", source, "--format", "nvfp4", "--layout", "mxcli", "-o", tmp_path / "q")
    assert _told("inspect", tmp_path / "q")["dialect"] == "mxcli"


@pytest.mark.parametrize("verb", ["inspect", "report"])
def test_torchscript_is_refused(silero: Path, verb: str) -> None:
    source = silero / "silero_vad.jit"
    assert run(verb, source, code=3) == (
        f"error: {source}: a TorchScript archive, which holds code; save its state_dict() with torch.save or "
        "safetensors instead.\n"
    )


def test_onnx_is_refused(silero: Path) -> None:
    source = silero / "silero_vad.onnx"
    assert run("inspect", source, code=3).startswith(f"error: {source}: not a checkpoint; known endings are ")
