"""`mxcli training` from the command line, and what `mxcli explain` says of training recipes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import strict_json
from safetensors.numpy import save_file

from mxcli.numerics.training import TRAINING_RECIPES

SAMPLE, CAPTURES = "samples/tiny-llama", "samples/tiny-llama-captures.safetensors"
TRAINING = ("training", SAMPLE, "--captures", CAPTURES, "--include", "*layers.[13].*.down_proj")


def test_the_table_has_a_row_per_recipe_and_product(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli(*TRAINING, "--recipes", "mxfp8,mxfp8_floor,fp8_current")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"{SAMPLE} with {CAPTURES}: 18 products of 2 layers, 2 captures, under 3 training recipes"
    assert [line.split()[:2] for line in lines[-9:]] == [
        [recipe, passes] for recipe in ("mxfp8", "mxfp8_floor", "fp8_current") for passes in ("fprop", "dgrad", "wgrad")
    ]
    assert "fp8_current: 2 of 4 blocks stay high" in err


def test_layers_are_shown_on_request(mxcli: Callable[..., Any]) -> None:
    out = mxcli(*TRAINING, "--recipes", "mxfp8", "--top", "2", "--sort", "x_saturated").err
    assert "--sort x_saturated: it takes sqnr_db" in out
    lines = mxcli(*TRAINING, "--recipes", "mxfp8", "--top", "2").out.splitlines()
    assert [line.split()[:3] for line in lines[-4:-2]] == [
        ["model.layers.3.mlp.down_proj", "mxfp8", "wgrad"],
        ["model.layers.1.mlp.down_proj", "mxfp8", "wgrad"],
    ]
    assert lines[-1] == "2 of 6 products shown, worst sqnr_db first"


def test_records_are_those_of_the_csv(mxcli: Callable[..., Any]) -> None:
    words = (*TRAINING, "--recipes", "mxfp8,fp8_subchannel", "--seed", "3")
    record = strict_json(mxcli(*words, "--json").out)
    assert record["schema"] == "mxcli.training/1"
    assert (record["seed"], record["draws"]) == (3, 1)
    assert record["recipes"][1]["high_blocks"] == ["model.layers.0", "model.layers.3"]
    assert record["recipes"][1]["operands"]["dgrad"]["W"] == {
        "format": "fp8_e4m3_128x128", "scale_rounding": "amax", "rounding": "nearest-even", "hadamard": None,
        "history": None,
    }  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(mxcli(*words, "--csv", "-").out)))
    assert len(rows) == len(record["products"]) == 12
    for row, product in zip(rows, record["products"], strict=True):
        assert list(row) == list(product)
        assert row["sqnr_db"] == ("" if product["sqnr_db"] is None else str(product["sqnr_db"]))
        assert (product["sqnr_db"] is None) == product["high"]
        assert (product["dy_sqnr_db"] is None) == (product["high"] or product["pass"] == "fprop")


def test_several_steps_are_distinguished(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    layer = "layers.5.fc"
    for step in range(10):
        x = np.random.default_rng(step).standard_normal((32, 64)).astype(np.float32)
        tensors = {
            f"{layer}.activation": x,
            f"{layer}.gradient": x[:, :32].copy(),
            f"{layer}.weight": x[:, ::-1].copy(),
        }
        records = {
            name: {"role": name.rpartition(".")[2], "layer": layer, "step": step, "rank": 0, "axis": "row"}
            for name in tensors
        }
        entry = json.dumps({"version": 1, "tensors": records})
        save_file(tensors, tmp_path / f"step-{step:06d}.safetensors", {"mxcli.capture": entry})
    out = mxcli("training", tmp_path, "--recipes", "mxfp8,mxfp8_floor").out
    lines = out.splitlines()
    assert lines[0].endswith(": 60 products of 1 layer, 10 captures, under 2 training recipes")
    (at,) = (at for at, line in enumerate(lines) if "SQNR in dB at step" in line)
    assert lines[at + 1].split() == ["recipe", "product", "0", "1", "2", "3", "5", "6", "7", "9"]
    assert [line.split()[:2] for line in lines[at + 2 :]] == [
        [recipe, passes] for recipe in ("mxfp8", "mxfp8_floor") for passes in ("fprop", "dgrad", "wgrad")
    ]
    record = strict_json(mxcli("training", tmp_path, "--recipes", "mxfp8", "--json").out)
    assert [(each["step"], each["pass"]) for each in record["by_step"][:4]] == [
        (0, "fprop"), (0, "dgrad"), (0, "wgrad"), (1, "fprop")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TRAINING, "--recipes", "mxfp9"), "unknown training recipe 'mxfp9'"),
        ((*TRAINING, "--recipes", "mxfp8", "--format", "mxfp4"), "no such option: --format"),
        (
            (*TRAINING, "--recipes", "nvfp4", "--seed", "4294967295", "--draws", "2"),
            "--seed 4294967295 with --draws 2: the last draw has seed 4294967296, and a seed is an integer from 0 "
            "to 4294967295",
        ),
        ((*TRAINING, "--recipes", "mxfp8", "--jsonl"), "no such option: --jsonl"),
        ((*TRAINING, "--draws", "65"), "invalid value for '--draws'"),
        ((*TRAINING, "--html", "-"), "--html takes a file"),
        (("training", SAMPLE, "--recipes", "mxfp8"), "samples/tiny-llama has none: add --captures CAPTURES"),
    ],
)
def test_what_means_nothing_is_refused(mxcli: Callable[..., Any], words: tuple[str, ...], message: str) -> None:
    code, _, err = mxcli(*words)
    assert code == 2
    assert message in err


def test_captures_without_weights_need_a_model(mxcli: Callable[..., Any]) -> None:
    code, _, err = mxcli("training", CAPTURES, "--recipes", "mxfp8")
    assert code == 3
    assert "give their model as SOURCE, and the captures with --captures" in err


@pytest.mark.parametrize("shape", [(128, 384, 1), (384, 128), (128 * 384,)])
def test_captured_weights_of_another_shape_are_refused(
    mxcli: Callable[..., Any], tmp_path: Path, shape: tuple[int, ...]
) -> None:
    layer = "model.layers.0.mlp.down_proj"
    records = {
        f"{layer}.{role}": {"role": role, "layer": layer, "step": 0, "axis": "row", "tokens": 4}
        for role in ("activation", "weight")
    }
    tensors = {
        f"{layer}.activation": np.ones((4, 384), np.float32),
        f"{layer}.weight": np.ones(shape, np.float32),
    }
    metadata = {"mxcli.capture": json.dumps({"version": 1, "tensors": records})}
    save_file(tensors, tmp_path / "captures.safetensors", metadata)
    code, _, err = mxcli("training", SAMPLE, "--captures", tmp_path / "captures.safetensors", "--recipes", "mxfp8")
    assert code == 3
    assert layer in err


def test_recipes_of_training_explain_themselves_next_to_their_formats(mxcli: Callable[..., Any]) -> None:
    assert mxcli("explain", "nvfp4").out.startswith("nvfp4: a block format")
    page = mxcli("explain", "training:nvfp4").out
    assert page.startswith("nvfp4: a training recipe")
    assert "Hadamard transform of 16" in page
    assert mxcli("explain", "fp8_delayed").out.startswith("fp8_delayed: a training recipe")
    assert "fp8_delayed" in mxcli("explain", "training").out
    code, _, err = mxcli("explain", "training:nvfp5")
    assert code == 2
    assert "Did you mean training:nvfp4" in err


def test_more_memory_than_is_allowed_is_refused(mxcli: Callable[..., Any]) -> None:
    words = (*TRAINING, "--recipes", "mxfp8", "--device", "cpu", "--quiet", "--no-color")
    code, out, err = mxcli(*words, "--max-memory", "64M")
    assert (code, out) == (6, "")
    assert "mlp.down_proj: needs about 3" in err
    assert mxcli(*words, "--max-memory", "400M").code == 0


def test_captured_tensors_can_be_left_out(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """Selectors take captured tensors too: without the gradient of a step, of which one value is infinite, what else
    there is of that step has its products."""
    for step in range(2):
        x = np.random.default_rng(step).standard_normal((32, 64)).astype(np.float32)
        gradient = x[:, :32].copy()
        gradient[0, 0] = np.inf if step else 0
        tensors = {"fc.activation": x, "fc.gradient": gradient, "fc.weight": x[:, ::-1].copy()}
        records = {name: {"role": name[3:], "layer": "fc", "step": step} for name in tensors}
        described = json.dumps({"version": 1, "tensors": records})
        save_file(tensors, tmp_path / f"step-{step}.safetensors", {"mxcli.capture": described})
    words = ("training", tmp_path, "--recipes", "mxfp8")
    code, _, err = mxcli(*words)
    assert code == 3
    assert "step-1/fc.gradient holds NaN or infinities" in err
    left = strict_json(mxcli(*words, "--exclude", "step-1/fc.gradient", "--json").out)
    assert [(each["step"], each["pass"]) for each in left["products"]] == [
        *((0, passes) for passes in ("fprop", "dgrad", "wgrad")),
        (1, "fprop"),
    ]


def test_all_recipes_are_the_default(mxcli: Callable[..., Any]) -> None:
    words = (*TRAINING[:-1], "*layers.1.*.down_proj", "--json")
    names = [recipe["name"] for recipe in strict_json(mxcli(*words).out)["recipes"]]
    assert names == list(TRAINING_RECIPES)


def test_a_page(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    page = tmp_path / "training.html"
    code, out, _ = mxcli(*TRAINING, "--recipes", "mxfp8,nvfp4", "--html", page)
    assert code == 0
    assert out == mxcli(*TRAINING, "--recipes", "mxfp8,nvfp4").out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>\n")
    assert "mxcli training samples/tiny-llama" in text
    assert mxcli(*TRAINING, "--recipes", "mxfp8", "--html", page).code == 4


@pytest.mark.slow
def test_plots(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    assert mxcli(*TRAINING, "--recipes", "mxfp8,nvfp4", "--plots", tmp_path / "plots").code == 0
    assert {file.suffix for file in (tmp_path / "plots").iterdir()} == {".png", ".svg"}
