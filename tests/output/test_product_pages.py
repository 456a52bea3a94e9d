"""Pages and plots of products: `training` and `products`."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from product_reports import CAPTURES, at_steps, product_report, training_report
from studies import PROVENANCE
from test_html import Page

from mxcli.flows.products.training import TrainingReport
from mxcli.output.charts import COLUMNS, BarChart, Chart, HeatMap, LineChart
from mxcli.output.html import html_page
from mxcli.output.page import Tile, page_of
from mxcli.output.plots import write_plots
from mxcli.output.study import Product, ProductStudy, study_of_products, study_of_training
from mxcli.output.study_charts import study_charts
from mxcli.output.svg import draw

LAYERS = ["1.mlp.down_proj", "1.mlp.gate_proj", "1.mlp.up_proj", "3.mlp.down_proj", "3.mlp.gate_proj", "3.mlp.up_proj"]


@pytest.fixture(scope="module")
def report() -> TrainingReport:
    """Two recipes; block 3 stays high under nvfp4."""
    return training_report("mxfp8,nvfp4", "model.layers.[13].mlp.*", draws=2)


@pytest.fixture(scope="module")
def study(report: TrainingReport) -> ProductStudy:
    return study_of_training(report)


@pytest.fixture(scope="module")
def products() -> ProductStudy:
    return study_of_products(product_report("nvfp4", "model.layers.1.mlp.*"))


def charts(shown: ProductStudy) -> dict[str, Chart]:
    return {chart.key: chart for chart in study_charts(shown)}


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def rounded(values: tuple[float | None, ...]) -> list[float | None]:
    return [None if value is None else round(value, 1) for value in values]


def test_the_head_of_training(study: ProductStudy) -> None:
    page = page_of(study)
    assert page.title == "Products under training recipes"
    assert page.facts == f"36 products of 6 layers, 6 captures of {CAPTURES}"
    assert [rule.partition(":")[0] for rule in page.rules] == ["mxfp8", "nvfp4"]
    assert page.rules[0].endswith("so that nothing saturates; no block stays high. Recipes for Pre-training LLMs with "
                                  "MXFP8, section 3.")  # fmt: skip
    assert page.findings == (
        "Y = X W^T (fprop): SQNR is highest under mxfp8 (33.6 dB) and lowest under nvfp4 (29.0 dB); the lowest of a "
        "layer is 20.8 dB at model.layers.1.mlp.up_proj under nvfp4.",
        "dX = dY W (dgrad): SQNR is highest under mxfp8 (32.7 dB) and lowest under nvfp4 (22.9 dB); the lowest of a "
        "layer is 18.5 dB at model.layers.1.mlp.gate_proj under nvfp4.",
        "dW = dY^T X (wgrad): SQNR is highest under mxfp8 (28.4 dB) and lowest under nvfp4 (22.8 dB); the lowest of a "
        "layer is 14.4 dB at model.layers.1.mlp.down_proj under nvfp4.",
    )
    assert len(page.notes) == 2


def test_totals_of_training_by_recipe_and_pass(study: ProductStudy) -> None:
    totals = page_of(study).totals
    assert totals is not None
    assert [" ".join(column).rstrip() for column in totals.columns] == [
        "SQNR dB", "averaged SQNR dB", "quantized SQNR dB", "relative error", "bias", "shrunk %",
        "X saturated %", "X underflowed %", "W saturated %", "W underflowed %", "dY saturated %", "dY underflowed %",
    ]  # fmt: skip
    assert totals.bodies["mxfp8"][2] == (
        "wgrad, dW = dY^T X",
        ["28.4", "28.4", "28.4", "0.0379", "\N{MINUS SIGN}9.19e-08", "0.326", "0", "0.00366", "-", "-", "0", "0.110"],
    )
    assert totals.bodies["nvfp4"][1] == (
        "dgrad, dX = dY W",
        ["22.9", "24.6", "19.1", "0.0713", "1.80e-08", "0.230", "-", "-", "0.230", "11.6", "3.23", "26.5"],
    )


def test_one_draw_without_high_blocks_has_no_column_for_either() -> None:
    totals = page_of(study_of_training(training_report("mxfp8", "model.layers.1.mlp.down_proj"))).totals
    assert totals is not None
    assert [name for name, _ in totals.columns][:3] == ["SQNR", "relative error", "bias"]


def test_a_heat_map_of_layers_by_recipe_and_pass(study: ProductStudy) -> None:
    chart = charts(study)["product_sqnr"]
    assert isinstance(chart, HeatMap)
    assert chart.title == "SQNR of products, by layer, recipe and pass"
    assert "Blank: exact, as the layer is not quantized." in chart.caption
    assert list(chart.columns) == LAYERS
    assert chart.rows == ("mxfp8 fprop", "mxfp8 dgrad", "mxfp8 wgrad", "nvfp4 fprop", "nvfp4 dgrad", "nvfp4 wgrad")
    panel = chart.panels[0]
    assert rounded(panel.values[0]) == [33.4, 34.2, 33.0, 32.5, 34.1, 33.6]
    assert rounded(panel.values[5]) == [14.4, 15.2, 15.6, None, None, None]
    assert (round(panel.light, 1), round(panel.dark, 1)) == (34.8, 14.4)
    assert panel.level(panel.dark) == 1.0, "the lowest SQNR has the strongest colour"
    assert "nvfp4 wgrad, layer 1.mlp.down_proj: 14.4 dB SQNR" in draw(chart)


def test_lines_along_the_layers(study: ProductStudy, products: ProductStudy) -> None:
    chart = charts(study)["wgrad_sqnr_by_layer"]
    assert isinstance(chart, LineChart)
    assert chart.title == "SQNR along the layers, dW = dY^T X (wgrad), by recipe"
    assert [line.name for line in chart.lines] == ["mxfp8", "nvfp4"]
    assert list(chart.names) == LAYERS
    assert rounded(tuple(y for _, y in chart.lines[1].points)) == [14.4, 15.2, 15.6, None, None, None]
    assert "mxfp8, 3.mlp.up_proj: 28.5 dB" in draw(chart)
    alone = charts(products)["product_sqnr_by_layer"]
    assert isinstance(alone, LineChart)
    assert [line.name for line in alone.lines] == ["fprop, Y = X W^T", "dgrad, dX = dY W", "wgrad, dW = dY^T X"]
    assert rounded(tuple(y for _, y in alone.lines[0].points)) == [23.7, 23.1, 21.7]


def test_losses_of_operands_are_those_of_each_product(study: ProductStudy, products: ProductStudy) -> None:
    chart = charts(study)["operand_losses"]
    assert isinstance(chart, HeatMap)
    assert chart.columns == ("X in fprop", "W in fprop", "dY in dgrad", "W in dgrad", "dY in wgrad", "X in wgrad")
    saturated, underflowed = chart.panels
    assert rounded(saturated.values[1]) == [3.2, 0.2, 3.2, 0.2, 3.6, 3.6]
    assert rounded(underflowed.values[1]) == [19.5, 11.6, 26.5, 11.6, 5.3, 6.1]
    assert "operand_losses" not in charts(products), "not reported"


def test_recipes_side_by_side(study: ProductStudy) -> None:
    chart = charts(study)["recipes"]
    assert isinstance(chart, BarChart)
    assert chart.rows == ("mxfp8", "nvfp4")
    assert [rounded(bars.values) for bars in chart.measures] == [[33.6, 29.0], [32.7, 22.9], [28.4, 22.8]]
    assert [bars.best for bars in chart.measures] == [frozenset({0})] * 3


def test_lines_over_the_steps(report: TrainingReport) -> None:
    shown = study_of_training(at_steps(report, {0: 0.0, 100: 3.0}))
    chart = charts(shown)["fprop_sqnr_by_step"]
    assert isinstance(chart, LineChart)
    assert [(line.name, [(x, round(y or 0.0, 1)) for x, y in line.points]) for line in chart.lines] == [
        ("mxfp8", [(0, 33.6), (100, 30.6)]),
        ("nvfp4", [(0, 29.0), (100, 26.0)]),
    ]
    assert "step" in [column.key for column in page_of(shown).table.columns]
    alone = study_of_training(at_steps(training_report("mxfp8", "model.layers.1.mlp.down_proj"), {0: 0.0, 7: 3.0}))
    assert [key for key in charts(alone) if key.endswith("step")] == ["product_sqnr_by_step"]


def test_many_layers_are_taken_together() -> None:
    layers = [f"model.layers.{at}.fc" for at in range(2 * COLUMNS)]
    line = ("r", "fprop")
    shown = ProductStudy(
        verb="training",
        source="s",
        facts="",
        recipes=("r",),
        rules=(),
        products=(Product(layers[0], "r", "fprop", (1, 1, 1), {"sqnr_db": 20.0}),),
        totals={line: {"sqnr_db": 20.0, "relative_error": 0.1}},
        by_layer={line: {layer: float(at) for at, layer in enumerate(layers)}},
        by_step={},
        findings=(),
        notes=(),
    )
    chart = charts(shown)["product_sqnr"]
    assert isinstance(chart, HeatMap)
    assert (chart.columns[0], len(chart.columns)) == ("0.fc (+1)", COLUMNS)
    assert chart.panels[0].values[0][:2] == (0.0, 2.0), "the lowest of two"
    assert "Of 2 neighbouring layers the lowest." in chart.caption
    ElementTree.fromstring(draw(chart))


def test_the_page_of_training_has_every_product(study: ProductStudy) -> None:
    text = html_page(study, PROVENANCE)
    Page(text)
    data = data_of(text)
    assert (data["noun"], data["rows"], data["filters"]) == ("product", 36, ["recipe", "pass"])
    assert [column["key"] for column in data["columns"]] == [
        "layer", "recipe", "pass", "sizes", "formats", "high", "sqnr_db", "averaged_sqnr_db", "relative_error",
        "cosine", "bias", "shrunk_percent", "x_saturated_percent", "x_underflowed_percent", "w_saturated_percent",
        "w_underflowed_percent", "dy_saturated_percent", "dy_underflowed_percent",
    ]  # fmt: skip
    sqnr = data["data"][6]
    assert sqnr[:6] == [33.43, 32.61, 28.4, 22.26, 19.19, 14.38]
    assert sqnr[-3:] == ["exact"] * 3, "high under nvfp4"
    assert data["data"][5]["words"] == ["no", "yes"]
    assert list(data["charts"]) == [
        "recipes", "product_sqnr", "fprop_sqnr_by_layer", "dgrad_sqnr_by_layer", "wgrad_sqnr_by_layer",
        "operand_losses",
    ]  # fmt: skip
    assert '<a class="skip" href="#products">Skip to the table of products</a>' in text
    assert html_page(study, PROVENANCE) == text


def test_the_page_of_products(products: ProductStudy) -> None:
    page = page_of(products)
    assert page.title == "Products of quantized layers"
    assert page.facts == f"9 products of 3 layers, captured in {CAPTURES}"
    assert page.rules[0] == "X: nvfp4, scale rounding te, element rounding nearest-even, as mxcli"
    assert page.tiles[2] == Tile("dW = dY^T X (wgrad)", "17.3", "dB", "SQNR; relative error 0.137")
    assert page.findings[2] == (
        "dW = dY^T X (wgrad): SQNR is 17.3 dB; the lowest of a layer is 16.7 dB at model.layers.1.mlp.down_proj."
    )
    assert page.totals is not None
    assert page.totals.bodies["nvfp4"][0] == ("fprop, Y = X W^T", ["22.6", "0.0745", "0.997", "0.000962", "0.911"])
    text = html_page(products, PROVENANCE)
    Page(text)
    data = data_of(text)
    assert (data["rows"], data["filters"]) == (9, ["pass"])
    assert list(data["charts"]) == ["product_sqnr", "product_sqnr_by_layer"]


def test_plots_of_products(study: ProductStudy, tmp_path: Path) -> None:
    found = charts(study)
    write_plots([found["product_sqnr"], found["wgrad_sqnr_by_layer"]], tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "product_sqnr.png", "product_sqnr.svg", "wgrad_sqnr_by_layer.png", "wgrad_sqnr_by_layer.svg",
    ]  # fmt: skip
    assert (tmp_path / "product_sqnr.png").read_bytes().startswith(b"\x89PNG")
