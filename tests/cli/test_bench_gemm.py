"""`mxcli bench gemm` from the command line, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import strict_json

SMALL = ("bench", "gemm", "--shape", "16x32x64", "--rounds", "1", "--kernel", "fp8-row,mxfp4-as-fp8-row,nvfp4")


def test_a_cpu_shows_errors_and_says_what_a_gpu_would_add(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("bench", "gemm", "--shape", "16x32x64", "--rounds", "1")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if " 16x32x64 " in line}
    assert {"bf16", "fp8-row", "mxfp4-as-fp8-row", "nvfp4-emulated"} <= set(rows)
    assert "mxfp8: needs a GPU of compute capability 10.0 or later; this is the CPU" in out
    assert "MXFP8, MXFP4 and NVFP4 from 10.0" in err


def test_a_product_that_only_a_gpu_has_is_refused_when_requested(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("bench", "gemm", "--kernel", "mxfp8,nvfp4")
    assert (code, out) == (6, "")
    assert "mxfp8: needs a GPU" in err
    assert "nvfp4: needs a GPU" in err


def test_records_have_every_name_and_survive_a_comparison(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    kernels = ("--kernel", "fp8-row,mxfp4-as-fp8-row")
    command = ("bench", "gemm", "--shape", "16x32x64,17x32x60", "--rounds", "1", *kernels)
    record = strict_json(mxcli(*command, "--json").out)
    assert record["schema"] == "mxcli.bench.gemm/1"
    by_name = {(row["kernel"], row["m"]): row for row in record["rows"]}
    assert by_name["fp8-row", 16]["format_a"] == "fp8_e4m3_channel"
    assert by_name["mxfp4-as-fp8-row", 16]["inexact"] == 0
    assert by_name["mxfp4-as-fp8-row", 17]["problem"] == "k 60 is not a multiple of 32"
    assert by_name["bf16", 17]["tflops"] > 0
    for row in record["rows"]:
        if row["tflops"]:
            row["tflops"] *= 1e-6
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    slow.write_text(json.dumps(record))
    assert mxcli(*command, "--compare", slow).code == 0
    for row in record["rows"]:
        if row["tflops"]:
            row["tflops"] *= 1e12
    fast.write_text(json.dumps(record))
    code, _, err = mxcli(*command, "--compare", fast)
    assert code == 5
    assert "slower than in" in err
    assert "bf16 16x32x64 by 100.0 %" in err


def test_csv_and_a_picture(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    out = mxcli("bench", "gemm", "--shape", "16x32x64", "--rounds", "1", "--kernel", "fp8-row", "--csv", "-").out
    assert out.splitlines()[0].startswith("kernel,format_a,format_b,m,n,k,pass,layer,layers,tflops,speedup")
    assert len(out.splitlines()) == 3
    plot = tmp_path / "rates.svg"
    assert mxcli(*SMALL[:-2], "--kernel", "fp8-row", "--plot", plot).code == 0
    assert plot.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--shape", "16x16"), 2, "a shape is MxNxK"),
        (("--vs", "fp8-row", "--kernel", "fp8-tensor"), 2, "is not one of the products"),
        (("--captures", "x"), 2, "--captures needs a model: name it with --from"),
        (("--plot", "x.pdf"), 2, "must end in .png or .svg"),
        (("--rounds", "0"), 2, "not a positive number"),
        (("--data", "gaussian"), 2, "unknown data 'gaussian'"),
        (("--from", "samples/tiny-llama", "--tokens", "0"), 2, "not a list of positive numbers"),
        (("--shapes", "nowhere.csv"), 3, "cannot be read as CSV"),
        (("--shape", "16x16x32", "--rounds", "1", "--kernel", "fp8-row", "--compare", "README.md"), 3, "README.md"),
        (("--device", "cuda"), 6, "--device cuda"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(
    mxcli: Callable[..., Any], arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, _, err = mxcli("bench", "gemm", *arguments)
    assert found == code
    assert words in err
    assert "Traceback" not in err


def test_constant_operands_are_warned_of(mxcli: Callable[..., Any]) -> None:
    err = mxcli("bench", "gemm", "--shape", "16x32x64", "--rounds", "1", "--kernel", "fp8-row", "--data", "ones").err
    assert "--data ones: constant operands draw less power and run faster than a model's" in err
