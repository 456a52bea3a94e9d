"""A report as a table, as JSON, as JSON lines and as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol, TypeVar

from mxcli.errors import printable
from mxcli.flows.measure.inspect import Total
from mxcli.flows.measure.report import KEPT, LayerReport, Report
from mxcli.flows.measure.sampled import Taken
from mxcli.flows.plan.plan import Options
from mxcli.flows.write.records import options_record, scheme_record
from mxcli.numerics.estimates import keys_of
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import METRICS, number_of
from mxcli.numerics.samples import CONFIDENCE_PERCENT
from mxcli.numerics.scheme import Scheme
from mxcli.output.both_axes import axes_concluded
from mxcli.output.export import csv_text, json_line, json_text
from mxcli.output.formats import rules_words
from mxcli.output.inspection import source_line
from mxcli.output.numbers import ABSENT, counted, noise_cell, number_cell, shape_text, significant, sparkline
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.series import series_lines, series_records
from mxcli.output.table import Column, Row, aligned

DEFAULT_SORT = "sqnr_db"
_AXIS = Column("axis", right=False)
_COLUMNS = (
    Column("tensor", right=False),
    Column("shape", right=False, drop=6),
    Column("SQNR\ndB"),
    Column("relative\nerror", drop=2),
    Column("saturated\n% of elements", drop=1),
    Column("underflowed\n% of elements", drop=3),
    Column("scale\nexponents", drop=4),
    Column("blocks\nby them", right=False, drop=5),
    Column("binades\nused/available", drop=7),
    Column("decision", right=False, drop=8),
)
_LAYER_KEYS = (
    "name",
    "dtype",
    "shape",
    "role",
    "decision",
    "reason",
    "format",
    "scale_rounding",
    "rounding",
    "dialect",
    "axis",
)
RECORD_KEYS = (*_LAYER_KEYS, *METRICS)
SAMPLE_KEYS = (*_LAYER_KEYS, *keys_of(METRICS, sampled=True))
"""Of a report on a sample."""

Metrics = Mapping[str, Value]
T = TypeVar("T")


class Decided(Protocol):
    """A tensor of which it was decided what to do."""

    @property
    def role(self) -> str:
        """What it is for."""

    @property
    def decision(self) -> str:
        """What became of it."""


class Measured(Protocol):
    """What reports and comparisons have in common."""

    @property
    def source(self) -> str:
        """What the user called the source."""

    @property
    def total(self) -> Total:
        """How much it holds."""

    @property
    def by_dtype(self) -> Mapping[str, Total]:
        """How much of each type."""

    @property
    def options(self) -> Options:
        """What was asked for."""

    @property
    def layers(self) -> Sequence[Decided]:
        """The tensors measured."""

    @property
    def kept(self) -> Sequence[Decided]:
        """The others."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How many there are of each decision."""

    @property
    def unfinished(self) -> int:
        """How many an interruption left unmeasured."""

    @property
    def sample(self) -> Taken | None:
        """The sample that was measured; None: no sample was asked for."""


def report_text(report: Report, screen: Screen, sort: str = DEFAULT_SORT, top: int | None = None) -> str:
    """Two headlines, the tensors with the worst first, totals by role, and what was decided, counted; of both axes a
    row for each and what they change, of several steps how they differ.

    `top` limits the tensors shown, never what the totals cover.
    """
    lines = [*headlines(report, screen), ""]
    layers = _sorted(report.layers, sort)
    shown = layers if top is None else layers[:top]
    rows = [*(_layer_row(report, layer, screen) for layer in shown), *_total_rows(report, screen)]
    lines += [*aligned(_columns(report), rows, screen), ""]
    if report.by_step:
        lines += [*series_lines(report.by_step, screen), ""]
    for sentence in axes_concluded(report):
        lines += [bold(line, screen) for line in folded_lines(sentence, screen, "  ")]
    some = report.totals[0][1].sum
    lines += ending_lines(report, some, screen, len(shown), sort, "case" if report.by_axis else "tensor")
    return "\n".join(lines)


def ending_lines(
    result: Measured, total: Metrics | None, screen: Screen, shown: int, sort: str, noun: str = "tensor"
) -> list[str]:
    """How many tensors, or what else a row is, are shown, what was decided about how many, and whether an interruption
    left some out."""
    lines, layers = list[str](), len(result.layers)
    if shown < layers:
        order = "in order of name" if sort == "name" else f"worst {sort} first"
        lines += folded_lines(f"{shown:,} of {counted(layers, noun)} shown, {order}", screen)
    lines += count_lines(result, total, screen)
    if result.unfinished:
        lines += folded_lines(f"interrupted: {counted(result.unfinished, noun)} not measured", screen)
    return lines


