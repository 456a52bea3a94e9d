"""The accounting of a source: every file is read, carried along to an output, or left out with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.model_folder import WEIGHTS
from mxcli.files.tensors import LeftOut

ACCOUNTING = "accounting"
READ, CARRIED, LEFT_OUT = "read", "carried", "left_out"
FILES, BYTES, TENSORS, WEIGHT_FILES, LISTED = "files", "bytes", "tensors", "weights", "listed"
_MOST = 200
"""Entries that a record lists of the files that are left out; others are counted by their reason."""


@dataclass(frozen=True, slots=True)
class Accounted:
    """A file of a source, or a folder that is left out as a whole with the number of `files` in it: its name in the
    source, its bytes, and why it is left out (None: it is not)."""

    name: str
    nbytes: int
    reason: str | None = None
    files: int = 1

    @property
    def is_weights(self) -> bool:
        """True if files of this name usually hold weights."""
        return WEIGHTS.search(self.name) is not None


@dataclass(frozen=True, slots=True)
class Tensors:
    """A number of tensors of a source, and their bytes there."""

    count: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Accounting:
    """The files of a source: `read` as weights or configuration, `carried` along as they are, and `left_out`; of those
    that are read, the `parts` that are left out."""

    read: tuple[Accounted, ...]
    carried: tuple[Accounted, ...]
    left_out: tuple[Accounted, ...]
    parts: tuple[LeftOut, ...] = ()

    def record(self, tensors: Mapping[str, Tensors] | None = None) -> dict[str, object]:
        """Return the accounting as JSON; a record also has the tensors of the weights by what is done with them."""
        every = (*self.read, *self.carried, *self.left_out)
        carried = {**_sums(self.carried), WEIGHT_FILES: [each.name for each in self.carried if each.is_weights]}
        counted = {what: {TENSORS: each.count, BYTES: each.nbytes} for what, each in (tensors or {}).items()}
        return {
            **_sums(every),
            READ: _sums(self.read),
            CARRIED: carried,
            LEFT_OUT: {**_sums(self.left_out), LISTED: [_entry(each) for each in _shortened(self.left_out)]},
            **({} if tensors is None else {TENSORS: counted}),
        }


def _sums(entries: Iterable[Accounted]) -> dict[str, object]:
    listed = list(entries)
    return {FILES: sum(each.files for each in listed), BYTES: sum(each.nbytes for each in listed)}


def _shortened(entries: tuple[Accounted, ...]) -> Iterator[Accounted]:
    """Yield the entries, those beyond the most that are listed together by their reason."""
    ranked = sorted(entries, key=lambda each: (not each.is_weights, -each.nbytes))
    yield from sorted(ranked[:_MOST], key=lambda each: each.name)
    others: dict[str, list[Accounted]] = {}
    for each in ranked[_MOST:]:
        others.setdefault(str(each.reason), []).append(each)
    for reason, alike in others.items():
        yield Accounted("", sum(each.nbytes for each in alike), reason, sum(each.files for each in alike))


def _entry(each: Accounted) -> dict[str, object]:
    return {"name": printable(each.name), FILES: each.files, BYTES: each.nbytes, "reason": each.reason}


def is_accounting(value: object) -> bool:
    """Return whether a JSON value is the accounting of a source as a record has it, with sums that agree."""
    if not isinstance(value, Mapping) or not _has_sums(value):
        return False
    parts = [value.get(key) for key in (READ, CARRIED, LEFT_OUT)]
    known = [part for part in parts if isinstance(part, Mapping) and _has_sums(part)]
    if len(known) < len(parts) or any(sum(part[key] for part in known) != value[key] for key in (FILES, BYTES)):
        return False
    weights, listed = known[1].get(WEIGHT_FILES), known[2].get(LISTED)
    if not (isinstance(weights, list) and all(isinstance(name, str) for name in weights) and isinstance(listed, list)):
        return False
    entries = [each for each in listed if isinstance(each, Mapping) and _has_sums(each)]
    tensors = value.get(TENSORS)
    if not isinstance(tensors, Mapping) or not all(isinstance(each, Mapping) for each in tensors.values()):
        return False
    stated = all(isinstance(each.get(key), str) for each in entries for key in ("name", "reason"))
    agree = all(sum(each[key] for each in entries) == known[2][key] for key in (FILES, BYTES))
    return stated and agree and len(entries) == len(listed)


def _has_sums(value: Mapping[str, object]) -> bool:
    return all(type(count := value.get(key)) is int and count >= 0 for key in (FILES, BYTES))
