"""The weights that the maker of a quantized checkpoint left plain: they stay so when it is quantized again."""

from __future__ import annotations

from mxcli.files.checkpoint import Checkpoint
from mxcli.files.selection import Decision
from mxcli.files.tensors import IN_MEMORY, TensorInfo

LEFT_PLAIN = "its maker left it plain"


def left_plain(checkpoint: Checkpoint, info: TensorInfo, decision: Decision) -> str | None:
    """Return why a tensor of a checkpoint that was quantized before stays plain; None if it was quantized there, or an
    `--include` selects it."""
    was_plain = checkpoint.restored_from is not None and info.offset != IN_MEMORY
    return LEFT_PLAIN if was_plain and decision.taken and decision.rule is None else None
