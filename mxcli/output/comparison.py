"""A comparison as tables and sentences, as JSON, as JSON lines and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from mxcli.errors import printable
from mxcli.numerics.metrics import METRICS, NUMBERS, Metric, number_of
from mxcli.output.conclusion import bold_lines, sentences
from mxcli.output.export import csv_text, json_line, json_text
from mxcli.output.fields import (
    COUNT,
    METRIC,
    NOTHING,
    NUMBER,
    SCHEME,
    SCHEME_OPTIONS,
    SOURCE,
    TENSORS,
    TEXT,
    TEXT_OR_NULL,
    Field,
    Fields,
    Metrics,
    Schema,
    choice,
    column,
    mapping,
    metric_fields,
    or_null,
    records,
    records_by_name,
)
from mxcli.output.numbers import ABSENT, counted, noise_cell, number_cell, shape_text, significant
from mxcli.output.report import (
    COMBINED,
    CONCLUSION,
    DECIDED,
    NOTES,
    OPTIONS,
    RESULT,
    ending_lines,
    format_words,
    headed,
    ordered,
)
from mxcli.output.screen import Screen, folded_lines
from mxcli.output.series import BY_STEP, COMPARED_STEP, compared_series_lines
from mxcli.output.table import Column, Row, aligned, least_width

if TYPE_CHECKING:
    from mxcli.flows.measure.compare import Compared, Comparison
    from mxcli.flows.plan.plan import Options
    from mxcli.numerics.combinations import Combinations
    from mxcli.numerics.scheme import Scheme

BEST, TINY = "*", "~0"
SORT = "sqnr_db"
_AXIS: Schema = {"enum": ["row", "column", None], "description": "null: the dimension that each layer sums over"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Metrics under a combination, and those under the first, which is the baseline."""

    metrics: Metrics
    first: Metrics


@dataclass(frozen=True, slots=True)
class _Line:
    """A tensor. `at`: index of the combination; None for a kept tensor, or in JSON."""

    layer: Compared
    combinations: Combinations
    at: int | None = None

    @property
    def pair(self) -> Pair | None:
        return None if self.at is None else Pair(self.layer.metrics[self.at], self.layer.metrics[0])

    @property
    def scheme(self) -> Scheme | None:
        return None if self.at is None else self.combinations.schemes[self.at]


def _delta(name: str) -> Field[Pair]:
    meaning = "minus that of the first combination"
    return Field(f"{name}_delta", lambda pair: delta(name, pair), NUMBER, meaning=meaning, optional=True)


DELTAS: Fields[Pair] = Fields(*map(_delta, ("sqnr_db", "saturated_percent", "underflowed_percent")))
"""Differences from the first combination."""


_METRICS_OF = attrgetter("metrics")


def _under(metrics: Mapping[str, Metric]) -> Fields[Pair]:
    return Fields(metric_fields(metrics).through(_METRICS_OF), DELTAS)


_UNDER = _under(NUMBERS)
_TOTALS: Fields[Pair] = Fields(Fields(TENSORS).through(_METRICS_OF), _under(METRICS))
_BEST: Field[_Line] = Field(
    "best",
    lambda line: None if line.layer.best is None else line.combinations.names[line.layer.best],
    TEXT_OR_NULL,
)
_DECIDED: Fields[_Line] = Fields(DECIDED.through(lambda line: line.layer), _BEST)
COMPARED: Fields[_Line] = Fields(
    _DECIDED,
    records_by_name("metrics", lambda line: _named(line.combinations, line.layer.metrics), _UNDER),
)
"""A tensor of JSON and JSON lines: `best` names a combination, `metrics` holds those of each by its name."""


def csv_fields(*, sampled: bool) -> Fields[Any]:
    """Return the columns of CSV; with `sampled` those of a comparison of samples."""
    return Fields(
        _DECIDED,
        Field("combination", lambda line: NOTHING if line.at is None else line.combinations.names[line.at], TEXT),
        Fields(SCHEME, SCHEME_OPTIONS).through(attrgetter("scheme")),
        Field("axis", lambda line: NOTHING if line.at is None else line.combinations.axes[line.at], _AXIS),
        Fields(DELTAS, metric_fields(NUMBERS, sampled=sampled).through(_METRICS_OF)).through(attrgetter("pair")),
    )


