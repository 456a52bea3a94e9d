"""Sets of layers that loaders fuse into one: they need one tensor scale, and one decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from mxcli.errors import UsageError, printable

# The last part of each member's module path; what comes before it, an expert's number included, is the same.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)


def named_sets(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the sets that a user names, as in "q+k+v,gate+up": last parts of module paths. Raises UsageError for a set
    of fewer than two, and for a part that occurs twice."""
    sets = tuple(tuple(part.strip() for part in each.split("+")) for each in text.split(","))
    parts = [part for members in sets for part in members]
    if any(len(members) < 2 or not all(members) for members in sets) or any("." in part for part in parts):
        raise UsageError(
            f"--fuse '{printable(text)}': a set is the last parts of module paths joined by +, such as "
            "query_key+value; sets are separated by commas."
        )
    twice = sorted({part for part in parts if parts.count(part) > 1})
    if twice:
        raise UsageError(f"--fuse '{printable(text)}': {', '.join(map(printable, twice))} is in two sets.")
    return sets


def fused_set(name: str, sets: Iterable[Sequence[str]] = FUSED) -> str | None:
    """Return the set a weight belongs to, such as `model.layers.0.self_attn.q_proj+k_proj+v_proj`, or None; of several
    sets the first one."""
    module, _, parameter = name.rpartition(".")
    prefix, dot, last = module.rpartition(".")
    members = next((members for members in sets if last in members), None)
    return None if parameter != "weight" or members is None else prefix + dot + "+".join(members)


def joined_sets(more: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the sets known here and `more`; sets with a member in common are one."""
    sets: list[tuple[str, ...]] = []
    for members in (*more, *FUSED):
        met = [each for each in sets if not set(each).isdisjoint(members)]
        place = sets.index(met[0]) if met else len(sets)
        sets = [each for each in sets if each not in met]
        sets.insert(place, tuple(dict.fromkeys(chain(*met, members))))
    return tuple(sets)


def fused_sets(names: Iterable[str], more: Iterable[Sequence[str]] = ()) -> dict[str, tuple[str, ...]]:
    """Return the sets with two members or more among the names, in their order; `more` are joined to the ones known
    here."""
    sets = joined_sets(more)
    found: dict[str, list[str]] = {}
    for name in names:
        key = fused_set(name, sets)
        if key is not None:
            found.setdefault(key, []).append(name)
    return {key: tuple(members) for key, members in found.items() if len(members) > 1}
