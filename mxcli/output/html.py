"""Page of a study: a single HTML file without network, fonts or scripts from elsewhere.

The page's policy forbids everything that is not in the file. Text of the source is escaped here, or is data that the
page's script shows as text. The data is stored once and compactly: names share their beginnings with the name before,
words are numbered, numbers have four significant digits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import chain

from mxcli.errors import printable
from mxcli.output.axes import DARK, LIGHT, SERIES_LIGHT
from mxcli.output.charts import BlockChart, Chart
from mxcli.output.numbers import counted
from mxcli.output.page import SHAPE, TEXT, WORD, Column, Page, Table, Tile, Totals, page_of
from mxcli.output.study import PageSource, ProductStudy, Study
from mxcli.output.svg import draw, is_wide


def html_page(study: Study | ProductStudy, origin: PageSource) -> str:
    """Return the page; the same study gives the same bytes."""
    page = page_of(study)
    blocks = [chart for chart in page.charts if isinstance(chart, BlockChart)]
    plots = [chart for chart in page.charts if not isinstance(chart, BlockChart)]
    sections = {
        "summary": ("Summary", _summary(page)),
        "plots": ("Plots", _figures(plots)),
        "worst": ("Worst blocks", _worst_blocks(page.worst, blocks)),
        "totals": ("Totals", _totals(page.totals)),
        f"{page.table.noun}s": (page.table.heading, _table(page.table)),
    }
    shown = {key: section for key, section in sections.items() if section[1]}
    style, script = _style(), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta name="generator" content="mxcli {escape(origin.version)}">',
            f"<title>{escape(f'{page.title}: {printable(page.source)}')}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            f'<a class="skip" href="#{page.table.noun}s">Skip to the table of {page.table.noun}s</a>',
            _header(page, {key: heading for key, (heading, _) in shown.items()}),
            "<main>",
            *(_section(key, heading, content) for key, (heading, content) in shown.items()),
            "</main>",
            _footer(origin),
            f'<script type="application/json" id="data">{embedded(page_data(page))}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
        ]
    )


def _asset(name: str) -> str:
    return files("mxcli.output").joinpath("html_assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _style() -> str:
    """Return the style sheet: colours of both themes as custom properties, a class for each series, and page.css."""
    light, dark = ("".join(f"--{name}:{colour};" for name, colour in theme.items()) for theme in (LIGHT, DARK))
    series = "".join(f".s{at}{{--c:var(--series-{at})}}" for at in range(len(SERIES_LIGHT)))
    return (
        f":root{{{light}}}@media screen and (prefers-color-scheme:dark)"
        f"{{:root:not([data-theme=light]){{{dark}}}}}@media screen{{:root[data-theme=dark]{{{dark}}}}}"
        f"{series}\n{_asset('page.css')}"
    )


def _header(page: Page, headings: Mapping[str, str]) -> str:
    links = "".join(f'<a href="#{key}">{escape(heading)}</a>' for key, heading in headings.items())
    return (
        f'<header><div class="bar"><p class="kind">{escape(page.title)}</p><nav aria-label="Sections">{links}'
        f'</nav><button type="button" id="theme" hidden>Dark mode</button></div>'
        f'<h1><bdi>{escape(printable(page.source))}</bdi></h1><p class="facts">{escape(page.facts)}</p>'
        f"{''.join(f'<p class=rule>{escape(rule)}</p>' for rule in page.rules)}</header>"
    )


def _section(key: str, heading: str, content: str) -> str:
    return f'<section id="{key}" aria-labelledby="h-{key}"><h2 id="h-{key}">{escape(heading)}</h2>\n{content}</section>'


def _summary(page: Page) -> str:
    found = "".join(f"<li>{escape(sentence)}</li>" for sentence in page.findings)
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
    return (
        _tiles(page.tiles)
        + (f'<ul class="findings">{found}</ul>' if found else "<p>Nothing was measured.</p>")
        + (f'<div class="notes"><h3>To note</h3><ul>{notes}</ul></div>' if notes else "")
    )


def _tiles(tiles: Iterable[Tile]) -> str:
    shown = "".join(
        f"<div><dt>{escape(tile.name)}</dt><dd><b>{escape(tile.value)}</b> {escape(tile.unit)}"
        f"<span>{escape(tile.more)}</span></dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


def _figures(charts: Iterable[Chart]) -> str:
    drawn = "".join(map(_figure, charts))
    return f'<div class="figures">{drawn}</div>' if drawn else ""


def _figure(chart: Chart, more: str = "") -> str:
    kind, title = "wide" if is_wide(chart) else "half", escape(chart.title)
    return (
        f'<figure class="{kind}" id="plot-{chart.key}"><figcaption><h3><bdi>{title}</bdi></h3>'
        f'<button type="button" class="csv" data-chart="{chart.key}" aria-label="Data of {title} as CSV" hidden>CSV'
        f'</button><p>{escape(chart.caption)}</p></figcaption><div class="plot" tabindex="0">{draw(chart)}</div>{more}'
        "</figure>\n"
    )


def _worst_blocks(lead: str, blocks: Sequence[BlockChart]) -> str:
    if not blocks:
        return ""
    drawn = "".join(_figure(block, _elements(block)) for block in blocks)
    return f'<p class=lead>{escape(lead)}</p><div class="figures">{drawn}</div>'


def _elements(block: BlockChart) -> str:
    """Return the values of a block as a table."""
    rows = "".join(
        f"<tr><th scope=row>{each.place}</th><td>{each.value:.6g}</td><td>{each.code}</td><td>{each.quantized:.6g}</td>"
        f"<td>{each.quantized - each.value:.3g}</td></tr>"
        for each in block.elements
    )
    return (
        "<details><summary>Values and codes</summary><table class=values><thead><tr>"
        f"<th scope=col>{escape(block.x)}</th><th scope=col>value</th><th scope=col>code</th>"
        f"<th scope=col>quantized</th><th scope=col>error</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


def _totals(totals: Totals | None) -> str:
    if totals is None:
        return ""
    heads = "".join(f"<th scope=col>{escape(name)}<small>{escape(unit)}</small></th>" for name, unit in totals.columns)
    named = f'<th scope=col class="left">{escape(totals.rows)}</th>' if totals.rows else ""
    kind = "totals first" if totals.first_is_all else "totals"
    bodies = []
    for group, rows in totals.bodies.items():
        lines = []
        for at, (name, cells) in enumerate(rows):
            span = f" rowspan={len(rows)}" if len(rows) > 1 else ""
            head = f"<th scope=rowgroup{span}><bdi>{escape(group)}</bdi></th>" if at == 0 else ""
            row = f"<th scope=row>{escape(name)}</th>" if totals.rows else ""
            lines.append(f"<tr>{head}{row}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Totals"><table class="{kind}"><thead><tr>'
        f"<th scope=col>{escape(totals.groups)}</th>{named}{heads}</tr></thead>{''.join(bodies)}</table></div>"
    )


def _table(table: Table) -> str:
    """Return the frame of the table: the page's script fills it."""
    selects = "".join(
        f'<label>{key.capitalize()} <select id="{key}"><option value="">all</option>{_options(words)}</select></label>'
        for key, words in table.filters.items()
    )
    noun = table.noun
    return (
        '<form class="controls" role="search" hidden>'
        f'<label>{table.searched} <input type="search" id="search" placeholder="words it contains" autocomplete="off" '
        f'spellcheck="false"></label>{selects}<output id="found" aria-live="polite"></output>'
        '<button type="button" class="csv" id="table-csv">CSV of these rows</button></form>'
        f'<div class="scroll" id="scroll" tabindex="0" role="region" aria-label="Table of {noun}s"><table id="table">'
        f'<caption class="unseen">{table.heading} with what was measured and decided; headings sort.</caption>'
        "<thead></thead><tbody></tbody></table></div>"
        '<nav class="pager" aria-label="Pages of the table" hidden><button type="button" id="first">First</button>'
        '<button type="button" id="previous">Previous</button><span id="page"></span>'
        '<button type="button" id="next">Next</button><button type="button" id="last">Last</button>'
        '<label>Rows <select id="size"><option>50</option><option>200</option><option>1000</option></select></label>'
        f"</nav><noscript><p>The table of {noun}s, its search and the CSV need JavaScript.</p></noscript>"
    )


