"""--for and --tp of quantize and verify, and the tables of engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, strict_json

from mxcli.files.layouts import LAYOUTS
from mxcli.output.schema import schema

Mxcli = Callable[..., Any]


def test_quantize_writes_a_layout_that_the_engines_load(mxcli: Mxcli, tmp_path: Path) -> None:
    code, _, err = mxcli("quantize", SAMPLE, "--format", "mxfp6", "--for", "vllm", "-o", tmp_path / "q")
    assert code == 0
    assert "refuses" not in err
    record = strict_json((tmp_path / "q" / "mxcli.json").read_text())
    assert (record["layout"], record["engines"], record["options"]["layout"]) == ("quark", ["vllm"], "quark")
    assert mxcli("verify", tmp_path / "q", "--for", "vllm,transformers")[0] == 0
    code, out, err = mxcli("verify", tmp_path / "q", "--for", "sglang")
    assert code == 5
    assert err == f"error: {tmp_path / 'q'}: 1 problem (named_loader 1)\n"
    assert "SGLang 0.5.23 refuses this (read, not run)" in out


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--for", "vlm"], 2, "error: --for: unknown engine 'vlm': known are vllm, "),
        (["--for", "vllm,,"], 2, "error: --for: unknown engine '': known are vllm, "),
        (["--for", "llama.cpp,vllm"], 4, "no layout of mxfp8_e4m3 is loaded by llama.cpp and vLLM, as far as"),
        (["--for", "sglang", "--layout", "ct"], 4, "error: SGLang 0.5.23 refuses compressed-tensors of this model: "),
        (["--tp", "3"], 4, "error: Not loaded by vLLM and SGLang: 10 problems."),
        (["--tp", "0"], 2, "invalid value for '--tp': Input should be greater than or equal to 1"),
    ],
)
def test_refusals_come_before_anything_is_written(
    mxcli: Mxcli, tmp_path: Path, words: list[str], code: int, sentence: str
) -> None:
    out = mxcli("quantize", SAMPLE, "--format", "mxfp8", *words, "-o", tmp_path / "q")
    assert (out.code, sentence in out.err) == (code, True), out.err
    assert not (tmp_path / "q").exists()
    assert mxcli("quantize", SAMPLE, "--format", "mxfp8", *words, "--dry-run").code == code


def test_a_dry_run_lists_the_engines(mxcli: Mxcli) -> None:
    code, out, _ = mxcli("quantize", SAMPLE, "--format", "mxfp8", "--dry-run")
    assert code == 0
    lines = out.splitlines()
    assert "vLLM 0.32.0 loads this (run 2026-11)" in lines
    assert "SGLang 0.5.23 refuses this (read, not run): mxfp8_e4m3: it has no scheme for this format" in lines
    code, out, _ = mxcli("quantize", SAMPLE, "--format", "mxfp8", "--for", "vllm,transformers", "--dry-run", "--json")
    assert code == 0
    record = strict_json(out)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(record, schema("quantize.plan"))
    assert record["loaders"][:3] == [
        {"engine": "vllm", "version": "0.32.0", "outcome": "loads", "reason": "", "evidence": "run 2026-11"},
        {
            "engine": "sglang",
            "version": "0.5.23",
            "outcome": "refuses",
            "reason": "mxfp8_e4m3: it has no scheme for this format",
            "evidence": "read, not run",
        },
        {"engine": "transformers", "version": "5.24.0", "outcome": "loads", "reason": "", "evidence": "run 2026-11"},
    ]


def test_verify_lists_the_engines(mxcli: Mxcli, tmp_path: Path) -> None:
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q").code == 0
    code, out, _ = mxcli("verify", tmp_path / "q")
    assert code == 0
    assert out.splitlines()[3:6] == [
        "vLLM 0.32.0 loads this (run 2026-11)",
        "SGLang 0.5.23 loads this (read, not run)",
        "transformers 5.24.0 loads this (run 2026-11)",
    ]
    record = strict_json(mxcli("verify", tmp_path / "q", "--json").out)
    pytest.importorskip("jsonschema").validate(record, schema("verify"))
    assert [(each["engine"], each["outcome"]) for each in record["loaders"]][:3] == [
        ("vllm", "loads"),
        ("sglang", "loads"),
        ("transformers", "loads"),
    ]


def test_explain_prints_the_rules_of_a_layout(mxcli: Mxcli) -> None:
    code, out, _ = mxcli("explain", "fp8")
    assert code == 0
    words = " ".join(out.split())
    assert "transformers 5.24.0 loads fp8_e4m3_128x128, e4m3:e8m0:128x128, mxfp8_e4m3, fp8_e4m3 (run 2026-11)" in words
    assert "vLLM 0.32.0 refuses mxfp8_e4m3: it takes the quant_method mxfp8 for ModelOpt's" in words
    assert "mxfp4" not in out


@pytest.mark.parametrize("table", ["layouts", "loaders"])
def test_explain_lists_every_layout(mxcli: Mxcli, table: str) -> None:
    code, out, _ = mxcli("explain", table)
    assert code == 0
    assert [name for name in LAYOUTS if name not in out] == ([] if table == "layouts" else ["mxcli"])
    assert "vLLM 0.32.0" in out
    assert "llama.cpp b11549" in out
