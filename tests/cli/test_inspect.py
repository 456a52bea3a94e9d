"""inspect: headers in, everything odd out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CAPTURES, SAMPLE, strict_json
from odd_files import many_tensors, odd_checkpoint
from raw_checkpoint import safetensors_bytes, zeros
from safetensors.numpy import save_file


def test_the_sample(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("inspect", SAMPLE)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("tiny-llama: 853 k elements, 39 tensors, 1.71 MB; BF16; not quantized")
    words = [line.split() for line in lines]
    assert lines[1] == "model llama: roles from transformers 5.24.0"
    assert [
        "model.layers.0.mlp.down_proj.weight",
        "BF16",
        "128x384",
        "weight",
        "linear",
        "layer",
        "98.3",
        "kB",
    ] in words
    assert ["norm", "9", "1,152", "2.30", "kB"] in words
    assert ["total", "39", "853,120", "1.71", "MB"] in words


def test_json(mxcli: Callable[..., Any]) -> None:
    record = strict_json(mxcli("inspect", SAMPLE, "--json").out)
    assert record["schema"] == "mxcli.inspect/1"
    assert record["total"] == {"tensors": 39, "elements": 853120, "bytes": 1706240}
    assert record["by_role"]["lm_head"] == {"tensors": 1, "elements": 32768, "bytes": 65536}
    assert record["by_dtype"] == {"BF16": record["total"]}
    assert record["dialect"] is None
    assert (record["model"], record["model_source"]) == ("llama", "transformers 5.24.0")
    assert record["tensors"][0] == {
        "name": "lm_head.weight",
        "dtype": "BF16",
        "block_type": None,
        "shape": [256, 128],
        "role": "lm_head",
        "reason": "output head",
        "elements": 32768,
        "bytes": 65536,
        "file": "model.safetensors",
        "capture": None,
    }
    assert record["captured"] is None
    captures = strict_json(mxcli("inspect", CAPTURES, "--json").out)
    assert captures["captured"] == {
        "layers": 29,
        "steps": [1100],
        "ranks": [],
        "roles": {"activation": 29, "gradient": 29},
    }
    captured = captures["tensors"][0]
    assert captured["role"] == "activation"
    assert captured["capture"]["layer"] == "lm_head"


def test_captures_are_reported_by_layer_step_and_rank(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    for rank in (0, 1):
        records = {"evil\x1b.x": {"role": "activation", "rank": rank}, "fc.dy": {"role": "gradient", "step": 1200}}
        entry = {"format": "pt", "mxcli.capture": json.dumps({"version": 1, "tensors": records})}
        tensors = {name: np.zeros((2, 4), np.float32) for name in records}
        save_file(tensors, tmp_path / f"rank-{rank}.safetensors", entry)
    out = mxcli("inspect", tmp_path, "--wide").out.splitlines()
    assert out[1] == "captures of 2 layers at step 1,200 on 2 ranks: 2 activations, 2 gradients"
    words = [line.split() for line in out]
    assert ["tensor", "dtype", "shape", "role", "layer", "step", "rank", "size"] in words
    assert ["rank-1/evil\\x1b.x", "F32", "2x4", "activation", "evil\\x1b", "-", "1", "32", "B"] in words
    assert ["rank-0/fc.dy", "F32", "2x4", "gradient", "fc", "1200", "0", "32", "B"] in words


def test_everything_odd_is_said(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    out = mxcli("inspect", odd_checkpoint(tmp_path)).out
    assert "note: 1 tensor ('empty.weight') without elements." in out
    assert "note: 1 name ('evil\\x1b[31m.weight') empty or with control characters" in out


def test_packed_codes_are_listed_by_their_elements(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """Readers that do not know these types refuse the file, or take a row of codes for one half as wide."""
    shapes = {"f4.weight": ("F4", 2, 8), "f6.weight": ("F6_E2M3", 2, 4), "f4.weight_scale": ("F8_E8M0", 2, 1)}
    source = tmp_path / "codes.safetensors"
    source.write_bytes(safetensors_bytes({name: zeros(*shape) for name, shape in shapes.items()}, {"format": "pt"}))
    code, out, err = mxcli("inspect", source)
    assert (code, err) == (0, "")
    words = [line.split() for line in out.splitlines()]
    why = ["already", "in", "8", "bits", "or", "fewer"]
    assert ["f4.weight", "F4", "2x8", "codes", *why, "8", "B"] in words
    assert ["f6.weight", "F6_E2M3", "2x4", "codes", *why, "6", "B"] in words
    assert ["f4.weight_scale", "F8_E8M0", "2x1", "scale", "scale", "of", "codes", "2", "B"] in words
    source.write_bytes(safetensors_bytes({"f4.weight": ("F4", [2, 7], bytes(7))}))
    code, out, err = mxcli("inspect", source)
    assert (code, out) == (3, "")
    assert "F4 packs 2 elements into 1 byte, so its last dimension must be a multiple of 2, not 7" in err


def test_tensors_without_elements_and_scalars_are_listed(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """They are left over from checkpoints that were split or resized, and have stopped programs that divide by size."""
    shapes = {"a": (), "b": (0,), "c": (0, 32), "d": (5, 0)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "empty.safetensors", {"format": "pt"})
    code, out, err = mxcli("inspect", tmp_path / "empty.safetensors")
    assert (code, err) == (0, "")
    words = [line.split() for line in out.splitlines()]
    assert [line[2] for line in words if line[:1] in (["a"], ["b"], ["c"], ["d"])] == ["scalar", "0", "0x32", "5x0"]
    assert ["total", "4", "1", "4", "B"] in words
    assert "note: 3 tensors ('b', …) without elements." in out


def test_ties_are_named(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.ones((8, 32), np.float32)}, tmp_path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "tied: lm_head.weight is model.embed_tokens.weight" in mxcli("inspect", tmp_path).out


def test_damaged_sources(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    whole = (SAMPLE / "model.safetensors").read_bytes()
    for name, content in {
        "empty": b"",
        "cut": whole[:-1],
        "lfs": b"version https://git-lfs.github.com/spec/v1\n",
    }.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        code, out, err = mxcli("inspect", path)
        assert (code, out) == (3, "")
        assert err.startswith(f"error: {path}: ")
        assert err.count("\n") == 1


@pytest.mark.slow
def test_fifty_thousand_tensors(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = many_tensors(tmp_path, 50_000)
    began = time.process_time()
    assert mxcli("inspect", source).code == 0
    # It takes 2 s, and what is not linear takes minutes; the rest is for what earlier tests left in memory.
    assert time.process_time() - began < 20
