"""What a comparison will measure, before it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mxcli.files.checkpoint import Checkpoint
from mxcli.flows.measure.compare import Compared, ComparisonPlan, counts_of
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.measure.report import KEPT, TIED
from mxcli.flows.plan.memory import Need
from mxcli.flows.plan.plan import Options
from mxcli.flows.write.records import scheme_record
from mxcli.output.comparison import rule_lines, shared_options
from mxcli.output.export import json_text
from mxcli.output.measuring_plan import Effort, effort_lines, effort_record, source_record, tensor_lines, tensor_records
from mxcli.output.numbers import byte_size, significant
from mxcli.output.plan import Site
from mxcli.output.report import count_lines, headed
from mxcli.output.screen import Screen
from mxcli.output.table import Column, Row, aligned

_COMBINATIONS = (Column("combination", right=False), Column("bits per\nelement", drop=1), Column("size if\nwritten"))


@dataclass(frozen=True, slots=True)
class PlannedComparison:
    """A comparison before it is made, and where it would be; as a report, it has no layers yet."""

    source: str
    checkpoint: Checkpoint
    planned: ComparisonPlan
    need: Need
    site: Site
    bytes_read: int | None = None
    layers: tuple[Compared, ...] = ()
    unfinished: int = 0
    sample: None = None

    @property
    def total(self) -> Total:
        """How much the source holds."""
        return Total.of(self.checkpoint.tensors.values())

    @property
    def by_dtype(self) -> Mapping[str, Total]:
        """How much of each type."""
        return totals_by(lambda info: info.dtype, self.checkpoint.tensors.values())

    @property
    def options(self) -> Options:
        """What was asked for."""
        return self.planned.options

    @property
    def kept(self) -> Sequence[Compared]:
        """The tensors that are not compared."""
        return [layer for layer in self.planned.decided if layer.decision in (KEPT, TIED)]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many tensors there are of each decision."""
        return counts_of(self.planned.decided)

    @property
    def effort(self) -> Effort:
        """What it takes."""
        tensors, ways = [steps[0].tensor for steps in self.planned.compared], len(self.planned.plans)
        return Effort(tensors, len(tensors) * ways, f"{ways:,} combinations", self.need, self.site, self.bytes_read)


def comparison_plan_text(plan: PlannedComparison, screen: Screen) -> str:
    """The tensors and why, the combinations and their sizes, and what it takes."""
    elements = sum(steps[0].tensor.elements for steps in plan.planned.compared)
    sizes: list[Row] = [
        [name, significant(8 * size / elements), byte_size(size)]
        for name, size in zip(plan.planned.combinations.names, plan.planned.quantized_bytes, strict=True)
    ]
    return "\n".join(
        [
            *headed(plan, rule_lines(plan.planned.combinations), screen),
            "",
            *tensor_lines(plan.planned.decided, plan.checkpoint, screen),
            "",
            *aligned(_COMBINATIONS, sizes, screen),
            "",
            *count_lines(plan, None, screen),
            *effort_lines(plan.effort, screen),
        ]
    )


def comparison_plan_json(plan: PlannedComparison) -> str:
    """The same as one JSON object."""
    combinations = plan.planned.combinations
    return json_text(
        "compare.plan",
        {
            **source_record(plan.source, plan.checkpoint),
            "options": shared_options(plan.options),
            "combinations": [
                {"name": name, **scheme_record(recipe), "quantized_bytes": size}
                for name, recipe, size in zip(
                    combinations.names, combinations.schemes, plan.planned.quantized_bytes, strict=True
                )
            ],
            "counts": dict(plan.counts),
            **effort_record(plan.effort),
            "notes": [*plan.checkpoint.notes, *plan.planned.notes],
            "tensors": tensor_records(plan.planned.decided, plan.checkpoint),
        },
    )
