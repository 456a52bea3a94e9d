"""Reports as Markdown: tables that stay tables for any names."""

from __future__ import annotations

import pytest

from mxcli.output.table import MARKDOWN, Column, aligned, escaped, page, table_lines


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("a|b", r"a\|b"),
        ("<img src=x>", r"\<img src=x\>"),
        ("31.2*", r"31.2\*"),
        ("`code` [link](to)", r"\`code\` \[link\](to)"),
        ("back\\slash", r"back\\slash"),
        ("two\nlines", "two lines"),
    ],
)
def test_names_are_text(text: str, wanted: str) -> None:
    assert escaped(text) == wanted


def test_a_table() -> None:
    columns = [Column("tensor", right=False), Column("SQNR\ndB", drop=1, group="floor")]
    assert aligned(columns, [["w|x", "30.1"], None, ["all", "-"]], MARKDOWN) == [
        "| tensor | floor SQNR dB |",
        "| --- | ---: |",
        r"| w\|x | 30.1 |",
        "| all | - |",
    ]
    assert table_lines(["a"], [True], [[]]) == ["| a |", "| ---: |"]


def test_lines_stay_lines_and_do_not_become_lists_or_headings() -> None:
    assert page("one\ntwo\n\n| a |\n# three\n- four\n1. five") == (
        "one  \ntwo\n\n| a |\n\\# three  \n\\- four  \n\\1. five"
    )
