"""Globs over dotted tensor names, and what to propose when a selector matches nothing."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping

from mxcli.errors import closest, printable
from mxcli.files.roles import tags_of
from mxcli.files.tensors import TensorInfo


def glob_regex(glob: str) -> re.Pattern[str]:
    """The regex that matches from the start of the names a glob takes: whole names, or whole module paths.

    `*` stands for any characters, dots included, `?` for one character, `[..]` for one of a set.
    """
    whole = fnmatch.translate(glob)
    return re.compile(whole if glob.endswith("*") else f"{whole}|{fnmatch.translate(glob + '.*')}")


def suggest_glob(glob: str, names: Collection[str]) -> str:
    """A question, with a leading space, proposing a glob that does match; else an example of the names."""
    candidates = [f"*.{glob}", *_respelled(glob, names)]
    for candidate in candidates:
        pattern = glob_regex(candidate)
        count = sum(pattern.match(name) is not None for name in names)
        if count:
            return f" Did you mean {printable(candidate)} ({_tensors(count)})?"
    return _example(names)


def suggest_regex(regex: re.Pattern[str], names: Collection[str]) -> str:
    """A hint when the regex occurs inside names but matches no whole one, else an example of the names."""
    count = sum(regex.search(name) is not None for name in names)
    if count:
        wider = printable(f"re:.*({regex.pattern}).*")
        return f" It must match the whole name; {wider} matches {_tensors(count)}."
    return _example(names)


def suggest_role(tensors: Mapping[str, TensorInfo]) -> str:
    """The roles and tags that do occur."""
    present = sorted({tag for info in tensors.values() for tag in tags_of(info.name, info.role)})
    return f" Here are {', '.join('@' + tag for tag in present)}."


def _respelled(glob: str, names: Iterable[str]) -> list[str]:
    """The glob with each word that no name contains replaced by the closest word of the names."""
    words = {word for name in names for word in name.split(".") if not word.isdigit()}
    respelled = glob
    for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", glob):
        if word not in words:
            respelled = respelled.replace(word, next(iter(closest(word, words)), word))
    return [respelled, f"*.{respelled}"] if respelled != glob else []


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count:,} tensors"


def _example(names: Iterable[str]) -> str:
    first = next(iter(names), None)
    return f" Names here look like {printable(first)}." if first is not None else ""
