"""`--markdown` of report and compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_report_and_compare_have_it(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "card.md"
    done = mxcli("report", "samples/tiny-llama", "--format", "mxfp4", "--top", 2, "--markdown", file)
    assert done.code == 0
    assert done.out.startswith("samples/tiny-llama")
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [line.count("|") for line in lines if line.startswith("|")] == [11] * 5
    assert lines[-2] == "2 of 28 tensors shown, worst sqnr_db first  "
    assert mxcli("report", "samples/tiny-llama", "--markdown", file).code == 4
    done = mxcli("compare", "samples/tiny-llama", "--formats", "mxfp8,mxfp4", "--top", 1, "--markdown", "-")
    assert done.code == 0
    assert [line[:9] for line in done.out.splitlines() if line.startswith("| ")][:2] == ["| tensor ", "| --- | -"]
    assert mxcli("report", "samples/tiny-llama", "--markdown", "-", "--json").code == 2
