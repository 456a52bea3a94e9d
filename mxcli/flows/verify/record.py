"""The record next to a checkpoint (`mxcli.json`), read without trusting any of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mxcli.errors import InputError, printable
from mxcli.files.hashes import ContentHash, recorded_hash
from mxcli.files.model_files import RECORD
from mxcli.files.plain import read_json_object

_RULES = ("format", "scale_rounding", "rounding", "dialect")
_SHA256, _XXH3 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Record:
    """Statements of a record in the form that mxcli writes; `faults` has what is wrong with each key.

    `tensors` are the records of the source's tensors, `files` the names of the output's files, `sha256` the hash of
    each whole file, `headers` of each shard's header, and `stored` of each tensor of each shard.
    """

    is_there: bool = False
    tensors: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, Mapping[str, ContentHash]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_hashes(self) -> bool:
        """True if it has hashes of tensors or whole files."""
        return bool(self.stored or self.sha256)


def read_record(root: Path) -> Record:
    """Return the record of a directory; an empty one if it is missing, one with faults if it cannot be read."""
    path = root / RECORD
    if not path.is_file():
        return Record()
    try:
        content = read_json_object(path)
    except InputError as error:
        return Record(is_there=True, faults={RECORD: printable(error.reasons[0])})
    faults: dict[str, str] = {}
    record = Record(
        is_there=True,
        tensors=_objects(content, "tensors", faults),
        files=_names(content, faults),
        sha256=_hashes(content, "sha256", _SHA256, faults),
        headers=_hashes(content, "headers", _XXH3, faults),
        stored=_stored(content, faults),
        faults=faults,
    )
    if not faults:
        faults |= dict(_contradictions(record, content))
    return record


def _contradictions(record: Record, content: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys that contradict others, with the way they do."""
    if record.sha256 and record.files and record.sha256.keys() != set(record.files):
        differing = sorted(record.sha256.keys() ^ set(record.files))
        yield "files", f"and 'sha256' do not list the same files: {printable(differing[0])} is in one of them"
    read = content.get("source_hashes")
    if isinstance(read, Mapping) and record.tensors and (alone := sorted(set(map(str, read)) - record.tensors.keys())):
        yield "tensors", f"lacks {printable(alone[0])}, whose hash is in 'source_hashes'"
    options = content.get("options")
    if isinstance(options, Mapping) and options.get("overrides") == []:
        yield from _odd_rules(record)


def _odd_rules(record: Record) -> Iterator[tuple[str, str]]:
    """Yield a tensor whose format or rules differ from those of all others, though no override states it."""
    by_rules: dict[tuple[str, ...], list[str]] = {}
    for name, each in record.tensors.items():
        if each.get("decision") == "quantized":
            by_rules.setdefault(tuple(str(each.get(key)) for key in _RULES), []).append(name)
    if len(by_rules) > 1:
        name = min(by_rules.values(), key=len)[0]
        yield "tensors", f"states other rules for {printable(name)} than for the others, and no override does"


def _objects(content: Mapping[str, object], key: str, faults: dict[str, str]) -> dict[str, Mapping[str, object]]:
    """Return the objects of an object by name."""
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        faults[key] = f"is {type(value).__name__}, not an object"
        return {}
    found = {str(name): each for name, each in value.items() if isinstance(each, Mapping)}
    if len(found) < len(value):
        faults[key] = "holds entries that are not objects"
    return found


def _names(content: Mapping[str, object], faults: dict[str, str]) -> tuple[str, ...]:
    value = content.get("files", [])
    if not isinstance(value, list):
        faults["files"] = f"is {type(value).__name__}, not a list"
        return ()
    if not all(_is_inside(name) for name in value):
        faults["files"] = "holds entries that are not names of files in this directory"
    return tuple(dict.fromkeys(name for name in value if _is_inside(name)))


def _hashes(content: Mapping[str, object], key: str, text: re.Pattern[str], faults: dict[str, str]) -> dict[str, str]:
    """Return the hashes of files by name."""
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        faults[key] = f"is {type(value).__name__}, not an object"
        return {}
    found = {
        name: digest
        for name, digest in value.items()
        if _is_inside(name) and isinstance(digest, str) and text.fullmatch(digest)
    }
    if len(found) < len(value):
        faults[key] = "holds entries that are not a file of this directory with its hash"
    return found


def _stored(content: Mapping[str, object], faults: dict[str, str]) -> dict[str, dict[str, ContentHash]]:
    found: dict[str, dict[str, ContentHash]] = {}
    for shard, entries in _objects(content, "stored", faults).items():
        hashes = {str(name): recorded_hash(each) for name, each in entries.items()}
        found[shard] = {name: each for name, each in hashes.items() if each is not None}
        if not _is_inside(shard) or len(found[shard]) < len(hashes):
            faults["stored"] = "holds entries that are not a shard of this directory with hashes of its tensors"
    return found


def _is_inside(name: object) -> bool:
    """Return whether a value is the name of a file below the directory, without a way out of it."""
    if not isinstance(name, str) or not name or "\0" in name or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts != ()
