"""Checks of weights in third-party formats, such as GGUF's Q4_K, by the values that a package decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import ForeignWeight
from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding

_PIECE_BYTES = 1 << 22
HUGE = 2.0**10


@dataclass(frozen=True, slots=True)
class ForeignSummary:
    """A decoded weight: its largest finite magnitude, how many values are not finite, and the first row with one."""

    name: str
    elements: int
    amax: float
    not_finite: int
    first_row: int | None


def foreign_summaries(checkpoint: Checkpoint, foreign: Mapping[str, ForeignWeight]) -> Iterator[ForeignSummary]:
    """Decode each weight piece by piece and yield its summary."""
    for name, weight in foreign.items():
        blocks = read(checkpoint, checkpoint.tensors[name])
        rows = blocks.reshape(-1, blocks.shape[-1])
        height = max(_PIECE_BYTES // max(rows.shape[-1], 1), 1)
        amax, bad, elements, first = 0.0, 0, 0, None
        for begin in range(0, len(rows), height):
            # Scales that are not finite are what is looked for here.
            with np.errstate(all="ignore"):
                values = weight.values(rows[begin : begin + height], "F32")
            finite = np.isfinite(values)
            elements += values.size
            if not finite.all():
                bad += int(values.size - np.count_nonzero(finite))
                first = (
                    begin + int(np.flatnonzero(~finite.reshape(len(values), -1).all(axis=1))[0])
                    if first is None
                    else first
                )
                values = np.where(finite, values, 0)
            amax = max(amax, float(np.abs(values).max(initial=0.0)))
        yield ForeignSummary(name, elements, amax, bad, first)


def _not_finite(summary: ForeignSummary) -> Iterator[Finding]:
    if summary.not_finite:
        yield Finding(
            summary.name,
            f"{summary.not_finite:,} of {summary.elements:,} values NaN or infinite, the first in row "
            f"{summary.first_row:,}",
            "finite values: a scale of its blocks is not finite",
            "Quantize the weight from its source again.",
        )


def _odd(summary: ForeignSummary) -> Iterator[Finding]:
    if summary.amax > HUGE or not summary.amax:
        yield Finding(
            summary.name,
            f"its values reach {summary.amax:.3g}" if summary.amax else "all values are 0",
            "an amax below 2^10 and above 0, as in known models",
            "Compare with --against SOURCE.",
        )


FOREIGN_CHECKS: tuple[Check[ForeignSummary], ...] = (
    Check(
        "nan_foreign",
        PROBLEM,
        "weights in third-party formats that read as NaN or infinite",
        "every value as the package gguf decodes it",
        _not_finite,
    ),
    Check(
        "odd_foreign",
        WARNING,
        "weights in third-party formats that are 0, or far larger than in known models",
        "the largest decoded magnitude",
        _odd,
    ),
)
