"""Files that belong to a source are never written to, by any verb and form, with --force or without."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CAPTURES, SAMPLE

from mxcli.files.source import source_of


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory, which is the current one, with a source of every sort."""
    shutil.copytree(SAMPLE, tmp_path / "model")
    shutil.copy(CAPTURES, tmp_path / "steps.safetensors")
    (tmp_path / "rules.toml").write_text('format = "nvfp4"\n')
    (tmp_path / "book.txt").write_text("Once upon a time.\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "report model --json=model/model.safetensors",
        "report model --jsonl=model/model.safetensors",
        "report model --csv model/generation_config.json",
        "report model --markdown model/config.json",
        "report model --html model/config.json",
        "report model --per-block model/model.safetensors",
        "report model --plots model",
        "report model --json=model/../model/mxcli.json",
        "report model/model.safetensors --json=model/generation_config.json",
        "products model steps.safetensors --json=steps.safetensors",
        "products model steps.safetensors --html model/config.json",
        "training model --recipes nvfp4 --captures steps.safetensors --csv steps.safetensors",
        "training model --captures steps.safetensors --plots model",
        "report model --products steps.safetensors --json=steps.safetensors",
        "report model --training nvfp4 --products steps.safetensors --csv steps.safetensors",
        "report model --recipe rules.toml --json=rules.toml",
        "compare model --formats mxfp8 --json=model/config.json",
        "compare model --formats mxfp8 --html model/config.json",
        "recommend model --formats nvfp4,mxfp8 --bits 6 --save-recipe model/config.json",
        "recommend model --formats nvfp4,mxfp8 --bits 6 --captures steps.safetensors --json=steps.safetensors",
        "quantize model --format nvfp4 -o out --save-recipe model/config.json",
        "quantize model --format nvfp4 -o out --captures steps.safetensors --csv steps.safetensors",
        "dequantize model -o out --json=model/config.json",
        "inspect model --json=model/config.json",
        "verify model --json=model/config.json",
        "verify steps.safetensors --against model --json=model/config.json",
        "diff steps.safetensors model --csv model/config.json",
        "diff model steps.safetensors --json=model/config.json",
        "capture model -o out --text book.txt --json=book.txt",
        "capture model -o out --text book.txt --json=model/config.json",
        "merge model --json=model/config.json",
    ],
)
def test_no_form_goes_into_a_source(words: str, home: Path, mxcli: Callable[..., Any]) -> None:
    before = contents(home)
    done = mxcli(*words.split(), "--force")
    assert done.code == 4, done.err
    assert "belongs to the source" in done.err
    assert "the source is never written to." in done.err
    assert contents(home) == before


@pytest.mark.parametrize(
    ("file", "source", "owner"),
    [
        ("model/config.json", "model", "model"),
        ("model/config.json", "model/model.safetensors", "model/model.safetensors"),
        ("model/hf_quant_config.json", "model", "model"),
        ("model/extra.safetensors", "model", "model"),
        ("model/report.json", "model", None),
        ("model/report.json", "model/model.safetensors", None),
        ("model/deep/config.json", "model", "model"),
        ("report.json", "model", None),
        ("steps.safetensors", "steps.safetensors", "steps.safetensors"),
        ("config.json", "steps.safetensors", "steps.safetensors"),
        ("blocks.safetensors", "steps.safetensors", None),
        ("book.txt", "steps.safetensors", None),
        ("link.json", "model", "model"),
        ("model/config.json", "missing", None),
    ],
)
def test_what_belongs_to_a_source(file: str, source: str, owner: str | None, home: Path) -> None:
    (home / "link.json").symlink_to("model/config.json")
    assert source_of(Path(file), [source]) == owner


def test_a_report_next_to_a_model_may_be_replaced(home: Path, mxcli: Callable[..., Any]) -> None:
    for _ in range(2):
        assert mxcli("inspect", "model", "--json=found.json", "--force").code == 0
        assert mxcli("inspect", "steps.safetensors", "--json=more.json", "--force").code == 0


@pytest.mark.parametrize(("form", "at"), [("--html", "page.html"), ("--plots", "plots"), ("--json=", "report.json")])
def test_a_disk_that_cannot_be_written(
    form: str, at: str, home: Path, mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("write_text", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    words = [form + at] if form.endswith("=") else [form, at]
    done = mxcli("report", "model", "--include", "*.layers.0.*.q_proj", "--exclude", "*.layers.0.mlp.*", *words)
    assert done.code == 6
    assert f"{at}: cannot be written: Read-only file system." in done.err
