"""The record of an output (`mxcli.json`) read back: its types and names are checked before anything follows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from mxcli.errors import InputError, MxcliError, printable, together
from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.hashes import ContentHash, recorded_hash
from mxcli.files.model_files import RECORD
from mxcli.files.plain import read_json_object
from mxcli.files.record_schema import TENSORS, schema_faults, tensor_fault

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
    """The record of an output: its content, the records of the source's tensors, its files, and the hashes of files,
    tensors, headers and source tensors; those that it does not state are empty. `faults` says for each key what it must
    have and has not."""

    content: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, object]]
    files: tuple[str, ...]
    sha256: Mapping[str, str]
    stored: Mapping[str, Mapping[str, ContentHash]]
    headers: Mapping[str, str]
    source_hashes: Mapping[str, str]
    faults: Mapping[str, str]


def record_content(folder: Path) -> Mapping[str, Any] | None:
    """Return the JSON of the record in a folder, to be read only; None without one. Raises InputError for a file that
    is not a JSON object."""
    record = record_in(folder)
    return None if record is None else record.content


def record_in(folder: Path) -> OutputRecord | None:
    """Return what the record in a folder states, which is read once; None without one. Raises InputError for a file
    that is not a JSON object."""
    path = folder / RECORD
    if not path.is_file():
        return None
    status = path.stat()
    return _stated(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=2)
def _stated(path: Path, *identity: int) -> OutputRecord:
    return stated_record(read_json_object(path))


def read_record(folder: Path) -> OutputRecord | None:
    """Return the record in a folder; None without one. Raises InputError for a record that mxcli did not write."""
    record = record_in(folder)
    if record is None:
        return None
    if record.faults:
        shown = printable(folder / RECORD)
        problems = [
            f"{shown}: '{key}' {fault}; it is not as mxcli writes it. Move the file away."
            for key, fault in record.faults.items()
        ]
        raise together(InputError, shown, problems)
    return record


def stated_record(content: Mapping[str, Any]) -> OutputRecord:
    """Return what a record states in the form that mxcli writes, and the faults of what is not in it."""
    faults: dict[str, str] = {}

    def inside(key: str, names: Iterable[object]) -> list[str]:
        found = list(names)
        outside = [name for name in found if not is_inside(name)]
        if outside:
            faults[key] = f"must have names of files in its folder, which {_shown(outside[0])} is not"
        return [str(name) for name in found if is_inside(name)]

    def objects(key: str, needed: str) -> dict[str, Mapping[str, Any]]:
        value = content.get(key, {})
        entries = value if type(value) is dict else {}
        found: dict[str, Mapping[str, Any]] = {n: each for n, each in entries.items() if isinstance(each, dict)}
        if type(value) is not dict or len(found) < len(entries):
            faults[key] = f"must have {needed}"
        return found

    def hashes(key: str, pattern: re.Pattern[str], *, of_files: bool) -> dict[str, str]:
        value = content.get(key, {})
        found = value if type(value) is dict else {}
        if type(value) is not dict or not is_hashes(found, pattern):
            faults[key] = "must have names with their hashes"
            found = {name: each for name, each in found.items() if isinstance(each, str) and pattern.fullmatch(each)}
        names = inside(key, found) if of_files else found
        return {name: found[name] for name in names}

    files = content.get(FILES, [])
    if not isinstance(files, list):
        faults[FILES], files = "must have a list of names", []
    stored: dict[str, dict[str, ContentHash]] = {}
    tensors, entries = objects(TENSORS, "an object for each tensor"), objects(STORED, _OF_TENSORS)
    for shard in inside(STORED, entries):
        parsed = {name: recorded_hash(each) for name, each in entries[shard].items()}
        stored[shard] = {name: each for name, each in parsed.items() if each is not None}
        if len(stored[shard]) < len(parsed):
            faults[STORED] = f"must have {_OF_TENSORS}"
    return OutputRecord(
        content=content,
        tensors={name: each for name, each in tensors.items() if tensor_fault(each) is None},
        files=tuple(dict.fromkeys(inside(FILES, files))),
        sha256=hashes(SHA256, SHA256_TEXT, of_files=True),
        stored=stored,
        headers=hashes(HEADERS, _XXH3_TEXT, of_files=True),
        source_hashes=hashes(SOURCE_HASHES, _XXH3_TEXT, of_files=False),
        faults={**dict(schema_faults(content)), **faults},
    )


_OF_TENSORS = "the hashes of the tensors of each file"


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


def _shown(value: object) -> str:
    return f"'{printable(value)}'"
