"""Safetensors headers, read without trusting any of it: `_header_length`, `_checked_entry` and `_coverage` refuse
hostile ones."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.plain import foreign_content, read_head
from mxcli.files.roles import role_of
from mxcli.files.tensors import DTYPES, LARGEST, FileContents, TensorInfo, byte_count

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
METADATA = "__metadata__"
STALE_METADATA = frozenset({"_quantization_metadata", "quantization_config", "quantization"})
"""Its keys that describe the codes of a file: an output has others, or none."""
FIELDS = ("dtype", "shape", "data_offsets")
_STATED = itemgetter(*FIELDS)
_WHOLE = frozenset({int})


def read_safetensors(path: Path) -> FileContents:
    """Read the tensors of one file ordered by position; no tensor data is read.

    Raises InputError with every problem found: a file that is truncated, empty or of another kind, an absurd header
    length, invalid JSON, duplicate keys, unknown dtypes, shapes that do not fit their bytes, and data offsets that
    overlap, leave holes or point outside the file.
    """
    head, size = read_head(path)
    header_bytes = _header_length(path, head, size)
    with path.open("rb") as file:
        file.seek(LENGTH_BYTES)
        text = file.read(header_bytes)
        size = os.fstat(file.fileno()).st_size
    entries = _parse(path, text)
    problems: list[str] = []
    metadata = _metadata(path, entries.pop(METADATA, None), problems)
    data_start = LENGTH_BYTES + header_bytes
    tensors = []
    for name, entry in entries.items():
        try:
            dtype, shape, begin, nbytes = _checked_entry(name, entry)
        except ValueError as fault:
            problems.append(f"{printable(path)}: tensor '{printable(name)}': {fault}.")
            continue
        role = role_of(name, shape, dtype)
        tensors.append(TensorInfo(name, dtype, shape, role, path, data_start + begin, nbytes))
    if not problems:
        tensors.sort(key=lambda info: (info.offset, info.nbytes))
        problems += _coverage(path, tensors, data_start, size)
    if problems:
        raise together(InputError, printable(path), problems)
    return FileContents(tuple(tensors), metadata)


def looks_like_safetensors(head: bytes) -> bool:
    """Return whether the first bytes are a possible header length and the beginning of a JSON object."""
    return head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and _length(head) <= MAX_HEADER_BYTES


def _length(head: bytes) -> int:
    return int.from_bytes(head[:LENGTH_BYTES], "little")


def _header_length(path: Path, head: bytes, size: int) -> int:
    """Return the length of the header. Raises InputError for another kind of file, and a length that is absurd or
    beyond the end."""
    shown = printable(path)
    # The length of a real header may equal the first bytes of another kind of file.
    foreign = None if looks_like_safetensors(head) else foreign_content(path, head, size)
    if foreign:
        raise InputError(foreign)
    if size < LENGTH_BYTES + 2:
        raise InputError(f"{shown}: {size} bytes, too short for a safetensors file; download it again.")
    length = _length(head)
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"{shown}: header length {length:,} is above the limit of {MAX_HEADER_BYTES:,} bytes; "
            "not a safetensors file, or damaged."
        )
    if length > size - LENGTH_BYTES:
        raise InputError(
            f"{shown}: truncated: the header needs {LENGTH_BYTES + length:,} bytes and the file has "
            f"{size:,}; download it again."
        )
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        raise InputError(f"{shown}: not a safetensors file: its header does not begin with '{{'.")
    return length


def _parse(path: Path, text: bytes) -> dict[str, object]:
    shown = printable(path)
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = dict(pairs)
        if len(names) != len(pairs):
            repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return names

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shown}: its header is not valid JSON: {printable(error)}.") from error
    if repeated:
        problems = [f"{shown}: '{printable(name)}' occurs twice in its header." for name in repeated]
        raise together(InputError, shown, problems)
    if not isinstance(parsed, dict):
        raise InputError(f"{shown}: its header is not a JSON object.")
    return parsed


def _metadata(path: Path, entry: object, problems: list[str]) -> dict[str, str]:
    if entry is None:
        return {}
    shown = printable(path)
    if not isinstance(entry, dict):
        problems.append(f"{shown}: {METADATA} is {_shown(entry)}; it must map text to text.")
        return {}
    problems += [
        f"{shown}: {METADATA}: the value of '{printable(key)}' is {_shown(value)}; it must be text."
        for key, value in entry.items()
        if not isinstance(value, str)
    ]
    return entry


def _shown(value: object) -> str:
    """Return a JSON value as text; containers, which may nest without end, by their kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return printable(json.dumps(value))


def _checked_entry(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, first byte and byte count of a header entry. Raises ValueError stating what is invalid."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError("its name is not valid Unicode") from None
    if not isinstance(entry, dict):
        raise ValueError(f"its entry is {type(entry).__name__}, not an object")
    try:
        dtype, shape, offsets = _STATED(entry)
    except KeyError:
        missing = [field for field in FIELDS if field not in entry]
        raise ValueError(f"its entry lacks {', '.join(missing)}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype {printable(dtype)} is unknown; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise ValueError(f"shape {printable(shape)} must be a list of whole numbers from 0 to 2^63 - 1")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {printable(offsets)} must be two ascending whole numbers")
    begin, end = offsets
    try:
        nbytes = byte_count(dtype, tuple(shape))
    except ValueError as fault:
        raise ValueError(f"shape {printable(shape)}: {fault}") from None
    if nbytes != end - begin:
        raise ValueError(f"{dtype} {printable(shape)} needs {nbytes:,} bytes and its offsets hold {end - begin:,}")
    return dtype, tuple(shape), begin, nbytes


def _are_sizes(numbers: object) -> bool:
    if not isinstance(numbers, list) or not _WHOLE.issuperset(map(type, numbers)):
        return False
    return not numbers or (min(numbers) >= 0 and max(numbers) <= LARGEST)


def _coverage(path: Path, tensors: Sequence[TensorInfo], data_start: int, size: int) -> list[str]:
    """Return problems of sorted tensors that do not tile the bytes from data_start to the end of the file."""
    shown = printable(path)
    problems = []
    reached, owner = data_start, ""
    for info in tensors:
        name = printable(info.name)
        if info.offset < reached and info.nbytes:
            shared = min(reached - info.offset, info.nbytes)
            problems.append(f"{shown}: tensors '{owner}' and '{name}' overlap by {shared:,} bytes.")
        elif info.offset > reached:
            problems.append(f"{shown}: {info.offset - reached:,} bytes before tensor '{name}' belong to no tensor.")
        if info.offset + info.nbytes > reached:
            reached, owner = info.offset + info.nbytes, name
    if reached > size:
        problems.append(
            f"{shown}: truncated: the header describes {reached:,} bytes and the file has {size:,} "
            f"({reached - size:,} missing); download it again."
        )
    elif reached < size:
        problems.append(f"{shown}: {size - reached:,} bytes after the last tensor belong to no tensor.")
    return problems
