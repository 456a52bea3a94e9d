"""Charts of a study of tensors: metrics by layer, kind of tensor and scheme, histograms, and worst blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from mxcli.errors import printable
from mxcli.flows.measure.totals import labels, layer_of
from mxcli.flows.measure.worst_blocks import WorstBlock
from mxcli.numerics.metrics import number_of
from mxcli.output.charts import (
    COLOURS,
    COLUMNS,
    GREY,
    BarChart,
    Bars,
    BlockChart,
    Chart,
    Element,
    HeatMap,
    Histogram,
    Line,
    LineChart,
    Mark,
    Panel,
    Range,
    RangeChart,
    Series,
)
from mxcli.output.numbers import counted, power_of_two, significant, trimmed
from mxcli.output.product_charts import product_charts
from mxcli.output.step_charts import step_charts
from mxcli.output.study import Metrics, ProductStudy, Study, Tensor

ROWS, BINS = 16, 300
"""Most rows of a heat map, and bins of a histogram."""
DIGITS = 9
"""Most digits of the number of a layer."""
REST = "all others"

Cells = dict[tuple[str, int], list[Metrics]]
"""Metrics by row (a kind of tensor, or a scheme) and layer."""


def study_charts(study: Study | ProductStudy) -> list[Chart]:
    """Return the charts of a study."""
    return product_charts(study) if isinstance(study, ProductStudy) else tensor_charts(study)


def tensor_charts(study: Study) -> list[Chart]:
    """Return the charts of a study of tensors in a fixed order, worst blocks last, without those that would be
    empty."""
    if not study.sums:
        return []
    cells = _cells(study)
    found = [
        _scheme_bars(study),
        *step_charts(study.series),
        _sqnr_by_layer(study, cells),
        _losses_heat_map(study, cells),
        _block_sqnr_histogram(study),
        _scale_histogram(study),
        _code_histogram(study),
        _binade_ranges(study),
    ]
    blocks = [_block_chart(at, block, study) for at, block in enumerate(study.worst_blocks, 1)]
    return [*(chart for chart in found if chart is not None), *blocks]


def _kinds(study: Study) -> dict[str, str]:
    """Return the kind of each tensor by its name; several stacks of layers have their own kinds."""
    kinds = labels("kind", study.measured)
    layers = {tensor.name: layer_of(tensor) for tensor in study.measured if _layer(tensor) >= 0}
    stacks = {layer: layer.rpartition(".")[0] for layer in layers.values()}
    several = len(set(stacks.values())) > 1
    for name, layer in layers.items():
        stack, kind = stacks[layer], kinds[name]
        if kind.startswith(layer):  # the layer holds only the tensor
            kinds[name] = f"{stack}.*{kind.removeprefix(layer)}"
        elif stack and several:
            kinds[name] = f"{stack}.*.{kind}"
    return kinds


def _layer(tensor: Tensor) -> int:
    """Return the number of a tensor's layer; -1 outside layers."""
    number = layer_of(tensor).rpartition(".")[2]
    return int(number) if number.isdecimal() and len(number) <= DIGITS else -1


def _cells(study: Study) -> Cells:
    """Return the metrics in each layer: by kind under a single scheme, or by scheme."""
    kinds, cells = _kinds(study), Cells()
    for tensor in study.measured:
        layer = _layer(tensor)
        for at, metrics in enumerate(tensor.metrics if layer >= 0 else ()):
            row = study.schemes[at] if study.compares else printable(kinds[tensor.name])
            cells.setdefault((row, layer), []).append(metrics)
    return cells


def _by_row(cells: Cells) -> dict[str, dict[int, list[Metrics]]]:
    rows: dict[str, dict[int, list[Metrics]]] = {}
    for (row, layer), found in cells.items():
        rows.setdefault(row, {})[layer] = found
    return rows


