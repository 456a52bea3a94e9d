"""Comparisons as tables that fit, and as records."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.compare import Comparison, make_comparison, plan_comparison
from mxcli.flows.plan.plan import Options
from mxcli.numerics.combinations import combine
from mxcli.numerics.scheme import Rules
from mxcli.output.comparison import compared_line, comparison_csv, comparison_json, comparison_text, titles
from mxcli.output.screen import Screen, cells

NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]


def comparison(folder: Path, formats: list[str], rules: list[str] | None = None, by: str = "role") -> Comparison:
    """Of two weights: a block whose maximum 957 is saturated by floor under MXFP8, and one that is exact."""
    saturating, exact = np.zeros((1, 32), np.float32), np.ones((2, 64), np.float32)
    saturating[0, 0] = 957
    save_file(dict(zip(NAMES, (saturating, exact), strict=True)), folder / "x.safetensors")
    checkpoint = open_checkpoint(folder / "x.safetensors")
    asked = Options("mxfp8", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True)
    planned = plan_comparison(checkpoint, combine(formats, rules or []), asked)
    return make_comparison("x", checkpoint, planned, backend=Cpu(), by=by)


def test_the_table(tmp_path: Path) -> None:
    text = comparison_text(comparison(tmp_path, ["mxfp8"], ["floor", "rceil"], by="layer"), Screen())
    assert text.splitlines() == [
        "x: 160 elements, 2 tensors, 640 B; F32",
        "mxfp8_e4m3: e4m3 elements, e8m0 scales by 1x32; scale rounding floor, rceil; element rounding nearest-even; "
        "as mxcli",
        "non-finite input: saturate; indivisible lengths: pad",
        "",
        "                                               ------ floor ------  --------- rceil ---------",
        "                                                SQNR    sat.  und.   SQNR     +/-  sat.  und.",
        "tensor                                  shape     dB       %     %     dB      dB     %     %",
        "model.layers.0.self_attn.q_proj.weight  1x32    23.9    3.12     0   50.1*  +26.2     0     0",
        "model.layers.1.mlp.down_proj.weight     2x64   exact*      0     0  exact       -     0     0",
        "---------------------------------------------------------------------------------------------",
        "all 2 tensors                                   23.9   0.625     0   50.1*  +26.2     0     0",
        "model.layers.0 (1)                              23.9    3.12     0   50.1*  +26.2     0     0",
        "model.layers.1 (1)                             exact*      0     0  exact       -     0     0",
        "",
        "* best SQNR; +/- against floor; sat., und.: saturated, underflowed % of elements",
        "",
        "                  bits per  SQNR     +/-  relative      saturated    saturated    underflowed  best on",
        "                   element    dB      dB     error  % of elements  % of blocks  % of elements  tensors",
        "mxfp8_e4m3 floor      8.25  23.9            0.0637          0.625         20.0              0        1",
        "mxfp8_e4m3 rceil      8.25  50.1*  +26.2   0.00313              0            0              0        1",
        "",
        "Against floor, rceil removes all saturation (20 % of blocks) and gains 26.2 dB on 1 of 2 tensors.",
        "",
        "quantized 2, padded 0, kept 0, tied 0",
    ]


@pytest.mark.parametrize("width", [40, 64, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("formats", [["mxfp8"], ["mxfp8", "mxfp4", "nvfp4"], ["mxfp8", "mxfp6", "mxfp4", "mxint8"]])
def test_lines_fit_and_every_combination_is_shown(tmp_path: Path, width: int, formats: list[str]) -> None:
    rules = ["floor", "ceil", "rceil", "best"] if len(formats) > 1 else []
    found = comparison(tmp_path, formats, rules, by="kind")
    lines = comparison_text(found, Screen(width, unicode=True)).splitlines()
    assert max(map(cells, lines)) <= width
    tables = lines[: next(at for at, line in enumerate(lines) if line.startswith("* best"))]
    rows = [line.split() for line in tables if line.startswith("all ")]
    assert sum(len(row) for row in rows) >= 3 * len(rows) + len(found.combinations.names)
    assert sum(cell.endswith("*") for row in rows for cell in row) == 1


def test_combinations_that_do_not_fit_follow_in_further_tables(tmp_path: Path) -> None:
    found = comparison(tmp_path, ["mxfp8", "mxfp4"], ["floor", "ceil", "rceil", "even", "best"])
    narrow = comparison_text(found, Screen(80, unicode=True))
    assert narrow.count("\ntensor ") == 3
    assert comparison_text(found, Screen()).count("\ntensor ") == 1
    assert narrow.count("* best SQNR") == 1


def test_headings_distinguish_combinations() -> None:
    assert titles(combine(["mxfp8"])) == ["floor", "ceil", "rceil", "even"]
    assert titles(combine(["mxfp8", "mxfp4"])) == ["mxfp8_e4m3", "mxfp4_e2m1"]
    assert titles(combine(["mxfp8", "nvfp4"])) == ["mxfp8_e4m3 rceil", "nvfp4 te"]
    assert titles(combine(["nvfp4"], [], ["nearest-even", "toward-zero"])) == ["nearest-even", "toward-zero"]


def test_top_and_sort(tmp_path: Path) -> None:
    found = comparison(tmp_path, ["mxfp8"])

    def shown(sort: str, top: int | None = None) -> list[str]:
        lines = comparison_text(found, Screen(), sort, top).splitlines()
        return [line.split()[0] for line in lines if line.startswith("model.")]

    assert shown("sqnr_db") == NAMES
    assert shown("elements") == NAMES[::-1]
    assert shown("name") == NAMES
    assert shown("sqnr_db", 1) == NAMES[:1]
    assert shown("sqnr_db", 0) == []
    assert "1 of 2 tensors shown, worst sqnr_db first" in comparison_text(found, Screen(), "sqnr_db", 1)


def test_records_agree(tmp_path: Path) -> None:
    found = comparison(tmp_path, ["mxfp8", "nvfp4"], ["floor", "rceil"])
    content: dict[str, Any] = json.loads(comparison_json(found))
    assert content["schema"] == "mxcli.compare/1"
    names = [each["name"] for each in content["combinations"]]
    assert names == ["mxfp8_e4m3 floor", "mxfp8_e4m3 rceil", "nvfp4 te"]
    assert [each["best_on_tensors"] for each in content["combinations"]] == [0, 0, 2], "957 is amax, so exact in NVFP4"
    assert [layer["best"] for layer in content["layers"]] == ["nvfp4 te", "nvfp4 te"]
    first = content["layers"][0]["metrics"]
    assert list(first) == names
    assert first["mxfp8_e4m3 floor"]["sqnr_db_delta"] == 0
    assert first["mxfp8_e4m3 rceil"]["saturated_percent_delta"] == -3.125
    assert first["mxfp8_e4m3 rceil"]["sqnr_db_delta"] == pytest.approx(
        first["mxfp8_e4m3 rceil"]["sqnr_db"] - first["mxfp8_e4m3 floor"]["sqnr_db"]
    )
    assert content["layers"][1]["metrics"]["nvfp4 te"]["sqnr_db_delta"] is None
    assert content["totals"]["nvfp4 te"]["tensors"] == 2
    assert content["groups"]["weight"] == content["totals"]
    assert [json.loads(compared_line(layer, found.combinations)) for layer in found.layers] == content["layers"]
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    assert [(row["name"], row["combination"]) for row in rows] == [(name, way) for name in NAMES for way in names]
    for row in rows:
        layer = next(layer for layer in content["layers"] if layer["name"] == row["name"])
        for name, value in layer["metrics"][row["combination"]].items():
            assert row[name] == ("" if value is None else str(value))
        assert f"{row['format']} {row['scale_rounding']}" == row["combination"]
