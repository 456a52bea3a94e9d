"""`--html` and `--plots` on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE

FEW = ("report", SAMPLE, "--format", "mxfp4", "--include", "*.layers.0.mlp", "--device", "cpu")


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def test_a_page_next_to_the_table(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, _ = mxcli(*FEW, "--html", page, "--threads", "1")
    assert code == 0
    assert "all 3 tensors" in out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>\n")
    data = data_of(page)
    assert data["rows"] == 39
    assert [key for key in data["charts"] if key.startswith("worst_block")] == [f"worst_block_{n}" for n in (1, 2, 3)]
    assert "--threads" not in text, "the command says what to repeat, not where"
    assert "model.safetensors" in text
    again = page.read_bytes()
    assert mxcli(*FEW, "--html", page, "--force").code == 0
    assert page.read_bytes().replace(b" --force", b"") == again


def test_plots_in_a_directory(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    assert mxcli(*FEW, "--plots", folder).code == 0
    names = {file.name for file in folder.iterdir()}
    assert {"sqnr_by_layer.png", "sqnr_by_layer.svg", "block_sqnr.svg", "worst_block_3.png"} <= names
    assert not [name for name in names if name.endswith(".partial")]
    (folder / "sqnr_by_layer.png").write_bytes(b"old")
    assert mxcli(*FEW, "--plots", folder, "--force").code == 0
    assert (folder / "sqnr_by_layer.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--html", "there.html"), 4, "there.html: exists; use --force"),
        (("--html", "-"), 2, "--html takes a file"),
        (("--html", "no/such.html"), 3, "no/such.html: its directory does not exist"),
        (("--plots", "full"), 4, "full: not empty; use --force"),
        (("--plots", "there.html"), 4, "there.html: a file; --plots takes a directory"),
        (("--plots", "no/such"), 3, "no/such: its directory does not exist"),
    ],
)
def test_refusals_come_before_any_work(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, code: int, told: str
) -> None:
    (tmp_path / "there.html").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    outcome = mxcli("report", "no such source", *arguments)
    assert outcome.code == code
    assert told in outcome.err
    assert (tmp_path / "there.html").read_text() == "mine"
