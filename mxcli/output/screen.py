"""Screens: the width, colour and characters of an output stream, and text that fits them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Screen:
    """Columns (None: as many as a line needs), and flags for colour, for characters beyond ASCII and for a page of
    Markdown."""

    width: int | None = None
    color: bool = False
    unicode: bool = False
    markdown: bool = False


def detect(stream: TextIO, environ: Mapping[str, str], *, no_color: bool = False) -> Screen:
    """Return the screen behind a stream, according to COLUMNS, NO_COLOR, TERM=dumb and the locale.

    A stream that is not a terminal has no colour, and no width unless COLUMNS gives one.
    """
    terminal = stream.isatty()
    columns = environ.get("COLUMNS", "")
    stated = int(columns) if columns.isdecimal() and 0 < int(columns) < 100_000 else None
    width = stated or (shutil.get_terminal_size().columns if terminal else None)
    color = terminal and not no_color and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    return Screen(width, color, _beyond_ascii(stream, environ))


def spelled(text: str, screen: Screen) -> str:
    """Return the text with characters that the screen cannot show spelled in ASCII or escaped."""
    if text.isascii():
        return text
    if screen.unicode:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text.replace(ELLIPSIS, "...").replace("±", "+-").encode("ascii", "backslashreplace").decode("ascii")


def bold(text: str, screen: Screen) -> str:
    """Return the text in bold where the screen has colour."""
    return f"\x1b[1m{text}\x1b[0m" if screen.color else text


def cells(text: str) -> int:
    """Return the number of columns that the text occupies."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def shortened(name: str, width: int, screen: Screen) -> str:
    """Return a dotted name in at most `width` columns: segments cut to a letter, leftmost first, at last its middle.

    Numbers and the last segment but one, which distinguish tensors, stay longest.
    """
    mark = ELLIPSIS if screen.unicode else "~"
    segments = name.split(".")
    for at, segment in [*enumerate(segments)][:-2] + [*enumerate(segments)][-1:]:
        if cells(".".join(segments)) <= width or len(segments) == 1:
            break
        # Before a slash is the file, or the step, that distinguishes tensors of the same name.
        place, slash, rest = segment.rpartition("/")
        if not rest.isdecimal() and len(rest) > 2:
            segments[at] = place + slash + rest[0] + mark
    text = ".".join(segments)
    if cells(text) <= width:
        return text
    kept = max(width - len(mark), 0)
    head, tail = text[: kept // 2], text[len(text) - (kept - kept // 2) :]
    while cells(head) + cells(tail) > kept:
        head, tail = (head[:-1], tail) if len(head) > len(tail) else (head, tail[1:])
    return f"{head}{mark}{tail}"


def folded_lines(text: str, screen: Screen, indent: str = "") -> list[str]:
    """Return a paragraph in lines that fit the screen, later ones indented; a longer word has its own line."""
    first, *words = spelled(text, screen).split(" ")
    lines, line = list[str](), first
    for word in words:
        longer = f"{line} {word}"
        if screen.width is None or cells(longer) <= screen.width:
            line = longer
        else:
            lines.append(line)
            line = indent + word
    return [*lines, line]


def _beyond_ascii(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether both stream and locale can print non-ASCII: Python writes UTF-8 even where the locale says C."""
    if "utf" not in (stream.encoding or "").lower():
        return False
    if sys.platform == "win32":
        return True
    locale = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or ""
    return locale.partition(".")[0] not in ("C", "POSIX") or "utf" in locale.lower()
