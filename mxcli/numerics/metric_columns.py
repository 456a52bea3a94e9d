"""Columns of metrics: where tables of text and pages show them, and under which headings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextColumn:
    """Column of a metric in text: its heading of one or two lines, its place in the table of a report (0: only other
    tables show it), and when a narrow screen loses it: highest `drop` first, 0 never."""

    heading: str
    place: int = 0
    drop: int = 0


@dataclass(frozen=True, slots=True)
class PageColumn:
    """Column of a metric in the tensors of a page: its place, the heading of its group, its own below that, its unit.

    `compared` is its heading in a comparison, where the groups are the schemes (empty: it is not there). `meaning` is
    that of the value shown, where it differs from the metric's.
    """

    place: int
    group: str
    label: str
    unit: str = ""
    compared: str = ""
    meaning: str = ""