def headlines(report: Report, screen: Screen) -> list[str]:
    """What the source is, the rules in force and the policies."""
    return headed(report, map(scheme_line, report.schemes), screen)


def headed(result: Measured, rules: Iterable[str], screen: Screen) -> list[str]:
    """What the source is, the rules given, and the policies."""
    source = source_line(result.source, result.total, result.by_dtype)
    said = (source, *rules, policy_line(result.options), *sample_lines(result.sample))
    lines = [line for text in said for line in folded_lines(text, screen)]
    return [bold(lines[0], screen), *lines[1:]]


def report_json(report: Report, verb: str = "report", **more: object) -> str:
    """The whole report as one object; `more` are further keys."""
    content: dict[str, object] = {
        "source": report.source,
        "elements": report.total.elements,
        "bytes": report.total.bytes,
        "by_dtype": {dtype: asdict(total) for dtype, total in report.by_dtype.items()},
        "options": options_record(report.options),
        "recipes": [{**scheme_record(recipe), "tensors": count} for recipe, count in report.schemes],
        "counts": dict(report.counts),
        "unfinished": report.unfinished,
        **sample_record(report.sample),
        "totals": report.sum,
        "by_role": report.by_role,
        **_axes_record(report),
        **({"by_step": series_records(report.by_step)} if report.by_step else {}),
        "notes": list(report.notes),
        "layers": [layer_record(layer) for layer in report.layers],
        "kept": [layer_record(layer) for layer in report.kept],
        **more,
    }
    return json_text(verb, content)


def report_csv(report: Report) -> str:
    """One row per tensor, measured or kept, under the names of the JSON records."""
    keys = RECORD_KEYS if report.sample is None else SAMPLE_KEYS
    return csv_text([layer_record(layer) for layer in (*report.layers, *report.kept)], keys)


def layer_record(layer: LayerReport) -> dict[str, object]:
    """A tensor under the key names of JSON, JSON lines and CSV."""
    return {
        "name": layer.name,
        "dtype": layer.dtype,
        "shape": list(layer.shape),
        "role": layer.role,
        "decision": layer.decision,
        "reason": layer.reason,
        **(scheme_record(layer.scheme) if layer.scheme else {}),
        **({} if layer.axis is None else {"axis": layer.axis}),
        **layer.metrics,
    }


def _axes_record(report: Report) -> dict[str, object]:
    """What there is of both axes, for JSON; nothing where there is one."""
    if not report.by_axis:
        return {}
    by_axis = {axis: {"totals": each.sum, "by_role": each.by_role} for axis, each in report.by_axis.items()}
    return {"by_axis": by_axis, "conclusion": axes_concluded(report)}


def layer_line(layer: LayerReport) -> str:
    """The record of a tensor on one line."""
    return json_line(layer_record(layer))


def policy_line(options: Options) -> str:
    """What is done about values and lengths that do not fit."""
    return f"non-finite input: {options.rules.nonfinite}; indivisible lengths: {options.on_indivisible}"


def sample_lines(sample: Taken | None) -> list[str]:
    """What was read of the tensors; nothing where no sample was asked for."""
    if sample is None:
        return []
    unsure = "" if sample.is_everything else f"; ± is half of a {CONFIDENCE_PERCENT} % interval"
    scales = (
        f"; tensor scales are those of the sample ({', '.join(sample.tensor_scales)})" if sample.tensor_scales else ""
    )
    return [f"sample: {_share(sample)} of the elements, seed {sample.seed}{unsure}{scales}"]


def estimate_sentences(sample: Taken | None) -> list[str]:
    """What all that is said rests on, where something was left out."""
    if sample is None or sample.is_everything:
        return []
    return [f"Estimated from {_share(sample)} of the elements."]


def sample_record(sample: Taken | None) -> dict[str, object]:
    """The key of the sample for JSON; none where no sample was asked for."""
    return {} if sample is None else {"sample": {**asdict(sample), "confidence_percent": CONFIDENCE_PERCENT}}


def _share(sample: Taken) -> str:
    return f"{significant(100 * sample.sampled_elements / sample.elements) if sample.elements else '100'} %"


