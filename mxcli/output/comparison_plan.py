"""What a comparison will measure, before it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.flows.compare import Compared, ComparisonPlan, counts_of
from mxcli.flows.inspect import Total, totals_by
from mxcli.flows.memory import Need
from mxcli.flows.plan import Options
from mxcli.flows.records import recipe_record
from mxcli.flows.report import KEPT, TIED
from mxcli.output.comparison import rule_lines, shared_options
from mxcli.output.export import json_text
from mxcli.output.numbers import byte_size, counted, shape_text, significant
from mxcli.output.plan import Site, memory_words
from mxcli.output.report import count_lines, headed
from mxcli.output.screen import Screen, folded_lines
from mxcli.output.table import Column, Row, aligned

_TENSORS = (
    Column("tensor", right=False),
    Column("dtype", right=False, drop=3),
    Column("shape", right=False, drop=2),
    Column("size", drop=1),
    Column("why", right=False, drop=4),
)
_COMBINATIONS = (Column("combination", right=False), Column("bits per\nelement"), Column("size if\nwritten"))


@dataclass(frozen=True, slots=True)
class PlannedComparison:
    """A comparison before it is made, and where it would be; as a report, it has no layers yet."""

    source: str
    checkpoint: Checkpoint
    planned: ComparisonPlan
    need: Need
    site: Site
    layers: tuple[Compared, ...] = ()
    unfinished: int = 0

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
    def bytes_read(self) -> int:
        """Bytes of the tensors compared."""
        return sum(steps[0].tensor.nbytes for steps in self.planned.compared)


def comparison_plan_text(plan: PlannedComparison, screen: Screen) -> str:
    """The tensors and why, the combinations and their sizes, and what it takes."""
    tensors = plan.checkpoint.tensors
    rows: list[Row] = [
        [
            printable(layer.name),
            layer.dtype,
            shape_text(layer.shape),
            byte_size(tensors[layer.name].nbytes),
            layer.reason,
        ]
        for layer in plan.planned.decided
    ]
    elements = sum(steps[0].tensor.elements for steps in plan.planned.compared)
    sizes: list[Row] = [
        [name, significant(8 * size / elements), byte_size(size)]
        for name, size in zip(plan.planned.combinations.names, plan.planned.quantized_bytes, strict=True)
    ]
    lines = [
        *headed(plan, rule_lines(plan.planned.combinations), screen),
        "",
        *aligned(_TENSORS, rows, screen),
        "",
        *aligned(_COMBINATIONS, sizes, screen),
        "",
        *count_lines(plan, None, screen),
    ]
    count, ways = len(plan.planned.compared), len(sizes)
    needs = [
        f"would measure {counted(count, 'tensor')} under {ways:,} combinations: {count * ways:,} measurements, "
        f"{byte_size(plan.bytes_read)} read once",
        memory_words(plan.need, plan.site),
        f"would compute on {plan.site.device}",
    ]
    return "\n".join([*lines, *(line for text in needs for line in folded_lines(text, screen))])


def comparison_plan_json(plan: PlannedComparison) -> str:
    """The same as one JSON object."""
    combinations, tensors = plan.planned.combinations, plan.checkpoint.tensors
    return json_text(
        "compare.plan",
        {
            "source": plan.source,
            "elements": plan.total.elements,
            "bytes": plan.total.bytes,
            "by_dtype": {dtype: asdict(total) for dtype, total in plan.by_dtype.items()},
            "options": shared_options(plan.options),
            "combinations": [
                {"name": name, **recipe_record(recipe), "quantized_bytes": size}
                for name, recipe, size in zip(
                    combinations.names, combinations.recipes, plan.planned.quantized_bytes, strict=True
                )
            ],
            "counts": dict(plan.counts),
            "measurements": len(plan.planned.compared) * len(combinations.names),
            "bytes_read": plan.bytes_read,
            "peak_memory_bytes": plan.need.peak_bytes,
            "max_memory_bytes": plan.site.max_memory,
            "device": plan.site.device,
            "notes": [*plan.checkpoint.notes, *plan.planned.notes],
            "tensors": [
                {
                    "name": layer.name,
                    "dtype": layer.dtype,
                    "shape": list(layer.shape),
                    "role": layer.role,
                    "decision": layer.decision,
                    "reason": layer.reason,
                    "bytes": tensors[layer.name].nbytes,
                }
                for layer in plan.planned.decided
            ],
        },
    )
