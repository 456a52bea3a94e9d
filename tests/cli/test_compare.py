"""`mxcli compare`: its forms, its plan, its refusals."""

from __future__ import annotations

import csv
import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CAPTURES, SAMPLE, environment, strict_json
from odd_files import many_tensors, odd_checkpoint, one_tensor
from safetensors.numpy import save_file

WORDS = ("compare", SAMPLE, "--formats", "mxfp4,nvfp4", "--scale-roundings", "floor,rceil")
NAMES = ["mxfp4_e2m1 floor", "mxfp4_e2m1 rceil", "nvfp4 te"]


def test_the_numbers_are_those_of_reports(mxcli: Callable[..., Any]) -> None:
    compared = strict_json(mxcli(*WORDS, "--json").out)
    assert compared["schema"] == "mxcli.compare/1"
    for name in NAMES:
        format, rule = name.split(" ")
        alone = strict_json(mxcli("report", SAMPLE, "--format", format, "--scale-rounding", rule, "--json").out)
        for layer, reported in zip(compared["layers"], alone["layers"], strict=True):
            own = {key: value for key, value in layer["metrics"][name].items() if not key.endswith("_delta")}
            assert own == {key: reported[key] for key in own}
        total = {key: value for key, value in compared["totals"][name].items() if not key.endswith("_delta")}
        assert total == alone["totals"]
    assert len(compared["kept"]) == 11


