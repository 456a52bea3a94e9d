"""The page as text: what it holds, that nothing gets out of its place in it, and how large it becomes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from studies import HOSTILE, PROVENANCE, metrics, study, tensor

from mxcli.output.html import embedded, html_page, page_data, rounded
from mxcli.output.page import page_of
from mxcli.output.study import PageSource, Study
from mxcli.output.study_charts import study_charts

VOID = {"meta", "input", "wbr", "br", "link", "img"}


class Page(HTMLParser):
    """Elements of a page, checked to be closed in order, with the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.raw: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            self.raw.append((self._open[-1], data))
        else:
            self.words.append(data)


def page(shown: Study, provenance: PageSource = PROVENANCE) -> str:
    return html_page(shown, provenance)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def names_in(data: dict[str, Any]) -> list[str]:
    """The names as the page's script puts them together: it counts UTF-16 units."""
    names, before = [], b""
    for shared, rest in zip(data["data"][0]["shared"], data["data"][0]["rest"], strict=True):
        before = before[: 2 * shared] + rest.encode("utf-16-le", "surrogatepass")
        names.append(before.decode("utf-16-le", "surrogatepass"))
    return names


def test_names_and_numbers_survive_the_page() -> None:
    shown = study(2, names=[*HOSTILE, "\U0001f600\U0001f601", "\U0001f600\U0001f602"])
    data = data_of(page(shown))
    tensors = (*shown.measured, *shown.kept)
    assert data["rows"] == len(tensors)
    assert names_in(data) == [each.name for each in tensors]
    keys = [column["key"] for column in data["columns"]]
    sqnr = data["data"][keys.index("sqnr_db")]
    assert sqnr[:-1] == pytest.approx([each.metrics[0]["sqnr_db"] for each in shown.measured], rel=5e-4)
    assert sqnr[-1] is None, "kept"
    words = data["data"][keys.index("reason")]
    assert [words["words"][at] for at in words["index"]] == [each.reason for each in tensors]
    least = [each["p0"] for each in (t.metrics[0]["block_sqnr_db"] for t in shown.measured) if isinstance(each, dict)]
    assert data["data"][keys.index("block_sqnr_db")][:-1] == pytest.approx(least, rel=5e-4)


def test_every_chart_has_its_data() -> None:
    shown = study(3)
    charts = study_charts(shown)
    data = data_of(page(shown))["charts"]
    assert list(data) == [chart.key for chart in charts]
    for chart in charts:
        columns, rows = chart.table
        found = data[chart.key]
        assert found["columns"] == list(columns)
        assert len(found["cells"]) == len(rows) * len(columns)
    assert f'data-chart="{charts[0].key}"' in page(shown)


def test_hostile_names_end_nothing() -> None:
    shown = replace(study(1, names=HOSTILE), source=HOSTILE[0], notes=(HOSTILE[1],), findings=(HOSTILE[2],))
    shown = replace(shown, groups=dict.fromkeys(HOSTILE, shown.sums))
    text = page(shown, PageSource(("report", HOSTILE[0]), "0.1.0", {HOSTILE[1]: {"bytes": 1, "fingerprint": "00"}}))
    parsed = Page(text)
    assert parsed.tags.count("script") == 2
    assert not {"img", "link", "iframe", "object"} & set(parsed.tags)
    assert not [entry for entry in parsed.attributes if entry[1].startswith("on")]
    assert "\u202e" not in text, "nothing changes the direction of text"
    assert "\x00" not in text
    assert HOSTILE[1] in parsed.words


