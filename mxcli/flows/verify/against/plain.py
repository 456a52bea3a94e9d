"""Plain tensors compared with their originals: which are copies, and which of the others must have been.

Producers change plain tensors on purpose, but then whole kinds of them: all norms before the layers that they rescaled,
or embedding and head of a rotated model. One that differs where the others of its kind are copies is damage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.hashes import hash_of
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.verify.against.originals import Original
from mxcli.flows.verify.errors import Distance, converted, distance, same_bytes, widened

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
WILD = 0.5
"""The relative error from which on a plain tensor is another one: a cast, or a change that trained on, is far below."""
_NEARLY_ALL = 0.9
"""The share of the other plain tensors that are copies, from which on one without siblings must be a copy too."""


@dataclass(frozen=True, slots=True)
class PlainDifference:
    """A plain tensor that is not a copy of its original: how it differs, and why it must be one (empty: a producer may
    have changed it)."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Compared:
    """A plain tensor and its original; `difference` is empty if it is a copy, or a cast. `far` says why it is wrong
    for itself, and `xxh3` is the hash of what is stored."""

    name: str
    info: TensorInfo
    original: Original
    difference: str = ""
    far: str = ""
    xxh3: str = ""

    @property
    def kind(self) -> str:
        return re.sub(r"\d+", "*", self.name)


def plain_differences(
    checkpoint: Checkpoint,
    pairs: Sequence[tuple[TensorInfo, Original]],
    copied: Mapping[str, object],
    *,
    rotated: bool,
) -> list[PlainDifference]:
    """Return the plain tensors that are not copies of their originals. `copied` are the names of those that a record
    says were copied; with `rotated` the configuration states transforms of the model."""
    compared = [
        _compare(checkpoint, info, original, is_copied=info.name in copied, rotated=rotated) for info, original in pairs
    ]
    differing = [each for each in compared if each.difference]
    places = _places(compared, {each.info.shape for each in differing}, {each.xxh3 for each in differing})
    return [PlainDifference(each.name, *_judged(each, compared, places)) for each in differing]


def _compare(
    checkpoint: Checkpoint, info: TensorInfo, original: Original, *, is_copied: bool, rotated: bool
) -> _Compared:
    x, y, dtype = original.read(), read(checkpoint, info), original.info.dtype
    found = _Compared(info.name, info, original)
    floats = dtype in FLOATS and info.dtype in FLOATS
    if dtype != info.dtype and not floats:
        return found
    cast = converted(x, dtype, info.dtype)
    if same_bytes(cast, y):
        return found
    difference, far = _first_difference(cast, y, info.dtype), ""
    measured = distance(x, dtype, y, info.dtype) if floats else Distance()
    error = measured.relative_error
    if measured.unmatched:
        far = f"{measured.unmatched:,} values are finite in only one of checkpoint and source"
    elif is_copied:
        far = difference
    elif ((error is None and measured.noise > 0) or (error is not None and error > WILD)) and not rotated:
        far = f"relative error {'infinite' if error is None else f'{error:.3g}'}: these are other values"
    return _Compared(info.name, info, original, difference, far, hash_of(y).xxh3)


def _places(compared: Sequence[_Compared], shapes: set[tuple[int, ...]], wanted: set[str]) -> dict[str, str]:
    """Return the names of the originals of some shapes by the hash of what a copy of them is."""
    found: dict[str, str] = {}
    for each in compared:
        if each.info.shape in shapes:
            copy = converted(each.original.read(), each.original.info.dtype, each.info.dtype)
            xxh3 = hash_of(copy).xxh3
            if xxh3 in wanted:
                found.setdefault(xxh3, each.name)
    return found


def _judged(each: _Compared, compared: Sequence[_Compared], places: Mapping[str, str]) -> tuple[str, str]:
    """Return how a tensor differs, and why it must not."""
    siblings = [other for other in compared if other.kind == each.kind]
    copies = sum(1 for other in siblings if not other.difference)
    how = f"{len(siblings) - copies:,} of {len(siblings):,} such tensors differ"
    if each.far:
        return each.far, "the values of the source"
    if each.xxh3 in places:
        return f"{each.difference}; these are the values of '{printable(places[each.xxh3])}'", "its own values"
    if 2 * copies > len(siblings):
        return each.difference, f"a copy: {copies:,} of {len(siblings):,} such tensors are copies"
    others = list(_others(each, compared))
    equal = sum(1 for other in others if not other.difference)
    if (len(siblings) == 1 or 2 * copies == len(siblings)) and others and equal >= _NEARLY_ALL * len(others):
        return each.difference, f"a copy: {equal:,} of {len(others):,} other plain tensors are copies"
    return (f"values differ from the source; {how}" if len(siblings) > 1 else "values differ from the source"), ""


def _others(each: _Compared, compared: Sequence[_Compared]) -> Iterator[_Compared]:
    """Yield the tensors of other kinds, without the kinds that were changed as a whole."""
    counts: dict[str, list[bool]] = {}
    for other in compared:
        counts.setdefault(other.kind, []).append(not other.difference)
    for other in compared:
        whole = len(counts[other.kind]) > 1 and not any(counts[other.kind])
        if other.kind != each.kind and not whole:
            yield other


def _first_difference(x: Array, y: Array, dtype: str) -> str:
    one, other = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (x, y))
    differing = np.flatnonzero(one != other)
    at = int(differing[0]) // x.itemsize
    listed = ", ".join(map(str, map(int, np.unravel_index(at, x.shape)))) if x.ndim else ""
    values = f"; there {_value(y, at, dtype)}, in the source {_value(x, at, dtype)}"
    return f"{len(differing):,} of {one.size:,} bytes differ from the source, the first at [{listed}]{values}"


def _value(x: Array, at: int, dtype: str) -> str:
    single = x.reshape(-1)[at : at + 1]
    return f"{float(widened(single, dtype)[0]):g}" if dtype in FLOATS else str(single[0])
