"""The lines of a progress log: how they are written, and the one place where they are read.

A log is a header and lines after it, each an object of JSON with its own hash as the last key. Every line is checked
for types and names before anything follows it; only the end of a log, cut off by a crash, may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.hashes import hash_of, recorded_hash
from mxcli.files.model_files import RECORD
from mxcli.files.record import SHA256_TEXT, is_hashes, is_inside

SCHEMA = "mxcli.progress/2"
SHARD, ENTRIES, MEMO, STORED, SOURCE = "shard", "entries", "memo", "stored", "source"
PUBLISHING, EARLIER, COMPLETE, SHA256, IDENTITY = "publishing", "earlier", "complete", "sha256", "identity"
RECORDED, OWN_SHARDS = "record", "own"
SAMPLED, SHARDS, DOCUMENTS, CARRIED = "sampled", "shards", "documents", "carried"
_BEGIN = b'{"schema":"mxcli.progress/'
_CHECK = "check"
_AGAIN = "remove the unfinished run, whose files end with .partial, and start again"

JsonLine = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProgressLog:
    """The content of a progress log: its header (None: an empty log), the lines after it, and where they end."""

    header: JsonLine | None
    lines: tuple[JsonLine, ...]
    nbytes: int

    def latest(self, key: str) -> Any:
        """Return the value of the last line with this key; None without one."""
        return next((line[key] for line in reversed(self.lines) if key in line), None)

    def sha256_with(self, key: str) -> Mapping[str, str]:
        """Return the SHA-256 of each file in the last line with this key; none without one."""
        return next((line[SHA256] for line in reversed(self.lines) if key in line), {})

    @property
    def done(self) -> dict[str, JsonLine]:
        """Return the lines of finished tensors, by the name of each one's first entry."""
        return {line[ENTRIES][0]: line for line in self.lines if ENTRIES in line}

    @property
    def is_complete(self) -> bool:
        """Return whether it is of a share that is complete."""
        return bool(self.latest(COMPLETE))

    @property
    def holds_work(self) -> bool:
        """Return whether anything is finished that a run starting from scratch would discard."""
        return bool(self.done or self.is_complete or self.latest(PUBLISHING))


NO_LOG = ProgressLog(None, (), 0)


def line_bytes(line: Mapping[str, object]) -> bytes:
    """Return a line with its hash."""
    text = json.dumps(line, separators=(",", ":"))
    return f'{text[:-1]},"{_CHECK}":"{_hash(text)}"}}\n'.encode()


def parse_log(path: Path, content: bytes) -> ProgressLog:
    """Return the content of a log. Raises InputError, naming file and line, for what mxcli did not write there."""
    whole, _, rest = content.rpartition(b"\n")
    if not whole:
        begun = rest.rstrip(b"\0")[: len(_BEGIN)]
        if not _BEGIN.startswith(begun):
            raise InputError(f"{printable(path)}: is not a progress log of mxcli; move it away.")
        return NO_LOG
    lines: list[JsonLine] = []
    for number, raw in enumerate(whole.split(b"\n"), 1):
        fault, line = _parsed(raw, lines[0] if lines else None)
        if fault:
            raise InputError(f"{printable(path)}: line {number}: {fault}; {_AGAIN}.")
        lines.append(line)
    return ProgressLog(lines[0], tuple(lines[1:]), len(whole) + 1)


def _parsed(raw: bytes, header: JsonLine | None) -> tuple[str, JsonLine]:
    """Return what is wrong with a line (nothing: empty), and the line without its hash."""
    try:
        text = raw.decode()
        line = json.loads(text)
    except (ValueError, RecursionError):
        return "not valid JSON", {}
    if not isinstance(line, dict):
        return f"a JSON {type(line).__name__}, not an object", {}
    check = line.pop(_CHECK, None)
    fault = _header_fault(line) if header is None else _line_fault(line, header)
    if not fault and check != _hash(text.rpartition(f',"{_CHECK}"')[0] + "}"):
        fault = "does not have the hash that was written with it"
    return fault, line


def _hash(text: str) -> str:
    return hash_of(np.frombuffer(text.encode(), np.uint8)).xxh3