_COMBINATION: Fields[tuple[str, Scheme, str | None, int]] = Fields(
    Field("name", itemgetter(0), TEXT),
    Fields(SCHEME, SCHEME_OPTIONS).through(itemgetter(1)),
    Field("axis", itemgetter(2), _AXIS),
    Field("best_on_tensors", itemgetter(3), COUNT),
)
_TOTALS_BY_NAME = mapping(_TOTALS.object_schema())

COMPARISON: Fields[Comparison] = Fields(
    SOURCE,
    Field("options", lambda comparison: shared_options(comparison.options), OPTIONS),
    records("combinations", lambda comparison: _combinations(comparison), _COMBINATION),
    RESULT,
    Field("totals", lambda each: _totals(each.combinations, each.sums) or None, or_null(_TOTALS_BY_NAME)),
    Field("by", lambda comparison: comparison.by, choice(("layer", "role", "kind"))),
    Field(
        "groups",
        lambda each: {label: _totals(each.combinations, group) for label, group in each.groups.items()},
        mapping(_TOTALS_BY_NAME),
    ),
    records(
        "by_step",
        lambda each: ((each.combinations.names, at) for at in zip(*each.by_step, strict=True)),
        COMPARED_STEP,
        meaning=BY_STEP,
    ).when(lambda comparison: comparison.by_step),
    CONCLUSION,
    NOTES,
    records("layers", lambda each: (_Line(layer, each.combinations) for layer in each.layers), COMPARED),
    records("kept", lambda each: (_Line(layer, each.combinations) for layer in each.kept), COMPARED),
)
"""The JSON of `mxcli compare`."""


def delta(name: str, pair: Pair) -> float | None:
    """Return a metric minus that of the first combination; None where either is absent."""
    value, start = number_of(pair.metrics, name), number_of(pair.first, name)
    return None if value is None or start is None else value - start


def _delta_cell(pair: Pair) -> str:
    """Return the SQNR in dB minus that of the first combination."""
    more = delta("sqnr_db", pair)
    if more is None:
        return ABSENT
    return TINY if 0 < abs(more) < 0.001 else f"{'+' if more > 0 else ''}{significant(more)}"


def _block_range(metrics: Metrics) -> str:
    """Return the dynamic range of the median block, and of one in a hundred."""
    quantiles = metrics["block_dynamic_range"]
    found = quantiles if isinstance(quantiles, dict) else {}
    known = [found.get("p50"), found.get("p99")]
    return "/".join(ABSENT if value is None else f"{value:.1f}" for value in known)


_DELTA: Field[Pair] = column("+/-\ndB", _delta_cell, drop=2)
_SHARED = (Column("tensor", right=False), Column("shape", right=False, drop=4))
_PER_COMBINATION = (Column("SQNR \ndB "), _DELTA.column, Column("sat.\n%", drop=1), Column("und.\n%", drop=3))
_BITS = METRIC["bits_per_element"].at(drop=4)
_MEASURES: Fields[Pair] = Fields(
    _DELTA.at(cell=lambda pair: "" if pair.metrics is pair.first else _delta_cell(pair), drop=1),
    Fields(
        METRIC["relative_error"].at(drop=6),
        METRIC["bias"].at(drop=2),
        METRIC["shrunk_percent"].at(drop=2),
        METRIC["saturated_percent"].at(drop=3),
        METRIC["saturated_blocks_percent"].at(drop=5),
        METRIC["underflowed_percent"].at(drop=3),
        METRIC["binades_used"].at(drop=4),
        column("block range\np50/p99", _block_range, key="range", drop=4),
    ).through(_METRICS_OF),
)
"""The columns of the table of totals after the SQNR."""
_SPECIAL = ("bias", "shrunk_percent", "binades_used", "range")
"""Those that are shown only where roundings, transforms or axes are compared, which change them."""
_SQNR, _WINS = Column("SQNR \ndB "), Column("best on\ntensors", drop=2)


