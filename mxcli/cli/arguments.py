"""The argument list before it is parsed: options with an optional file, selectors in their order."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from mxcli.errors import UsageError, printable

STDOUT = "-"
INCLUDE, EXCLUDE = "+", "-"
_ENDINGS = {"--json": ".json", "--jsonl": ".jsonl"}
_MARKS = {"--include": INCLUDE, "--exclude": EXCLUDE}
_INDEX = ".index.json"
_MACHINE = {"--device", "--threads", "--max-memory", "--shard-range"}
_RUNS = {"--resume"}
_FOLDERS = {"-o", "--output"}
_NAME_BYTES = 255
"""Most bytes of a name of a file or directory."""
_HOME = re.compile(r"((?!--include=|--exclude=)--[a-z-]+=|-o)?(~(?:/.*)?)", re.DOTALL)


def normalized(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--json [FILE]` and `--jsonl [FILE]` joined to their file, `-` if none follows.

    The next word is the file if it is `-`, or has the option's ending and is not a shard index. `--include` and
    `--exclude` are one parameter, to keep their common order: each value is marked `+` or `-`. A path that begins with
    `~/` and that no shell has expanded, as in `--json=~/x.json`, begins with the home directory. Raises UsageError for
    an output without a name.
    """
    result: list[str] = []
    waiting = list(map(_at_home, arguments))
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*result, word, *waiting]
        if word in _ENDINGS:
            takes = bool(waiting) and _is_file(waiting[0], _ENDINGS[word])
            result.append(f"{word}={waiting.pop(0) if takes else STDOUT}")
            continue
        option, equals, value = word.partition("=")
        if option in _FOLDERS and (equals or waiting):
            _check_folder_name(option, value if equals else waiting[0])
        if option in _MARKS and (equals or waiting):
            word = f"{option}={_MARKS[option]}{value if equals else waiting.pop(0)}"
        result.append(word)
    return result


def repeatable(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without device, threads, memory, resuming and shares, on which outputs, and the command
    that they record, do not depend; bytes that are not UTF-8 are escaped."""
    result: list[str] = []
    waiting = [word.encode(errors="surrogateescape").decode(errors="backslashreplace") for word in arguments]
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*result, word, *waiting]
        option, equals, _ = word.partition("=")
        if option not in _MACHINE:
            result += [word] if word not in _RUNS else []
        elif not equals and waiting:
            waiting.pop(0)
    return result


def listed(text: str | None, option: str) -> list[str]:
    """Return the words of a comma-separated list; none without `text`. Raises UsageError for an empty word."""
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option} '{printable(text)}': a name is missing; give names separated by single commas.")
    return words


def _check_folder_name(option: str, name: str) -> None:
    if not name.strip():
        raise UsageError(f"{option}: the name of the directory is empty: give it one.")
    longest = max(len(os.fsencode(part)) for part in name.split("/"))
    if longest > _NAME_BYTES:
        raise UsageError(f"{option} {printable(name)}: a name of {longest:,} bytes; the most there is {_NAME_BYTES:,}.")


def _at_home(word: str) -> str:
    found = _HOME.fullmatch(word)
    return word if found is None else f"{found[1] or ''}{os.path.expanduser(found[2])}"


def _is_file(word: str, ending: str) -> bool:
    return word == STDOUT or (word.endswith(ending) and not word.endswith(_INDEX))
