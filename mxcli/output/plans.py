"""Plans of --dry-run: the decision about every tensor and what the run takes, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.tensors import TensorInfo
from mxcli.flows.capture.plan import CapturePlan
from mxcli.flows.doctor import free_bytes
from mxcli.flows.measure.compare import Compared, ComparisonPlan, stored_bytes, unmeasured_comparison
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.measure.report import LayerReport, Report, decision_of, planned_layers
from mxcli.flows.plan.memory import Need
from mxcli.flows.plan.plan import Plan
from mxcli.flows.recommend.candidates import KEEP
from mxcli.flows.recommend.recommend import Candidates
from mxcli.flows.write.arrange import Arrangement, Task
from mxcli.flows.write.records import scheme_record
from mxcli.numerics.metrics import Objective
from mxcli.output.capture import CAPTURED, REQUEST
from mxcli.output.comparison import COMPARISON, rule_lines
from mxcli.output.export import json_text
from mxcli.output.fields import COUNT, SOURCE, TEXT, TEXT_OR_NULL, Field, Fields, array
from mxcli.output.inspection import source_line
from mxcli.output.loaders import LOADER, loader_lines
from mxcli.output.numbers import ABSENT, byte_size, counted, quantity, shape_text, significant
from mxcli.output.recommendation import objective_line, target_line
from mxcli.output.report import REPORT, count_lines, headed, headlines
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.site import Site, memory_record, memory_words
from mxcli.output.table import Column, Row, aligned
from mxcli.output.written import output_files, output_size


@dataclass(frozen=True, slots=True)
class Effort:
    """The cost of measuring: the tensors, each read once, the number of `measurements` of them, under `variants` in
    words, the memory, the site, and the bytes read."""

    tensors: Sequence[TensorInfo]
    measurements: int
    variants: str
    need: Need
    site: Site
    bytes_read: int


@dataclass(frozen=True, slots=True)
class _Decided:
    """A tensor with the decision about it, and in a plan of an output its format and its bytes there (None: none)."""

    info: TensorInfo
    decision: str
    reason: str
    format: str | None = None
    written: int | None = None


_MEASURED: Fields[_Decided] = Fields(
    Field("name", lambda each: each.info.name, TEXT, "tensor", right=False),
    Field("dtype", lambda each: each.info.dtype, TEXT, "dtype", right=False, drop=3),
    Field("shape", lambda each: list(each.info.shape), array(COUNT), "shape", right=False, drop=2,
          cell=lambda each: shape_text(each.info.shape)),
    Field("role", lambda each: each.info.role, TEXT),
    Field("decision", lambda each: each.decision, TEXT),
    Field("reason", lambda each: each.reason, TEXT, "why", right=False, drop=5, cell=lambda each: each.reason),
    Field("bytes", lambda each: each.info.nbytes, COUNT, "size", drop=1,
          cell=lambda each: byte_size(each.info.nbytes)),
)  # fmt: skip
_WRITTEN: Fields[_Decided] = Fields(
    _MEASURED.without("bytes"),
    Field("format", lambda each: each.format, TEXT_OR_NULL),
    _MEASURED["bytes"].at(drop=4),
    Field("output_bytes", lambda each: each.written or 0, COUNT, "written", drop=1,
          cell=lambda each: ABSENT if each.written is None else byte_size(each.written)),
)  # fmt: skip
_COLUMNS = _MEASURED.only("name", "dtype", "shape", "bytes", "reason")


def _page(*parts: Sequence[str]) -> str:
    first, *others = parts
    return "\n".join([*first, *(line for part in others for line in ("", *part))])


def _folded(texts: Iterable[str], screen: Screen) -> list[str]:
    return [line for text in texts for line in folded_lines(text, screen)]


def _table(tensors: Iterable[_Decided], fields: Fields[_Decided], screen: Screen) -> list[str]:
    return aligned(fields.columns(), [fields.cells(each) for each in tensors], screen)


def _effort_words(effort: Effort) -> tuple[str, ...]:
    under = f" under {effort.variants}: {effort.measurements:,} measurements, " if effort.variants else ": "
    return (
        f"would measure {counted(len(effort.tensors), 'tensor')}{under}{byte_size(effort.bytes_read)} read once",
        memory_words(effort.need, effort.site),
        f"would compute on {effort.site.device}",
    )


def _effort_record(effort: Effort) -> dict[str, object]:
    return {
        "measurements": effort.measurements,
        "bytes_read": effort.bytes_read,
        **memory_record(effort.need, effort.site),
    }


def plan_text(report: Report, checkpoint: Checkpoint, arrangement: Arrangement, site: Site, screen: Screen) -> str:
    """Return the text of what `quantize` would write; `report` measured nothing yet."""
    files, layout = output_files(checkpoint, arrangement), arrangement.layout
    needs = [
        checkpoint.model.words,
        f"layout {layout.name}: {layout.meaning}",
        f"final size {output_size(report, arrangement)}; {memory_words(arrangement.need, site)}",
        f"would compute on {site.device}",
        f"would write {counted(len(files), 'file')}: {', '.join(map(printable, files))}",
        *loader_lines(arrangement.loaders, arrangement.engines),
        *([] if site.free_bytes is None else [f"free disk {byte_size(site.free_bytes)} at {printable(site.folder)}"]),
    ]
    columns = _WRITTEN.only("name", "dtype", "shape", "bytes", "output_bytes", "reason")
    return _page(
        headlines(report, screen),
        _table(map(_of_task, arrangement.tasks), columns, screen),
        [*count_lines(report, None, screen), *_folded(needs, screen)],
    )


def plan_json(report: Report, checkpoint: Checkpoint, arrangement: Arrangement, site: Site) -> str:
    """Return the same as JSON."""
    content: dict[str, object] = {
        "source": report.source,
        "model": checkpoint.model.title,
        "model_source": checkpoint.model.source or None,
        "layout": arrangement.layout.name,
        "counts": dict(report.counts),
        "source_bytes": report.total.bytes,
        "output_bytes": arrangement.output_bytes,
        **memory_record(arrangement.need, site),
        "free_disk_bytes": site.free_bytes,
        "output": site.folder,
        "files": output_files(checkpoint, arrangement),
        "notes": list(report.notes),
        "ignored": list(arrangement.ignored),
        "loaders": [LOADER.record(verdict) for verdict in arrangement.loaders],
        "tensors": written_records(arrangement.tasks),
    }
    return json_text("quantize.plan", content)


def written_records(tasks: Iterable[Task]) -> list[dict[str, object]]:
    """Return the JSON of each tensor of an output."""
    return [_WRITTEN.record(_of_task(task)) for task in tasks]


def _of_task(task: Task) -> _Decided:
    planned = task.planned
    name = None if planned.scheme is None else planned.scheme.format.name
    written = sum(entry.nbytes for entry in task.entries) if task.entries else None
    return _Decided(planned.tensor, decision_of(planned), planned.reason, name, written)


def _decided(layers: Iterable[LayerReport | Compared], checkpoint: Checkpoint) -> list[_Decided]:
    return [_Decided(checkpoint.tensors[each.name], each.decision, each.reason) for each in layers]


@dataclass(frozen=True, slots=True)
class PlannedReport:
    """A report that measured nothing yet, its source and plans, and its cost."""

    report: Report
    checkpoint: Checkpoint
    plans: tuple[Plan, ...]
    effort: Effort

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the quantized tensors, scales included, of both axes together."""
        return sum(stored_bytes(planned) for plan in self.plans for planned in plan.quantized)


