"""Numbers, screens, tables and exports as text."""

from __future__ import annotations

import io
import json
import math
from typing import TextIO

import pytest

from mxcli.output.export import csv_text, json_line, json_text
from mxcli.output.numbers import (
    byte_size,
    decimal,
    duration,
    power_of_two,
    quantity,
    shape_text,
    significant,
    sparkline,
    trimmed,
)
from mxcli.output.screen import Screen, cells, detect, folded_lines, shortened, spelled
from mxcli.output.table import Column, aligned, least_width

NAME = "model.layers.13.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (31.4949, "31.5"),
        (0.026612, "0.0266"),
        (9.996, "10.0"),
        (99.96, "100"),
        (100.0, "100"),
        (12345.6, "12,300"),
        (-0.5, "-0.500"),
        (1.2345e-9, "1.23e-09"),
        (0.00012345, "0.000123"),
        (3.4e38, "3.40e+38"),
        (7, "7"),
        (12345, "12,345"),
        (math.inf, "inf"),
    ],
)
def test_three_significant_digits(value: float | None, text: str) -> None:
    assert significant(value) == text


def test_other_numbers() -> None:
    assert [byte_size(n) for n in (0, 999, 1000, 98304, 1.7e6, 999_600, 5e12)] == [
        "0 B", "999 B", "1.00 kB", "98.3 kB", "1.70 MB", "1.00 MB", "5.00 TB",
    ]  # fmt: skip
    assert [quantity(n) for n in (0, 9999, 853120, 1_240_000_000)] == ["0", "9,999", "853 k", "1.24 B"]
    assert [power_of_two(x) for x in (2.0**-9, 1.0, 448.0, 2.0)] == ["2^-9", "1", "448", "2^1"]
    assert [decimal(x) for x in (127 / 64, 57344.0)] == ["1.984375", "57344"]
    assert [trimmed(x) for x in (0.2, 1.35, 12.04, 1e-9, 0.0)] == ["0.2", "1.35", "12", "1.00e-09", "0"]
    assert [duration(s) for s in (41.6, 190, 7500)] == ["42 s", "3 min 10 s", "2 h 5 min"]
    assert [shape_text(shape) for shape in ((), (3,), (2, 0))] == ["scalar", "3", "2x0"]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def stream(kind: type[io.TextIOWrapper], encoding: str = "utf-8") -> TextIO:
    return kind(io.BytesIO(), encoding=encoding)


@pytest.mark.parametrize(
    ("environ", "screen"),
    [
        ({"COLUMNS": "90"}, Screen(90, True, True)),
        ({"COLUMNS": "90", "NO_COLOR": "1"}, Screen(90, False, True)),
        ({"COLUMNS": "90", "NO_COLOR": ""}, Screen(90, True, True)),
        ({"COLUMNS": "90", "TERM": "dumb"}, Screen(90, False, True)),
        ({"COLUMNS": "90", "LC_ALL": "C"}, Screen(90, True, False)),
        ({"COLUMNS": "90", "LC_ALL": "C", "LANG": "de_DE.UTF-8"}, Screen(90, True, False)),
        ({"COLUMNS": "90", "LC_ALL": "C.UTF-8"}, Screen(90, True, True)),
        ({"COLUMNS": "90", "LANG": "POSIX"}, Screen(90, True, False)),
    ],
)
def test_what_a_terminal_shows(environ: dict[str, str], screen: Screen) -> None:
    assert detect(stream(Terminal), environ) == screen


def test_what_a_pipe_shows() -> None:
    pipe = stream(io.TextIOWrapper)
    assert detect(pipe, {}) == Screen(None, False, True)
    assert detect(pipe, {"COLUMNS": "40"}) == Screen(40, False, True)
    assert detect(pipe, {"COLUMNS": "wide"}).width is None
    assert detect(stream(Terminal), {"COLUMNS": "90"}, no_color=True) == Screen(90, False, True)
    assert not detect(stream(io.TextIOWrapper, "latin-1"), {}).unicode


def test_text_a_screen_cannot_show_is_spelled() -> None:
    assert spelled("a…ö\udcff", Screen(unicode=True)) == "a…ö\\udcff"
    assert spelled("a…ö", Screen()) == "a...\\xf6"


