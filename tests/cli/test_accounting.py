"""What of a source is not in an output is on the last line, also with -q; what is not a model is refused with a way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import SAMPLE, strict_json
from safetensors.numpy import save_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = Path(shutil.copytree(SAMPLE, tmp_path / "m"))
    (root / "optimizer.pt").write_bytes(b"x" * 5000)
    (root / "2_Dense").mkdir()
    save_file({"linear.weight": np.zeros((4, 4), np.float32)}, root / "2_Dense" / "model.safetensors")
    return root


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_the_last_line_says_what_was_left_out(mxcli: Callable[..., Any], source: Path, quiet: tuple[str, ...]) -> None:
    output = source.parent / "q"
    code, out, err = mxcli("quantize", source, "--format", "nvfp4", "-o", output, *quiet)
    assert code == 0
    assert ("note: Not carried to an output, training state: optimizer.pt." in err) is not bool(quiet)
    line = out.splitlines()[-1]
    assert line.startswith(f"written to {output}: 5 files, layout compressed-tensors, weights 586 kB, ")
    assert (
        "weights: 2_Dense/model.safetensors), left out 1 file (5.00 kB): training state (optimizer.pt, 5.00 kB)" in line
    )
    (output / "optimizer.pt").write_bytes(b"x" * 3000)
    code, out, _ = mxcli("dequantize", output, "-o", source.parent / "d", *quiet)
    assert code == 0
    assert out.startswith(f"written to {source.parent / 'd'}: 28 weights dequantized; read 3 files (")
    assert out.endswith("left out 1 file (3.00 kB): training state (optimizer.pt, 3.00 kB)\n")


def test_the_json_of_a_run_has_the_accounting(mxcli: Callable[..., Any], source: Path) -> None:
    output = source.parent / "q"
    made = strict_json(mxcli("quantize", source, "--format", "nvfp4", "-o", output, "--json").out)
    back = strict_json(mxcli("dequantize", output, "-o", source.parent / "d", "--json").out)
    recorded = json.loads((output / "mxcli.json").read_text())["accounting"]
    assert made["accounting"] == {key: value for key, value in recorded.items() if key != "tensors"}
    assert made["accounting"]["carried"]["weights"] == ["2_Dense/model.safetensors"]
    assert back["accounting"]["left_out"] == {"files": 0, "bytes": 0, "listed": []}


def test_verify_reports_what_was_left_behind(mxcli: Callable[..., Any], source: Path) -> None:
    output = source.parent / "q"
    assert mxcli("quantize", source, "--format", "nvfp4", "-o", output).code == 0
    assert mxcli("verify", output, "--against", source).code == 0
    shutil.copytree(source / "2_Dense", source / "3_Dense")
    code, out, _ = mxcli("verify", output, "--against", source)
    assert code == 5
    assert "problem weights_left_behind: weights in the source that are neither read nor in the output" in out
    left = (source / "3_Dense" / "model.safetensors").stat().st_size
    assert f"3_Dense/model.safetensors: {left} bytes in the source, which were not read and are not here" in out


def test_a_pipeline_is_refused_with_the_way(mxcli: Callable[..., Any], source: Path) -> None:
    pipeline = source.parent / "pipe"
    shutil.copytree(source, pipeline / "transformer")
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "X", "transformer": ["diffusers", "Y"]}))
    code, out, err = mxcli("quantize", pipeline, "--format", "nvfp4", "-o", source.parent / "q")
    assert (code, out) == (3, "")
    assert (
        f"pipe: a diffusers pipeline (X), whose components are models of their own; give one of them: {pipeline}" in err
    )
    assert mxcli("quantize", pipeline / "transformer", "--format", "nvfp4", "-o", source.parent / "q").code == 0


def test_what_is_not_read_is_refused_by_every_verb(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--layout", "modelopt", "-o", tmp_path / "q").code == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W4A8_AWQ"
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    for words in (
        ("dequantize", tmp_path / "q", "-o", tmp_path / "d"),
        ("quantize", tmp_path / "q", "--requantize", "--format", "mxfp8", "-o", tmp_path / "d"),
        ("diff", tmp_path / "q", tmp_path / "q"),
    ):
        code, _, err = mxcli(*words)
        assert code == 4
        assert "the quant_algo is W4A8_AWQ, which mxcli does not read" in err
    assert not (tmp_path / "d").exists()
    assert mxcli("verify", tmp_path / "q").code == 5