def report_plan_text(planned: PlannedReport, screen: Screen) -> str:
    """Return the tensors, their size if written, and the cost of a report."""
    size, copies = planned.quantized_bytes, " along both axes" if len(planned.plans) > 1 else ""
    elements = sum(each.tensor.elements for plan in planned.plans for each in plan.quantized)
    written = f"size if written{copies} {byte_size(size)}: {significant(8 * size / elements)} bits per element"
    return _page(
        headlines(planned.report, screen),
        _table(_decided(planned_layers(*planned.plans), planned.checkpoint), _COLUMNS, screen),
        [*count_lines(planned.report, None, screen), *_folded((written, *_effort_words(planned.effort)), screen)],
    )


def report_plan_json(planned: PlannedReport) -> str:
    """Return the same as JSON."""
    report, tensors = planned.report, _decided(planned_layers(*planned.plans), planned.checkpoint)
    content = {
        **REPORT.only("source", "elements", "bytes", "by_dtype", "options", "recipes", "counts").record(report),
        "quantized_bytes": planned.quantized_bytes,
        **_effort_record(planned.effort),
        "notes": list(report.notes),
        "tensors": [_MEASURED.record(each) for each in tensors],
    }
    return json_text("report.plan", content)


@dataclass(frozen=True, slots=True)
class PlannedComparison:
    """A comparison before it is made, the memory it needs, its site, and the bytes to read."""

    source: str
    checkpoint: Checkpoint
    planned: ComparisonPlan
    need: Need
    site: Site
    bytes_read: int

    @property
    def effort(self) -> Effort:
        """The cost."""
        tensors, count = [each[0].tensor for each in self.planned.compared], len(self.planned.plans)
        return Effort(tensors, len(tensors) * count, f"{count:,} combinations", self.need, self.site, self.bytes_read)