def _options(words: Iterable[str]) -> str:
    return "".join(f"<option>{escape(word)}</option>" for word in words)


def _footer(origin: PageSource) -> str:
    command = shlex.join(["mxcli", *map(printable, origin.command)])
    inputs = "".join(
        f"<tr><th scope=row><bdi>{escape(printable(name))}</bdi></th>{_identity(found)}</tr>"
        for name, found in origin.inputs.items()
    )
    return (
        f"<footer><dl><dt>Command</dt><dd><code>{escape(command)}</code></dd><dt>Version</dt><dd>mxcli "
        f"{escape(origin.version)}</dd></dl><details><summary>Input: {counted(len(origin.inputs), 'file')}"
        "</summary><table class=values><thead><tr><th scope=col>file</th><th scope=col>bytes</th>"
        "<th scope=col>fingerprint: SHA-256 of its header, or of its first and last 64 KiB</th></tr></thead>"
        f"<tbody>{inputs}</tbody></table></details></footer>"
    )


def _identity(found: object) -> str:
    known = found if isinstance(found, Mapping) else {}
    return f"<td>{known.get('bytes', 0):,}</td><td><code>{escape(str(known.get('fingerprint', '')))}</code></td>"


def page_data(page: Page) -> dict[str, object]:
    """Return the data for the page's script: `columns`, the values of each under `data`, and `charts` by key."""
    table, rows = page.table, page.table.rows
    return {
        "noun": table.noun,
        "rows": len(rows),
        "filters": list(table.filters),
        "columns": [
            {
                "key": column.key,
                "kind": column.kind,
                "label": column.label,
                "group": column.group,
                "unit": column.unit,
                "meaning": column.meaning,
                "better": column.better,
            }
            for column in table.columns
        ],
        "data": [_encoded(column, rows) for column in table.columns],
        "charts": {chart.key: _chart_data(chart) for chart in page.charts},
    }


