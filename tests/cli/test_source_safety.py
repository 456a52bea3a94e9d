"""Files that belong to a source are never written to, by any verb and form, with --force or without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CAPTURES, SAMPLE, environment, strict_json

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


FORMS = ("--json=r.json", "--jsonl=r.jsonl", "--csv=r.csv", "--markdown=r.md", "--html=r.html")
FEW = ("--include", "*.layers.0.*.q_proj", "--exclude", "*.layers.0.mlp.*")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("form", [*FORMS, "--per-block=r.safetensors", "--plots=r"])
def test_a_file_larger_than_the_limit_is_a_fault_of_the_environment(form: str, home: Path) -> None:
    words = [sys.executable, "-m", "mxcli", "report", "model", *FEW, form]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words],
        env=environment(), cwd=home, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 6
    assert "cannot be written: File too large." in done.stderr
    assert [path.name for path in home.rglob("*") if "r." in path.name or path.suffix == ".partial"] == []


@pytest.mark.parametrize("form", [*FORMS, "--per-block=r.safetensors"])
def test_temporary_names_of_others_are_not_followed_or_replaced(
    form: str, home: Path, mxcli: Callable[..., Any]
) -> None:
    name = form.partition("=")[2]
    (home / f"{name}.partial").symlink_to("model/model.safetensors")
    before = contents(home / "model")
    assert mxcli("report", "model", *FEW, form).code == 0
    assert contents(home / "model") == before
    assert (home / f"{name}.partial").is_symlink()
    assert sorted(path.name for path in home.glob(".mxcli-*")) == []


def test_temporary_names_of_other_verbs(home: Path, mxcli: Callable[..., Any]) -> None:
    names = (
        "r.toml",
        "compressed-tensors.json",
        "llm-compressor.yaml",
        "modelopt.yaml",
        "auto-round.json",
        "sizes.png",
    )
    for name in names:
        (home / f"{name}.partial").symlink_to("model/model.safetensors")
    before = contents(home / "model")
    words = ("recommend", "model", "--formats", "nvfp4", "--bits", "6", "--save-recipe", "r.toml", "--configs", ".")
    assert mxcli(*words).code == 0
    assert contents(home / "model") == before


def test_a_link_is_replaced_and_its_target_is_not(home: Path, mxcli: Callable[..., Any]) -> None:
    (home / "elsewhere.json").write_text("mine")
    (home / "there.json").symlink_to("elsewhere.json")
    (home / "nowhere.json").symlink_to("missing.json")
    for name in ("there.json", "nowhere.json"):
        refused = mxcli("inspect", "model", f"--json={name}")
        assert (refused.code, "exists; use --force" in refused.err) == (4, True)
        assert mxcli("inspect", "model", f"--json={name}", "--force").code == 0
        assert not (home / name).is_symlink()
    assert (home / "elsewhere.json").read_text() == "mine"
    assert not (home / "missing.json").exists()


def test_other_names_of_the_source(home: Path, mxcli: Callable[..., Any]) -> None:
    os.link("model/model.safetensors", "hard.json")
    os.link("model/tokenizer.json", "words.json") if Path("model/tokenizer.json").exists() else None
    Path("soft.json").symlink_to("model/model.safetensors")
    Path("CKPT.partial").symlink_to("model/model.safetensors")
    before = contents(home / "model")
    for name in ("hard.json", "soft.json", "model/CONFIG.JSON", "model/New.SafeTensors"):
        done = mxcli("report", "model", f"--json={name}", "--force")
        assert (done.code, "belongs to the source" in done.err) == (4, True), name
    shutil.copy("model/model.safetensors", "ckpt.partial")
    source = Path("ckpt.partial").read_bytes()
    assert mxcli("report", "ckpt.partial", *FEW, "--html", "ckpt").code == 0
    assert Path("ckpt.partial").read_bytes() == source
    assert contents(home / "model") == before


def test_two_outputs_whose_names_differ_by_case(home: Path, mxcli: Callable[..., Any]) -> None:
    done = mxcli("report", "model", "--json=r.json", "--csv", "R.JSON")
    assert (done.code, "is named for two outputs" in done.err) == (2, True)
    done = mxcli("report", "model", "--json=r.json", "--html", "model/../r.json")
    assert (done.code, "is named for two outputs" in done.err) == (2, True)


def test_all_outputs_are_refused_at_once(home: Path, mxcli: Callable[..., Any]) -> None:
    done = mxcli(
        "report", "model", "--json=missing/r.json", "--csv", "book.txt", "--html", "model/config.json",
        "--markdown", "m" * 256, "--plots", "book.txt", "--per-block", "model",
    )  # fmt: skip
    assert done.code == 3
    assert done.err.splitlines() == [
        "error: outputs: 6 problems.",
        "  missing/r.json: its directory does not exist; create it first.",
        "  book.txt: exists; use --force to replace it, or another name.",
        f"  {'m' * 100}…{'m' * 100}: a name of 256 bytes; the most there is 255.",
        "  model/config.json: belongs to the source model; give another name, the source is never written to.",
        "  model: belongs to the source model; give another name, the source is never written to.",
        "  book.txt: a file; --plots takes a directory.",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_pipes_and_descriptors_are_written_into(home: Path) -> None:
    os.mkfifo("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()), daemon=True)
    reader.start()
    words = f"{sys.executable} -m mxcli inspect model"
    script = f"{words} --json=pipe >/dev/null && {words} --json=/dev/stdout | tail -n +1 >out && exec 3>three && "
    script += f"{words} --json=/dev/fd/3 >/dev/null && {words} --json=/dev/null >/dev/null"
    done = subprocess.run(
        ["sh", "-c", script], env=environment(), cwd=home, capture_output=True, text=True, check=False, timeout=60
    )
    reader.join(20)
    assert (done.returncode, done.stderr) == (0, "")
    assert strict_json(read[0])["schema"] == "mxcli.inspect/1"
    assert '"schema": "mxcli.inspect/1"' in (home / "out").read_text()
    assert strict_json((home / "three").read_text())["schema"] == "mxcli.inspect/1"
    assert Path("/dev/null").is_char_device()
    assert (home / "pipe").is_fifo()


def test_runs_that_write_one_file_do_not_tear_it(home: Path) -> None:
    words = [sys.executable, "-m", "mxcli", "inspect", "model", "--json=r.json", "--force"]
    runs = [
        subprocess.Popen(words, env=environment(), cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert strict_json((home / "r.json").read_text())["schema"] == "mxcli.inspect/1"


def test_permissions_of_a_file_that_is_replaced_stay(home: Path, mxcli: Callable[..., Any]) -> None:
    (home / "r.json").write_text("{}")
    (home / "r.json").chmod(0o600)
    assert mxcli("inspect", "model", "--json=r.json", "--force").code == 0
    assert (home / "r.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")
def test_names_that_are_not_utf_8(home: Path, mxcli: Callable[..., Any]) -> None:
    odd = os.fsdecode(b"r\xff.json")
    assert mxcli("inspect", "model", f"--json={odd}").code == 0
    assert strict_json((home / odd).read_text())["schema"] == "mxcli.inspect/1"
    assert mxcli("report", "model", *FEW, "--html", os.fsdecode(b"r\xff.html"), f"--json={odd}", "--force").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "model", "--format", "nvfp4", "-o", ""),
        ("quantize", "model", "--format", "nvfp4", "--output="),
        ("dequantize", "model", "-o", " "),
        ("capture", "model", "--text", "book.txt", "-o", ""),
        ("report", "model", "--plots", ""),
        ("report", "model", "--html", ""),
        ("report", "model", "--per-block", ""),
        ("recommend", "model", "--formats", "nvfp4", "--bits", "6", "--configs", ""),
        ("quantize", "model", "--format", "nvfp4", "-o", "out", "--save-recipe", ""),
        ("merge", ""),
    ],
)
def test_an_empty_name_is_not_the_current_directory(
    words: tuple[str, ...], home: Path, mxcli: Callable[..., Any]
) -> None:
    before = contents(home)
    done = mxcli(*words)
    assert (done.code, "empty" in done.err) == (2, True), done.err
    assert contents(home) == before


def test_the_home_directory(home: Path, mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "me").mkdir()
    monkeypatch.setenv("HOME", str(home / "me"))
    assert mxcli("inspect", "model", "--json=~/a.json").code == 0
    assert mxcli("inspect", "model", "--json", "~/b.json").code == 0
    assert mxcli("quantize", "model", "--format", "nvfp4", "-o", "~/out", "--save-recipe", "~/r.toml").code == 0
    assert sorted(path.name for path in (home / "me").iterdir()) == ["a.json", "b.json", "out", "r.toml"]
    assert not (home / "~").exists()


@pytest.mark.parametrize("mode", ["--force", "--force --resume", "--force --dry-run"])
@pytest.mark.parametrize(
    "other",
    [
        "--json=out/config.json",
        "--json=./out/../out/mxcli.json",
        "--json=out/model.safetensors",
        "--json=linked/model.safetensors.partial",
        "--save-recipe=out/generation_config.json",
    ],
)
def test_other_files_do_not_replace_those_of_an_output(
    other: str, mode: str, home: Path, mxcli: Callable[..., Any]
) -> None:
    quantize = ("quantize", "model", "--format", "nvfp4", "-o", "out", "-q")
    assert mxcli(*quantize).code == 0
    os.symlink("out", "linked")
    before = contents(home)
    code, _, err = mxcli(*quantize, *mode.split(), other)
    assert code == 4
    assert "is a file of the output out itself; give the other one another name." in err
    assert contents(home) == before


def test_a_report_in_the_folder_of_an_output_is_written(home: Path, mxcli: Callable[..., Any]) -> None:
    quantize = ("quantize", "model", "--format", "nvfp4", "-o", "out", "-q")
    assert mxcli(*quantize).code == 0
    assert mxcli(*quantize, "--resume", "--json=out/report.json").code == 0
    assert strict_json((home / "out" / "report.json").read_text())["schema"] == "mxcli.quantize/1"


@pytest.mark.parametrize("other", ["--json=back/config.json", "--json=back/model.safetensors.partial"])
def test_nor_those_of_other_verbs(other: str, home: Path, mxcli: Callable[..., Any]) -> None:
    assert mxcli("quantize", "model", "--format", "nvfp4", "-o", "out", "-q").code == 0
    assert mxcli("dequantize", "out", "-o", "back", "-q").code == 0
    before = contents(home)
    code, _, err = mxcli("dequantize", "out", "-o", "back", "--force", other)
    assert code == 4
    assert "is a file of the output back itself" in err
    assert contents(home) == before
