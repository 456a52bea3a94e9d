"""The page in a real browser, from disk and without a network."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMEDRIVER, CHROMIUM, Browser, chromium
from product_reports import training_report
from studies import HOSTILE, PROVENANCE, study

from mxcli.output.html import html_page
from mxcli.output.study import ProductStudy, Study, study_of_training

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver (apt-get install chromium chromium-driver)"
)

NAMES = "return [...document.querySelectorAll('#table tbody th')].map((cell) => cell.textContent)"
CELLS = """
const heads = [...document.querySelectorAll('#table thead [data-column]')];
const at = heads.findIndex((th) => th.dataset.column === arguments[0]);
return [...document.querySelectorAll('#table tbody tr')].map((row) => row.children[at].textContent)"""
TYPE = """
const field = document.getElementById(arguments[0]);
field.value = arguments[1];
field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input'))"""
CLICK = "document.querySelector(arguments[0]).click()"
FOUND = "return document.getElementById('found').textContent"


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def window(downloads: Path) -> Iterator[Browser]:
    with chromium(downloads) as browser:
        yield browser


def opened(browser: Browser, folder: Path, shown: Study | ProductStudy) -> Browser:
    page = folder / "page.html"
    page.write_text(html_page(shown, PROVENANCE), encoding="utf-8")
    browser.open(page)
    return browser


def column(browser: Browser, key: str) -> str:
    """The index of the column with a key, as its heading has it."""
    columns = "return JSON.parse(document.getElementById('data').textContent).columns.map((column) => column.key)"
    return str(browser.run(columns).index(key))


def order(browser: Browser, at: str) -> Any:
    return browser.run(f"return document.querySelector('[data-column=\"{at}\"]').getAttribute('aria-sort')")


def test_a_page_opens_without_errors_and_requests(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study())
    assert window.log() == []
    assert window.run("return performance.getEntriesByType('resource').length") == 0
    assert window.run("return document.querySelectorAll('svg.chart').length") == 5
    assert window.run(FOUND) == "29 tensors"
    assert len(window.run(NAMES)) == 29
    assert not window.run("return document.querySelector('.controls').hidden")


def test_the_table_is_sorted_worst_first_and_by_any_heading(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study())
    sqnr, saturated, name = (column(window, key) for key in ("sqnr_db", "saturated_percent", "name"))
    numbers = [float(text) for text in window.run(CELLS, sqnr) if text != "\N{EN DASH}"]
    assert numbers == sorted(numbers)
    assert window.run(CELLS, sqnr)[-1] == "\N{EN DASH}", "the tensor that was kept comes last"
    assert order(window, sqnr) == "ascending"

    window.click(f'[data-column="{sqnr}"] button')
    assert order(window, sqnr) == "descending"
    assert [float(text) for text in window.run(CELLS, sqnr)[:-1]] == sorted(numbers, reverse=True)
    assert window.run(CELLS, sqnr)[-1] == "\N{EN DASH}"

    window.click(f'[data-column="{saturated}"] button')
    shares = [float(text) for text in window.run(CELLS, saturated)[:-1]]
    assert shares == sorted(shares, reverse=True), "the most saturated first: the worst"
    assert (order(window, saturated), order(window, sqnr)) == ("descending", None)

    window.click(f'[data-column="{name}"] button')
    names = window.run(NAMES)
    assert names[:2] == ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight"]
    assert len(names) == 29


def test_numbers_in_names_sort_as_numbers(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study(11))
    window.run(TYPE, "search", "q_proj")
    window.click(f'[data-column="{column(window, "name")}"] button')
    assert [name.split(".")[2] for name in window.run(NAMES)] == [str(layer) for layer in range(11)]


def test_search_and_filters(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study())
    window.run(TYPE, "search", "Down_Proj 2.")
    assert window.run(NAMES) == ["model.layers.2.mlp.down_proj.weight"]
    assert window.run(FOUND) == "1 of 29 tensors"
    window.run(TYPE, "search", "nothing has this")
    assert window.run(NAMES) == []
    assert window.run("return document.getElementById('page').textContent") == "none"
    window.run(TYPE, "search", "")
    window.run(TYPE, "role", "norm")
    assert window.run(NAMES) == ["model.norm.weight"]
    window.run(TYPE, "decision", "quantized")
    assert window.run(NAMES) == []
    window.run(TYPE, "role", "")
    assert len(window.run(NAMES)) == 28


def test_light_and_dark(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study())
    background = "return getComputedStyle(document.body).backgroundColor"
    first = window.run(background)
    words = window.run("return document.getElementById('theme').textContent")
    window.click("#theme")
    assert window.run(background) != first
    assert window.run("return document.getElementById('theme').textContent") != words
    window.click("#theme")
    assert window.run(background) == first


