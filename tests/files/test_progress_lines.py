"""The lines of a progress log: those of mxcli are read as written, all others are refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxcli.errors import InputError
from mxcli.files.progress_lines import line_bytes, parse_log

LOG = Path("out/mxcli.progress.partial")
HASH, SHA256 = "0" * 32, "0" * 64
HEADER: dict[str, Any] = {
    "schema": "mxcli.progress/2",
    "record": {"version": "1"},
    "sampled": {},
    "shards": {"s": [20, 10, HASH]},
    "documents": {"config.json": {}},
    "carried": ["sub/x.txt"],
    "own": ["s"],
}
DONE: dict[str, Any] = {
    "entries": ["a", "../b"],
    "shard": "s",
    "memo": "null",
    "stored": {"a": {"xxh3_128": HASH}, "../b": {"xxh3_128": HASH, "chunks_xxh3_64": ["0" * 16]}},
    "source": {"a": HASH},
}
PUBLISHING = {
    "publishing": True,
    "earlier": {"old": [SHA256], "mxcli.json": []},
    "sha256": {"s": SHA256, "mxcli.json": SHA256},
}
COMPLETE = {"complete": True, "sha256": {"s": SHA256}}
IDENTITY = {"identity": {"model.safetensors": [1, 2, 3, 4, 5]}}
LINES = (DONE, PUBLISHING, COMPLETE, IDENTITY)
WHOLE = b"".join(map(line_bytes, (HEADER, *LINES)))


def test_lines_are_read_as_they_were_written() -> None:
    log = parse_log(LOG, WHOLE)
    assert log.header == HEADER
    assert log.lines == LINES
    assert log.nbytes == len(WHOLE)
    assert log.done == {"a": DONE}
    assert log.is_complete
    assert log.sha256_with("publishing") == {"s": SHA256, "mxcli.json": SHA256}


def test_the_end_of_a_log_may_be_missing() -> None:
    """A crash cuts the last line off, and leaves the zeros of the space that was reserved."""
    ends = [at + 1 for at, byte in enumerate(WHOLE) if byte == 10]
    for cut in range(len(WHOLE)):
        for zeros in (b"", bytes(100)):
            log = parse_log(LOG, WHOLE[:cut] + zeros)
            whole = sum(end <= cut for end in ends)
            assert len(log.lines) == max(0, whole - 1), cut
            assert (log.header is None) == (whole == 0), cut


NAMES = [
    "../x",
    "/etc/passwd",
    "a/../../x",
    "",
    ".",
    "..",
    "a\0b",
    "mxcli.json",
    "s.partial",
    "a//b",
    "\ud800",
    "x" * 300,
    7,
    None,
]
WRONG = [None, 7, 1.5, True, "x", [], [7], [None], {}, {"a": 7}, {"a": None}, [[]], {"": []}]


def hostile() -> list[tuple[int, Any]]:
    """Return lines that mxcli does not write, each with its number."""
    found: list[tuple[int, Any]] = []
    for name in NAMES:
        key = name if isinstance(name, str) else "7/"
        found += [
            (1, {**HEADER, "carried": [name]}),
            (1, {**HEADER, "own": [name]}),
            (1, {**HEADER, "documents": {key: {}}}),
            (1, {**HEADER, "shards": {key: [20, 10, HASH]}}),
            (2, {**DONE, "shard": name}),
        ]
        if name != "mxcli.json":
            found += [(2, {**PUBLISHING, "earlier": {key: [SHA256]}}), (2, {**PUBLISHING, "sha256": {key: SHA256}})]
    for line, number in ((HEADER, 1), *((each, 2) for each in LINES)):
        for key, right in line.items():
            found += [(number, {**line, key: wrong}) for wrong in WRONG if type(wrong) is not type(right)]
            found.append((number, {other: value for other, value in line.items() if other != key}))
        found.append((number, {**line, "more": 1}) if number == 2 else (1, {**line, "schema": "mxcli.progress/1"}))
    found += [
        (1, {**HEADER, "shards": {"s": outline}})
        for outline in ([1, 2], [1, 2, 3], [-1, 2, HASH], [1, True, HASH], [1, 2, "x"], {"a": 1}, [1.5, 2, HASH])
    ]
    found += [
        (1, {**HEADER, "carried": ["s"]}),
        (1, {**HEADER, "own": ["other"]}),
        (1, {**HEADER, "sampled": {"a": "x"}}),
        (2, {**DONE, "shard": "other"}),
        *((2, {**PUBLISHING, "earlier": {"a": each}}) for each in (SHA256, [7], ["x"], [None], {}, None)),
        (2, {**DONE, "entries": []}),
        (2, {**DONE, "entries": ["a"]}),
        (2, {**DONE, "stored": {"a": {"xxh3_128": "x"}, "../b": {"xxh3_128": HASH}}}),
        (2, {**DONE, "stored": {"a": {}, "../b": {}}}),
        (2, {**DONE, "source": {"a": "x"}}),
        (2, {**IDENTITY, "complete": True}),
        (2, {"identity": {"f": [1, 2, 3, 4]}}),
        (2, {"identity": {"f": [1, 2, 3, 4, "5"]}}),
        (2, {**COMPLETE, "sha256": {"s": HASH}}),
        (2, {}),
        *((number, line) for number in (1, 2) for line in ([], "x", 7, None, True)),
    ]
    return found


@pytest.mark.parametrize(("number", "line"), hostile())
def test_lines_that_mxcli_did_not_write_are_refused(number: int, line: Any) -> None:
    raw = line_bytes(line) if isinstance(line, dict) and line else json.dumps(line).encode() + b"\n"
    content = raw + line_bytes(DONE) if number == 1 else line_bytes(HEADER) + raw + line_bytes(DONE)
    with pytest.raises(InputError, match=rf"out/mxcli\.progress\.partial: line {number}: "):
        parse_log(LOG, content)


@pytest.mark.parametrize("raw", [b"{", b"", b"\xff", b"[" * 100_000, b"9" * 5_000, b'{"entries": NaN}', b"\0\0"])
def test_lines_that_are_not_json_are_refused(raw: bytes) -> None:
    with pytest.raises(InputError, match=r"line 2: "):
        parse_log(LOG, line_bytes(HEADER) + raw + b"\n" + line_bytes(DONE))


def test_any_changed_byte_is_seen() -> None:
    """Also where types and names stay right, as in a memo."""
    content = line_bytes(HEADER) + line_bytes(DONE)
    start = len(line_bytes(HEADER))
    for at in range(start, len(content) - 1):
        for flip in (1, 4):
            with pytest.raises(InputError):
                parse_log(LOG, content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
