"""Findings on scales that a fault explains, and weights too small for their format explain too. Of bytes that the
record or the source proves the second is true: they are what the rule makes, and nothing is wrong with the file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mxcli.flows.verify.checks.check import Check, Finding, Findings
from mxcli.flows.verify.checks.values import WEIGHT_CHECKS
from mxcli.flows.verify.weight_summary import WeightSummary

IF_PROVEN = {"zero_scale": "underflowed_scale", "scale_direction": "magnitude"}
"""Checks whose findings on proven bytes belong to another check: of weights that are too small."""
_BY_NAME: Mapping[str, Check[WeightSummary]] = {check.name: check for check in WEIGHT_CHECKS}
CERTAIN_CHECKS = tuple(check for check in WEIGHT_CHECKS if check.name not in IF_PROVEN)
"""Checks whose findings do not depend on a proof."""
_NEED = "larger weights: the bytes are those that the rule makes, and what is so small is lost or close to it"
_WAY_OUT = "Keep the weight plain (--exclude), or check the source for a layer that is not used."


@dataclass(frozen=True, slots=True)
class Doubts:
    """The findings on a weight, by check, that are faults unless its bytes are proven."""

    weight: str
    entries: tuple[str, ...]
    found: Mapping[str, tuple[Finding, ...]]

    @classmethod
    def of(cls, summary: WeightSummary) -> Doubts:
        """Return the doubts about a weight."""
        entries = tuple(content.entry.name for content in summary.stored.contents)
        return cls(summary.name, entries, {name: tuple(_BY_NAME[name].find(summary)) for name in IF_PROVEN})


def settle(doubts: Collection[Doubts], proven: Collection[str], exact: Collection[str], findings: Findings) -> None:
    """Report the doubts: `proven` are tensors with the recorded bytes, `exact` weights with those that their rule makes
    of the source."""
    for each in doubts:
        is_proven = each.weight in exact or all(entry in proven for entry in each.entries)
        for name, found in each.found.items():
            known = _BY_NAME[IF_PROVEN[name] if is_proven else name]
            check: Check[tuple[Finding, ...]] = Check(known.name, known.severity, known.meaning, known.how, iter)
            reported = tuple(replace(one, need=_NEED, way_out=_WAY_OUT) for one in found)
            findings.run((check,), reported if is_proven else found)
