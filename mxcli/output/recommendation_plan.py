"""What a recommendation will measure and choose among, before it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.plan.memory import Need
from mxcli.flows.recommend.candidates import KEEP, Group
from mxcli.flows.recommend.recommend import Candidates
from mxcli.numerics.metrics import Objective
from mxcli.output.export import json_text
from mxcli.output.inspection import source_line
from mxcli.output.measuring_plan import Effort, effort_lines, effort_record, source_record
from mxcli.output.numbers import ABSENT, quantity
from mxcli.output.plan import Site
from mxcli.output.recommendation import objective_line, target_line
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned


@dataclass(frozen=True, slots=True)
class PlannedRecommendation:
    """A recommendation before anything is measured, and where it would be."""

    source: str
    checkpoint: Checkpoint
    candidates: Candidates
    objective: Objective
    need: Need
    site: Site

    @property
    def effort(self) -> Effort:
        """What it takes."""
        tensors = [info for group in self.candidates.groups for info in group.tensors]
        measurements = sum(
            len(group.tensors) * (len(bits) - 1)
            for group, bits in zip(self.candidates.groups, self.candidates.bits, strict=True)
        )
        ways = len(self.candidates.formats)
        return Effort(tensors, measurements, f"{ways:,} format{'s' if ways > 1 else ''}", self.need, self.site)

    @property
    def notes(self) -> list[str]:
        """What there is to say about the source and the plans, each once."""
        plans = [note for plan in self.candidates.plans for note in plan.notes]
        return list(dict.fromkeys([*self.checkpoint.notes, *plans]))

    @property
    def range(self) -> tuple[float, float]:
        """Bits per element where every group has its smallest option, and where all are kept."""
        elements, options = self.candidates.elements, self.candidates.bits
        return sum(min(each.values()) for each in options) / elements, sum(each[KEEP] for each in options) / elements


def recommendation_plan_text(planned: PlannedRecommendation, screen: Screen) -> str:
    """The groups with the size of each option, within which sizes a choice can be, and what it takes."""
    candidates, infos = planned.candidates, planned.checkpoint.tensors.values()
    names = (*candidates.formats, KEEP)
    columns = (
        Column("tensor or group", right=False),
        Column("tensors", drop=2),
        Column("elements", drop=3),
        *(Column("bits per\nelement", group=name, drop=1) for name in names),
    )
    head = [
        source_line(planned.source, Total.of(infos), totals_by(lambda info: info.dtype, infos)),
        target_line(candidates.target, candidates.groups),
        objective_line(planned.objective),
    ]
    first, *lines = [line for text in head for line in folded_lines(text, screen)]
    rows: list[Row] = [_row(*each, names) for each in zip(candidates.groups, candidates.bits, strict=True)]
    least, kept = planned.range
    sizes = f"choices take {least:.4g} to {kept:.4g} bits per element on average"
    return "\n".join(
        [
            bold(first, screen),
            *lines,
            "",
            *aligned(columns, rows, screen),
            "",
            *folded_lines(sizes, screen),
            *effort_lines(planned.effort, screen),
        ]
    )


def recommendation_plan_json(planned: PlannedRecommendation) -> str:
    """The same as one JSON object."""
    candidates, (least, kept) = planned.candidates, planned.range
    return json_text(
        "recommend.plan",
        {
            **source_record(planned.source, planned.checkpoint),
            "target": {candidates.target.kind: candidates.target.value},
            "objective": {"name": planned.objective.name, "formula": planned.objective.formula},
            "formats": list(candidates.formats),
            "chosen_for_elements": candidates.elements,
            "least_bits_per_element": least,
            "kept_bits_per_element": kept,
            **effort_record(planned.effort),
            "notes": planned.notes,
            "groups": [
                {
                    "name": group.name,
                    "tensors": [info.name for info in group.tensors],
                    "elements": group.elements,
                    "options": {name: {"bits_per_element": size / group.elements} for name, size in bits.items()},
                }
                for group, bits in zip(candidates.groups, candidates.bits, strict=True)
            ],
        },
    )


def _row(group: Group, bits: Mapping[str, int], names: tuple[str, ...]) -> Row:
    sizes = [f"{bits[name] / group.elements:.4g}" if name in bits else ABSENT for name in names]
    return [printable(group.name), f"{len(group.tensors):,}", quantity(group.elements), *sizes]
