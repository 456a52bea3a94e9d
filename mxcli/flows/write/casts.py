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
    casts = any(info.dtype in FP8 for info in infos)
    if scale is not None or checkpoint.dialect not in (UNSCALED, UNKNOWN) or not casts:
        found = (
            f"the scale {printable(scale.name)}"
            if scale
            else f"quantized ({checkpoint.dialect})"
            if checkpoint.dialect
            else "plain tensors"
        )
        raise RefusedError(
            f"{printable(checkpoint.where)}: --unscaled is for FP8 weights without scales; found {found}. Omit it."
        )
    return replace(checkpoint, dialect=DIALECT)
