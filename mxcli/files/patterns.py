"""Regular expressions in the configurations of checkpoints: compiled once, and refused where matching may not end.

Python tries every way to match: a repetition of a repetition, as in `(a*)*`, takes twice as long for every character of
a name, and many repetitions in a row a higher power of its length.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from mxcli.errors import printable

REGEX = "re:"
MOST_CHARACTERS = 1 << 16
"""The longest expression."""
MOST_WAYS = 24.0
"""The most ways to match: a repetition counts 2, one that follows another 8, and what may be there or not 1."""
_REPETITION, _OPTIONAL, _IN_A_ROW = 2.0, 1.0, 6.0
_AS_GOOD_AS_ENDLESS = 10
"""Places from which on a range such as `{0,50}` counts as a repetition."""
_TOKEN = re.compile(
    r"""
    (?P<single>\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|\(\?(?:[aiLmsux]+|\#[^)]*|P=\w+)\))
    |(?P<often>(?:[*+?]|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\})[?+]?)
    |(?P<opened>\((?:\?(?:P<\w+>|<[=!]|[:=!>]|[a-zA-Z-]*:|\(\w+\)))?)
    |(?P<closed>\))
    |(?P<either>\|)
    |(?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=4096)
def stated_expression(entry: str) -> re.Pattern[str]:
    """Return the regular expression that an entry of a configuration states, after `re:` if it begins so.

    Raises ValueError if it is not one, is very long, or repeats what is repeated, so that matching may not end.
    """
    if len(entry) > MOST_CHARACTERS:
        raise ValueError(f"'{printable(entry[:20])}…' is not read: it has {len(entry):,} characters")
    text = entry.removeprefix(REGEX)
    try:
        compiled = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"'{printable(entry)}' is not a regular expression: {error}") from error
    if ways_to_match(text) > MOST_WAYS:
        raise ValueError(f"'{printable(entry)}' repeats what is repeated, so that matching a name may not end")
    return compiled


@dataclass(slots=True)
class _Group:
    """The part of an expression between parentheses so far: the ways to match this alternative, and the most of those
    before; the ways of its last item, and whether that is a repetition or follows one."""

    ways: float = 0.0
    most: float = 0.0
    has_choice: bool = False
    last: float = 0.0
    last_has_choice: bool = False
    repeats: bool = False
    follows: bool = False

    def add(self, inner: _Group) -> None:
        """Add an item: a group, or an empty one for a character."""
        self.follows, self.repeats = self.repeats, inner.repeats
        self.last, self.last_has_choice = max(inner.ways, inner.most), inner.has_choice
        self.ways += self.last + (_IN_A_ROW if self.follows and self.repeats else 0)

    def end_alternative(self) -> None:
        """Begin the next alternative."""
        self.most, self.ways, self.has_choice = max(self.most, self.ways), 0.0, True
        self.last, self.last_has_choice, self.repeats = 0.0, False, False

    def repeat(self, least: int, most: float) -> None:
        """Let the last item occur as often as a quantifier says."""
        if most - least < _AS_GOOD_AS_ENDLESS:
            self.ways += self.last * max(most - 1, 0) + _OPTIONAL * (most - least)
        elif self.last or self.last_has_choice:
            self.ways = math.inf
        else:
            self.ways += _REPETITION + (_IN_A_ROW if self.follows else 0)
            self.repeats = True


def ways_to_match(expression: str) -> float:
    """Return a measure of how many ways a valid regular expression has to match a name; infinity for a repetition of
    what is repeated, optional, or a choice itself."""
    groups = [_Group()]
    for token in _TOKEN.finditer(expression):
        if token["opened"]:
            groups.append(_Group())
        elif token["closed"] and len(groups) > 1:
            inner = groups.pop()
            groups[-1].add(inner)
        elif token["either"]:
            groups[-1].end_alternative()
        elif token["often"]:
            groups[-1].repeat(*_range(token))
        else:
            groups[-1].add(_Group())
    return max(max(group.ways, group.most) for group in groups)


def _range(token: re.Match[str]) -> tuple[int, float]:
    """Return how often a quantifier lets an item occur, at least and at most."""
    simple = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1.0)}
    if token["often"][0] in simple:
        return simple[token["often"][0]]
    if not token["least"] and not token["comma"]:
        return 1, 1.0  # braces without a number are characters
    least = int(token["least"] or 0)
    if not token["comma"]:
        return least, float(least)
    return least, float(token["most"]) if token["most"] else math.inf
