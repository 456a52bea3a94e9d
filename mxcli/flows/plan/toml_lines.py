"""The line of each value in a TOML file, which the standard library's parser does not report."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left

Path = tuple[str | int, ...]
"""Keys and places in arrays from the top of the file: `("override", 1, "select", 0)`."""

_BLANK = re.compile(r"(?:[\s]|#[^\n]*)*")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_KEY = re.compile(rf"\s*(?:{_PART.pattern})(?:\s*\.\s*(?:{_PART.pattern}))*\s*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\]|\\.)*"' r"|'[^']*'",
    re.DOTALL,
)
_BARE = re.compile(r"[^,\]}\s#]+(?:[ \t]+[^,\]}\s#]+)*")


def toml_lines(text: str) -> dict[Path, int]:
    """Return the line, from 1, of every table, key and array element of a text that `tomllib` has parsed."""
    scan = _Scan(text)
    scan.document()
    return scan.lines


def line_of(path: Path, lines: dict[Path, int]) -> int:
    """Return the line of a path, or of the nearest thing around it; 1 for the file itself."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


class _Scan:
    """A walk through a document, noting where things begin."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\r\n", "\n"), 0
        self.ends = [found.start() for found in re.finditer("\n", self.text)]
        self.lines: dict[Path, int] = {}
        self.tables: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        before = -1
        while not self.ended() and self.at > before:
            before = self.at
            if self.taken("[["):
                start, names = self.at, self.key()
                number = self.tables[names] = self.tables.get(names, -1) + 1
                table = (*names, number)
                self.note(table, start)
                self.taken("]]")
            elif self.taken("["):
                start, names = self.at, self.key()
                table = self.within(names)
                self.note(table, start)
                self.taken("]")
            else:
                self.pair(table)

    def within(self, names: Path) -> Path:
        """Return the path of a table: one inside an array of tables is of the last of them."""
        found: Path = ()
        for name in names:
            found = (*found, name)
            if found in self.tables:
                found = (*found, self.tables[found])
        return found

    def pair(self, table: Path) -> None:
        start, names = self.at, self.key()
        path = (*table, *names)
        self.note(path, start)
        self.taken("=")
        self.value(path)

    def value(self, path: Path) -> None:
        self.ended()
        if self.taken("["):
            place = 0
            while not self.ended() and not self.taken("]"):
                self.note((*path, place), self.at)
                self.value((*path, place))
                place += 1
                self.ended()
                self.taken(",")
        elif self.taken("{"):
            while not self.ended() and not self.taken("}"):
                self.pair(path)
                self.ended()
                self.taken(",")
        else:
            _ = self.match(_STRING) or self.match(_BARE)

    def key(self) -> Path:
        parts = _PART.findall(self.match(_KEY))
        return tuple(next(iter(tomllib.loads(f"{part} = 0"))) for part in parts)

    def note(self, path: Path, start: int) -> None:
        self.lines.setdefault(path, bisect_left(self.ends, start) + 1)

    def ended(self) -> bool:
        """Return whether nothing but space and comments is left, which is passed over."""
        self.match(_BLANK)
        return self.at >= len(self.text)

    def taken(self, mark: str) -> bool:
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None or not found[0]:
            return ""
        self.at = found.end()
        return found[0]
