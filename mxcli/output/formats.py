"""Formats with their derived numbers: a table, a page about one, JSON, and the README's Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from mxcli.numerics.floats import FloatFormat
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scheme import Scheme, resolve, scale_rules
from mxcli.output.fields import COUNT, NUMBER, TEXT, TEXT_OR_NULL, Field, Fields, array, attributes
from mxcli.output.numbers import ABSENT, decimal, power_of_two
from mxcli.output.screen import Screen
from mxcli.output.table import aligned

TEXT_WIDTH = 100
"""Most columns of running text."""

FORMAT: Fields[BlockFormat] = Fields(
    Field("name", lambda fmt: fmt.name, TEXT, "format", right=False),
    Field("aliases", lambda fmt: list(fmt.aliases), array(TEXT), "aliases", right=False, drop=5,
          cell=lambda fmt: ", ".join(fmt.aliases) or ABSENT),
    attributes(TEXT, "spelling"),
    Field("element", lambda fmt: fmt.element.name, TEXT, "element", right=False),
    Field("element_bits", lambda fmt: fmt.element.bits, COUNT),
    Field("stored_bits", lambda fmt: fmt.element.stored_bits, COUNT),
    Field("scale", lambda fmt: fmt.scale.name, TEXT, "scale", right=False),
    Field("scale_bits", lambda fmt: fmt.scale.bits, COUNT),
    Field("block", lambda fmt: fmt.block_name, TEXT, "block", right=False),
    Field("block_rows", lambda fmt: fmt.block[0], {"type": ["integer", "null"]}),
    Field("block_columns", lambda fmt: fmt.block[1], {"type": ["integer", "null"]}),
    Field("tensor_scale", lambda fmt: fmt.tensor_scale.name if fmt.tensor_scale else None, TEXT_OR_NULL,
          "tensor\nscale", right=False, drop=2),
    Field("bits_per_element", lambda fmt: fmt.bits_per_element, NUMBER, "bits per\nelement",
          cell=lambda fmt: f"{fmt.bits_per_element:.4g}"),
    Field("max", lambda fmt: fmt.element.max, NUMBER, "max", cell=lambda fmt: decimal(fmt.element.max)),
    Field("emax", lambda fmt: fmt.element.emax, {"type": "integer"}),
    Field("min_normal", lambda fmt: fmt.element.min_normal, NUMBER, "min\nnormal", drop=3,
          cell=lambda fmt: power_of_two(fmt.element.min_normal)),
    Field("min_positive", lambda fmt: fmt.element.min_positive, NUMBER, "min\npositive", drop=4,
          cell=lambda fmt: power_of_two(fmt.element.min_positive)),
    Field("binades", lambda fmt: fmt.element.binades, NUMBER, "binades", drop=1,
          cell=lambda fmt: f"{fmt.element.binades:.1f}"),
    Field("scale_roundings", lambda fmt: list(scale_rules(fmt)), array(TEXT)),
    Field("default_scale_rounding", lambda fmt: resolve(fmt).scale_rule.name, TEXT),
)  # fmt: skip
_TABLE = Fields(FORMAT.without("aliases"), FORMAT["aliases"])


def format_record(fmt: BlockFormat) -> dict[str, object]:
    """Return the record of a format in `mxcli formats --json`."""
    return FORMAT.record(fmt)


def format_table(formats: Iterable[BlockFormat], screen: Screen) -> str:
    """Return a line per format."""
    return "\n".join(aligned(_TABLE.columns(), [_TABLE.cells(fmt) for fmt in formats], screen))


def format_page(fmt: BlockFormat, screen: Screen) -> list[str]:
    """Return the lines of the page about a format."""
    element = fmt.element
    kind = (
        "two's complement" if element.twos_complement else f"{element.exponent_bits} exponent bits, bias {element.bias}"
    )
    aliases = f" (also {', '.join(fmt.aliases)})" if fmt.aliases else ""
    facts = {
        "spelling": fmt.spelling,
        "element": f"{element.name}: {element.bits} bits, {kind}, {element.mantissa_bits} mantissa bits",
        "values": f"up to {decimal(element.max)}; normal from {power_of_two(element.min_normal)}, "
        f"smallest {power_of_two(element.min_positive)}; {element.binades:.1f} binades",
        "scale": f"{fmt.scale.name}, one per {_block_words(fmt)}",
        "tensor scale": fmt.tensor_scale.name if fmt.tensor_scale else "none",
        "stored": f"{element.stored_bits} bits a code, {fmt.bits_per_element:.4g} bits per element with scales",
        "scale rules": f"{', '.join(scale_rules(fmt))}; default {resolve(fmt).scale_rule.name}",
    }
    return [f"{fmt.name}{aliases}: a block format", "", *facts_lines(facts, screen)]


def facts_lines(facts: Mapping[str, str], screen: Screen) -> list[str]:
    """Return `key  value` lines with the values aligned, long ones continued below."""
    indent = max(map(len, facts)) + 4
    width = max(min(screen.width or TEXT_WIDTH, TEXT_WIDTH), indent + 20)
    lines: list[str] = []
    for key, value in facts.items():
        first = f"  {key}".ljust(indent)
        lines += textwrap.wrap(
            value,
            width,
            initial_indent=first,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def scalar_facts(fmt: FloatFormat) -> dict[str, str]:
    """Return the facts about a format of single values."""
    facts = {
        "bits": f"{fmt.bits} ({fmt.signed:d} sign, {fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa)",
        "max": decimal(fmt.max),
        "min normal": power_of_two(fmt.min_normal),
        "min positive": power_of_two(fmt.min_positive),
        "binades": f"{fmt.binades:.1f}",
    }
    if fmt.bits <= 6:
        facts["magnitudes"] = " ".join(decimal(fmt.magnitude(code)) for code in range(fmt.max_code + 1))
    return facts


def format_markdown(formats: Iterable[BlockFormat]) -> str:
    """Return the table as the README shows it."""
    columns, rows = _TABLE.columns(), [_TABLE.cells(fmt) for fmt in formats]
    titles = [column.title.replace("\n", " ") for column in columns]
    marks = ["---:" if column.right else "---" for column in columns]
    lines = [titles, marks, *([f"`{cells[0]}`", *cells[1:]] for cells in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block_words(fmt: BlockFormat) -> str:
    rows, columns = fmt.block
    if columns is None:
        return "tensor" if rows is None else "row"
    return f"block of {rows} x {columns} elements"


def rules_words(scheme: Scheme) -> str:
    """Return the scale and element rounding, the transform and the dialect: all that the bytes depend on."""
    seed = f" (seed {scheme.seed})" if scheme.rounding.is_random else ""
    after = f" after {scheme.hadamard.name}" if scheme.hadamard is not None else ""
    return (
        f"scale rounding {scheme.scale_rule.name}, element rounding {scheme.rounding.name}{seed}{after}, as "
        f"{scheme.dialect.name}"
    )
