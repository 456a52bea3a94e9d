"""Checks on paths before anything is parsed: only regular files are opened, and foreign content is recognized by its
first bytes."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, printable, together

MAX_JSON_BYTES = 1 << 30
MAX_JSON_NESTING = 100
HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Foreign:
    """Content often found instead of a checkpoint: how it begins, what it is, and what to do."""

    begins: Callable[[bytes], bool]
    what: str
    way_out: str


FOREIGN = (
    Foreign(
        lambda head: head.startswith(b"version https://git-lfs"),
        "a Git LFS pointer, not the file itself",
        "fetch the real file with 'git lfs pull'",
    ),
    Foreign(
        lambda head: head.lstrip().lower().startswith((b"<!doctype", b"<html")),
        "an HTML page, probably a failed download",
        "download the file again",
    ),
    Foreign(
        lambda head: head.startswith(b"GGUF"),
        "a GGUF file",
        "give it the ending .gguf",
    ),
    Foreign(
        lambda head: head.startswith(b"PK\x03\x04"),
        "a zip archive (PyTorch or npz)",
        "give it the ending .pt or .npz",
    ),
    Foreign(
        lambda head: head.startswith(b"\x93NUMPY"),
        "a NumPy array",
        "give it the ending .npy",
    ),
    Foreign(
        lambda head: head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")),
        "a Python pickle",
        "give it the ending .pt if PyTorch wrote it",
    ),
    Foreign(
        lambda head: head[257:262] == b"ustar",
        "a tar archive, as NeMo writes them",
        "unpack it, or convert it with the program that wrote it",
    ),
    Foreign(
        lambda head: head.startswith(b"\x89HDF\r\n"),
        "an HDF5 file",
        "convert it to safetensors first",
    ),
    Foreign(
        lambda head: head.lstrip().startswith((b'{"error', b"Access", b"Entry not found", b"Invalid")),
        "an error message of a server, not the file",
        "download the file again",
    ),
)


def foreign_content(path: Path, head: bytes, size: int) -> str | None:
    """Return one sentence on what the file is if its first bytes match a FOREIGN row, else None."""
    for foreign in FOREIGN:
        if foreign.begins(head):
            pointed = re.search(rb"^size (\d{1,18})$", head, re.MULTILINE) if "LFS" in foreign.what else None
            real = f" (the real file has {int(pointed[1]):,} bytes)" if pointed else ""
            return f"{printable(path)}: {size:,} bytes, {foreign.what}{real}; {foreign.way_out}."
    return None


def path_problem(path: Path) -> str | None:
    """Return why `path` cannot be opened as a regular file or listed as a directory, as one sentence, or None."""
    shown = printable(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            return f"{shown}: link to {printable(os.readlink(path))}, which does not exist; finish the download."
        return f"{shown}: no such file or directory."
    except NotADirectoryError:
        return f"{shown}: a parent of it is a file, not a directory."
    except PermissionError:
        return f"{shown}: permission denied; make it and its directory readable."
    except (OSError, ValueError) as error:
        return f"{shown}: cannot be opened: {printable(error)}."
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return f"{shown}: {_kind_of_node(mode)}; a regular file or a directory is needed."
    needed = os.R_OK | os.X_OK if stat.S_ISDIR(mode) else os.R_OK
    if not os.access(path, needed):
        return f"{shown}: permission denied; make it readable."
    return None


def file_problem(path: Path) -> str | None:
    """Return a problem like path_problem; a directory is one too."""
    problem = path_problem(path)
    if problem is None and path.is_dir():
        return f"{printable(path)}: a directory; a file is needed."
    return problem


def read_head(path: Path) -> tuple[bytes, int]:
    """Read the first HEAD_BYTES and the size of a regular, non-empty file. Raises InputError for any other."""
    problem = file_problem(path)
    if problem:
        raise InputError(problem)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(min(size, HEAD_BYTES))  # one of /proc has no size, and may wait for ever
    except OSError as error:
        raise InputError(f"{printable(path)}: cannot be read: {printable(error)}.") from error
    if size == 0:
        raise InputError(f"{printable(path)}: empty file (0 bytes); download or write it again.")
    return head, size


_CONTAINERS = (dict, list)
_KINDS = {list: "list", str: "text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}
"""What a JSON value is called."""


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON file whose top is an object. Raises InputError naming the file, line and column, or what it is
    instead, and for keys that have two values: readers differ in the one they take."""
    head, size = read_head(path)
    if size > MAX_JSON_BYTES:
        raise InputError(f"{printable(path)}: {size:,} bytes of JSON; the limit is {MAX_JSON_BYTES:,}.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        parsed, ambiguous = parse_json(text)
    except (ValueError, RecursionError, OSError) as error:
        what = foreign_content(path, head, size)
        raise InputError(what or f"{printable(path)}: not valid JSON: {printable(error)}.") from error
    if ambiguous:
        shown = printable(path)
        problems = [
            f"{shown}: the key '{printable(key)}' occurs twice, with two values; keep one." for key in ambiguous
        ]
        raise together(InputError, shown, problems)
    if not isinstance(parsed, dict):
        raise InputError(f"{printable(path)}: the top of the JSON is {_KINDS[type(parsed)]}, not an object.")
    if nests_deeper(parsed, MAX_JSON_NESTING):
        raise InputError(f"{printable(path)}: its JSON nests more than {MAX_JSON_NESTING} deep.")
    return parsed


def parse_json(text: str) -> tuple[object, list[str]]:
    """Parse JSON, and return the keys that occur twice in an object with different values too. Raises ValueError, and
    RecursionError."""
    ambiguous: dict[str, None] = {}

    def collected(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ambiguous.update((key, None) for key, value in pairs if not _same(value, found[key]))
        return found

    return json.loads(text, object_pairs_hook=collected), list(ambiguous)


def nests_deeper(value: object, most: int) -> bool:
    """Return whether a value is inside `most` containers or more."""
    level: list[Any] = [value]
    for _ in range(most):
        # Few values are containers.
        inside = (each for each in level if type(each) in _CONTAINERS)
        level = [part for each in inside for part in (each.values() if type(each) is dict else each)]
        if not level:
            return False
    return True


def _same(one: object, other: object) -> bool:
    """Return whether two values are the same text in JSON, true and 1 being different."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _kind_of_node(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device file")
