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


def test_what_could_not_be_evaluated_has_not_passed(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """A tensor of NaN only has no error; one of zeros is exact, so that no limit on its error is passed."""
    source = odd_checkpoint(tmp_path)
    code, out, err = mxcli("report", source, "-q", "--fail-on", "sqnr_db<0", "--json")
    assert (code, out) == (5, mxcli("report", source, "--json").out)
    assert err == (
        "error: --fail-on 'sqnr_db<0' could not be evaluated without sqnr_db: absent for all_nan.weight. What cannot "
        "be checked has not passed: leave such tensors out (--exclude), or say for which the condition counts, as in "
        "'sqnr_db<20 and nonfinite==0'.\n"
    )
    assert mxcli("report", source, "-q", "--fail-on", "sqnr_db<0", "--exclude", "all_nan").code == 0
    assert mxcli("report", source, "-q", "--fail-on", "sqnr_db<0 and nonfinite==0").code == 0
    assert mxcli("report", source, "-q", "--fail-on", "sqnr_db<0 or nonfinite>9").err.count("all_nan.weight: sqnr") == 1


def test_a_metric_that_no_tensor_has(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """Integers have no subnormals."""
    words = (one_tensor(tmp_path, 957.0), "-q", "--fail-on", "subnormal_percent>1")
    code, _, err = mxcli("report", *words, "--format", "mxint8")
    assert code == 5
    assert "could not be evaluated without subnormal_percent: absent for layer.weight. " in err
    code, _, err = mxcli("compare", *words, "--formats", "mxint8,mxfp8")
    assert code == 5
    assert "could not be evaluated without subnormal_percent: absent for layer.weight under mxint8 rceil. " in err
    assert "under mxfp8" not in err


def test_what_cannot_be_read_is_reported_at_once(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("report", "no-such-file", "--fail-on", "sqnr<1", "--fail-on", "saturated_percent>0.1%")
    assert (code, out) == (2, "")
    assert "2 problems" in err
    assert "Did you mean sqnr_db" in err
    assert "'saturated_percent>0.1%' cannot be read" in err