def comparison_plan_text(plan: PlannedComparison, screen: Screen) -> str:
    """Return the tensors, the combinations with their sizes, and the cost of a comparison."""
    effort, planned = plan.effort, plan.planned
    unmeasured = unmeasured_comparison(plan.source, plan.checkpoint, planned)
    elements = sum(info.elements for info in effort.tensors)
    columns = (Column("combination", right=False), Column("bits per\nelement", drop=1), Column("size if\nwritten"))
    sizes = zip(planned.combinations.names, planned.quantized_bytes, strict=True)
    rows = [[name, significant(8 * size / elements), byte_size(size)] for name, size in sizes]
    return _page(
        headed(unmeasured, rule_lines(planned.combinations), screen),
        _table(_decided(planned.decided, plan.checkpoint), _COLUMNS, screen),
        aligned(columns, rows, screen),
        [*count_lines(unmeasured, None, screen), *_folded(_effort_words(effort), screen)],
    )


def comparison_plan_json(plan: PlannedComparison) -> str:
    """Return the same as JSON."""
    planned, unmeasured = plan.planned, unmeasured_comparison(plan.source, plan.checkpoint, plan.planned)
    schemes = zip(planned.combinations.names, planned.combinations.schemes, planned.quantized_bytes, strict=True)
    content = {
        **COMPARISON.only("source", "elements", "bytes", "by_dtype", "options").record(unmeasured),
        "combinations": [
            {"name": name, **scheme_record(scheme), "quantized_bytes": size} for name, scheme, size in schemes
        ],
        "counts": dict(unmeasured.counts),
        **_effort_record(plan.effort),
        "notes": list(unmeasured.notes),
        "tensors": [_MEASURED.record(each) for each in _decided(planned.decided, plan.checkpoint)],
    }
    return json_text("compare.plan", content)


@dataclass(frozen=True, slots=True)
class PlannedRecommendation:
    """A recommendation before anything is measured, and its site."""

    source: str
    checkpoint: Checkpoint
    candidates: Candidates
    objective: Objective
    need: Need
    site: Site

    @property
    def total(self) -> Total:
        """The size of the source."""
        return Total.of(self.checkpoint.tensors.values())

    @property
    def by_dtype(self) -> Mapping[str, Total]:
        """The same by dtype."""
        return totals_by(lambda info: info.dtype, self.checkpoint.tensors.values())

    @property
    def effort(self) -> Effort:
        """The cost."""
        groups = list(zip(self.candidates.groups, self.candidates.bits, strict=True))
        tensors = [info for group, _ in groups for info in group.tensors]
        measurements = sum(len(group.tensors) * (len(bits) - 1) for group, bits in groups)
        formats, size = counted(len(self.candidates.formats), "format"), sum(info.nbytes for info in tensors)
        return Effort(tensors, measurements, formats, self.need, self.site, size)

    @property
    def notes(self) -> list[str]:
        """Notes on the source and the plans, each once."""
        plans = [note for plan in self.candidates.plans for note in plan.notes]
        return list(dict.fromkeys([*self.checkpoint.notes, *plans]))

    @property
    def range(self) -> tuple[float, float]:
        """Bits per element with the smallest option for every group, and with all of them kept."""
        elements, options = self.candidates.elements, self.candidates.bits
        return sum(min(each.values()) for each in options) / elements, sum(each[KEEP] for each in options) / elements