def _spans(cells: Cells) -> list[list[int]]:
    """Return the layers in order; neighbours together if there are more than COLUMNS."""
    layers = sorted({layer for _, layer in cells})
    step = max(1, -(-len(layers) // COLUMNS))
    return [layers[at : at + step] for at in range(0, len(layers), step)]


def _sqnr_by_layer(study: Study, cells: Cells) -> Chart | None:
    """Return the SQNR over the layers; of many kinds, those that fall lowest have colours."""
    lines = []
    firsts = {layer: span[0] for span in _spans(cells) for layer in span}
    for row, layers in _by_row(cells).items():
        gathered: dict[int, list[Metrics]] = {}
        for layer, found in sorted(layers.items()):
            gathered.setdefault(firsts[layer], []).extend(found)
        points = tuple((layer, _least(found, "sqnr_db")) for layer, found in gathered.items())
        if any(value is not None for _, value in points):
            lines.append(Line(row, points))
    if not lines:
        return None
    by, what = (study.scheme_noun, "layer") if study.compares else ("kind of tensor", "kind in the layer")
    ranked = sorted(range(len(lines)), key=lambda at: min(y for _, y in lines[at].points if y is not None))
    if study.compares:
        ranked = list(range(len(lines)))
    coloured, others = (
        [lines[at] for at in sorted(part)] for part in (ranked[:COLOURS], ranked[COLOURS : COLOURS + GREY])
    )
    first = "first" if study.compares else "that fall lowest"
    rest = f"{len(others):,} of {len(lines) - COLOURS:,} others"
    grey = f" The {COLOURS} {first} have colours; grey: {rest}." if others else ""
    return LineChart(
        "sqnr_by_layer",
        f"Error along the layers, by {by}",
        f"The lowest SQNR of the tensors of each {what}: the lower, the more is lost.{grey}{_outside(study)}",
        "layer",
        "SQNR [dB]",
        tuple(coloured),
        tuple(others),
    )


def _outside(study: Study) -> str:
    outside = sum(1 for tensor in study.measured if _layer(tensor) < 0)
    return f" {counted(outside, 'tensor')} outside layers not shown." if outside else ""


def _losses_heat_map(study: Study, cells: Cells) -> Chart | None:
    """Return saturation and underflow by layer and row."""
    if not cells:
        return None
    by_row = _by_row(cells)
    rows, merged = list(by_row), dict[str, str]()
    if len(rows) > ROWS:
        kept = set(sorted(rows, key=lambda row: -_harm(by_row[row]))[: ROWS - 1])
        merged = {row: row if row in kept else REST for row in rows}
        rows = [*(row for row in rows if row in kept), REST]
    spans = _spans(cells)
    place = {layer: at for at, span in enumerate(spans) for layer in span}
    gathered: dict[tuple[str, int], list[Metrics]] = {}
    for (row, layer), found in cells.items():
        gathered.setdefault((merged.get(row, row), place[layer]), []).extend(found)
    panels = [
        Panel(
            what,
            "% of elements",
            tuple(tuple(_share(gathered.get((row, at), ()), what) for at in range(len(spans))) for row in rows),
        )
        for what in ("saturated", "underflowed")
    ]
    by = study.scheme_noun if study.compares else "kind of tensor"
    return HeatMap(
        "saturation_and_underflow",
        f"Saturation and underflow, by layer and {by}",
        f"Saturated: clamped at the largest value the scale lets a code reach. Underflowed: not zero, but became "
        f"zero.{_outside(study)}",
        "layer",
        tuple(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans),
        tuple(rows),
        tuple(panels),
    )


def _harm(layers: dict[int, list[Metrics]]) -> float:
    found = [metrics for group in layers.values() for metrics in group]
    return (_share(found, "saturated") or 0.0) + (_share(found, "underflowed") or 0.0)


def _share(found: Iterable[Metrics], what: str) -> float | None:
    """Return a count in percent of the elements of all tensors together."""
    pairs = [(number_of(metrics, what) or 0, number_of(metrics, "elements") or 0) for metrics in found]
    elements = sum(size for _, size in pairs)
    return 100.0 * sum(count for count, _ in pairs) / elements if elements else None


def _least(found: Iterable[Metrics], name: str) -> float | None:
    return min((value for metrics in found if (value := number_of(metrics, name)) is not None), default=None)


def _totals(study: Study) -> list[tuple[str, Metrics]]:
    """Return the totals that histograms show: of schemes, or of roles under a single scheme."""
    if study.compares:
        return list(zip(study.schemes, study.sums, strict=True))[:COLOURS]
    if 1 < len(study.groups) <= COLOURS:
        return [(printable(label), group[0]) for label, group in study.groups.items()]
    return [("all", study.sums[0])]


def _scale_histogram(study: Study) -> Chart | None:
    return _histogram(
        study,
        "scale_exponent_histogram",
        "zero",
        "Exponents of the block scales",
        "How far blocks are scaled: a wide spread means that blocks differ much in magnitude. Bins that are not empty "
        "are at least a line high.",
        "exponent of the scale",
    )


def _code_histogram(study: Study) -> Chart | None:
    return _histogram(
        study,
        "element_exponent_histogram",
        "zero",
        "Codes by binade",
        "Where in the element format's range the codes are: those on the left keep fewer bits, zeros none.",
        "exponent of the code's value",
        "elements",
    )


def _block_sqnr_histogram(study: Study) -> Chart | None:
    chart = _histogram(
        study,
        "block_sqnr_histogram",
        "exact",
        "SQNR of single blocks",
        "How the error spreads over blocks: the tail on the left is what an average hides. Exact are blocks without "
        "noise.",
        "SQNR of a block [dB, rounded down]",
    )
    quantiles = study.sums[0]["block_sqnr_db"]
    if chart is None or len(chart.series) > 1 or not isinstance(quantiles, dict):
        return chart
    lowest = next((int(name) for name in chart.bins if name != "exact"), None)
    marks = [
        Mark({"p1": "1 %", "p50": "median"}[name], value - lowest)
        for name in ("p1", "p50")
        if lowest is not None and isinstance(value := quantiles[name], float)
    ]
    return Histogram(
        chart.key, chart.title, chart.caption, chart.x, chart.counted, chart.bins, chart.series, tuple(marks)
    )


def _histogram(
    study: Study, name: str, odd: str, title: str, caption: str, x: str, counted: str = "blocks"
) -> Histogram | None:
    """Return the shares by a whole number; the key `odd` of the counts is the first bin (zero) or the last (exact)."""
    found = [(label, counts) for label, metrics in _totals(study) if isinstance(counts := metrics.get(name), dict)]
    keys = {key for _, counts in found for key in counts}
    numbers = [int(key) for key in keys if key != odd]
    if not keys:
        return None
    bins = [str(at) for at in range(min(numbers, default=0), max(numbers, default=-1) + 1)][:BINS]
    if odd in keys:
        bins = [odd, *bins] if odd == "zero" else [*bins, odd]
    series = tuple(Series(label, tuple(int(counts.get(key) or 0) for key in bins)) for label, counts in found)
    by = "" if len(series) == 1 else f", by {study.scheme_noun if study.compares else study.by}"
    key = name.replace("_histogram", "" if odd == "exact" else "s")
    return Histogram(key, title + by, caption, x, counted, tuple(bins), series)


def _binade_ranges(study: Study) -> Chart | None:
    """Return the used part of the element format's range: of each kind of tensor, or under each scheme."""
    kinds = _kinds(study)
    found: dict[str, list[Metrics]] = {}
    for tensor in study.measured:
        for at, metrics in enumerate(tensor.metrics):
            row = study.schemes[at] if study.compares else printable(kinds[tensor.name])
            found.setdefault(row, []).append(metrics)
    ranges = [each for row, group in found.items() if (each := _used(row, group)) is not None]
    if not ranges:
        return None
    more = ""
    if len(ranges) > ROWS:
        more = f" The {ROWS} kinds with least are shown, of {len(ranges):,}."
        ranges = sorted(ranges, key=lambda each: each.middle)[:ROWS]
    return RangeChart(
        "binades_used",
        f"Binades in use, by {study.scheme_noun if study.compares else 'kind of tensor'}",
        "From the smallest value of the element format to the largest code of a block, on average over the blocks of "
        f"a tensor: least, median and most over tensors; the track is what the format has.{more}",
        "binades",
        tuple(ranges),
    )


def _used(row: str, group: Sequence[Metrics]) -> Range | None:
    used = [value for metrics in group if (value := number_of(metrics, "binades_used")) is not None]
    available = max((number_of(metrics, "binades_available") or 0.0 for metrics in group), default=0.0)
    return Range(row, min(used), median(used), max(used), available) if used else None


def _scheme_bars(study: Study) -> Chart | None:
    """Return the totals of each scheme."""
    if not study.compares:
        return None
    wanted = {
        "sqnr_db": "SQNR [dB]",
        "saturated_percent": "saturated [% of elements]",
        "underflowed_percent": "underflowed [% of elements]",
        "bits_per_element": "bits per element",
    }
    better = {"sqnr_db": "high"}
    measures = [
        Bars(label, better.get(name, "low"), tuple(number_of(metrics, name) for metrics in study.sums))
        for name, label in wanted.items()
    ]
    wins = tuple(sum(1 for each in study.measured if each.best == at) for at in range(len(study.schemes)))
    return BarChart(
        "recipes",
        f"What each {study.scheme_noun} costs, everything taken together",
        "A dot marks the best of a column. Best on tensors: on how many single tensors the SQNR is best.",
        study.schemes,
        (*measures, Bars("best on tensors", "high", wins)),
    )


def _block_chart(at: int, block: WorstBlock, study: Study) -> BlockChart:
    fmt = block.scheme.format
    width = (fmt.element.bits + 3) // 4
    down = len({each.row for each in block.elements}) > 1
    elements = tuple(
        Element(
            f"{each.row},{each.column}" if down else str(each.column), each.value, f"0x{each.code:0{width}x}",
            each.quantized,
        )
        for each in block.elements
    )  # fmt: skip
    sqnr = "no signal" if block.sqnr_db is None else f"SQNR {trimmed(block.sqnr_db)} dB"
    some = "" if len(elements) == block.size else f" The {len(elements)} of {block.size:,} elements with most error."
    batch = f"index {block.index}, " if block.index else ""
    return BlockChart(
        f"worst_block_{at}",
        f"{study.schemes[block.under]}: {printable(block.tensor)}" if study.compares else printable(block.tensor),
        f"{batch}row {block.row:,}, columns from {block.column:,}: {sqnr}, {trimmed(block.noise_percent)} % of the "
        f"tensor's noise; scale {_scale(block.scale)}, amax {significant(block.amax)}, {block.saturated} saturated, "
        f"{block.underflowed} underflowed.{some}",
        "row,column" if down else "element",
        fmt.element.max * block.scale,
        elements,
    )


def _scale(value: float) -> str:
    return power_of_two(value) if value > 0 else significant(value)