@pytest.mark.parametrize("unicode", [True, False])
def test_names_are_shortened_to_any_width_and_stay_distinct(unicode: bool) -> None:
    screen = Screen(unicode=unicode)
    assert shortened(NAME, 99, screen) == NAME
    for width in range(1, len(NAME)):
        assert cells(shortened(NAME, width, screen)) <= width
    mark = "…" if unicode else "~"
    assert shortened(NAME, 30, screen) == f"m{mark}.l{mark}.13.s{mark}.q_proj.weight"
    assert shortened(NAME, 24, screen) == f"m{mark}.l{mark}.13.s{mark}.q_proj.w{mark}"
    assert shortened(f"step-000200/{NAME}", 42, screen) == f"step-000200/m{mark}.l{mark}.13.s{mark}.q_proj.weight"
    assert cells(shortened("层" * 30, 21, screen)) <= 21


def test_a_table_loses_columns_before_it_breaks() -> None:
    columns = [Column("name", right=False), Column("first\nnumber", drop=1), Column("second", drop=2)]
    rows = [["layers.1.q_proj.weight", "1", "22"], None, ["all", "3", "4"]]
    assert aligned(columns, rows, Screen()) == [
        "                         first",
        "name                    number  second",
        "layers.1.q_proj.weight       1      22",
        "--------------------------------------",
        "all                          3       4",
    ]
    assert aligned(columns, rows, Screen(30)) == [
        "                         first",
        "name                    number",
        "layers.1.q_proj.weight       1",
        "------------------------------",
        "all                          3",
        "Too narrow for: second. Use",
        "--wide.",
    ]
    assert aligned(columns, [[NAME, "1", "22"]], Screen(32, unicode=True))[2] == "m….l….13.s….q_proj.w…          1"
    assert aligned(columns, [], Screen(60))[-1].split() == ["name", "number", "second"]


def test_columns_stand_under_the_heading_of_their_group() -> None:
    headings = [("short", ""), ("of two\nlines", "."), ("much_longer", "")]
    columns = [Column("name", right=False), *(Column(f"{a}{b}", group=group) for group, b in headings for a in "xy")]
    rows = [["layers.1.q_proj.weight", *"123456"], None, ["all", "77777", *"89012"]]
    assert aligned(columns, rows, Screen()) == [
        "                                  of two",
        "                         short    lines   much_longer",
        "name                        x  y  x.  y.         x  y",
        "layers.1.q_proj.weight      1  2   3   4         5  6",
        "-----------------------------------------------------",
        "all                     77777  8   9   0         1  2",
    ]


def test_a_table_gives_up_the_same_column_of_every_group() -> None:
    shown = [Column("a", group=group, drop=drop) for group in ("one", "other") for drop in (0, 2)]
    columns, row = [Column("name", right=False), *shown], ["layers.1.q_proj.weight", *"1234"]
    assert aligned(columns, [row], Screen(34)) == [
        "                        one  other",
        "name                      a      a",
        "layers.1.q_proj.weight    1      3",
        "Too narrow for: a. Use --wide.",
    ]
    assert least_width(columns, [row], Screen(20)) == 34


def test_paragraphs_fold() -> None:
    assert folded_lines("one two three four five six", Screen(20), "  ") == ["one two three four", "  five six"]
    assert folded_lines("one two", Screen()) == ["one two"]


def test_exports_know_no_nan() -> None:
    content = {"a": math.nan, "b": [math.inf, 1], "c": {"d": -math.inf}, "rows": [{"x": math.nan}, {"x": 2}]}
    parsed = json.loads(json_text("report", content))
    assert parsed == {
        "schema": "mxcli.report/1", "a": None, "b": [None, 1], "c": {"d": None}, "rows": [{"x": None}, {"x": 2}]
    }  # fmt: skip
    assert json_line({"a": math.nan}) == '{"a": null}'
    records = [{"name": 'a,"b', "x": math.nan, "h": {"k": 1}}, {"name": "c", "x": 0.1}]
    assert csv_text(records, ["name", "x", "h"]) == 'name,x,h\n"a,""b",,"{""k"": 1}"\nc,0.1,'


@pytest.mark.parametrize(
    ("counts", "bars"),
    [
        ({}, ""),
        ({-3: 0}, ""),
        ({-3: 7}, "█"),
        ({-3: 1, -2: 4, -1: 8}, "▁▄█"),
        ({0: 1, 2: 1000}, "▁ █"),
        (dict.fromkeys(range(24), 1), "█" * 12),
    ],
)
def test_sparklines(counts: dict[int, int], bars: str) -> None:
    assert sparkline(counts) == bars
