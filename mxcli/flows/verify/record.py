"""The record next to a checkpoint (`mxcli.json`), read without trusting any of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mxcli.errors import InputError, UsageError, printable
from mxcli.files.hashes import ContentHash
from mxcli.files.model_files import RECORD
from mxcli.files.record import SOURCE_HASHES, OutputRecord, is_hashes, record_in
from mxcli.files.record_schema import CONVERTED_FROM, ORIGIN, REQUANTIZED_FROM
from mxcli.numerics.formats import find_format

_RULES = ("format", "scale_rounding", "rounding", "dialect")


@dataclass(frozen=True, slots=True)
class Record:
    """Statements of a record in the form that mxcli writes; `faults` has what is wrong with each key.

    `layout` is the name of the output's layout, `tensors` are the records of the source's tensors, `files` the names of
    the output's files, `sha256` the hash of each whole file, `headers` of each shard's header, `stored` of each tensor
    of each shard, and `source_hashes` of each tensor that was read of the source. Of a converted checkpoint,
    `origin_hashes` are those of the source that the codes were made of, if it is known.
    """

    is_there: bool = False
    layout: str = ""
    tensors: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, Mapping[str, ContentHash]] = field(default_factory=dict)
    source_hashes: Mapping[str, str] = field(default_factory=dict)
    is_converted: bool = False
    origin_hashes: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_hashes(self) -> bool:
        """True if it has hashes of tensors or whole files."""
        return bool(self.stored or self.sha256)


def read_record(root: Path) -> Record:
    """Return the record of a directory; an empty one if it is missing, one with faults if it cannot be read."""
    try:
        stated = record_in(root)
    except InputError as error:
        return Record(is_there=True, faults={RECORD: printable(error.reasons[0])})
    if stated is None:
        return Record()
    return Record(
        is_there=True,
        layout=str(stated.content.get("layout", "")),
        tensors=stated.tensors,
        files=stated.files,
        sha256=stated.sha256,
        headers=stated.headers,
        stored=stated.stored,
        source_hashes=stated.source_hashes,
        is_converted=CONVERTED_FROM in stated.content,
        origin_hashes=_origin_hashes(stated),
        faults=stated.faults or dict(_contradictions(stated)),
    )


def _origin_hashes(record: OutputRecord) -> Mapping[str, str]:
    origin = record.content.get(ORIGIN)
    hashes = origin.get(SOURCE_HASHES, {}) if isinstance(origin, Mapping) else {}
    return hashes if is_hashes(hashes) else {}


def _contradictions(record: OutputRecord) -> Iterator[tuple[str, str]]:
    """Yield the keys that contradict others, with the way they do."""
    if record.sha256 and record.files and record.sha256.keys() != set(record.files):
        differing = sorted(record.sha256.keys() ^ set(record.files))
        yield "files", f"and 'sha256' do not list the same files: {printable(differing[0])} is in one of them"
    # Of a quantized source, codes and scales were read, which have names of their own.
    plain = record.tensors and not any(record.content.get(key) for key in (REQUANTIZED_FROM, CONVERTED_FROM))
    if plain and (alone := sorted(record.source_hashes.keys() - record.tensors.keys())):
        yield "tensors", f"lacks {printable(alone[0])}, whose hash is in 'source_hashes'"
    options = record.content.get("options")
    if isinstance(options, Mapping):
        yield from _other_formats(record, options)
        if options.get("overrides") == []:
            yield from _odd_rules(record)


def _other_formats(record: OutputRecord, options: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield a quantized tensor whose format the options and their overrides do not have."""
    overrides = options.get("overrides")
    stated = [options, *(overrides if isinstance(overrides, list) else ())]
    formats = {_format_name(each.get("format")) for each in stated if isinstance(each, Mapping)}
    for name, each in record.tensors.items():
        if each.get("decision") == "quantized" and _format_name(each.get("format")) not in formats:
            yield "options", f"has no format {printable(each.get('format'))}, which 'tensors' has for {printable(name)}"
            return


def _format_name(stated: object) -> str:
    """Return the name of a format for one of its names; an unknown one stands for itself."""
    try:
        return find_format(str(stated)).name
    except UsageError:
        return str(stated)


def _odd_rules(record: OutputRecord) -> Iterator[tuple[str, str]]:
    """Yield a tensor whose format or rules differ from those of all others, though no override states it."""
    by_rules: dict[tuple[str, ...], list[str]] = {}
    for name, each in record.tensors.items():
        if each.get("decision") == "quantized":
            by_rules.setdefault(tuple(str(each.get(key)) for key in _RULES), []).append(name)
    if len(by_rules) > 1:
        name = min(by_rules.values(), key=len)[0]
        yield "tensors", f"states other rules for {printable(name)} than for the others, and no override does"