def recommendation_plan_text(planned: PlannedRecommendation, screen: Screen) -> str:
    """Return the groups with the size of each option, the range of sizes, and the cost of a recommendation."""
    candidates, (least, kept) = planned.candidates, planned.range
    names = (*candidates.formats, KEEP)
    columns = (
        Column("tensor or group", right=False), Column("tensors", drop=2), Column("elements", drop=3),
        *(Column("bits per\nelement", group=name, drop=1) for name in names),
    )  # fmt: skip
    rows: list[Row] = []
    for group, bits in zip(candidates.groups, candidates.bits, strict=True):
        sizes = (f"{bits[name] / group.elements:.4g}" if name in bits else ABSENT for name in names)
        rows.append([printable(group.name), f"{len(group.tensors):,}", quantity(group.elements), *sizes])
    source = source_line(planned.source, planned.total, planned.by_dtype)
    target = target_line(candidates.target, candidates.groups)
    first, *lines = _folded((source, target, objective_line(planned.objective)), screen)
    choices = f"choices take {least:.4g} to {kept:.4g} bits per element on average"
    return _page(
        [bold(first, screen), *lines],
        aligned(columns, rows, screen),
        _folded((choices, *_effort_words(planned.effort)), screen),
    )


def recommendation_plan_json(planned: PlannedRecommendation) -> str:
    """Return the same as JSON."""
    candidates, (least, kept) = planned.candidates, planned.range
    content = {
        **SOURCE.record(planned),
        "target": {candidates.target.kind: candidates.target.value},
        "objective": {"name": planned.objective.name, "formula": planned.objective.formula},
        "formats": list(candidates.formats),
        "chosen_for_elements": candidates.elements,
        "least_bits_per_element": least,
        "kept_bits_per_element": kept,
        **_effort_record(planned.effort),
        "notes": planned.notes,
        "groups": [
            {"name": group.name, "tensors": [info.name for info in group.tensors], "elements": group.elements,
             "options": {name: {"bits_per_element": size / group.elements} for name, size in bits.items()}}
            for group, bits in zip(candidates.groups, candidates.bits, strict=True)
        ],
    }  # fmt: skip
    return json_text("recommend.plan", content)


def capture_plan_text(plan: CapturePlan, screen: Screen) -> str:
    """Return the layers with the bytes of each role in the file of a step, and the disk and memory of a capture."""
    windows, roles, count = plan.windows, plan.request.recorded, counted(len(plan.layers), "linear layer")
    of = f"{windows.batch:,} x {windows.tokens:,} tokens of {printable(plan.text.name)}"
    head = f"{printable(plan.source)}: {count}, {plan.model.dtype}; {counted(windows.steps, 'step')} of {of}"
    first, *lines = folded_lines(head, screen)
    sizes = {tensor.name: tensor.nbytes for tensor in plan.tensors}
    columns = (Column("layer", right=False), Column("weight", right=False, drop=1), *map(Column, roles))
    rows: list[Row] = [
        [printable(layer.name), shape_text((layer.outputs, layer.inputs)),
         *(byte_size(sizes[f"{layer.name}.{role}"]) for role in roles)]
        for layer in plan.layers
    ]  # fmt: skip
    sums = (sum(tensor.nbytes for tensor in plan.tensors if tensor.role == role) for role in roles)
    rows += [None, [f"all {len(plan.layers):,} layers", ABSENT, *map(byte_size, sums)]]
    kept = f", of which {len(plan.earlier):,} are there" if plan.earlier else ""
    needs = (
        f"disk: {byte_size(plan.size.disk)} a step, {byte_size(windows.steps * plan.size.disk)} in all{kept}; "
        f"{byte_size(free_bytes(plan.output.folder))} available",
        f"memory: about {byte_size(plan.memory_bytes)}, {byte_size(plan.model.nbytes)} of it weights",
    )
    return _page([bold(first, screen), *lines], aligned(columns, rows, screen), _folded(needs, screen))


def capture_plan_json(plan: CapturePlan) -> str:
    """Return the same as JSON."""
    content = {
        **REQUEST.record(plan),
        "disk_bytes_per_step": plan.size.disk,
        "disk_bytes": plan.windows.steps * plan.size.disk,
        "memory_bytes": plan.memory_bytes,
        "weight_bytes": plan.model.nbytes,
        "steps_there": sorted(plan.earlier),
        "notes": list(plan.notes),
        "tensors": [CAPTURED.record(tensor) for tensor in plan.tensors],
    }
    return json_text("capture.plan", content)
