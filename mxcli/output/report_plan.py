"""What a report will measure, before it does."""

from __future__ import annotations

from dataclasses import dataclass

from mxcli.files.checkpoint import Checkpoint
from mxcli.flows.measure.compare import stored_bytes
from mxcli.flows.measure.report import Report, planned_layers
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.write.records import options_record, scheme_record
from mxcli.output.export import json_text
from mxcli.output.measuring_plan import Effort, effort_lines, effort_record, source_record, tensor_lines, tensor_records
from mxcli.output.numbers import byte_size, significant
from mxcli.output.report import count_lines, headlines
from mxcli.output.screen import Screen, folded_lines


@dataclass(frozen=True, slots=True)
class PlannedReport:
    """A report that measured nothing yet, what it is of, and what it takes."""

    report: Report
    checkpoint: Checkpoint
    plans: tuple[Plan, ...]
    effort: Effort

    @property
    def quantized(self) -> tuple[TensorPlan, ...]:
        """What would be measured: the tensors quantized, along each axis."""
        return tuple(step for plan in self.plans for step in plan.quantized)

    @property
    def quantized_bytes(self) -> int:
        """What the tensors quantized would take, scales included; of both axes together."""
        return sum(map(stored_bytes, self.quantized))


def report_plan_text(planned: PlannedReport, screen: Screen) -> str:
    """The tensors and why, their size if written, and what it takes."""
    elements, size = sum(step.tensor.elements for step in planned.quantized), planned.quantized_bytes
    copies = " along both axes" if len(planned.plans) > 1 else ""
    written = f"size if written{copies} {byte_size(size)}: {significant(8 * size / elements)} bits per element"
    return "\n".join(
        [
            *headlines(planned.report, screen),
            "",
            *tensor_lines(planned_layers(*planned.plans), planned.checkpoint, screen),
            "",
            *count_lines(planned.report, None, screen),
            *folded_lines(written, screen),
            *effort_lines(planned.effort, screen),
        ]
    )


def report_plan_json(planned: PlannedReport) -> str:
    """The same as one JSON object."""
    report = planned.report
    return json_text(
        "report.plan",
        {
            **source_record(report.source, planned.checkpoint),
            "options": options_record(report.options),
            "recipes": [{**scheme_record(recipe), "tensors": count} for recipe, count in report.schemes],
            "counts": dict(report.counts),
            "quantized_bytes": planned.quantized_bytes,
            **effort_record(planned.effort),
            "notes": list(report.notes),
            "tensors": tensor_records(planned_layers(*planned.plans), planned.checkpoint),
        },
    )
