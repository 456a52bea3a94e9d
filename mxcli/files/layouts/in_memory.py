"""Names of parameters in memory, found for names in files that differ in their beginnings or by a known row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile

from mxcli.files.layouts.renamed import names_of

_LAYER = re.compile(r"[^.]+\.\d+\..+$")


def names_in_memory(names: Iterable[str], in_memory: Iterable[str]) -> Mapping[str, str]:
    """Return the name in memory of each parameter that has one: the nearest of those with the same end from the number
    of the layer on. Names of which several are as near are left out."""
    left, found = dict.fromkeys(names), dict[str, str]()
    by_end: dict[str, list[str]] = {}
    for each in in_memory:
        by_end.setdefault(_end(each), []).append(each)
    while True:
        taken = set(found.values())
        nearest = {name: _nearest(name, by_end, taken) for name in left}
        times = Counter(nearest.values())
        sure = {name: called for name, called in nearest.items() if called is not None and times[called] == 1}
        if not sure:
            return found
        found |= sure
        left = {name: None for name in left if name not in sure}


def _end(name: str) -> str:
    """Return a name from its first numbered part on, such as `layers.0.mlp.fc1.weight`; without one, its last two
    parts."""
    match = _LAYER.search(name)
    return match[0] if match else ".".join(name.split(".")[-2:])


def _nearest(name: str, by_end: Mapping[str, Iterable[str]], taken: Collection[str]) -> str | None:
    """Return the one name in memory that is nearest to a name of a file, as its file or transformers calls it; None if
    several are, or none."""
    module, _, parameter = name.rpartition(".")
    for called in (f"{each}.{parameter}" for each in names_of(module)):
        near = {other: _nearness(called, other) for other in by_end.get(_end(called), ()) if other not in taken}
        most = max(near.values(), default=None)
        nearest = [other for other, count in near.items() if count == most]
        if nearest:
            return nearest[0] if len(nearest) == 1 else None
    return None


def _nearness(name: str, other: str) -> tuple[int, int]:
    """Return how many of the last parts of two names are equal, and how many parts both have."""
    ours, theirs = name.split("."), other.split(".")
    pairs = zip(reversed(ours), reversed(theirs), strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return equal, len(set(ours) & set(theirs))