def _header_fault(header: JsonLine) -> str:
    if header.get("schema") != SCHEMA:
        return f"schema {printable(header.get('schema'))} is not {SCHEMA}, which this version of mxcli reads"
    missing = [key for key in _HEADER if key not in header]
    wrong = missing or [key for key, is_valid in _HEADER.items() if not is_valid(header[key])]
    outside = [name for name in _names_of(header.get(wrong[0])) if not is_inside(name)] if wrong else []
    if outside and wrong[0] in (SHARDS, DOCUMENTS, CARRIED, OWN_SHARDS):
        return f"'{wrong[0]}' names '{printable(outside[0])}', which is not a file inside the folder"
    if wrong:
        return f"'{wrong[0]}' is {_HEADER_NEEDS[wrong[0]]}; {printable(header.get(wrong[0]))} is not"
    names = [*header[SHARDS], *header[DOCUMENTS], *header[CARRIED]]
    if len(set(names)) < len(names) or not set(header[OWN_SHARDS]) <= set(header[SHARDS]):
        return "its files are not those of one output"
    return ""


def _names_of(value: object) -> list[object]:
    return list(value) if isinstance(value, (dict, list)) else []


def _line_fault(line: JsonLine, header: JsonLine) -> str:
    kind = next((kind for kind in _LINES if kind in line), None)
    if kind is None or not set(line) <= {kind, *_LINES[kind]}:
        return f"unknown keys {', '.join(map(printable, line)) or 'none'}"
    for key in (kind, *_LINES[kind]):
        if key not in line:
            return f"'{key}' is missing"
        if not _VALUES[key](line[key]):
            return f"'{key}' cannot be {printable(json.dumps(line[key]))}"
    if kind == ENTRIES and line[SHARD] not in header[SHARDS]:
        return f"'{printable(line[SHARD])}' is not among its files"
    if kind == ENTRIES and set(line[STORED]) != set(line[ENTRIES]):
        return "has not one hash for each of its tensors"
    return ""


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(map(is_inside, value))


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_outline(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value[:2])) and is_hashes({"": value[2]})


def _is_shards(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_inside, value)) and all(map(_is_outline, value.values()))


def _is_documents(value: object) -> bool:
    named = isinstance(value, dict) and all(map(is_inside, value))
    return named and all(isinstance(each, dict) for each in value.values())  # type: ignore[attr-defined]


def _is_stored(value: object) -> bool:
    return isinstance(value, dict) and all(recorded_hash(each) for each in value.values())


def _is_files(value: object) -> bool:
    named = isinstance(value, dict) and _is_names([name for name in value if name != RECORD])
    return named and is_hashes(value, SHA256_TEXT)


def _is_earlier(value: object) -> bool:
    named = isinstance(value, dict) and _is_names([name for name in value if name != RECORD])
    return named and all(
        isinstance(each, list) and is_hashes(dict(enumerate(each)), SHA256_TEXT)
        for each in value.values()  # type: ignore[attr-defined]
    )


def _is_identities(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, list) and len(each) == 5 and all(type(number) is int for number in each)
        for each in value.values()
    )


_HEADER: Mapping[str, Callable[[object], bool]] = {
    RECORDED: lambda value: isinstance(value, dict),
    SAMPLED: is_hashes,
    SHARDS: _is_shards,
    DOCUMENTS: _is_documents,
    CARRIED: _is_names,
    OWN_SHARDS: _is_names,
}
_HEADER_NEEDS = {
    RECORDED: "an object",
    SAMPLED: "an object of hashes",
    SHARDS: "an object from names inside the folder to sizes and hashes",
    DOCUMENTS: "an object from names inside the folder to objects",
    CARRIED: "a list of names inside the folder",
    OWN_SHARDS: "a list of names inside the folder",
}
_LINES = {
    ENTRIES: (SHARD, MEMO, STORED, SOURCE),
    PUBLISHING: (EARLIER, SHA256),
    COMPLETE: (SHA256,),
    IDENTITY: (),
}
"""The kinds of line by their first key, with the others."""
_VALUES: Mapping[str, Callable[[object], bool]] = {
    ENTRIES: _is_texts,
    SHARD: is_inside,
    MEMO: lambda value: isinstance(value, str),
    STORED: _is_stored,
    SOURCE: is_hashes,
    PUBLISHING: lambda value: isinstance(value, bool),
    EARLIER: _is_earlier,
    COMPLETE: lambda value: isinstance(value, bool),
    SHA256: _is_files,
    IDENTITY: _is_identities,
}