def test_nothing_comes_from_elsewhere() -> None:
    parsed = Page(page(study()))
    policy = next(value for tag, name, value in parsed.attributes if tag == "meta" and value.startswith("default-src"))
    assert policy.startswith("default-src 'none'; ")
    for kind, text in parsed.raw:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert text.startswith("{") or f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    links = [value for _, name, value in parsed.attributes if name in ("src", "href", "action", "srcset")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert "url(" not in page(study())
    assert "@import" not in page(study())
    # The policy allows no inline style.
    assert not [entry for entry in parsed.attributes if entry[1] == "style"]


def test_the_page_is_for_screen_readers_too() -> None:
    parsed = Page(page(study()))
    named = {value for _, name, value in parsed.attributes if name == "id"}
    labelled = {value for _, name, value in parsed.attributes if name == "aria-labelledby"}
    assert labelled <= named
    pictures = [name for tag, name, _ in parsed.attributes if tag == "svg" and name == "aria-label"]
    assert len(pictures) == parsed.tags.count("svg")
    assert {value.removeprefix("#") for _, name, value in parsed.attributes if name == "href"} <= named
    assert ("html", "lang", "en") in parsed.attributes


def test_the_same_study_has_the_same_bytes() -> None:
    assert page(study(3)) == page(study(3))


@pytest.mark.parametrize(
    "recipes", [("floor",), pytest.param(("floor", "ceil", "rceil", "even"), marks=pytest.mark.slow)]
)
def test_fifty_thousand_tensors_are_less_than_ten_megabytes(recipes: tuple[str, ...]) -> None:
    names = [f"model.layers.{at // 896}.mlp.experts.{at // 7 % 128}.{at % 7}_proj.weight" for at in range(50_000)]
    text = page(study(0, recipes=recipes, names=names))
    assert len(text.encode()) < 10_000_000
    assert data_of(text)["rows"] == 50_001


def test_what_was_done() -> None:
    shown = replace(study(), unfinished=3, notes=("odd",))
    words = " ".join(Page(page(shown)).words)
    for text in (
        "a model made up", "mxfp4_e2m1: e2m1 elements", "SQNR is 19.5 dB", "Interrupted: 3 tensors not measured.",
        "odd",
        "mxcli report 'made up' --html page.html", "mxcli 0.1.0", "model.safetensors", "ab" * 32,
    ):  # fmt: skip
        assert text in words


def test_pages_of_nothing_and_of_the_exact() -> None:
    nothing = replace(study(1), measured=(), sums=(), groups={}, findings=(), counts={"kept": 1})
    assert "Nothing was measured." in Page(page(nothing)).words
    import random

    exact = {**metrics(random.Random(1)), "mse": 0.0, "rmse": 0.0, "sqnr_db": None, "relative_error": 0.0}
    exact |= {"binades_used": None, "block_sqnr_histogram": {}, "scale_exponent_histogram": {"zero": 4096}}
    one = tensor("w", (exact,))
    text = page(replace(study(1), measured=(one,), sums=(exact,), groups={}))
    data = data_of(text)
    assert data["data"][[column["key"] for column in data["columns"]].index("sqnr_db")] == ["exact", None]
    assert list(data["charts"]) == ["scale_exponents"]
    Page(text)


def test_json_in_a_script_element() -> None:
    assert embedded({"a": "</script>&<!--\u2028"}) == '{"a":"\\u003c/script\\u003e\\u0026\\u003c!--\\u2028"}'
    assert [rounded(x) for x in (1.23456, 12.0, float("nan"), 123456.7, 3, None, "exact", 1e-9)] == [
        1.235, 12, None, 123500, 3, None, "exact", 1e-9,
    ]  # fmt: skip


def test_the_table_of_a_comparison() -> None:
    shown = study(1, recipes=("floor", "rceil"))
    data = page_data(page_of(shown))
    columns = data["columns"]
    assert isinstance(columns, list)
    assert [column["key"] for column in columns] == [
        "name", "role", "shape", "dtype", "best",
        "sqnr_db floor", "saturated_percent floor", "underflowed_percent floor",
        "sqnr_db rceil", "saturated_percent rceil", "underflowed_percent rceil",
        "decision", "reason",
    ]  # fmt: skip
