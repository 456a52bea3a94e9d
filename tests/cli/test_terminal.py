"""Standard streams that are closed or full, and files that are named twice."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import environment
from safetensors.numpy import save_file

from mxcli.cli.app import run
from mxcli.output.export import csv_text

REPORT = f"{sys.executable} -m mxcli report samples/tiny-llama --top 1"
ROOT = Path(__file__).parents[2]


def shell(command: str) -> tuple[int, str, str]:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        (">&- 2>&-", 6),
        (">/dev/full", 6),
        pytest.param(">&-", 6, marks=pytest.mark.slow),
        *(pytest.param(each, 0, marks=pytest.mark.slow) for each in ("2>&-", "2>/dev/full")),
    ],
)
def test_streams_that_take_nothing(redirection: str, code: int) -> None:
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    returned, _, err = shell(f"{REPORT} {redirection}")
    assert returned == code
    assert "Traceback" not in err
    assert "bug" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    "words", ["report samples/tiny-llama --format mxfp8 -q --json", "inspect samples/tiny-llama --json", "formats"]
)
def test_a_closed_stdout_is_the_environment(words: str) -> None:
    closed = "error: standard output cannot be written: Bad file descriptor.\n"
    assert shell(f"{sys.executable} -m mxcli {words} >&-") == (6, "", closed)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "out"
    assert run(["quantize", str(ROOT / "samples/tiny-llama"), "--format", "mxfp8", "-q", "-o", str(folder)]) == 0
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("form", ["--json", "--csv=-", ""])
def test_verify_with_a_closed_stdout(form: str, quantized: Path) -> None:
    closed = "error: standard output cannot be written: Bad file descriptor.\n"
    assert shell(f"{sys.executable} -m mxcli verify {quantized} {form} -q >&-") == (6, "", closed)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_exit_codes_do_not_depend_on_stderr() -> None:
    assert shell(f"{REPORT} --fail-on 'sqnr_db<1000' 2>&-")[0] == 5
    assert shell(f"{REPORT} --format mxfp9 2>&-")[0] == 2


def test_one_file_for_two_forms(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    done = mxcli("report", "samples/tiny-llama", "--json", file, "--csv", file)
    assert (done.code, file.exists()) == (2, False)
    assert "is named for two outputs" in done.err
    assert mxcli("report", "samples/tiny-llama", "--csv", "").code == 2


def test_what_nothing_can_be_sorted_by(mxcli: Callable[..., Any]) -> None:
    for verb, words in (("compare", ("--formats", "mxfp8")), ("report", ())):
        done = mxcli(verb, "samples/tiny-llama", *words, "--sort", "block_sqnr_histogram")
        assert done.code == 2
        assert "tensors can be ordered by single numbers only" in done.err


def test_a_carriage_return_in_a_name() -> None:
    text = csv_text([{"name": "a\rb", "n": 1}, {"name": "c", "n": 2}], ["name", "n"])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["name", "n"], ["a\rb", "1"], ["c", "2"]]
    assert text.splitlines()[-1] == "c,2"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudoterminal")
def test_control_characters_of_names_do_not_reach_a_terminal(tmp_path: Path) -> None:
    import pty

    file = tmp_path / "x.safetensors"
    save_file({"e\x1b[31mred\x9b31m\u202eabc.weight": np.ones((4, 64), np.float32)}, file)
    forms = ("--csv=-", "--jsonl=-", "--markdown=-", "--json=-")
    program = """
import sys
from mxcli.cli.app import run
for form in sys.argv[2:]:
    print("exit code", run(["report", sys.argv[1], form, "-q"]))
"""
    reading, written = pty.openpty()
    words = [sys.executable, "-c", program, str(file), *forms]
    with subprocess.Popen(words, env=environment(), stdout=written, stderr=subprocess.PIPE) as running:
        os.close(written)
        shown = b""
        with contextlib.suppress(OSError):
            while part := os.read(reading, 1 << 16):
                shown += part
    os.close(reading)
    assert running.returncode == 0
    *texts, rest = shown.decode().split("exit code 0")
    assert (len(texts), rest.strip()) == (len(forms), "")
    for form, text in zip(forms, texts, strict=True):
        assert "abc.weight" in text, form
        assert not {"\x1b", "\x9b", "\u202e"} & set(text), form


def test_control_characters_of_names_are_not_in_pages(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"e\x1b[31mred\x9b31m\u202eabc.weight": np.ones((4, 64), np.float32)}, file)
    assert run(["report", str(file), "--html", str(tmp_path / "r.html"), "-q"]) == 0
    assert not {"\x1b", "\x9b", "\u202e"} & set((tmp_path / "r.html").read_text())
