"""A report as a table, as JSON, as JSON lines and as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mxcli.numerics.metrics import METRICS, Metric, number_of
from mxcli.numerics.samples import CONFIDENCE_PERCENT
from mxcli.numerics.scheme import NONFINITE_POLICIES, RULE_NAMES, TENSOR_RULES
from mxcli.output.conclusion import bold_lines, sentences
from mxcli.output.export import csv_text, json_line, json_text
from mxcli.output.fields import (
    AXIS,
    COUNT,
    FLAG,
    HADAMARD,
    METRIC,
    NOTHING,
    SCHEME,
    SCHEME_OPTIONS,
    SOURCE,
    TEXT,
    TEXT_OR_NULL,
    TOTALS,
    Field,
    Fields,
    Metrics,
    array,
    attributes,
    choice,
    column,
    mapping,
    metric_fields,
    nested,
    object_of,
    or_null,
    record_of,
    records,
    records_by_name,
)
from mxcli.output.formats import rules_words
from mxcli.output.inspection import source_line
from mxcli.output.numbers import ABSENT, counted, shape_text, significant, sparkline
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.series import BY_STEP, STEP_TOTAL, series_lines
from mxcli.output.table import Row, aligned

if TYPE_CHECKING:
    from mxcli.flows.measure.report import LayerReport, Report, Result
    from mxcli.flows.measure.sampled import Taken
    from mxcli.flows.measure.totals import Named, Totals
    from mxcli.flows.plan.plan import Options
    from mxcli.numerics.formats import BlockFormat
    from mxcli.numerics.scheme import Scheme

DEFAULT_SORT = "sqnr_db"
T = TypeVar("T")
L = TypeVar("L", bound="Named")

DECISIONS = ("quantized", "padded", "kept", "tied")
DECIDED: Fields[Any] = Fields(
    Field("name", lambda layer: layer.name, TEXT, "tensor", right=False),
    Field("dtype", lambda layer: layer.dtype, TEXT),
    Field(
        "shape",
        lambda layer: list(layer.shape),
        array(COUNT),
        "shape",
        cell=lambda layer: shape_text(layer.shape),
        right=False,
        drop=6,
    ),
    Field("role", lambda layer: layer.role, TEXT),
    Field("decision", lambda layer: layer.decision, choice(DECISIONS), "decision", right=False, drop=8),
    Field("reason", lambda layer: layer.reason, TEXT),
)
"""A tensor of a report or a comparison, and the decision about it."""
_AXIS: Field[LayerReport] = Field(
    "axis", lambda layer: NOTHING if layer.axis is None else layer.axis, AXIS, "axis", right=False
)
_SCHEME: Fields[LayerReport] = SCHEME.through(lambda layer: layer.scheme)


def layer_fields(*, sampled: bool) -> Fields[LayerReport]:
    """Return the columns of CSV; with `sampled` those of a report on a sample."""
    return Fields(DECIDED, _SCHEME, _AXIS, metric_fields(sampled=sampled).through(lambda layer: layer.metrics))


LAYER: Fields[LayerReport] = Fields(
    DECIDED,
    _SCHEME,
    SCHEME_OPTIONS.through(lambda layer: layer.scheme),
    _AXIS,
    metric_fields().through(lambda layer: layer.metrics),
)
"""A measured tensor."""
KEPT_LAYER: Fields[LayerReport] = Fields(DECIDED, _AXIS.at(optional=True))
"""A tensor that is kept; it has an axis where it is measured along the other."""

SAMPLE: Fields[Taken] = Fields(
    Field("fraction", lambda sample: sample.fraction, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    *attributes(COUNT, "seed", "tensors"),
    *attributes(COUNT, "read_whole", meaning="tensors of which nothing was left out"),
    *attributes(COUNT, "elements", "sampled_elements"),
    *attributes(array(TEXT), "tensor_scales", meaning="formats with a scale of the sample, not of the tensor"),
    Field("confidence_percent", lambda sample: CONFIDENCE_PERCENT, {"const": CONFIDENCE_PERCENT}),
)
COMBINED = ("format", "scale_rounding", "rounding", "hadamard", "layout")
"""Options that a comparison lacks: those that it combines, and the layout."""
_OVERRIDE = {"selector": TEXT, "format": TEXT, "keep": FLAG, **dict.fromkeys(TENSOR_RULES, TEXT)}
OPTIONS = object_of(
    {
        "format": TEXT,
        **{name: TEXT_OR_NULL if name in TENSOR_RULES else {} for name in RULE_NAMES},
        "nonfinite": choice(NONFINITE_POLICIES),
        "on_indivisible": choice(("error", "pad", "keep")),
        "selection": array(object_of({"include": TEXT, "exclude": TEXT}, optional=("include", "exclude"))),
        "overrides": array(object_of(_OVERRIDE, optional=_OVERRIDE.keys() - {"selector"})),
        "layout": TEXT_OR_NULL,
        "axis": choice(("row", "column", "both", None)),
        "fuse": TEXT_OR_NULL,
        "seed": or_null(COUNT),
        "hadamard": or_null(HADAMARD),
    },
    optional=COMBINED,
)
"""Schema of `options_record`."""
RESULT: Fields[Any] = Fields(
    Field("counts", lambda result: dict(result.counts), mapping(COUNT)),
    Field("unfinished", lambda result: result.unfinished, COUNT, meaning="tensors left unmeasured by an interruption"),
    record_of("sample", lambda result: result.sample, SAMPLE, meaning="with --sample only").when(
        lambda result: result.sample is not None
    ),
)
"""Keys that reports and comparisons have in common."""
NOTES: Field[Any] = Field("notes", lambda result: list(result.notes), array(TEXT))
CONCLUSION: Field[Any] = Field("conclusion", lambda result: sentences(result.conclusion), array(TEXT))
_AXIS_TOTALS: Fields[Totals] = Fields(
    nested("totals", lambda totals: totals.sum, TOTALS),
    records_by_name("by_role", lambda totals: totals.by_role, TOTALS),
)
_COUNTED_SCHEME: Fields[tuple[Scheme, int]] = Fields(
    SCHEME.through(lambda pair: pair[0]),
    SCHEME_OPTIONS.through(lambda pair: pair[0]),
    Field("tensors", lambda pair: pair[1], COUNT),
)

REPORT: Fields[Report] = Fields(
    SOURCE,
    Field("options", lambda report: _options_record(report.options), OPTIONS),
    records("recipes", lambda report: report.schemes, _COUNTED_SCHEME),
    RESULT,
    nested(
        "totals",
        lambda report: report.sum,
        TOTALS,
        meaning="null: nothing was measured, or along both axes (by_axis)",
    ),
    records_by_name(
        "by_role", lambda report: report.by_role, TOTALS, meaning="empty where both axes were measured (by_axis)"
    ),
    records_by_name(
        "by_axis",
        lambda report: report.by_axis,
        _AXIS_TOTALS,
        meaning="with --axis both, by row and column; layers, counts and unfinished count each axis",
    ).when(lambda report: report.by_axis),
    CONCLUSION.at(meaning="with --axis both: the axis that serves a role better").when(lambda report: report.by_axis),
    records("by_step", lambda report: report.by_step, STEP_TOTAL, meaning=BY_STEP).when(lambda report: report.by_step),
    NOTES,
    records("layers", lambda report: report.layers, LAYER),
    records("kept", lambda report: report.kept, KEPT_LAYER),
)
"""The JSON of `mxcli report`, and of the report that `mxcli quantize` gives."""


def _scale_exponents(metrics: Metrics) -> str:
    low, high = metrics["scale_exponent_min"], metrics["scale_exponent_max"]
    return ABSENT if low is None else f"{low}..{high}"


def _blocks_by_exponent(metrics: Metrics) -> str:
    histogram = metrics["scale_exponent_histogram"]
    if metrics["scale_exponent_min"] is None or not isinstance(histogram, Mapping):
        return ""
    counts = {int(exponent): int(count or 0) for exponent, count in histogram.items() if _is_whole(exponent)}
    return sparkline(counts)


def _is_whole(text: object) -> bool:
    return str(text).lstrip("-").isdecimal()


def _binades(metrics: Metrics) -> str:
    used, available = number_of(metrics, "binades_used"), number_of(metrics, "binades_available")
    return ABSENT if available is None else f"{ABSENT if used is None else f'{used:.1f}'}/{available:.1f}"


_BARS: Field[Metrics] = column("blocks\nby them", _blocks_by_exponent, right=False, drop=5)
_PLACED = [(row.text.place, row.name, row.text.drop) for row in METRICS.values() if row.text and row.text.place]
_MEASURES: Fields[Metrics] = Fields(
    *(METRIC[name].at(drop=drop) for _, name, drop in sorted(_PLACED)),
    column("scale\nexponents", _scale_exponents, drop=4),
    _BARS,
    column("binades\nused/available", _binades, drop=7),
)
"""The columns of the table that totals have too."""
_COMPOSED = ("scale_exponent_min", "scale_exponent_max", "binades_used", "binades_available")
"""Metrics that are shown together with others."""


def report_text(report: Report, screen: Screen, sort: str = DEFAULT_SORT, top: int | None = None) -> str:
    """Return headlines, the tensors with the worst first, totals by role, and the decisions, counted; of both axes a
    row for each and the effects of the axis, of several training steps the worst.

    `top` limits the tensors shown, not those that the totals cover.
    """
    lines = [*headlines(report, screen), ""]
    layers = ordered(report.layers, sort, lambda layer: [layer.metrics])
    shown = layers if top is None else layers[:top]
    lines += [*_table(report, shown, screen, sort), ""]
    if report.by_step:
        lines += [*series_lines(report.series, screen), ""]
    lines += bold_lines(sentences(report.conclusion), screen)
    some = report.totals[0][1].sum
    lines += ending_lines(report, some, screen, len(shown), sort, "case" if report.by_axis else "tensor")
    return "\n".join(lines)


def ending_lines(
    result: Result[Any], total: Metrics | None, screen: Screen, shown: int, sort: str, noun: str = "tensor"
) -> list[str]:
    """Return the footer: rows shown, counts per decision, rows left out by an interrupt."""
    lines, layers = list[str](), len(result.layers)
    if shown < layers:
        order = "in order of name" if sort == "name" else f"worst {sort} first"
        lines += folded_lines(f"{shown:,} of {counted(layers, noun)} shown, {order}", screen)
    lines += count_lines(result, total, screen)
    if result.unfinished:
        lines += folded_lines(f"interrupted: {counted(result.unfinished, noun)} not measured", screen)
    return lines


def headlines(report: Report, screen: Screen) -> list[str]:
    """Return the source, the rules of each scheme and the policies."""
    return headed(report, map(scheme_line, report.schemes), screen)


def headed(result: Result[Any], rules: Iterable[str], screen: Screen) -> list[str]:
    """Return the source, the rules given, and the policies."""
    source = source_line(result.source, result.total, result.by_dtype)
    said = (source, *rules, policy_line(result.options), *sample_lines(result.sample))
    lines = [line for text in said for line in folded_lines(text, screen)]
    return [bold(lines[0], screen), *lines[1:]]


def report_json(report: Report, verb: str = "report", **more: object) -> str:
    """Return the whole report as one object; `more` are further keys."""
    return json_text(verb, {**REPORT.record(report), **more})


def report_csv(report: Report) -> str:
    """Return a row per tensor, measured or kept, under the names of the JSON records."""
    names = layer_fields(sampled=report.sample is not None).names
    return csv_text(map(layer_record, (*report.layers, *report.kept)), names)


def layer_record(layer: LayerReport) -> dict[str, object]:
    """Return a tensor under the key names of JSON, JSON lines and CSV."""
    return (LAYER if layer.scheme else KEPT_LAYER).record(layer)


def layer_line(layer: LayerReport) -> str:
    """Return the record of a tensor on one line."""
    return json_line(layer_record(layer))


def policy_line(options: Options) -> str:
    """Return the policies for values and lengths that do not fit."""
    return f"non-finite input: {options.rules.nonfinite}; indivisible lengths: {options.on_indivisible}"


def sample_lines(sample: Taken | None) -> list[str]:
    """Return the share of the tensors that was read; nothing without a sample."""
    if sample is None:
        return []
    unsure = "" if sample.is_everything else f"; ± is half of a {CONFIDENCE_PERCENT} % interval"
    scales = (
        f"; tensor scales are those of the sample ({', '.join(sample.tensor_scales)})" if sample.tensor_scales else ""
    )
    share = significant(100 * sample.sampled_elements / sample.elements) if sample.elements else "100"
    return [f"sample: {share} % of the elements, seed {sample.seed}{unsure}{scales}"]


def scheme_line(counted_scheme: tuple[Scheme, int]) -> str:
    """Return a scheme in words with the number of its tensors."""
    scheme, count = counted_scheme
    return f"{format_words(scheme.format)}; {rules_words(scheme)} ({counted(count, 'tensor')})"


def format_words(fmt: BlockFormat) -> str:
    """Return the name, elements and scales of a format."""
    tensor = f", {fmt.tensor_scale.name} tensor scale" if fmt.tensor_scale else ""
    return f"{fmt.name}: {fmt.element.name} elements, {fmt.scale.name} scales by {fmt.block_name}{tensor}"


def _options_record(options: Options) -> dict[str, object]:
    from mxcli.flows.write.records import options_record

    return options_record(options)


def _table(report: Report, shown: Sequence[LayerReport], screen: Screen, sort: str) -> list[str]:
    """Return the tensors, everything together, and totals by role; along each axis where there are both.

    A metric that the tensors are in order of has a column too.
    """
    measures = _MEASURES if screen.unicode else _with(_MEASURES, _BARS.at(cell=lambda metrics: ""))
    if sort in METRICS and sort not in (*(field.key for field in measures), *_COMPOSED):
        measures = Fields(measures, METRIC[sort].at(title=_heading(METRICS[sort])))
    fields: Fields[LayerReport] = Fields(
        LAYER["name"],
        *([_AXIS] if report.by_axis else []),
        LAYER["shape"],
        measures.through(lambda layer: layer.metrics),
        LAYER["decision"],
    )
    rows: list[Row] = [fields.cells(layer) for layer in shown]
    for axis, totals in report.totals:
        if totals.sum is None:
            continue
        titled = {f"all {counted(int(str(totals.sum['tensors'])), 'tensor')}": totals.sum}
        if len(totals.by_role) > 1:
            titled |= {f"{role} ({total['tensors']:,})": total for role, total in totals.by_role.items()}
        along = [] if axis is None else [axis]
        rows += [None, *([title, *along, "", *measures.cells(total), ""] for title, total in titled.items())]
    return aligned(fields.columns(), rows, screen)


def _heading(row: Metric) -> str:
    """Return the heading of a metric: that of its column, or its name on up to two lines."""
    if row.text is not None:
        return row.text.heading
    first, _, last = row.name.rpartition("_")
    return "\n".join(filter(None, (first.replace("_", " "), last)))


def _with(fields: Fields[T], other: Field[T]) -> Fields[T]:
    """Return the fields with one replaced by another of its key."""
    return Fields(*(other if field.key == other.key else field for field in fields))


def ordered(layers: Iterable[L], sort: str, metrics: Callable[[L], Sequence[Metrics]]) -> list[L]:
    """Return the layers by name, or by the worst value of a metric under any scheme; exact and absent ones last."""
    if sort == "name":
        return sorted(layers, key=lambda layer: layer.name)
    sign = 1 if METRICS[sort].better == "high" else -1

    def harm(layer: L) -> tuple[bool, float]:
        known = [sign * value for each in metrics(layer) if (value := number_of(each, sort)) is not None]
        return not known, min(known, default=0.0)

    return sorted(layers, key=harm)


def count_lines(result: Result[Any], total: Metrics | None, screen: Screen) -> list[str]:
    """Return the decisions, counted, the roles of kept tensors, and what was not finite in the `total`."""
    kept = ", ".join(f"{role} {count:,}" for role, count in result.kept_by_role.items())
    words = [
        f"{word} {count:,}" + (f" ({kept})" if word == "kept" and kept else "") for word, count in result.counts.items()
    ]
    lines = folded_lines(", ".join(words), screen)
    if total and total["nonfinite"]:
        met = f"non-finite input: {total['nonfinite']:,} elements, {total['nan_blocks']:,} blocks became NaN"
        lines += folded_lines(met, screen)
    return lines
