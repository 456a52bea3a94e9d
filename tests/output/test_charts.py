"""Charts of a study, and how they are drawn."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from studies import HOSTILE, KINDS, metrics, study, tensor

from mxcli.flows.measure.worst_blocks import BlockElement, WorstBlock
from mxcli.numerics.scheme import Rules, resolve
from mxcli.output.axes import fitted, sparse, tick_texts, ticks
from mxcli.output.charts import (
    COLOURS,
    COLUMNS,
    GREY,
    BarChart,
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
from mxcli.output.study import Study
from mxcli.output.study_charts import ROWS, study_charts
from mxcli.output.svg import Scale, draw, pixels

BLOCK = WorstBlock(
    "model.layers.0.<q>.weight", resolve("mxfp4", Rules(scale_rounding="floor")),
    0, 3, 32, 32, 14.0, 1.5, 7.9, 1.0, 1, 1,
    (BlockElement(0, 0, 7.9, 0b0111, 6.0), BlockElement(0, 1, 0.2, 0, 0.0), BlockElement(0, 2, -3.0, 0b1101, -3.0)),
)  # fmt: skip


def charts(shown: Study) -> dict[str, Chart]:
    return {chart.key: chart for chart in study_charts(shown)}


def test_a_report_has_its_charts_in_order() -> None:
    shown = replace(study(), worst_blocks=(BLOCK,))
    assert list(charts(shown)) == [
        "sqnr_by_layer", "saturation_and_underflow", "block_sqnr", "scale_exponents", "binades_used", "worst_block_1",
    ]  # fmt: skip
    assert next(iter(charts(study(recipes=("floor", "ceil"))))) == "recipes"


def test_error_along_the_layers_is_the_lowest_of_a_kind() -> None:
    shown = study(3)
    chart = charts(shown)["sqnr_by_layer"]
    assert isinstance(chart, LineChart)
    assert [line.name for line in chart.lines] == list(KINDS)
    layer = {each.name: each.metrics[0]["sqnr_db"] for each in shown.measured}
    assert chart.lines[0].points[2] == (2, layer["model.layers.2.self_attn.q_proj.weight"])
    experts = study(0, names=[f"layers.4.experts.{at}.w1.weight" for at in range(5)])
    chart = charts(experts)["sqnr_by_layer"]
    assert isinstance(chart, LineChart)
    least = min(float(str(each.metrics[0]["sqnr_db"])) for each in experts.measured)
    assert chart.lines == (Line("experts.*.w1", ((4, least),)),)


def test_captures_of_ranks_are_lines_of_one_kind() -> None:
    """The file that a tensor is in, which its name begins with where several hold it, is not a stack of layers."""
    modules = [f"model.layers.{at}.fc" for at in (0, 1)]
    shown = study(0, names=[f"rank-{rank}-iter-7/{module}.weight" for rank in (0, 1) for module in modules])
    measured = tuple(replace(one, layer=module) for one, module in zip(shown.measured, modules * 2, strict=True))
    chart = charts(replace(shown, measured=measured))["sqnr_by_layer"]
    assert isinstance(chart, LineChart)
    least = [min(float(str(measured[at + 2 * rank].metrics[0]["sqnr_db"])) for rank in (0, 1)) for at in (0, 1)]
    assert chart.lines == (Line("fc", ((0, least[0]), (1, least[1]))),)


def test_the_lowest_of_many_kinds_have_colours() -> None:
    shown = study(0, names=[f"layers.{layer}.kind_{at}.weight" for layer in range(2) for at in range(COLOURS + 90)])
    found = charts(shown)
    lines, heat = found["sqnr_by_layer"], found["saturation_and_underflow"]
    assert isinstance(lines, LineChart)
    assert isinstance(heat, HeatMap)
    assert (len(lines.lines), len(lines.others)) == (COLOURS, GREY)
    assert f"grey: {GREY} of 90 others" in lines.caption
    assert len(heat.rows) == ROWS
    assert heat.rows[-1] == "all others"
    ranges = found["binades_used"]
    assert isinstance(ranges, RangeChart)
    assert len(ranges.rows) == ROWS


def test_stacks_of_layers_have_kinds_of_their_own() -> None:
    shown = study(0, names=["vision.blocks.0.fc.weight", "text.layers.0.fc.weight", "head.weight", "net.0.weight"])
    chart = charts(shown)["sqnr_by_layer"]
    assert isinstance(chart, LineChart)
    assert [line.name for line in chart.lines] == ["vision.blocks.*.fc", "text.layers.*.fc", "net.*"]
    assert "1 tensor outside layers not shown." in chart.caption


def test_shares_are_of_all_elements_together() -> None:
    import random

    big, small = (metrics(random.Random(1)) for _ in range(2))
    big |= {"elements": 900, "saturated": 9}
    small |= {"elements": 100, "saturated": 100}
    shown = replace(study(1), measured=(tensor("layers.0.e.0.w", (big,)), tensor("layers.0.e.1.w", (small,))))
    chart = charts(shown)["saturation_and_underflow"]
    assert isinstance(chart, HeatMap)
    assert chart.panels[0].values == ((pytest.approx(10.9),),)


def test_too_many_layers_are_taken_together() -> None:
    chart = charts(study(0, names=[f"layers.{at}.w.weight" for at in range(2 * COLUMNS + 1)]))
    heat, lines = chart["saturation_and_underflow"], chart["sqnr_by_layer"]
    assert isinstance(heat, HeatMap)
    assert isinstance(lines, LineChart)
    assert (heat.columns[0], heat.columns[-1], len(heat.columns)) == ("0-2", "798-800", 267)
    assert len(lines.lines[0].points) == 267


def test_histograms_keep_words_first_or_last() -> None:
    shown = study()
    total = {**shown.sums[0], "scale_exponent_histogram": {"zero": 1, "-3": 2, "1": 1}}
    total["block_sqnr_histogram"] = {"10": 1, "12": 2, "exact": 1}
    found = charts(replace(shown, sums=(total,), groups={}))
    scales, blocks = found["scale_exponents"], found["block_sqnr"]
    assert isinstance(scales, Histogram)
    assert isinstance(blocks, Histogram)
    assert scales.bins == ("zero", "-3", "-2", "-1", "0", "1")
    assert scales.series[0].shares == (25.0, 50.0, 0.0, 0.0, 0.0, 25.0)
    assert blocks.bins == ("10", "11", "12", "exact")


def test_a_block_is_shown_with_its_codes() -> None:
    chart = charts(replace(study(), worst_blocks=(BLOCK,)))["worst_block_1"]
    assert isinstance(chart, BlockChart)
    assert chart.table == (
        ("element", "value", "code", "quantized", "error"),
        [("0", 7.9, "0x7", 6.0, 6.0 - 7.9), ("1", 0.2, "0x0", 0.0, -0.2), ("2", -3.0, "0xd", -3.0, 0.0)],
    )
    assert "1 saturated, 1 underflowed" in chart.caption
    assert "The 3 of 32 elements with most error." in chart.caption
    assert chart.limit == 6.0


ALL: tuple[Chart, ...] = (
    LineChart("a", "<t>", "&", "layer", "y", (Line("<l>", ((0, 1.0), (1, None), (2, 3.0))),), (Line("", ((0, 2.0),)),)),
    LineChart("a", "one point", "", "layer", "dB", (Line("l", ((7, 20.0),)),)),
    HeatMap("b", "t", "c", "layer", ("0", "1"), ("<r>",), (Panel("saturated", "%", ((1.0, None),)),) * 2),
    HeatMap("b", "none", "c", "x", tuple(map(str, range(300))), ("r",), (Panel("saturated", "%", ((0.0,) * 300,)),)),
    Histogram("c", "t", "c", "x", "blocks", ("zero", "-1", "0"), (Series("<s>", (1, 0, 3)),), (Mark("m", 1.5),)),
    Histogram("c", "several", "c", "x", "blocks", ("1", "exact"), (Series("a", (0, 0)), Series("b", (1, 2)))),
    RangeChart("d", "t", "c", "binades", (Range("<r>", 1.0, 2.0, 3.0, 4.0),)),
    BlockChart("f", "t", "c", "element", 6.0, (Element("0", math.nan, "0x1", math.inf), Element("1", 1.0, "0x2", 1.0))),
)  # fmt: skip


@pytest.mark.parametrize("chart", ALL, ids=lambda chart: f"{type(chart).__name__}-{chart.title}")
def test_pictures_are_well_formed_and_have_numbers_only(chart: Chart) -> None:
    text = draw(chart)
    ElementTree.fromstring(text)
    assert not re.findall(r'\b[a-z0-9]+="[^"]*\b(?:nan|inf)\b', text.replace("aria-label", "").split("<title>")[0])
    assert "<r>" not in text


@pytest.mark.parametrize("shown", [study(2, names=HOSTILE), study(1, recipes=("<a>", "b&c")), study(300)])
def test_studies_are_drawn(shown: Study) -> None:
    for chart in study_charts(shown):
        ElementTree.fromstring(draw(chart))


def test_the_best_of_a_measure_is_marked() -> None:
    chart = charts(study(2, recipes=("floor", "ceil")))["recipes"]
    assert isinstance(chart, BarChart)
    wins = chart.measures[-1]
    assert sum(value for value in wins.values if value) == 14
    bits = next(bars for bars in chart.measures if bars.label == "bits per element")
    assert bits.best == frozenset(), "equal"


def test_scales_ticks_and_labels() -> None:
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(3, 3, 100, 200)(3) == 100
    assert ticks(18.4, 19.1) == pytest.approx([18.4, 18.6, 18.8, 19.0])
    assert ticks(0, 3, 20, whole=True) == [0, 1, 2, 3]
    assert tick_texts([18.5, 19.0, 19.5]) == ["18.5", "19.0", "19.5"]
    assert tick_texts([-1.0, 0.0, 1000.0]) == ["\N{MINUS SIGN}1", "0", "1,000"]
    assert tick_texts([0.0, 2e-9]) == ["0", "2e-09"]
    assert pixels(1.04) == "1"
    assert sparse([str(at) for at in range(300)], 3.0) == 20
    assert len(fitted("model.layers.0.self_attn.q_proj", 100)) <= 100 / 6.9
