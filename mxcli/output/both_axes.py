"""What it changes whether blocks run along rows or columns, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mxcli.flows.measure.report import Report
from mxcli.flows.measure.totals import Metrics, Totals
from mxcli.numerics.metrics import judged_number
from mxcli.output.numbers import EXACT, counted

SPOKEN_DB = 0.05
"""A smaller difference is not worth a word."""


def axes_concluded(report: Report) -> list[str]:
    """What the axis changes, where the same tensors were measured along both."""
    alone = {layer.name for layer in report.kept if layer.axis is not None}
    if not alone:
        return axis_sentences(report.by_axis)
    left = f"{counted(len(alone), 'tensor')} {'is' if len(alone) == 1 else 'are'} not measured along both axes"
    return [f"{left}, so that their totals do not compare."]


def axis_sentences(by_axis: Mapping[str, Totals]) -> list[str]:
    """A sentence on each role that one axis serves better, or that none does; none where only one was measured."""
    if len(by_axis) < 2 or not all(totals.by_role for totals in by_axis.values()):
        return []
    (first, one), (second, other) = by_axis.items()
    shared = [role for role in one.by_role if role in other.by_role]
    found = [_sentence(role, {first: one.by_role[role], second: other.by_role[role]}) for role in shared]
    said = [sentence for sentence in found if sentence is not None]
    if shared and not said:
        return [f"Blocks along {first}s and along {second}s differ by less than {SPOKEN_DB} dB in every role."]
    return said


def _sentence(role: str, along: Mapping[str, Metrics]) -> str | None:
    """Which axis has the higher SQNR, and by how much; None where that is no difference, or there is no SQNR."""
    known = [(sqnr, axis) for axis, metrics in along.items() if (sqnr := judged_number(metrics, "sqnr_db")) is not None]
    if len(known) < len(along):
        return None
    (low, worse), (high, better) = sorted(known, key=lambda pair: pair[0])
    if low == high or high - low < SPOKEN_DB:
        return None
    if math.isinf(high):
        return f"{role}: blocks along {better}s have an {EXACT} result, along {worse}s {low:.2f} dB SQNR."
    return (
        f"{role}: blocks along {better}s have {high:.2f} dB SQNR, {high - low:.2f} dB more than along {worse}s "
        f"({low:.2f} dB)."
    )