def comparison_text(comparison: Comparison, screen: Screen, sort: str = SORT, top: int | None = None) -> str:
    """Return headlines, the tensors with the worst first, groups, totals of each combination, and the conclusion.

    Combinations are side by side; those that do not fit the screen follow in further tables. `top` limits the tensors
    shown, not those that the totals cover.
    """
    layers = ordered(comparison.layers, sort, lambda layer: layer.metrics)
    shown = layers if top is None else layers[:top]
    lines = [*headed(comparison, rule_lines(comparison.combinations), screen), ""]
    if comparison.sums:
        for band in _bands(comparison, shown, screen):
            lines += [*aligned(_columns(comparison, band), _rows(comparison, shown, band), screen), ""]
        lines += folded_lines(_legend(comparison), screen)
        lines += ["", *total_lines(comparison, screen), ""]
        if comparison.by_step:
            lines += [*compared_series_lines(comparison, screen), ""]
        lines += [*bold_lines(sentences(comparison.conclusion), screen), ""]
    lines += ending_lines(comparison, next(iter(comparison.sums), None), screen, len(shown), sort)
    return "\n".join(lines)


def total_lines(comparison: Comparison, screen: Screen) -> list[str]:
    """Return the table of totals; of each role too where roundings, transforms or axes are compared, since their
    effects on weights, activations and gradients differ."""
    special = comparison.combinations.varies
    measures = _MEASURES if special else _MEASURES.without(*_SPECIAL)
    columns = [Column("", right=False), _BITS.column, _SQNR, *measures.columns(), _WINS]
    wins = [f"{won:,}" for won in comparison.wins]
    rows = list[Row](_total_rows(comparison, measures, comparison.sums, comparison.best, wins))
    if special and comparison.by == "role" and len(comparison.groups) > 1:
        nothing = [""] * len(comparison.sums)
        for label, group in comparison.groups.items():
            best = comparison.best_in(label)
            rows += [None, *_total_rows(comparison, measures, group, best, nothing, f"{printable(label)}: ")]
    return aligned(columns, rows, screen)


def comparison_json(comparison: Comparison) -> str:
    """Return the whole comparison as one object."""
    return json_text("compare", COMPARISON.record(comparison))


def comparison_csv(comparison: Comparison) -> str:
    """Return a row per tensor and combination, and one per tensor that was kept, under the names of the JSON
    records."""
    fields = csv_fields(sampled=comparison.sample is not None)
    lines = (
        _Line(layer, comparison.combinations, at)
        for layer in (*comparison.layers, *comparison.kept)
        for at in (range(len(layer.metrics)) if layer.metrics else (None,))
    )
    return csv_text(map(fields.record, lines), fields.names)


def compared_record(layer: Compared, combinations: Combinations) -> dict[str, object]:
    """Return a tensor for JSON and JSON lines."""
    return COMPARED.record(_Line(layer, combinations))


def compared_line(layer: Compared, combinations: Combinations) -> str:
    """Return the record of a tensor on one line."""
    return json_line(compared_record(layer, combinations))


def shared_options(options: Options) -> dict[str, object]:
    """Return the options that all combinations have in common."""
    from mxcli.flows.write.records import options_record

    return {name: value for name, value in options_record(options).items() if name not in COMBINED}


def rule_lines(combinations: Combinations) -> list[str]:
    """Return a line per format with everything under which it is compared."""
    formats = {scheme.format.name: scheme.format for scheme in combinations.schemes}
    lines = []
    for name, fmt in formats.items():
        schemes = [scheme for scheme in combinations.schemes if scheme.format.name == name]
        rules = _listed(scheme.scale_rule.name for scheme in schemes)
        roundings = _listed(scheme.rounding.name for scheme in schemes) + _transforms(schemes)
        as_whom = schemes[0].dialect.name
        lines.append(f"{format_words(fmt)}; scale rounding {rules}; element rounding {roundings}; as {as_whom}")
    return lines


def _transforms(schemes: Sequence[Scheme]) -> str:
    """Return the transforms in words, if there are any."""
    if not any(scheme.hadamard for scheme in schemes):
        return ""
    sizes = _listed("none" if scheme.hadamard is None else str(scheme.hadamard.size) for scheme in schemes)
    return f"; Hadamard transform {sizes}"


