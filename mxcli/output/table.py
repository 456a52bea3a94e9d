"""Rows of text in aligned columns, made to fit a screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxcli.output.screen import Screen, bold, cells, folded_lines, shortened, spelled

GAP = "  "
NARROWEST = 24


@dataclass(frozen=True, slots=True)
class Column:
    """A heading of one or two lines, its alignment, and when a narrow screen loses it: highest `drop` first.

    A column with `drop` 0 always stays.
    """

    title: str
    right: bool = True
    drop: int = 0


Row = Sequence[str] | None
"""The cells of a row; None is a line across the table."""


def aligned(columns: Sequence[Column], rows: Sequence[Row], screen: Screen) -> list[str]:
    """Lines of the table, headings first; its first column, of names, is shortened on a narrow screen.

    Columns that do not fit are left out, and the last line says which.
    """
    filled = [row for row in rows if row is not None]
    texts = [[spelled(row[at], screen) for row in filled] for at in range(len(columns))]
    widths = [
        max(map(cells, (*column.title.split("\n"), *column_texts)))
        for column, column_texts in zip(columns, texts, strict=True)
    ]
    shown = _fitting(columns, widths, screen)
    if screen.width is not None:
        widths[0] = min(widths[0], max(min(NARROWEST, widths[0]), screen.width - _total(widths, shown, 0)))
        texts[0] = [shortened(text, widths[0], screen) for text in texts[0]]

    def lines_of(parts: Sequence[Sequence[str]]) -> list[str]:
        padded = [_padded(parts[at], widths[at], right=columns[at].right) for at in shown]
        return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)]

    waiting = iter(lines_of(texts))
    across = "-" * _total(widths, shown, widths[0])
    lines = [bold(line, screen) for line in lines_of(_headings(columns))]
    lines += [across if row is None else next(waiting) for row in rows]
    hidden = [" ".join(columns[at].title.split()) for at in range(len(columns)) if at not in shown]
    if hidden:
        lines += folded_lines(f"Too narrow for: {', '.join(hidden)}. Use --wide.", screen)
    return lines


def _fitting(columns: Sequence[Column], widths: Sequence[int], screen: Screen) -> list[int]:
    """The columns that fit when names are as short as they may be."""
    shown = list(range(len(columns)))
    least = min(NARROWEST, widths[0])
    while screen.width is not None and _total(widths, shown, least) > screen.width:
        droppable = [at for at in shown if columns[at].drop]
        if not droppable:
            break
        shown.remove(max(droppable, key=lambda at: columns[at].drop))
    return shown


def _total(widths: Sequence[int], shown: Sequence[int], first: int) -> int:
    return first + sum(widths[at] for at in shown if at) + len(GAP) * (len(shown) - 1)


def _padded(texts: Sequence[str], width: int, *, right: bool) -> list[str]:
    if all(map(str.isascii, texts)):
        return [text.rjust(width) if right else text.ljust(width) for text in texts]
    fills = [" " * (width - cells(text)) for text in texts]
    return [fill + text if right else text + fill for text, fill in zip(texts, fills, strict=True)]


def _headings(columns: Sequence[Column]) -> list[list[str]]:
    """Per column its heading lines, as many for each, short headings at the bottom."""
    split = [column.title.split("\n") for column in columns]
    height = max(map(len, split))
    return [[""] * (height - len(lines)) + lines for lines in split]
