"""`--fail-on`: the report as ever, then exit code 5 and every offender on stderr."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_line import SAMPLE
from odd_files import odd_checkpoint, one_tensor

FLOOR = ("--scale-rounding", "floor")


def test_a_report_that_fails(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = one_tensor(tmp_path, 957.0)
    whole = mxcli("report", source, *FLOOR, "-q")
    code, out, err = mxcli("report", source, *FLOOR, "-q", "--fail-on", "saturated_percent>0.1")
    assert (code, out) == (5, whole.out)
    assert err == "error: layer.weight: saturated_percent is 3.125 (--fail-on 'saturated_percent>0.1')\n"
    assert mxcli("report", source, *FLOOR, "-q", "--fail-on", "saturated_percent>4 or sqnr_db<20") == whole
    assert mxcli("report", source, "-q", "--fail-on=saturated>0").code == 0


def test_every_offender_is_named_up_to_twenty(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("report", SAMPLE, "-q", "--fail-on", "sqnr_db<99", "--fail-on", "elements>40000", "--json")
    assert code == 5
    assert out == mxcli("report", SAMPLE, "--json").out
    lines = err.splitlines()
    assert lines[0] == "error: --fail-on: 40 failures in 28 measurements."
    assert lines[1].startswith("  model.layers.0.mlp.down_proj.weight: sqnr_db is 31.4967 (")
    assert lines[2] == "  model.layers.0.mlp.down_proj.weight: elements is 49152 (--fail-on 'elements>40000')"
    assert len(lines) == 22
    assert lines[-1] == "  and 20 more"


def test_a_comparison_names_the_combination(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = ("compare", one_tensor(tmp_path, 957.0), "--formats", "mxfp8", "--scale-roundings", "floor,rceil", "-q")
    whole = mxcli(*words)
    code, out, err = mxcli(*words, "--fail-on", "saturated_percent > 0.1")
    assert (code, out) == (5, whole.out)
    assert err == (
        "error: layer.weight under mxfp8_e4m3 floor: saturated_percent is 3.125 (--fail-on 'saturated_percent > 0.1')\n"
    )


def test_what_is_absent_fails_nothing_and_is_told_once(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = odd_checkpoint(tmp_path)
    code, _, err = mxcli("report", source, "--fail-on", "sqnr_db<0", "--fail-on", "mse<0")
    assert code == 0
    told = "note: --fail-on 'sqnr_db<0': sqnr_db is absent for all_nan.weight and "
    assert err.count(told) == 1
    assert err.count("of which no comparison with it is true.") == 2


def test_what_cannot_be_read_is_told_at_once(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("report", "no-such-file", "--fail-on", "sqnr<1", "--fail-on", "saturated_percent>0.1%")
    assert (code, out) == (2, "")
    assert "2 problems" in err
    assert "Did you mean sqnr_db" in err
    assert "'saturated_percent>0.1%' cannot be read" in err