def titles(combinations: Combinations) -> list[str]:
    """Return the names of combinations without the parts that all have in common."""
    parts = [name.split(" ") for name in combinations.names]
    differ = [len(set(place)) > 1 for place in zip(*parts, strict=True)]
    return [" ".join(part for part, kept in zip(each, differ, strict=True) if kept) for each in parts]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _columns(comparison: Comparison, band: range) -> list[Column]:
    names = titles(comparison.combinations)
    return [
        *_SHARED,
        *(
            replace(each, group=names[at].replace(" ", "\n"))
            for at in band
            for each in _PER_COMBINATION
            if at or each != _DELTA.column
        ),
    ]


def _rows(comparison: Comparison, shown: Sequence[Compared], band: range) -> list[Row]:
    """Return the tensors, everything together, and the groups."""
    rows: list[Row] = [
        [printable(layer.name), shape_text(layer.shape), *_cells(layer.metrics, band, layer.best)] for layer in shown
    ]
    everything = f"all {counted(len(comparison.layers), 'tensor')}"
    rows += [None, [everything, "", *_cells(comparison.sums, band, comparison.best)]]
    if len(comparison.groups) > 1:
        rows += [
            [f"{printable(label)} ({group[0]['tensors']:,})", "", *_cells(group, band, comparison.best_in(label))]
            for label, group in comparison.groups.items()
        ]
    return rows


def _cells(metrics: Sequence[Metrics], band: range, best: int | None) -> list[str]:
    """Return the cells of some combinations in a row; the best one is marked."""
    cells = []
    for at in band:
        each = metrics[at]
        cells.append(noise_cell(each, "sqnr_db") + (BEST if at == best else " "))
        if at:
            cells.append(_delta_cell(Pair(each, metrics[0])))
        cells += [number_cell(each, "saturated_percent"), number_cell(each, "underflowed_percent")]
    return cells


def _total_rows(
    comparison: Comparison,
    measures: Fields[Pair],
    sums: Sequence[Metrics],
    best: int | None,
    wins: Sequence[str],
    label: str = "",
) -> Iterator[list[str]]:
    """Yield a row per combination, the best one marked."""
    for at, (name, total) in enumerate(zip(comparison.combinations.names, sums, strict=True)):
        pair = Pair(total, sums[0])
        sqnr = noise_cell(total, "sqnr_db") + (BEST if at == best else " ")
        yield [label + name, _BITS.text(total), sqnr, *measures.cells(pair), wins[at]]


def _bands(comparison: Comparison, shown: Sequence[Compared], screen: Screen) -> list[range]:
    """Return the combinations in as few runs as fit the screen, with nothing but their SQNR, and about equally long."""
    count = len(comparison.combinations.names)
    for length in (-(-count // runs) for runs in range(1, count)):
        bands = [range(start, min(start + length, count)) for start in range(0, count, length)]
        if screen.width is None or all(
            least_width(_columns(comparison, band), _rows(comparison, shown, band), screen) <= screen.width
            for band in bands
        ):
            return bands
    return [range(at, at + 1) for at in range(count)]


def _legend(comparison: Comparison) -> str:
    first = titles(comparison.combinations)[0]
    return f"{BEST} best SQNR; +/- against {first}; sat., und.: saturated, underflowed % of elements"


def _combinations(comparison: Comparison) -> Iterator[tuple[str, Scheme, str | None, int]]:
    each = comparison.combinations
    return zip(each.names, each.schemes, each.axes, comparison.wins, strict=True)


def _named(combinations: Combinations, metrics: Sequence[Metrics]) -> dict[str, Pair]:
    """Return the metrics by the name of their combination."""
    return {name: Pair(each, metrics[0]) for name, each in zip(combinations.names, metrics, strict=False)}


def _totals(combinations: Combinations, metrics: Sequence[Metrics]) -> dict[str, dict[str, object]]:
    return {name: _TOTALS.record(pair) for name, pair in _named(combinations, metrics).items()}
