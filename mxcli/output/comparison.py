"""A comparison as tables and sentences, as JSON, as JSON lines and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from mxcli.errors import printable
from mxcli.flows.measure.compare import Compared, Comparison, best_of
from mxcli.flows.plan.plan import Options
from mxcli.flows.write.records import options_record, scheme_record
from mxcli.numerics.combinations import Combinations
from mxcli.numerics.estimates import keys_of
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import NUMBERS
from mxcli.numerics.scheme import Scheme
from mxcli.output.comparison_totals import BEST, delta, delta_cell, total_lines, wins
from mxcli.output.conclusion import concluded
from mxcli.output.export import csv_text, json_line, json_text
from mxcli.output.numbers import counted, noise_cell, number_cell, shape_text
from mxcli.output.report import ending_lines, headed, sample_record, worst_first
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.series import compared_series_lines, compared_series_records
from mxcli.output.table import Column, Row, aligned, least_width

DELTAS = ("sqnr_db", "saturated_percent", "underflowed_percent")
"""Metrics of which the difference from the first combination is told, as NAME_delta."""
_LAYER_KEYS = ("name", "dtype", "shape", "role", "decision", "reason", "best")
_RECIPE_KEYS = ("format", "scale_rounding", "rounding", "dialect", "seed", "hadamard", "axis")
RECORD_KEYS = (
    *_LAYER_KEYS, "combination", *_RECIPE_KEYS, *(f"{name}_delta" for name in DELTAS), *NUMBERS
)  # fmt: skip
SAMPLE_KEYS = (*RECORD_KEYS[: -len(NUMBERS)], *keys_of(NUMBERS, sampled=True))
"""Of a comparison of samples."""

Metrics = Mapping[str, Value]

_SHARED = (Column("tensor", right=False), Column("shape", right=False, drop=4))
_DELTA = Column("+/-\ndB", drop=2)
_PER_COMBINATION = (Column("SQNR \ndB "), _DELTA, Column("sat.\n%", drop=1), Column("und.\n%", drop=3))


def comparison_text(comparison: Comparison, screen: Screen, sort: str = DELTAS[0], top: int | None = None) -> str:
    """Headlines, the tensors with the worst first, groups, totals of each combination, and what follows in words.

    Combinations stand side by side; those that do not fit the screen follow in further tables. `top` limits the
    tensors shown, never what the totals cover.
    """
    layers = _sorted(comparison.layers, sort)
    shown = layers if top is None else layers[:top]
    lines = [*headed(comparison, rule_lines(comparison.combinations), screen), ""]
    if comparison.sums:
        for band in _bands(comparison, shown, screen):
            lines += [*aligned(_columns(comparison, band), _rows(comparison, shown, band), screen), ""]
        lines += folded_lines(_legend(comparison), screen)
        lines += ["", *total_lines(comparison, screen), ""]
        if comparison.by_step:
            lines += [*compared_series_lines(comparison, screen), ""]
        for sentence in concluded(comparison):
            first, *rest = folded_lines(sentence, screen, "  ")
            lines += [bold(first, screen), *(bold(line, screen) for line in rest)]
        lines.append("")
    lines += ending_lines(comparison, next(iter(comparison.sums), None), screen, len(shown), sort)
    return "\n".join(lines)


def comparison_json(comparison: Comparison) -> str:
    """The whole comparison as one object."""
    names = comparison.combinations.names
    content: dict[str, object] = {
        "source": comparison.source,
        "elements": comparison.total.elements,
        "bytes": comparison.total.bytes,
        "by_dtype": {dtype: asdict(total) for dtype, total in comparison.by_dtype.items()},
        "options": shared_options(comparison.options),
        "combinations": [
            {"name": name, **scheme_record(recipe), "axis": axis, "best_on_tensors": won}
            for name, recipe, axis, won in zip(
                names, comparison.combinations.schemes, comparison.combinations.axes, wins(comparison), strict=True
            )
        ],
        "counts": dict(comparison.counts),
        "unfinished": comparison.unfinished,
        **sample_record(comparison.sample),
        "totals": _named(comparison.combinations, comparison.sums) or None,
        "by": comparison.by,
        "groups": {label: _named(comparison.combinations, group) for label, group in comparison.groups.items()},
        **({"by_step": compared_series_records(comparison)} if comparison.by_step else {}),
        "conclusion": concluded(comparison),
        "notes": list(comparison.notes),
        "layers": [compared_record(layer, comparison.combinations) for layer in comparison.layers],
        "kept": [compared_record(layer, comparison.combinations) for layer in comparison.kept],
    }
    return json_text("compare", content)


def comparison_csv(comparison: Comparison) -> str:
    """One row per tensor and combination, and one per tensor that was kept, under the names of the JSON records."""
    layers = (*comparison.layers, *comparison.kept)
    keys = RECORD_KEYS if comparison.sample is None else SAMPLE_KEYS
    return csv_text((row for layer in layers for row in _csv_rows(layer, comparison.combinations)), keys)


def compared_record(layer: Compared, combinations: Combinations) -> dict[str, object]:
    """A tensor for JSON and JSON lines: `best` names a combination, `metrics` holds those of each by its name."""
    return {**_layer_record(layer, combinations), "metrics": _named(combinations, layer.metrics)}


def compared_line(layer: Compared, combinations: Combinations) -> str:
    """The record of a tensor on one line."""
    return json_line(compared_record(layer, combinations))


def shared_options(options: Options) -> dict[str, object]:
    """The options that all combinations have in common."""
    apart = {"format", "scale_rounding", "rounding", "hadamard", "layout"}
    return {name: value for name, value in options_record(options).items() if name not in apart}


def rule_lines(combinations: Combinations) -> list[str]:
    """A line per format with everything it is compared under."""
    rows = {recipe.format.name: recipe.format for recipe in combinations.schemes}
    lines = []
    for name, row in rows.items():
        recipes = [recipe for recipe in combinations.schemes if recipe.format.name == name]
        tensor = f", {row.tensor_scale.name} tensor scale" if row.tensor_scale else ""
        lines.append(
            f"{name}: {row.element.name} elements, {row.scale.name} scales by {row.block_name}{tensor}; scale rounding "
            f"{_listed(recipe.scale_rule.name for recipe in recipes)}; element rounding "
            f"{_listed(recipe.rounding.name for recipe in recipes)}{_transforms(recipes)}; as {recipes[0].dialect.name}"
        )
    return lines


def _transforms(recipes: Sequence[Scheme]) -> str:
    """The transforms in words, if there are any."""
    if not any(recipe.hadamard for recipe in recipes):
        return ""
    sizes = _listed("none" if recipe.hadamard is None else str(recipe.hadamard.size) for recipe in recipes)
    return f"; Hadamard transform {sizes}"


def titles(combinations: Combinations) -> list[str]:
    """What tells combinations apart: their names without the parts that all have in common."""
    parts = [name.split(" ") for name in combinations.names]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return [" ".join(part for part, kept in zip(each, differ, strict=True) if kept) for each in parts]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _columns(comparison: Comparison, band: range) -> list[Column]:
    names = titles(comparison.combinations)
    return [
        *_SHARED,
        *(
            replace(column, group=names[at].replace(" ", "\n"))
            for at in band
            for column in _PER_COMBINATION
            if at or column is not _DELTA
        ),
    ]


def _rows(comparison: Comparison, shown: Sequence[Compared], band: range) -> list[Row]:
    """The tensors, everything together, and the groups."""
    tensors = len(comparison.layers)
    rows: list[Row] = [
        [printable(layer.name), shape_text(layer.shape), *_cells(layer.metrics, band, layer.best)] for layer in shown
    ]
    total = comparison.sums
    rows += [None, [f"all {counted(tensors, 'tensor')}", "", *_cells(total, band, best_of(total))]]
    if len(comparison.groups) > 1:
        rows += [
            [f"{printable(label)} ({group[0]['tensors']:,})", "", *_cells(group, band, best_of(group))]
            for label, group in comparison.groups.items()
        ]
    return rows


def _cells(metrics: Sequence[Metrics], band: range, best: int | None = None) -> list[str]:
    """The cells of some combinations in a row; the best one is marked."""
    cells = []
    for at in band:
        each = metrics[at]
        cells.append(noise_cell(each, "sqnr_db") + (BEST if at == best else " "))
        if at:
            cells.append(delta_cell(each, metrics[0]))
        cells += [number_cell(each, "saturated_percent"), number_cell(each, "underflowed_percent")]
    return cells


def _bands(comparison: Comparison, shown: Sequence[Compared], screen: Screen) -> list[range]:
    """The combinations in as few runs as fit the screen, with nothing but their SQNR, and about equally long."""
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


def _sorted(layers: Sequence[Compared], sort: str) -> list[Compared]:
    if sort == "name":
        return sorted(layers, key=lambda layer: layer.name)
    return worst_first(layers, sort, lambda layer: layer.metrics)


def _named(combinations: Combinations, metrics: Sequence[Metrics]) -> dict[str, Metrics]:
    """Metrics by the name of their combination, with the differences from the first."""
    return {
        name: {**each, **{f"{key}_delta": delta(key, each, metrics[0]) for key in DELTAS}}
        for name, each in zip(combinations.names, metrics, strict=False)
    }


def _layer_record(layer: Compared, combinations: Combinations) -> dict[str, object]:
    return {
        "name": layer.name,
        "dtype": layer.dtype,
        "shape": list(layer.shape),
        "role": layer.role,
        "decision": layer.decision,
        "reason": layer.reason,
        "best": None if layer.best is None else combinations.names[layer.best],
    }


def _csv_rows(layer: Compared, combinations: Combinations) -> Iterator[dict[str, object]]:
    record = _layer_record(layer, combinations)
    if not layer.metrics:
        yield record
    named = _named(combinations, layer.metrics).items()
    for recipe, axis, (name, metrics) in zip(combinations.schemes, combinations.axes, named, strict=False):
        yield {**record, "combination": name, **scheme_record(recipe), "axis": axis, **metrics}