def test_floor_saturates_957_and_rceil_does_not(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = ("compare", one_tensor(tmp_path, 957.0), "--formats", "mxfp8", "--scale-roundings", "floor,rceil")
    compared = strict_json(mxcli(*words, "--json").out)
    floor, rceil = compared["layers"][0]["metrics"].values()
    assert (floor["saturated"], rceil["saturated"]) == (1, 0)
    assert (floor["max_rel_error"], rceil["max_rel_error"]) == (pytest.approx(61 / 957), pytest.approx(3 / 957))
    assert compared["layers"][0]["best"] == "mxfp8_e4m3 rceil"
    assert compared["conclusion"] == [
        "Against floor, rceil removes all saturation (100 % of blocks) and gains 26.2 dB on the only tensor."
    ]


def test_captures_are_distinguished_by_role(mxcli: Callable[..., Any]) -> None:
    words = ("compare", CAPTURES, "--formats", "mxfp4,nvfp4", "--json")
    assert set(strict_json(mxcli(*words).out)["groups"]) == {"activation", "gradient"}
    by_layer = strict_json(mxcli(*words, "--by", "layer").out)["groups"]
    assert list(by_layer)[:3] == ["outside layers activation", "outside layers gradient", "model.layers.0 activation"]
    gradients = strict_json(mxcli(*words, "--include", "@gradient", "--by", "kind").out)["groups"]
    assert "mlp.down_proj" in gradients


def test_forms_go_to_files_next_to_the_table(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    files = {form: tmp_path / f"r.{form}" for form in ("json", "jsonl", "csv")}
    table = mxcli(*WORDS).out
    options = [word for form, file in files.items() for word in (f"--{form}", str(file))]
    assert mxcli(*WORDS, *options).out == table
    assert files["json"].read_text() == mxcli(*WORDS, "--json").out
    assert files["jsonl"].read_text() == mxcli(*WORDS, "--jsonl").out
    assert files["csv"].read_text() == mxcli(*WORDS, "--csv", "-").out
    content = strict_json(files["json"].read_text())
    lines = [strict_json(line) for line in files["jsonl"].read_text().splitlines()]
    assert lines == [*content["layers"], *content["kept"]]
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert len(rows) == 3 * 28 + 11
    assert {row["combination"] for row in rows} == {*NAMES, ""}


def test_nothing_odd_breaks_a_comparison(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = odd_checkpoint(tmp_path)
    code, out, err = mxcli("compare", source, "--formats", "mxfp8,nvfp4", "--json", "-v")
    assert code == 0
    compared = strict_json(out)
    assert compared["counts"] == {"quantized": 6, "padded": 1, "kept": 2, "tied": 0}
    best = {layer["name"]: layer["best"] for layer in compared["layers"]}
    assert best["zero.weight"] == "nvfp4 te"
    assert best["all_nan.weight"] is None
    assert err.count("note: 1 tensor ('zero.weight') of zeros only.") == 1
    assert "norm.weight: kept: norm" in err
    table = mxcli("compare", source, "--formats", "mxfp8,nvfp4").out
    assert "evil\\x1b[31m.weight" in table
    assert "non-finite input: 34 elements" in table
    code, out, err = mxcli("compare", source, "--formats", "mxfp8,nvfp4", "--nonfinite", "error")
    assert (code, out) == (4, "")
    assert err.count("values are NaN or infinite") == 2


def test_notes_are_not_repeated_and_can_be_silenced(mxcli: Callable[..., Any]) -> None:
    err = mxcli(*WORDS).err
    assert err.count("note: nvfp4 takes none of floor, rceil: it is compared under te, its own.") == 1
    assert err.count("8 fused sets") == 1
    assert mxcli(*WORDS, "-q").err == ""


def test_a_plan(mxcli: Callable[..., Any]) -> None:
    out = mxcli(*WORDS, "--dry-run", "--device", "cpu", "--max-memory", "1G").out
    assert "\nwould measure 28 tensors under 3 combinations: 84 measurements, 1.57 MB read once\n" in out
    assert "peak memory about 67.4 MB of 1.07 GB allowed (--max-memory)\n" in out
    assert "\nwould compute on cpu\n" in out
    plan = strict_json(mxcli(*WORDS, "--dry-run", "--json").out)
    assert plan["schema"] == "mxcli.compare.plan/1"
    assert (plan["measurements"], plan["bytes_read"]) == (84, 1_572_864)
    assert [each["quantized_bytes"] for each in plan["combinations"][:2]] == [417_792, 417_792]
    assert len(plan["tensors"]) == 39
    assert plan["counts"] == strict_json(mxcli(*WORDS, "--json").out)["counts"]


def test_a_device_changes_nothing(mxcli: Callable[..., Any]) -> None:
    out = mxcli(*WORDS, "--json").out
    assert mxcli(*WORDS, "--json", "--device", "cpu", "--threads", "1", "--max-memory", "1G").out == out


def test_refusals_of_all_formats_come_at_once(mxcli: Callable[..., Any]) -> None:
    words = ("compare", SAMPLE, "--formats", "e4m3:e8m0:1x100,e4m3:e8m0:1x48", "--on-indivisible", "error")
    code, out, err = mxcli(*words)
    assert (code, out) == (4, "")
    assert "52 problems" in err


@pytest.mark.parametrize("width", [48, 80])
def test_lines_follow_the_width(mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    unlimited = mxcli(*WORDS).out
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, mxcli(*WORDS, "--by", "kind").out.splitlines())) <= width
    assert mxcli(*WORDS, "--wide").out == unlimited


@pytest.mark.slow
def test_an_interrupted_comparison_still_has_its_lines(tmp_path: Path) -> None:
    source = many_tensors(tmp_path, 10_000)
    words = [sys.executable, "-m", "mxcli", "compare", str(source), "--formats", "mxfp8,nvfp4", "--jsonl"]
    with subprocess.Popen(
        words,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, such as a test run may be, hands on that interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        time.sleep(0.3)  # by now it waits for a reader, in the middle of a line
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert strict_json(first)["best"] == "nvfp4 te"
    assert all(strict_json(line) for line in out.splitlines())
    assert len(out.splitlines()) < 9_000
    assert err.endswith("interrupted\n")


def test_an_interruption_leaves_the_table(mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from mxcli.backends.cpu import Cpu

    calls, quantize = iter(range(1000)), Cpu.quantize

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 20:
            raise KeyboardInterrupt
        return quantize(*arguments, **options)

    monkeypatch.setattr(Cpu, "quantize", interrupted)
    code, out, err = mxcli(*WORDS, "--device", "cpu", "-q", "--fail-on", "sqnr_db>0")
    assert code == 130
    assert "\nall 4 tensors" in out
    assert "interrupted: 24 tensors not measured" in out
    assert err == "interrupted\n"


RULES = """format = "nvfp4"
as = "ocp"
on_indivisible = "keep"
exclude = "*.v_proj"

[[override]]
select = "*.down_proj"
keep = true
"""


def test_a_recipe_says_all_but_the_formats(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(RULES)
    words = ("compare", SAMPLE, "--formats", "mxfp4,mxfp8", "--recipe", recipe, "--json")
    compared = strict_json(mxcli(*words).out)
    assert [each["name"] for each in compared["combinations"]] == ["mxfp4_e2m1 floor", "mxfp8_e4m3 floor"]
    assert compared["options"]["on_indivisible"] == "keep"
    assert compared["options"]["overrides"] == [{"selector": "*.down_proj", "keep": True}]
    assert len(compared["layers"]) == 20
    kept = {layer["name"]: layer["reason"] for layer in compared["kept"]}
    assert kept["model.layers.0.mlp.down_proj.weight"].startswith("kept")
    typed = strict_json(mxcli(*words, "--as", "mxcli", "--scale-roundings", "ceil", "--include", "*.v_proj").out)
    assert [each["name"] for each in typed["combinations"]] == ["mxfp4_e2m1 ceil", "mxfp8_e4m3 ceil"]
    assert len(typed["layers"]) == 24
    recipe.write_text('scale_rounding = "even"\nrounding = "half-away"\n')
    compared = strict_json(mxcli(*words).out)
    assert {(each["scale_rounding"], each["rounding"]) for each in compared["combinations"]} == {("even", "half-away")}


def test_a_recipe_that_fixes_formats_of_tensors_cannot_be_compared(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(RULES + '\n[[override]]\nselect = "*.o_proj"\nformat = "mxfp8"\n')
    for verb, more in (("compare", ()), ("recommend", ("--bits", "6"))):
        code, out, err = mxcli(verb, SAMPLE, "--formats", "mxfp4,mxfp8", "--recipe", recipe, *more)
        assert (code, out) == (2, "")
        assert f"{recipe}:11: the override of *.o_proj names a format or a rule" in err
    recipe.write_text('exclude = "*.qproj"\n')
    code, _, err = mxcli("compare", SAMPLE, "--formats", "mxfp4,mxfp8", "--recipe", recipe)
    assert code == 2
    assert f"{recipe}:1: *.qproj: matches no tensor" in err


def test_the_page_shows_the_worst_blocks_of_each_combination(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    words = (*WORDS, "--include", "*.layers.0.mlp", "--html", page, "--top", "0")
    assert mxcli(*words).code == 0
    text = page.read_text(encoding="utf-8")
    titles = [part.partition("</bdi>")[0] for part in text.split("<h3><bdi>")[1:]]
    shown = [title for title in titles if "model.layers.0.mlp" in title]
    assert [title.partition(":")[0] for title in shown] == [name for name in NAMES for _ in range(2)]
    assert "with the lowest SQNR, under each recipe: every element" in text
    assert text.count("<summary>Values and codes</summary>") == 6
    assert len(text) < 200_000


def test_axes_stand_side_by_side(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = ("compare", CAPTURES, "--formats", "nvfp4", "--axis", "both")
    code, out, _ = mxcli(*words, "--top", "2")
    assert code == 0
    assert re.search(r"-- row -+ +-+ column --", out)
    assert "\nnvfp4 te column " in out
    assert "\ngradient: blocks along columns have 20.71 dB SQNR, 0.16 dB more than along rows (20.55 dB).\n" in out
    compared = strict_json(mxcli(*words, "--json", "--csv", tmp_path / "c.csv").out)
    assert [each["axis"] for each in compared["combinations"]] == ["row", "column"]
    assert compared["options"]["axis"] == "both"
    for axis in ("row", "column"):
        alone = strict_json(mxcli("report", CAPTURES, "--format", "nvfp4", "--axis", axis, "--json").out)
        total = compared["totals"][f"nvfp4 te {axis}"]
        assert {key: total[key] for key in alone["totals"]} == alone["totals"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text())))
    assert [row["axis"] for row in rows[:4]] == ["row", "column"] * 2
    code, _, err = mxcli(*words[:-1], "rows")
    assert code == 2
    assert "unknown value 'rows': --axis takes row, column" in err


def test_roundings_and_transforms(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = (
        "compare",
        CAPTURES,
        "--formats",
        "nvfp4",
        "--hadamards",
        "none,16",
        "--include",
        "@gradient",
        "--top",
        "0",
    )
    out = mxcli(*words, "--roundings", "nearest-even,stochastic", "--seed", "3").out
    assert "; element rounding nearest-even, stochastic; Hadamard transform none, 16; as mxcli\n" in out
    assert "\nnvfp4 te stochastic hadamard-16 " in out
    assert "stochastic rounding is for sums: its errors have no bias" in out
    compared = strict_json(mxcli(*words, "--json").out)
    plain, transformed = compared["totals"].values()
    assert transformed["underflowed_percent"] < plain["underflowed_percent"] / 2
    assert transformed["block_dynamic_range"]["p99"] < plain["block_dynamic_range"]["p99"]
    assert [each.get("hadamard", {}).get("size") for each in compared["combinations"]] == [None, 16]
    recipe = tmp_path / "r.toml"
    recipe.write_text("hadamard = 32\nhadamard_seed = 5\n")
    compared = strict_json(mxcli(*words[:4], "--recipe", recipe, "--axis", "both", "--json").out)
    assert [(each["hadamard"]["size"], each["hadamard"]["seed"]) for each in compared["combinations"]] == [(32, 5)] * 2
    for more, told in (
        (("--seed", "1"), "--seed 1 has no effect: nothing is random"),
        (("--hadamard-seed", "1"), "add --hadamards none,16"),
    ):
        code, _, err = mxcli("compare", CAPTURES, "--formats", "nvfp4,mxfp4", *more)
        assert code == 2
        assert told in err


def test_a_length_that_a_transform_does_not_divide_is_refused_by_name(
    mxcli: Callable[..., Any], tmp_path: Path
) -> None:
    x = np.ones((4, 48), np.float32)
    save_file({"a.weight": x}, tmp_path / "x.safetensors")
    words = ("compare", tmp_path / "x.safetensors", "--formats", "nvfp4", "--hadamards")
    assert mxcli(*words, "none,16").code == 0
    code, _, err = mxcli(*words, "none,32")
    assert code == 4
    assert "a.weight" in err
    assert "is not a multiple of 32 (Hadamard transform)" in err
