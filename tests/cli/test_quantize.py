"""quantize and dequantize from the outside: what they print, write and refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, strict_json
from odd_files import odd_checkpoint
from safetensors import safe_open


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_dry_run_writes_nothing_and_tells_all(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    before, output = listing(SAMPLE), tmp_path / "out"
    code, out, _ = mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "-o", output)
    assert code == 0
    assert listing(SAMPLE) == before
    assert listing(tmp_path) == {}
    lines = out.splitlines()
    assert sum("kept: norm, normalization" in line for line in lines) == 9
    assert sum("quantized: weight, linear layer" in line for line in lines) == 28
    assert "quantized 28, padded 0, kept 11 (norm 9, lm_head 1, embedding 1), tied 0" in lines
    assert any(line.startswith("final size 586 kB, 34% of the source's 1.71 MB; peak memory about ") for line in lines)
    assert "would write 4 files: model.safetensors, config.json, generation_config.json, mxcli.json" in lines
    assert any(line.startswith("free disk ") for line in lines)

    plan = strict_json(mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "--json", "-o", output).out)
    assert plan["schema"] == "mxcli.plan/1"
    assert listing(tmp_path) == {}
    mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", output)
    assert sorted(plan["files"]) == sorted(listing(output))
    assert plan["output_bytes"] == (output / "model.safetensors").stat().st_size


def test_dry_run_needs_no_output_and_refuses_what_the_run_would(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run").code == 0
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "-o", SAMPLE).code == 4
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "--csv", tmp_path / "x.csv").code == 2


def test_the_report_of_a_run_is_that_of_report(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err = mxcli("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out")
    assert code == 0
    *table, written = out.splitlines()
    report = mxcli("report", SAMPLE, "--format", "mxfp8", "--nonfinite", "error", "--on-indivisible", "error").out
    assert table == report.splitlines()
    assert written.startswith(f"written to {tmp_path / 'out'}: 4 files, layout compressed-tensors, ")
    assert "error" not in err
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert "model.layers.0.mlp.up_proj.weight_scale" in file.keys()  # noqa: SIM118 - not a mapping
    again = mxcli("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out")
    assert again.code == 4
    assert mxcli("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out", "--force").code == 0


def test_json_of_a_run(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    output = tmp_path / "out"
    report = strict_json(mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", output, "--json").out)
    assert report["schema"] == "mxcli.quantize/1"
    assert report["layout"] == "compressed-tensors"
    assert report["output"] == str(output)
    assert report["ignored"] == ["lm_head"]
    assert len(report["layers"]) == 28
    record = strict_json((output / "mxcli.json").read_text())
    assert record["command"] == ["quantize", str(SAMPLE), "--format", "nvfp4", "-o", str(output), "--json"]


def test_refusals_leave_nothing(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source, output = odd_checkpoint(tmp_path), tmp_path / "out"
    code, out, err = mxcli("quantize", source, "--format", "mxfp8", "-o", output)
    assert (code, out) == (4, "")
    assert "ragged.weight [4, 100]: last dimension 100 is not a multiple of 32" in err
    code, out, err = mxcli("quantize", source, "--format", "mxfp8", "-o", output, "--on-indivisible", "keep")
    assert (code, out) == (4, "")
    assert "nan.weight" in err
    assert not output.exists()
    code, out, err = mxcli("quantize", source, "--format", "mxfp8", "-o", output, "--exclude", "re:.*nan.*|ragged.*")
    assert code == 0


@pytest.mark.parametrize(("dtype", "stored"), [(None, "BF16"), ("bf16", "BF16"), ("F32", "F32")])
def test_dequantize_prints_its_path(mxcli: Callable[..., Any], tmp_path: Path, dtype: str | None, stored: str) -> None:
    quantized, back = tmp_path / "q", tmp_path / "back"
    mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", quantized)
    code, out, _ = mxcli("dequantize", quantized, "-o", back, *(["--dtype", dtype] if dtype else []))
    assert (code, out) == (0, f"{back}\n")
    with safe_open(back / "model.safetensors", "np") as file:
        assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_dtype() == stored
    other = tmp_path / "again"
    record = strict_json(mxcli("dequantize", quantized, "-o", other, "--json").out)
    assert record["schema"] == "mxcli.dequantize/1"
    assert record["output"] == str(other)
    assert len(record["dtypes"]) == 28


def test_a_quantized_checkpoint_is_not_measured_or_quantized_again(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q")
    for arguments in (["report"], ["quantize", "--format", "mxfp8", "-o", tmp_path / "r"]):
        code, out, err = mxcli(*arguments, tmp_path / "q")
        assert (code, out) == (4, "")
        assert "already quantized (compressed-tensors)" in err
    assert "quantized (compressed-tensors)" in mxcli("inspect", tmp_path / "q").out
