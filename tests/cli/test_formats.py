"""formats, explain and doctor: the rows and the machine, printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from command_line import strict_json

from mxcli.files.layouts import LAYOUTS
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.floats import ELEMENTS, SCALES
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES
from mxcli.numerics.metrics import METRICS
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, POWER_OF_TWO_SCALE_RULES

TABLE = """\
mxfp8_e4m3 e4m3 e8m0 1x32 - 8.25 448 2^-6 2^-9 17.8 mxfp8
mxfp8_e5m2 e5m2 e8m0 1x32 - 8.25 57344 2^-14 2^-16 31.8 -
mxfp6_e2m3 e2m3 e8m0 1x32 - 6.25 7.5 1 2^-3 5.9 mxfp6
mxfp6_e3m2 e3m2 e8m0 1x32 - 6.25 28 2^-2 2^-4 8.8 -
mxfp4_e2m1 e2m1 e8m0 1x32 - 4.25 6 1 2^-1 3.6 mxfp4
mxint8 int8 e8m0 1x32 - 8.25 1.984375 1 2^-6 7.0 -
nvfp4 e2m1 e4m3 1x16 fp32 4.5 6 1 2^-1 3.6 -
nvfp4_2d e2m1 e4m3 16x16 fp32 4.031 6 1 2^-1 3.6 -
fp8_e4m3 e4m3 fp32 tensor - 8 448 2^-6 2^-9 17.8 -
fp8_e4m3_channel e4m3 fp32 channel - 8 448 2^-6 2^-9 17.8 -
fp8_e4m3_1x128 e4m3 fp32 1x128 - 8.25 448 2^-6 2^-9 17.8 -
fp8_e4m3_128x128 e4m3 fp32 128x128 - 8.002 448 2^-6 2^-9 17.8 -
fp8_e5m2 e5m2 fp32 tensor - 8 57344 2^-14 2^-16 31.8 -
fp8_e5m2_channel e5m2 fp32 channel - 8 57344 2^-14 2^-16 31.8 -
fp8_e5m2_1x128 e5m2 fp32 1x128 - 8.25 57344 2^-14 2^-16 31.8 -
fp8_e5m2_128x128 e5m2 fp32 128x128 - 8.002 57344 2^-14 2^-16 31.8 -
"""
NAMES = sorted(
    {
        name
        for rows in (
            FORMATS,
            ELEMENTS,
            SCALES,
            POWER_OF_TWO_SCALE_RULES,
            MANTISSA_SCALE_RULES,
            ELEMENT_ROUNDINGS,
            DIALECTS,
            METRICS,
            LAYOUTS,
        )
        for name in rows
    }
)


def test_the_table_of_formats(mxcli: Callable[..., Any]) -> None:
    lines = mxcli("formats").out.splitlines()[2:]
    assert [line.split() for line in lines] == [line.split() for line in TABLE.splitlines()]


def test_markdown_has_the_same_cells(mxcli: Callable[..., Any]) -> None:
    titles, marks, *rows = mxcli("formats", "--markdown", "-").out.splitlines()
    assert titles.startswith("| format | element | scale | block | tensor scale | bits per element | max |")
    assert set(marks) == set("| -:")
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    assert cells == [line.split() for line in TABLE.splitlines()]


def test_json_of_formats(mxcli: Callable[..., Any]) -> None:
    record = strict_json(mxcli("formats", "--json").out)
    assert record["schema"] == "mxcli.formats/1"
    by_name = {row["name"]: row for row in record["formats"]}
    assert list(by_name) == list(FORMATS)
    nvfp4 = by_name["nvfp4"]
    assert (nvfp4["block_rows"], nvfp4["block_columns"], nvfp4["tensor_scale"]) == (1, 16, "fp32")
    assert (nvfp4["max"], nvfp4["min_positive"], nvfp4["bits_per_element"]) == (6.0, 0.5, 4.5)
    assert (nvfp4["spelling"], nvfp4["default_scale_rounding"]) == ("e2m1:e4m3:1x16:fp32", "te")
    assert by_name["mxint8"]["scale_roundings"] == ["floor", "ceil", "rceil", "nearest", "ct-even1", "best"]


def test_one_format_named_or_spelled(mxcli: Callable[..., Any]) -> None:
    assert mxcli("formats", "e2m1:e4m3:1x16:fp32").out == mxcli("formats", "NVFP4").out
    out = mxcli("formats", "e3m2:e8m0:1x16").out
    assert "6.5 bits per element" in out
    assert "up to 28; normal from 2^-2, smallest 2^-4; 8.8 binades" in out
    assert "default rceil" in out


def test_explain_without_a_name_lists_every_name(mxcli: Callable[..., Any]) -> None:
    words = mxcli("explain").out.replace(",", " ").split()
    assert set(NAMES) <= set(words)


@pytest.mark.parametrize("name", [*NAMES, "mxfp8", "ue8m0", "nvidia", "e4m3:fp32:channel"])
def test_explain_has_a_page_for_every_name(mxcli: Callable[..., Any], name: str) -> None:
    code, out, err = mxcli("explain", name)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) > 4


def test_the_three_rules_worked_out_by_the_kernel(mxcli: Callable[..., Any]) -> None:
    first, second = mxcli("explain", "rceil").out.split("with amax 957")
    rows = {words[0]: words[1:] for line in first.splitlines() if (words := line.replace(">", " ").split())}
    assert rows["floor"][0] == "126"
    assert rows["rceil"][0] == "126"
    assert rows["ceil"][0] == "127"
    assert "> rceil" in first
    clipped = {words[0]: words[1:] for line in second.splitlines() if (words := line.replace(">", " ").split())}
    assert clipped["floor"] == ["128", "2^1", "896", "yes"]
    assert clipped["rceil"] == ["129", "2^2", "960", "no"]


def test_ties_worked_out_by_the_kernel(mxcli: Callable[..., Any]) -> None:
    lines = [line.replace(">", " ").split() for line in mxcli("explain", "half-away").out.splitlines()]
    assert ["nearest-even", "0", "1", "1", "2", "2", "4", "4"] in lines
    assert ["half-away", "0.5", "1", "1.5", "2", "3", "4", "6"] in lines
    assert ["half-toward-zero", "0", "0.5", "1", "1.5", "2", "3", "4"] in lines


def test_metrics_print_their_rows(mxcli: Callable[..., Any]) -> None:
    out = mxcli("explain", "saturated_percent").out
    assert METRICS["saturated_percent"].formula in out
    assert "lower is better" in out
    assert "saturated_percent = 3.125" in out


def test_a_name_of_two_kinds_has_both_pages(mxcli: Callable[..., Any]) -> None:
    out = mxcli("explain", "te").out
    assert "te: a scale recipe" in out
    assert "te (also nvidia): a dialect" in out


def test_a_dialect_says_where_its_producer_writes_other_bytes(mxcli: Callable[..., Any]) -> None:
    out = mxcli("explain", "torchao-casts").out
    assert "  where its bytes are others\n  Rows of zeros in FP8 have the scale 0 there, and codes of NaN.\n" in out
    assert "where its bytes are others" not in mxcli("explain", "ocp").out


def test_doctor(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("doctor")
    assert (code, err) == (0, "")
    assert out.startswith("mxcli 0.1.0\n")
    assert "  NVIDIA driver  " in out
    record = strict_json(mxcli("doctor", "--json").out)
    assert record["schema"] == "mxcli.doctor/1"
    assert record["kernel"]["instruction_set"] in record["instruction_sets"]
    assert record["kernel"]["problem"] is None
    assert record["threads"] >= 1
    assert set(record["gpu"]["usable"]) <= {f"cuda:{gpu['index']}" for gpu in record["gpu"]["gpus"]}
    assert record["gpu"]["usable"] or record["gpu"]["problems"]
