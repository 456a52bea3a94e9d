"""Narrow screens, plain locales and readers that stop reading."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, environment
from odd_files import many_tensors, odd_checkpoint

from mxcli.output.screen import cells

SEVERAL = "mxfp4,nvfp4,fp8_e4m3_128x128,e2m1:e4m3:1x32:fp32"
COMMANDS = {
    "report": ("--top", 3),
    "report --dry-run": ("--dry-run",),
    "compare": ("--formats", "mxfp8", "--by", "kind", "--top", 3),
    "compare several": ("--formats", SEVERAL, "--scale-roundings", "floor,amax-bf16-scale", "--top", 3),
    "compare --dry-run": ("--formats", SEVERAL, "--dry-run"),
    "recommend": ("--formats", SEVERAL, "--bits", 9, "--top", 3),
    "recommend --dry-run": ("--formats", SEVERAL, "--bits", 9, "--dry-run"),
}


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("width", [20, 40])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_longer_than_the_screen_is_wide(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, width: int, locale: str
) -> None:
    """But for a single word, which nothing may break."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.setenv("NO_COLOR", "1")
    verb, *_ = command.split()
    for source in (SAMPLE, odd_checkpoint(tmp_path)):
        code, out, err = mxcli(verb, source, *COMMANDS[command], "-q", "--nonfinite", "saturate")
        assert (code, err) == (0, "")
        assert [line for line in out.splitlines() if cells(line) > width and len(line.split()) > 1] == []
        assert "\x1b" not in out
        assert out.isascii() or locale != "C"


def test_the_last_line_of_a_recommendation_folds_too(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    saved = tmp_path / "r.toml"
    out = mxcli("recommend", SAMPLE, "--formats", "mxfp8", "--bits", 9, "--save-recipe", saved, "-q").out
    assert out.splitlines()[-2:] == ["written:", str(saved)]


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes as POSIX has them")
@pytest.mark.parametrize(
    "words",
    [
        ("report", "--jsonl"),
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                ("report", "--top", "9999"),
                ("report", "--csv", "-"),
                ("compare", "--formats", "mxfp8,mxfp4", "--jsonl"),
                ("recommend", "--formats", "mxfp8,mxfp4", "--bits", "6", "--jsonl"),
            )
        ),
    ],
)
def test_a_reader_that_stops_after_a_line_ends_it_silently(tmp_path: Path, words: tuple[str, ...]) -> None:
    verb, *options = words
    line = [sys.executable, "-m", "mxcli", verb, str(many_tensors(tmp_path, 600)), *options]
    with subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode in (0, 141)
    assert "Traceback" not in err
    assert "rror" not in err


def test_csv_is_not_spelled_for_a_locale(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """What people read is spelled in ASCII where the locale is C; what programs read is not."""
    words = [sys.executable, "-m", "mxcli", "report", str(odd_checkpoint(tmp_path)), "-q"]
    plain = environment(LC_ALL="C")
    table, rows = (
        subprocess.run([*words, *more], env=plain, capture_output=True, check=True).stdout
        for more in ((), ("--csv", "-"))
    )
    assert rb"k\xf6.\u5c42.weight" in table
    assert "kö.层.weight" in rows.decode("utf-8")
