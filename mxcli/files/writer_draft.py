"""What an output is to be, before it is written: what a run says of itself, and what a later one must agree with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxcli.errors import printable
from mxcli.files.writer_progress import SCHEMA, Line, Share
from mxcli.files.writer_shards import Shard

RECORDED, OWN = "record", "own"
MODIFIED, SHARDS, DOCUMENTS, CARRIED = "modified", "shards", "documents", "carried"
_DERIVED = ("tensors", "notes")
"""What of a record follows from the rest of it."""
UNCOMPARED = ("command",)
"""What of a record may be another when a run is gone on with; the first has its way."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Draft:
    """An output: its shards, its JSON files and the files copied into it by name, and what its record says before
    anything is measured.

    `modified` tells when each file of the source was last written, in nanoseconds. A `share` writes the shards `own` of
    it; without one all are.
    """

    shards: tuple[Shard, ...]
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    carried: Mapping[str, Path] = field(default_factory=dict)
    record: Mapping[str, object] = field(default_factory=dict)
    modified: Mapping[str, int] = field(default_factory=dict)
    share: Share | None = None
    own: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All files of the output, its record apart."""
        return (*(shard.name for shard in self.shards), *self.documents, *self.carried)

    @property
    def written(self) -> tuple[Shard, ...]:
        """The shards that are written."""
        return tuple(shard for shard in self.shards if self.share is None or shard.name in self.own)

    @property
    def copied(self) -> Mapping[str, Path]:
        """The files that are copied: of several shares the first does it."""
        return self.carried if self.share is None or self.share.number == 1 else {}

    @property
    def header(self) -> Line:
        """What is said of it in the record of progress, to be held in JSON."""
        return {
            "schema": SCHEMA,
            RECORDED: self.record,
            MODIFIED: self.modified,
            SHARDS: {shard.name: _outlined(shard) for shard in self.shards},
            DOCUMENTS: self.documents,
            CARRIED: list(self.carried),
            OWN: [shard.name for shard in self.written],
        }


def _outlined(shard: Shard) -> list[object]:
    """Bytes of the file and of its header, and what the header is."""
    return [shard.nbytes, len(shard.header), header_digest(shard.header)]


def header_digest(header: bytes) -> str:
    """What tells the header of a file from another."""
    return hashlib.sha256(header).hexdigest()


def names_in(header: Mapping[str, Any]) -> tuple[str, ...]:
    """All files of the output that a header speaks of, its record apart."""
    return (*header[SHARDS], *header[DOCUMENTS], *header[CARRIED])


def differences(earlier: Line, later: Line, *, moment: bool = True) -> list[str]:
    """How two headers differ in what decides the bytes of an output: at first in what was asked for and of what, and
    only where that is the same in what follows from it. With `moment` the source must also not have been written anew.
    """
    one, other = dict(earlier[RECORDED]), dict(later[RECORDED])
    for key in UNCOMPARED:
        one.pop(key, None), other.pop(key, None)
    derived = [(key, one.pop(key, None), other.pop(key, None)) for key in _DERIVED]
    found = list(_changes("", one, other))
    if moment and not found:
        found = [
            f"{printable(file)} of the source was written anew meanwhile"
            for file, nanoseconds in later[MODIFIED].items()
            if earlier[MODIFIED].get(file) != nanoseconds
        ]
    if not found:
        found = [change for key, was, now in derived for change in _changes(key, was, now)]
    if not found and list(earlier[SHARDS].items()) != list(later[SHARDS].items()):
        found = list(_shard_changes(earlier[SHARDS], later[SHARDS]))
    if not found:
        found = [change for key in (DOCUMENTS, CARRIED) for change in _changes(key, earlier[key], later[key])]
    return found


def _changes(where: str, was: object, now: object) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in _keys(was, now):
            yield from _changes(f"{where} {printable(key)}".strip(), was.get(key), now.get(key))
    elif was != now:
        yield f"{where} was {_shown(was)} and is {_shown(now)}"


def _shard_changes(was: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    if list(was) != list(now):
        yield f"it was divided into {len(was):,} files and is into {len(now):,} (--max-shard-size)"
    else:
        yield from (f"{printable(name)} holds other tensors" for name in was if was[name] != now[name])


def _keys(one: Iterable[str], other: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def _shown(value: object) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
