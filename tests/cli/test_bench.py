"""`mxcli bench quantize` in its forms."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import strict_json

from mxcli.output.bench import RECORD_NAMES

QUICK = ("bench", "quantize", "--size", 256, "--rounds", 1)


def test_json_has_settings_checks_and_flat_rows(mxcli: Callable[..., Any]) -> None:
    done = mxcli(*QUICK, "--format", "mxfp8,nvfp4", "--threads", "1,2", "--json")
    assert (done.code, done.err) == (0, "")
    report = strict_json(done.out)
    assert report["schema"] == "mxcli.bench.quantize/1"
    assert (report["shape"], report["dtype"], report["rounds"]) == ([256, 256], "BF16", 1)
    assert len(report["checks"]) == 2
    assert [(row["name"], row["format"], row["threads"]) for row in report["rows"]][:3] == [
        ("copy", None, 1),
        ("mxcli", "mxfp8_e4m3", 1),
        ("mxcli", "mxfp8_e4m3", 1),
    ]
    assert all(tuple(row) == RECORD_NAMES for row in report["rows"])


def test_the_table_says_what_was_checked(mxcli: Callable[..., Any]) -> None:
    lines = mxcli(*QUICK, "--format", "mxfp4").out.splitlines()
    assert "BF16 256x256, normal, standard deviation 0.02, seed 0" in lines[0]
    assert lines[2].startswith("checked: mxfp4_e2m1 rceil: same bytes and statistics at 1 and 2 threads")
    assert [line.split()[0] for line in lines[-3:]] == ["copy", "mxcli", "mxcli"]


def test_csv_has_the_names_of_the_json(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "bench.csv"
    assert mxcli(*QUICK, "--format", "mxfp8", "--csv", file).code == 0
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [row["name"] for row in rows] == ["copy", "mxcli", "mxcli"]
    assert tuple(rows[0]) == RECORD_NAMES
    assert mxcli(*QUICK, "--csv", file).code == 4


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--format", "mxfp9"), 2, "Did you mean mxfp8"),
        (("--threads", "0"), 2, "--threads 0 is not a list of positive numbers, such as 1,2"),
        (("--threads", "two"), 2, "--threads two is not a list of positive numbers"),
        (("--size", "100"), 2, "--size 100 is not a multiple of 128"),
        (("--peers", "torcha"), 2, "Did you mean torchao"),
        (("--json", "--csv", "-"), 2, "--json and --csv both write to stdout"),
        (("--device", "gpu"), 2, "--device takes auto, cpu, cuda or cuda:N"),
    ],
)
def test_refusals(mxcli: Callable[..., Any], words: tuple[str, ...], code: int, sentence: str) -> None:
    done = mxcli("bench", "quantize", *words)
    assert (done.code, done.out) == (code, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_a_gpu_that_is_not_there(mxcli: Callable[..., Any]) -> None:
    done = mxcli("bench", "quantize", "--device", "cuda:99")
    assert (done.code, done.out) == (6, "")
    assert done.err.startswith("error: --device cuda:99: ")
    assert "--device cpu" in done.err
