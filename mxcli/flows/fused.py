"""Sets of layers that loaders fuse into one: they need one tensor scale, and one decision."""

from __future__ import annotations

from collections.abc import Iterable

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
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
_SET_OF = {member: "+".join(members) for members in FUSED for member in members}


def fused_set(name: str) -> str | None:
    """The set a weight belongs to, such as `model.layers.0.self_attn.q_proj+k_proj+v_proj`, or None."""
    module, _, parameter = name.rpartition(".")
    prefix, dot, last = module.rpartition(".")
    if parameter != "weight" or last not in _SET_OF:
        return None
    return prefix + dot + _SET_OF[last]


def fused_sets(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The sets with two members or more among the names, in their order."""
    found: dict[str, list[str]] = {}
    for name in names:
        key = fused_set(name)
        if key is not None:
            found.setdefault(key, []).append(name)
    return {key: tuple(members) for key, members in found.items() if len(members) > 1}