def embedded(data: object) -> str:
    """Return JSON for a `script` element: ASCII only, without a `<` that could end it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _encoded(column: Column, rows: Sequence[object]) -> object:
    values = [column.of(row) for row in rows]
    if column.kind == TEXT:
        return _shared_beginnings([str(value) for value in values])
    if column.kind in (WORD, SHAPE):
        words = list(dict.fromkeys(str(value) for value in values))
        place = {word: at for at, word in enumerate(words)}
        return {"words": words, "index": [place[str(value)] for value in values]}
    return [rounded(value) for value in values]


def _shared_beginnings(texts: Iterable[str]) -> dict[str, list[object]]:
    """Return for each text the length of the prefix it shares with the one before (in UTF-16 units, as scripts count),
    and its rest."""
    shared, rest, before = list[object](), list[object](), ""
    for text in texts:
        pairs = enumerate(zip(before, text, strict=False))
        common = next((at for at, (a, b) in pairs if a != b), min(len(before), len(text)))
        shared.append(common + sum(1 for character in text[:common] if character > "\uffff"))
        rest.append(text[common:])
        before = text
    return {"shared": shared, "rest": rest}


def rounded(value: object, digits: int = 4) -> object:
    """Return a float with that many significant digits, as an integer where it is whole; None if it is not finite.
    Other values are returned unchanged."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _chart_data(chart: Chart) -> dict[str, object]:
    columns, rows = chart.table
    return {"columns": list(columns), "cells": [rounded(cell, 7) for cell in chain.from_iterable(rows)]}
