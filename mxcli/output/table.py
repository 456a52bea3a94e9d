"""Tables of text in aligned columns that fit a screen, and pages of Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mxcli.output.screen import Screen, bold, cells, folded_lines, shortened, spelled

GAP = "  "
NARROWEST, CROWDED = 24, 8
"""The least width of names while other columns can be left out, and of text that is readable."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading of one or two lines, its alignment, and when a narrow screen loses it: highest `drop` first.

    A column with `drop` 0 always stays. Adjacent columns with the same `group` have it as a heading above theirs.
    """

    title: str
    right: bool = True
    drop: int = 0
    group: str = ""


Row = Sequence[str] | None
"""The cells of a row; None is a line across the table."""


def aligned(columns: Sequence[Column], rows: Sequence[Row], screen: Screen) -> list[str]:
    """Return the lines of a table, headings first; the first column, of names, is shortened on a narrow screen.

    Columns that do not fit are left out, and the last line names them. If even the others do not fit, all text is
    shortened, headings of groups included.
    """
    columns = [replace(column, group=_short_group(column.group, screen)) for column in columns]
    texts = _texts(columns, rows, screen)
    if screen.markdown:
        return table_lines([_one_line(column) for column in columns], [column.right for column in columns], texts)
    shown, widths = _fitting(columns, _widths(columns, texts), screen)
    headings = _headings(columns, shown)
    for at in _squeezed(columns, widths, shown, screen):
        headings[at], texts[at] = (
            [shortened(text, widths[at], screen) for text in part] for part in (headings[at], texts[at])
        )

    def lines_of(parts: Sequence[Sequence[str]]) -> list[str]:
        padded = [_padded(parts[at], widths[at], right=columns[at].right) for at in shown]
        return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)]

    waiting = iter(lines_of(texts))
    across = "-" * _total(widths, shown, widths[0])
    lines = [bold(line, screen) for line in (*_group_lines(columns, widths, shown), *lines_of(headings))]
    lines += [across if row is None else next(waiting) for row in rows]
    hidden = dict.fromkeys(" ".join(columns[at].title.split()) for at in range(len(columns)) if at not in shown)
    if hidden:
        lines += folded_lines(f"Too narrow for: {', '.join(hidden)}. Use --wide.", screen)
    return lines


def _one_line(column: Column) -> str:
    return " ".join(f"{column.group} {column.title}".split())


def least_width(columns: Sequence[Column], rows: Sequence[Row], screen: Screen) -> int:
    """Return the width that the table needs without all columns that can be left out."""
    widths = _widths(columns, _texts(columns, rows, screen))
    shown = [at for at, column in enumerate(columns) if not column.drop]
    return _total(_under_groups(columns, widths, shown), shown, min(NARROWEST, widths[0]))


def _texts(columns: Sequence[Column], rows: Sequence[Row], screen: Screen) -> list[list[str]]:
    """Return the cells of each column."""
    filled = [row for row in rows if row is not None]
    return [_spelled([row[at] for row in filled], screen) for at in range(len(columns))]


def _spelled(texts: list[str], screen: Screen) -> list[str]:
    return texts if all(map(str.isascii, texts)) else [spelled(text, screen) for text in texts]


def _widths(columns: Sequence[Column], texts: Sequence[Sequence[str]]) -> list[int]:
    return [
        _widest((*column.title.split("\n"), *column_texts)) for column, column_texts in zip(columns, texts, strict=True)
    ]


def _widest(texts: Sequence[str]) -> int:
    return max(map(len if all(map(str.isascii, texts)) else cells, texts))


def _fitting(columns: Sequence[Column], widths: list[int], screen: Screen) -> tuple[list[int], list[int]]:
    """Return the columns that fit with the shortest names, and their widths.

    Columns with the same `drop` are left out together.
    """
    shown = list(range(len(columns)))
    least = min(NARROWEST, widths[0])
    taken = _under_groups(columns, widths, shown)
    while screen.width is not None and _total(taken, shown, least) > screen.width:
        highest = max(columns[at].drop for at in shown)
        if not highest:
            break
        shown = [at for at in shown if columns[at].drop != highest]
        taken = _under_groups(columns, widths, shown)
    return shown, taken


def _squeezed(columns: Sequence[Column], widths: list[int], shown: Sequence[int], screen: Screen) -> set[int]:
    """Narrow columns of text, names first, until the table fits as well as it can; return the narrowed ones."""
    narrowed = set()
    for least in (CROWDED, 1):
        for at in shown:
            excess = _total(widths, shown, widths[0]) - (screen.width or math.inf)
            if excess > 0 and not columns[at].right and widths[at] > least:
                widths[at] = max(least, widths[at] - int(excess))
                narrowed.add(at)
    return narrowed


def _short_group(group: str, screen: Screen) -> str:
    """Return the heading of a group in lines of at most half the screen."""
    if screen.width is None:
        return group
    return "\n".join(shortened(line, max(screen.width // 2, 1), screen) for line in group.split("\n"))


def _groups(columns: Sequence[Column], shown: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return the runs of shown columns under one group heading."""
    runs = groupby(shown, key=lambda at: columns[at].group)
    return [(group, list(places)) for group, places in runs]


