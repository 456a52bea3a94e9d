"""The record of an output (`mxcli.json`) read back: its types and names are checked before anything follows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mxcli.errors import InputError, MxcliError, printable
from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.hashes import ContentHash, recorded_hash
from mxcli.files.model_files import RECORD
from mxcli.files.plain import read_json_object

FILES, SHA256, STORED, HEADERS, SOURCE_HASHES, VERIFIED = (
    "files",
    "sha256",
    "stored",
    "headers",
    "source_hashes",
    "verified",
)
COMPLETED = (FILES, SHA256, STORED, HEADERS, SOURCE_HASHES, VERIFIED)
"""Keys that are added once everything is written."""
SHA256_TEXT, _XXH3_TEXT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")
_MOST_BYTES = 255
"""Bytes of a name in a folder, on every file system."""


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """The record of an output: its content, its files, and the hashes of files, tensors, headers and source tensors;
    those that it does not state are empty."""

    content: Mapping[str, Any]
    files: tuple[str, ...]
    sha256: Mapping[str, str]
    stored: Mapping[str, Mapping[str, ContentHash]]
    headers: Mapping[str, str]
    source_hashes: Mapping[str, str]


def read_record(folder: Path) -> OutputRecord | None:
    """Return the record in a folder; None without one. Raises InputError for a record that mxcli did not write."""
    path = folder / RECORD
    if not path.is_file():
        return None
    content = read_json_object(path)

    def hashes(key: str, pattern: re.Pattern[str]) -> Mapping[str, str]:
        found = content.get(key, {})
        if not isinstance(found, dict) or not is_hashes(found, pattern):
            raise InputError(_wrong(path, key, "names with their hashes"))
        return found

    files = content.get(FILES, [])
    if not isinstance(files, list):
        raise InputError(_wrong(path, FILES, "a list of names"))
    sha256 = hashes(SHA256, SHA256_TEXT)
    for name in (*files, *sha256):
        if not is_inside(name):
            raise InputError(_wrong(path, FILES, f"names of files in its folder, which {_shown(name)} is not"))
    stored = content.get(STORED, {})
    parsed = {
        shard: {name: recorded_hash(each) for name, each in entries.items()}
        for shard, entries in (stored.items() if isinstance(stored, dict) else ())
        if isinstance(entries, dict)
    }
    if not isinstance(stored, dict) or len(parsed) < len(stored) or any(None in of.values() for of in parsed.values()):
        raise InputError(_wrong(path, STORED, "the hashes of the tensors of each file"))
    return OutputRecord(
        content=content,
        files=tuple(files),
        sha256=sha256,
        stored={shard: {name: each for name, each in of.items() if each} for shard, of in parsed.items()},
        headers=hashes(HEADERS, _XXH3_TEXT),
        source_hashes=hashes(SOURCE_HASHES, _XXH3_TEXT),
    )


def completed_record(
    record: Mapping[str, object],
    *,
    lines: Iterable[Mapping[str, Any]],
    headers: Mapping[str, str],
    sha256: Mapping[str, str],
    verified: bool,
) -> dict[str, object]:
    """Return the record of an output with the hashes that the progress lines of its tensors have, and those of its
    files."""
    stored: dict[str, dict[str, object]] = {name: {} for name in headers}
    source: dict[str, str] = {}
    for line in lines:
        stored[line["shard"]] |= line["stored"]
        source |= line["source"]
    return {
        **record,
        FILES: sorted(sha256),
        SHA256: dict(sha256),
        STORED: stored,
        HEADERS: dict(headers),
        SOURCE_HASHES: source,
        VERIFIED: verified,
    }


def is_hashes(value: object, pattern: re.Pattern[str] = _XXH3_TEXT) -> bool:
    """Return whether a JSON value has names with hashes: XXH3-128 unless another pattern is given."""
    return isinstance(value, dict) and all(isinstance(each, str) and pattern.fullmatch(each) for each in value.values())


def is_inside(name: object) -> bool:
    """Return whether a value read from a file is the name of a file that an output may have: a relative path without
    `..`, not the record, and not an unfinished file."""
    if not isinstance(name, str) or not name or "\0" in name or name != PurePosixPath(name).as_posix():
        return False
    try:
        sizes = [len(part.encode()) for part in name.split("/")]
    except UnicodeEncodeError:
        return False
    unsafe = name.startswith("/") or {".", "..", ""} & set(name.split("/")) or max(sizes) > _MOST_BYTES
    return not unsafe and name != RECORD and not name.endswith(PARTIAL_SUFFIX)


@contextmanager
def as_written(where: object, what: str) -> Iterator[None]:
    """Turn what goes wrong in the block, which takes values read back as those that mxcli wrote, into InputError."""
    try:
        yield
    except (MxcliError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{printable(where)}: {what} is not what mxcli writes: {printable(error)}.") from error


def _wrong(path: Path, key: str, needed: str) -> str:
    return f"{printable(path)}: '{key}' must have {needed}; it is not as mxcli writes it. Move the file away."


def _shown(value: object) -> str:
    return f"'{printable(value)}'"
