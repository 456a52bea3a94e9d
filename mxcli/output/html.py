"""A study as one HTML file that needs nothing else: no network, no font, no script from elsewhere.

The page's policy forbids everything that did not come with it. Text of the source is escaped here, or reaches the page
as data that its script shows as text.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from mxcli.errors import printable
from mxcli.flows.measure.worst_blocks import COMPARED
from mxcli.output.charts import DARK, LIGHT, BlockChart, Chart, variables
from mxcli.output.inspection import dtype_mix
from mxcli.output.numbers import ABSENT, byte_size, counted, noise_cell, number_cell, quantity
from mxcli.output.page_data import embedded, page_data
from mxcli.output.study import Metrics, PageSource, Study
from mxcli.output.study_charts import study_charts
from mxcli.output.svg import signed
from mxcli.output.svg_charts import is_wide, svg

TITLES = {"report": "Quantization report", "compare": "Comparison of quantization recipes"}
SERIES = range(8)


def html_page(study: Study, provenance: PageSource) -> str:
    """The page; the same study has the same bytes."""
    charts = study_charts(study)
    plots = [chart for chart in charts if not isinstance(chart, BlockChart)]
    blocks = [chart for chart in charts if isinstance(chart, BlockChart)]
    style, script = _style(), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    title = f"{TITLES[study.verb]}: {printable(study.source)}"
    sections = {
        "summary": ("Summary", _summary(study)),
        "plots": ("Plots", _figures(plots)),
        "worst": ("Worst blocks", _worst(study, blocks)),
        "totals": ("Totals", _totals(study)),
        "tensors": ("Tensors", _tensors(study)),
    }
    shown = {key: section for key, section in sections.items() if section[1]}
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta name="generator" content="mxcli {escape(provenance.version)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#tensors">Skip to the table of tensors</a>',
            _header(study, {key: heading for key, (heading, _) in shown.items()}),
            "<main>",
            *(_section(key, heading, content) for key, (heading, content) in shown.items()),
            "</main>",
            _footer(provenance),
            f'<script type="application/json" id="data">{embedded(page_data(study, charts))}</script>',
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
    """Colours by theme, one class per series, and the rest."""
    dark = variables(DARK)
    series = "".join(f".s{at}{{--c:var(--series-{at})}}" for at in SERIES)
    return (
        f":root{{{variables(LIGHT)}}}@media screen and (prefers-color-scheme:dark)"
        f"{{:root:not([data-theme=light]){{{dark}}}}}@media screen{{:root[data-theme=dark]{{{dark}}}}}"
        f"{series}\n{_asset('page.css')}"
    )


def _header(study: Study, headings: Mapping[str, str]) -> str:
    links = "".join(f'<a href="#{key}">{escape(heading)}</a>' for key, heading in headings.items())
    facts = (
        f"{quantity(study.total.elements)} elements in {counted(study.total.tensors, 'tensor')}, "
        f"{byte_size(study.total.bytes)}, {dtype_mix(study.by_dtype)}"
    )
    return (
        f'<header><div class="bar"><p class="kind">{escape(TITLES[study.verb])}</p><nav aria-label="Sections">{links}'
        f'</nav><button type="button" id="theme" hidden>Dark mode</button></div>'
        f'<h1><bdi>{escape(printable(study.source))}</bdi></h1><p class="facts">{escape(facts)}</p>'
        f"{''.join(f'<p class=rule>{escape(rule)}</p>' for rule in study.rules)}</header>"
    )


def _section(key: str, heading: str, content: str) -> str:
    return f'<section id="{key}" aria-labelledby="h-{key}"><h2 id="h-{key}">{escape(heading)}</h2>\n{content}</section>'


def _summary(study: Study) -> str:
    tiles = "" if study.compares or not study.sums else _tiles(study)
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in study.findings)
    warnings = [*study.notes]
    if study.unfinished:
        warnings.insert(0, f"Interrupted: {counted(study.unfinished, 'tensor')} not measured.")
    noted = "".join(f"<li>{escape(note)}</li>" for note in warnings)
    return (
        tiles
        + (f'<ul class="findings">{said}</ul>' if said else "<p>Nothing was measured.</p>")
        + (f'<div class="notes"><h3>To note</h3><ul>{noted}</ul></div>' if noted else "")
    )


def _tiles(study: Study) -> str:
    total = study.sums[0]
    sqnr = noise_cell(total, "sqnr_db")
    decided = {word: count for word, count in study.counts.items() if count}
    tiles = [
        ("SQNR", sqnr, "dB" if sqnr not in ("exact", ABSENT) else "", "signal over quantization noise"),
        ("Saturated", number_cell(total, "saturated_percent"), "%",
         f"of elements, in {number_cell(total, 'saturated_blocks_percent')} % of blocks"),
        ("Underflowed", number_cell(total, "underflowed_percent"), "%", "of elements became zero"),
        ("Size", number_cell(total, "bits_per_element"), "bits", "per element, scales included"),
        ("Tensors", f"{len(study.measured):,}", "measured",
         ", ".join(f"{word} {count:,}" for word, count in decided.items())),
    ]  # fmt: skip
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> {escape(unit)}<span>{escape(more)}</span></dd>"
            "</div>"
            for name, value, unit, more in tiles
        )
        + "</dl>"
    )


def _figures(charts: Iterable[Chart]) -> str:
    drawn = "".join(map(_figure, charts))
    return f'<div class="figures">{drawn}</div>' if drawn else ""


def _figure(chart: Chart, more: str = "") -> str:
    kind, title = "wide" if is_wide(chart) else "half", escape(chart.title)
    return (
        f'<figure class="{kind}" id="plot-{chart.key}"><figcaption><h3><bdi>{title}</bdi></h3>'
        f'<button type="button" class="csv" data-chart="{chart.key}" aria-label="Data of {title} as CSV" hidden>CSV'
        f'</button><p>{escape(chart.caption)}</p></figcaption><div class="plot" tabindex="0">{svg(chart)}</div>{more}'
        "</figure>\n"
    )


def _worst(study: Study, blocks: Sequence[BlockChart]) -> str:
    if not blocks:
        return ""
    some = f"each {study.ways}" if len(study.recipes) <= COMPARED else f"each of the first {COMPARED} recipes"
    under = f", under {some}" if study.compares else ""
    return (
        f"<p class=lead>The block with most error of each of the tensors with the lowest SQNR{under}: every element "
        "before and after, joined by its error.</p>"
        f'<div class="figures">{"".join(_figure(block, _elements(block)) for block in blocks)}</div>'
    )


def _elements(block: BlockChart) -> str:
    """The values of a block to read."""
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


_TOTALS: dict[tuple[str, str], Callable[[Metrics], str]] = {
    ("SQNR", "dB"): lambda m: noise_cell(m, "sqnr_db"),
    ("relative error", ""): lambda m: noise_cell(m, "relative_error"),
    ("saturated", "% of elements"): lambda m: number_cell(m, "saturated_percent"),
    ("saturated", "% of blocks"): lambda m: number_cell(m, "saturated_blocks_percent"),
    ("underflowed", "% of elements"): lambda m: number_cell(m, "underflowed_percent"),
    ("size", "bits per element"): lambda m: number_cell(m, "bits_per_element"),
    ("scale exponents", "least to most"): lambda m: _exponents(m),
    ("largest error", "of an element"): lambda m: number_cell(m, "max_abs_error"),
}


def _exponents(metrics: Metrics) -> str:
    low, high = metrics["scale_exponent_min"], metrics["scale_exponent_max"]
    return ABSENT if low is None else signed(f"{low} to {signed(str(high))}")


def _totals(study: Study) -> str:
    """Everything together, and by group, under each recipe."""
    if not study.sums:
        return ""
    groups = {f"all {counted(len(study.measured), 'tensor')}": study.sums}
    if len(study.groups) > 1:
        groups |= {f"{printable(label)} ({sums[0]['tensors']:,})": sums for label, sums in study.groups.items()}
    heads = "".join(f"<th scope=col>{name}<small>{unit}</small></th>" for name, unit in _TOTALS)
    recipe = f"<th scope=col>{study.ways}</th>" if study.compares else ""
    bodies = []
    for label, sums in groups.items():
        rows = []
        for at, metrics in enumerate(sums):
            span = f" rowspan={len(sums)}" if len(sums) > 1 else ""
            head = f"<th scope=rowgroup{span}><bdi>{escape(label)}</bdi></th>" if at == 0 else ""
            under = f"<th scope=row>{escape(study.recipes[at])}</th>" if study.compares else ""
            rows.append(f"<tr>{head}{under}{_total_cells(metrics)}</tr>")
        bodies.append(f"<tbody>{''.join(rows)}</tbody>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Totals"><table class="totals"><thead><tr>'
        f"<th scope=col>{escape(study.by)}</th>{recipe}{heads}</tr></thead>{''.join(bodies)}</table></div>"
    )


def _total_cells(metrics: Metrics) -> str:
    return "".join(f"<td>{escape(cell(metrics))}</td>" for cell in _TOTALS.values())


def _tensors(study: Study) -> str:
    tensors = (*study.measured, *study.kept)
    roles = sorted({tensor.role for tensor in tensors})
    decisions = [word for word, count in study.counts.items() if count]
    return (
        '<form class="controls" role="search" hidden>'
        '<label>Name <input type="search" id="search" placeholder="words it contains" autocomplete="off" '
        'spellcheck="false"></label>'
        f'<label>Role <select id="role"><option value="">all</option>{_options(roles)}</select></label>'
        f'<label>Decision <select id="decision"><option value="">all</option>{_options(decisions)}</select></label>'
        '<output id="found" aria-live="polite"></output>'
        '<button type="button" class="csv" id="table-csv">CSV of these rows</button></form>'
        '<div class="scroll" id="scroll" tabindex="0" role="region" aria-label="Table of tensors">'
        '<table id="table"><caption class="unseen">Tensors with what was measured and decided; headings sort.</caption>'
        "<thead></thead><tbody></tbody></table></div>"
        '<nav class="pager" aria-label="Pages of the table" hidden><button type="button" id="first">First</button>'
        '<button type="button" id="previous">Previous</button><span id="page"></span>'
        '<button type="button" id="next">Next</button><button type="button" id="last">Last</button>'
        '<label>Rows <select id="size"><option>50</option><option>200</option><option>1000</option></select></label>'
        "</nav><noscript><p>The table of tensors, its search and the CSV need JavaScript.</p></noscript>"
    )


def _options(words: Iterable[str]) -> str:
    return "".join(f"<option>{escape(word)}</option>" for word in words)


def _footer(provenance: PageSource) -> str:
    command = shlex.join(["mxcli", *map(printable, provenance.command)])
    inputs = "".join(
        f"<tr><th scope=row><bdi>{escape(printable(name))}</bdi></th>{_identity(found)}</tr>"
        for name, found in provenance.inputs.items()
    )
    return (
        f"<footer><dl><dt>Command</dt><dd><code>{escape(command)}</code></dd><dt>Version</dt><dd>mxcli "
        f"{escape(provenance.version)}</dd></dl><details><summary>Input: {counted(len(provenance.inputs), 'file')}"
        "</summary><table class=values><thead><tr><th scope=col>file</th><th scope=col>bytes</th>"
        "<th scope=col>SHA-256 of its header, or of its first and last 64 KiB</th></tr></thead>"
        f"<tbody>{inputs}</tbody></table></details></footer>"
    )


def _identity(found: object) -> str:
    known = found if isinstance(found, Mapping) else {}
    return f"<td>{known.get('bytes', 0):,}</td><td><code>{escape(str(known.get('sha256', '')))}</code></td>"