def _under_groups(columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int]) -> list[int]:
    """Return the widths, with columns widened where the heading of their group needs more."""
    taken = list(widths)
    for group, places in _groups(columns, shown):
        needed = max(map(cells, group.split("\n")))
        taken[places[0]] += max(0, needed - _span(taken, places))
    return taken


def _span(widths: Sequence[int], places: Sequence[int]) -> int:
    return sum(widths[at] for at in places) + len(GAP) * (len(places) - 1)


def _group_lines(columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int]) -> list[str]:
    """Return lines with the headings of groups over their columns; none without groups."""
    parts = []
    for group, places in _groups(columns, shown):
        width = _span(widths, places)
        *above, last = group.split("\n")
        framed = f" {last} ".center(width, "-") if last and width - cells(last) > 3 else last
        parts.append([line.center(width) for line in (*above, framed)])
    height = max(map(len, parts)) if any(columns[at].group for at in shown) else 0
    filled = [[" " * len(lines[0])] * (height - len(lines)) + lines for lines in parts]
    return [GAP.join(line).rstrip() for line in zip(*filled, strict=True)] if height else []


def _total(widths: Sequence[int], shown: Sequence[int], first: int) -> int:
    return first + sum(widths[at] for at in shown if at) + len(GAP) * (len(shown) - 1)


def _padded(texts: Sequence[str], width: int, *, right: bool) -> list[str]:
    if all(map(str.isascii, texts)):
        return [text.rjust(width) if right else text.ljust(width) for text in texts]
    fills = [" " * (width - cells(text)) for text in texts]
    return [fill + text if right else text + fill for text, fill in zip(texts, fills, strict=True)]


def _headings(columns: Sequence[Column], shown: Sequence[int]) -> list[list[str]]:
    """Return the heading lines of each column, equally many for all, short headings at the bottom."""
    split = [column.title.split("\n") for column in columns]
    height = max(len(split[at]) for at in shown)
    return [[""] * (height - len(lines)) + lines for lines in split]


MARKDOWN = Screen(unicode=True, markdown=True)
"""The screen of text that goes through `page`."""
_SPECIAL = re.compile(r"([\\`*<>|\[\]~])")
_BEGINS_A_LINE = re.compile(r"^(\s*)([#+-]|\d+[.)])(?=\s)")


def escaped(text: str) -> str:
    """Return the text with every character that Markdown or HTML takes as markup escaped."""
    return _SPECIAL.sub(r"\\\1", text.replace("\n", " "))


def table_lines(headings: Sequence[str], right: Sequence[bool], columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the Markdown of a table from the cells of its columns."""
    lines = [headings, ["---:" if each else "---" for each in right], *zip(*columns, strict=True)]
    first, rule, *rows = lines
    return [_row(map(escaped, first)), _row(rule), *(_row(map(escaped, row)) for row in rows)]


def page(text: str) -> str:
    """Return lines of text and tables as a Markdown page in which adjacent lines stay lines."""
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