def scheme_line(counted_recipe: tuple[Scheme, int]) -> str:
    """A recipe in words, and how many tensors have it."""
    recipe, count = counted_recipe
    row = recipe.format
    tensor = f", {row.tensor_scale.name} tensor scale" if row.tensor_scale else ""
    return (
        f"{row.name}: {row.element.name} elements, {row.scale.name} scales by {row.block_name}{tensor}; "
        f"{rules_words(recipe)} ({counted(count, 'tensor')})"
    )


def _columns(report: Report) -> list[Column]:
    first, *others = _COLUMNS
    return [first, *([_AXIS] if report.by_axis else []), *others]


def _layer_row(report: Report, layer: LayerReport, screen: Screen) -> list[str]:
    axis = [layer.axis or ""] if report.by_axis else []
    return [
        printable(layer.name), *axis, shape_text(layer.shape), *_metric_cells(layer.metrics, screen), layer.decision
    ]  # fmt: skip


def _total_rows(report: Report, screen: Screen) -> list[Row]:
    """Everything together, and by role; along each axis where there are both."""
    rows = list[Row]()
    for axis, totals in report.totals:
        if totals.sum is None:
            continue
        titled = {f"all {counted(int(str(totals.sum['tensors'])), 'tensor')}": totals.sum}
        if len(totals.by_role) > 1:
            titled |= {f"{role} ({total['tensors']:,})": total for role, total in totals.by_role.items()}
        along = [] if axis is None else [axis]
        rows += [None, *([title, *along, "", *_metric_cells(m, screen), ""] for title, m in titled.items())]
    return rows


def _metric_cells(metrics: Metrics, screen: Screen) -> list[str]:
    used, available = number_of(metrics, "binades_used"), number_of(metrics, "binades_available")
    return [
        noise_cell(metrics, "sqnr_db"),
        noise_cell(metrics, "relative_error"),
        number_cell(metrics, "saturated_percent"),
        number_cell(metrics, "underflowed_percent"),
        *_exponent_cells(metrics, screen),
        ABSENT if available is None else f"{ABSENT if used is None else f'{used:.1f}'}/{available:.1f}",
    ]


def _exponent_cells(metrics: Metrics, screen: Screen) -> list[str]:
    """From which to which scale exponent, and how blocks lie between them where bars can be shown."""
    low, high = metrics["scale_exponent_min"], metrics["scale_exponent_max"]
    if low is None:
        return [ABSENT, ""]
    histogram = metrics["scale_exponent_histogram"]
    assert isinstance(histogram, Mapping)
    counts = {int(exponent): int(count or 0) for exponent, count in histogram.items() if _is_whole(exponent)}
    return [f"{low}..{high}", sparkline(counts) if screen.unicode else ""]


def _is_whole(text: object) -> bool:
    return str(text).lstrip("-").isdecimal()


def worst_first(layers: Iterable[T], sort: str, metrics: Callable[[T], Sequence[Metrics]]) -> list[T]:
    """Ordered by a metric, the worst under any of a tensor's recipes deciding; exact and absent ones last."""
    sign = 1 if METRICS[sort].better == "high" else -1

    def harm(layer: T) -> tuple[bool, float]:
        known = [sign * value for each in metrics(layer) if (value := number_of(each, sort)) is not None]
        return not known, min(known, default=0.0)

    return sorted(layers, key=harm)


def _sorted(layers: Sequence[LayerReport], sort: str) -> list[LayerReport]:
    if sort == "name":
        return sorted(layers, key=lambda layer: layer.name)
    return worst_first(layers, sort, lambda layer: [layer.metrics])


def count_lines(result: Measured, total: Metrics | None, screen: Screen) -> list[str]:
    """What was decided about how many tensors, which kinds were kept, and what was not finite in the `total`."""
    kinds = Counter(layer.role for layer in result.kept if layer.decision == KEPT)
    kept = ", ".join(f"{role} {count:,}" for role, count in kinds.most_common())
    words = [
        f"{word} {count:,}" + (f" ({kept})" if word == KEPT and kept else "") for word, count in result.counts.items()
    ]
    lines = folded_lines(", ".join(words), screen)
    if total and total["nonfinite"]:
        met = f"non-finite input: {total['nonfinite']:,} elements, {total['nan_blocks']:,} blocks became NaN"
        lines += folded_lines(met, screen)
    return lines
