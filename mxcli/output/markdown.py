"""Text and tables as Markdown, in the dialect of model cards (GitHub, Hugging Face)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mxcli.output.screen import Screen

MARKDOWN = Screen(unicode=True, markdown=True)
"""The screen that text is made for before it goes through `page`."""
_SPECIAL = re.compile(r"([\\`*<>|\[\]~])")
_BEGINS_A_LINE = re.compile(r"^(\s*)([#+-]|\d+[.)])(?=\s)")


def escaped(text: str) -> str:
    """The text with every character that Markdown or HTML would take as markup escaped."""
    return _SPECIAL.sub(r"\\\1", text.replace("\n", " "))


def table_lines(headings: Sequence[str], right: Sequence[bool], columns: Sequence[Sequence[str]]) -> list[str]:
    """A table from its columns' cells."""
    lines = [headings, ["---:" if each else "---" for each in right], *zip(*columns, strict=True)]
    first, rule, *rows = lines
    return [_row(map(escaped, first)), _row(rule), *(_row(map(escaped, row)) for row in rows)]


def page(text: str) -> str:
    """Lines of text, tables among them, as a page: lines that follow each other stay lines."""
    lines = text.splitlines()
    after = [*lines[1:], ""]
    return "\n".join(map(_line, lines, after))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _line(line: str, following: str) -> str:
    if line.startswith("|"):
        return line
    text = _BEGINS_A_LINE.sub(r"\1\\\2", escaped(line))
    return f"{text}  " if text and following and not following.startswith("|") else text
