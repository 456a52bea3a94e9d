"""Sources of FP8 weights without scales, opened as plain casts by request."""

from __future__ import annotations

from dataclasses import replace

from mxcli.errors import RefusedError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.dialect import FP8, UNKNOWN, UNSCALED
from mxcli.files.layouts.casts import DIALECT


def as_casts(checkpoint: Checkpoint) -> Checkpoint:
    """Return a source whose FP8 codes are read as their values. Raises RefusedError if anything in it says that they
    have scales."""
    infos = checkpoint.tensors.values()
    scale = next((info for info in infos if info.role == "scale"), None)
    if scale is not None:
        found = f"the scale {printable(scale.name)}"
    elif checkpoint.dialect not in (None, UNSCALED, UNKNOWN):
        found = f"codes of {checkpoint.dialect}"
    elif not any(info.dtype in FP8 for info in infos):
        found = "no FP8 weights"
    else:
        return replace(checkpoint, dialect=DIALECT)
    raise RefusedError(
        f"{printable(checkpoint.where)}: --unscaled is for FP8 weights without scales; it has {found}. Omit it."
    )
