"""Tensors of a quantized source that have no plain equivalent, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mxcli.errors import printable
from mxcli.files.dialect import MARKER
from mxcli.files.gguf_model import ROPE_FACTORS

ACTIVATION_SCALES = (
    *(".input_scale", ".input_global_scale", ".activation_scale", ".scale_input"),
    "._weight_act_per_tensor_scale",
    ".qscale_act",
)
OMITTED_ENDINGS = (*ACTIVATION_SCALES, MARKER)
"""Endings of tensors of a quantized layer that have no plain equivalent."""

_KINDS = {
    "activation scales": "activation scale",
    "markers of the source's codes": "marker of the source's codes",
    "tables that loaders compute": "table that loaders compute",
}
"""What several tensors are called, and one."""


def kinds_omitted(names: Iterable[str]) -> dict[str, list[str]]:
    """Return tensors that have no plain equivalent by what they are."""
    scales, markers, computed = _KINDS
    kinds: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name in names:
        other = computed if name == ROPE_FACTORS else markers
        kinds[scales if name.endswith(ACTIVATION_SCALES) else other].append(name)
    return {what: alike for what, alike in kinds.items() if alike}


def omitted_note(what: str, names: Sequence[str]) -> str:
    """Return a note on omitted tensors of a kind."""
    many = len(names) > 1
    return (
        f"{len(names):,} {what if many else _KINDS[what]} ('{printable(names[0])}'{', …' if many else ''}) "
        f"{'are' if many else 'is'} omitted."
    )