def test_hostile_names_are_text(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study(1, names=HOSTILE))
    assert not window.has_dialog()
    assert window.log() == []
    count = window.run("return ['img', 'script', 'b'].map((tag) => document.querySelectorAll(tag).length)")
    assert count == [0, 2, 5], "data and script, and the numbers of the summary"
    assert window.run("return document.querySelectorAll('[onload], [onerror]').length") == 0
    shown = set(window.run(NAMES))
    assert {"</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>.weight"} <= shown
    assert "\\u{202e}gnirts.thgiew\\u{202c}" in shown, "characters that change the direction of text are escaped"
    assert "nul\\u{0}tab\\u{9}line\\u{a}end" in shown
    assert "x" * 100 + "…" + "x" * 100 in shown
    known = window.run("return [...document.querySelectorAll('#table tbody th')].map((cell) => cell.title)")
    assert "x" * 4096 in known
    window.run(TYPE, "search", "onerror")
    assert window.run(NAMES) == ["<img src=x onerror=alert(2)>.weight"]


def test_data_is_downloaded_as_csv(window: Browser, tmp_path: Path, downloads: Path) -> None:
    shown = study(2, names=HOSTILE)
    opened(window, tmp_path, shown)
    window.click("[data-chart=scale_exponents]")
    header, *rows = csv.reader(io.StringIO(window_text := window.downloaded("scale_exponents.csv")))
    assert header == ["series", "exponent of the scale", "blocks", "% of blocks"]
    assert sum(int(row[2]) for row in rows) == 4096, window_text

    window.click("#table-csv")
    table = list(csv.DictReader(io.StringIO(window.downloaded("tensors.csv"), newline="")))
    assert {row["name"] for row in table} == {tensor.name for tensor in (*shown.measured, *shown.kept)}
    worst = min(shown.measured, key=lambda tensor: float(str(tensor.metrics[0]["sqnr_db"])))
    assert table[0]["name"] == worst.name
    assert float(table[0]["sqnr_db"]) == pytest.approx(float(str(worst.metrics[0]["sqnr_db"])), rel=1e-3)
    assert table[-1]["sqnr_db"] == ""


def test_several_recipes_stand_side_by_side(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study(2, recipes=("floor", "rceil", "<even>")))
    assert window.log() == []
    groups = window.run("return [...document.querySelectorAll('th.group')].map((th) => [th.textContent, th.colSpan])")
    assert groups == [["floor", 3], ["rceil", 3], ["<even>", 3]]
    second = column(window, "sqnr_db rceil")
    window.click(f'[data-column="{second}"] button')
    numbers = [float(text) for text in window.run(CELLS, second)[:-1]]
    assert numbers == sorted(numbers)


def test_pages_of_the_table_and_print(window: Browser, tmp_path: Path) -> None:
    opened(window, tmp_path, study(30))
    page = "return document.getElementById('page').textContent"
    assert window.run(page) == "1\N{EN DASH}50 of 211"
    window.click("#next")
    assert window.run(page) == "51\N{EN DASH}100 of 211"
    window.click("#last")
    assert window.run(page) == "201\N{EN DASH}211 of 211"
    assert window.run("return document.getElementById('next').disabled")
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert len(window.run(NAMES)) == 211, "all rows are printed"
    window.run("dispatchEvent(new Event('afterprint'))")
    assert len(window.run(NAMES)) == 11


@pytest.mark.slow
def test_fifty_thousand_tensors_open_quickly(window: Browser, tmp_path: Path) -> None:
    names = [f"model.layers.{at // 896}.mlp.experts.{at // 7 % 128}.{at % 7}.weight" for at in range(50_000)]
    opened(window, tmp_path, study(0, names=names))
    milliseconds = window.run("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < milliseconds < 5000, "2000 on an idle machine"
    assert window.run(FOUND) == "50,001 tensors"
    started = "const start = performance.now(); "
    taken = window.run(started + TYPE + "; return performance.now() - start", "search", "experts.77. 3.weight")
    assert taken < 1000
    assert window.run(FOUND) == "56 of 50,001 tensors"
    window.run(TYPE, "search", "")
    taken = window.run(
        started + CLICK + "; return performance.now() - start", f'[data-column="{column(window, "name")}"] button'
    )
    assert taken < 3000
    print(f"opened in {milliseconds:.0f} ms, sorted by name in {taken:.0f} ms")


def test_products_under_training_recipes(window: Browser, tmp_path: Path) -> None:
    report = training_report("mxfp8,nvfp4", "model.layers.[13].mlp.down_proj")
    opened(window, tmp_path, study_of_training(report))
    assert window.log() == []
    assert window.run(FOUND) == "12 products"
    assert window.run("return document.querySelectorAll('svg.chart').length") == 6
    sqnr = column(window, "sqnr_db")
    assert window.run(CELLS, sqnr)[:3] == ["14.4", "19.2", "22.3"], "worst first"
    assert window.run(CELLS, sqnr)[-3:] == ["exact"] * 3, "block 3 stays high under nvfp4"
    assert window.run("return [...document.querySelectorAll('th.group')].map((th) => th.textContent)") == [
        "product", "X", "W", "dY",
    ]  # fmt: skip
    window.run(TYPE, "recipe", "nvfp4")
    window.run(TYPE, "pass", "wgrad")
    assert window.run(FOUND) == "2 of 12 products"
    assert window.run(NAMES) == ["model.layers.1.mlp.down_proj", "model.layers.3.mlp.down_proj"]
    fill = "return getComputedStyle(document.querySelector('#plot-product_sqnr rect.sqnr')).fill"
    light = window.run(fill)
    window.click("#theme")
    assert {light, window.run(fill)} == {"rgb(11, 98, 164)", "rgb(109, 179, 242)"}
