"""The format rows with their derived numbers: a table, a page about one, JSON, and the README's Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from mxcli.numerics.floats import FloatFormat
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scheme import Scheme, resolve, scale_rules
from mxcli.output.numbers import ABSENT, decimal, power_of_two
from mxcli.output.screen import Screen
from mxcli.output.table import Column, aligned

TEXT_WIDTH = 100
"""Columns of running text, however wide the screen."""

_COLUMNS = (
    Column("format", right=False),
    Column("element", right=False),
    Column("scale", right=False),
    Column("block", right=False),
    Column("tensor\nscale", right=False, drop=2),
    Column("bits per\nelement"),
    Column("max"),
    Column("min\nnormal", drop=3),
    Column("min\npositive", drop=4),
    Column("binades", drop=1),
    Column("aliases", right=False, drop=5),
)


def format_record(row: BlockFormat) -> dict[str, object]:
    """Everything about a format that `mxcli formats --json` lists, under its key names."""
    element, (block_rows, block_columns) = row.element, row.block
    return {
        "name": row.name,
        "aliases": list(row.aliases),
        "spelling": row.spelling,
        "element": element.name,
        "element_bits": element.bits,
        "stored_bits": element.stored_bits,
        "scale": row.scale.name,
        "scale_bits": row.scale.bits,
        "block": row.block_name,
        "block_rows": block_rows,
        "block_columns": block_columns,
        "tensor_scale": row.tensor_scale.name if row.tensor_scale else None,
        "bits_per_element": row.bits_per_element,
        "max": element.max,
        "emax": element.emax,
        "min_normal": element.min_normal,
        "min_positive": element.min_positive,
        "binades": element.binades,
        "scale_roundings": scale_rules(row),
        "default_scale_rounding": resolve(row).scale_rule.name,
    }


def format_table(rows: Iterable[BlockFormat], screen: Screen) -> str:
    """One line per format."""
    return "\n".join(aligned(_COLUMNS, [_cells(row) for row in rows], screen))


def format_page(row: BlockFormat, screen: Screen) -> list[str]:
    """One format in words and numbers, as lines."""
    element = row.element
    kind = (
        "two's complement" if element.twos_complement else f"{element.exponent_bits} exponent bits, bias {element.bias}"
    )
    aliases = f" (also {', '.join(row.aliases)})" if row.aliases else ""
    facts = {
        "spelling": row.spelling,
        "element": f"{element.name}: {element.bits} bits, {kind}, {element.mantissa_bits} mantissa bits",
        "values": f"up to {decimal(element.max)}; normal from {power_of_two(element.min_normal)}, "
        f"smallest {power_of_two(element.min_positive)}; {element.binades:.1f} binades",
        "scale": f"{row.scale.name}, one per {_block_words(row)}",
        "tensor scale": row.tensor_scale.name if row.tensor_scale else "none",
        "stored": f"{element.stored_bits} bits a code, {row.bits_per_element:.4g} bits per element with scales",
        "scale rules": f"{', '.join(scale_rules(row))}; default {resolve(row).scale_rule.name}",
    }
    return [f"{row.name}{aliases}: a block format", "", *facts_lines(facts, screen)]


def facts_lines(facts: Mapping[str, str], screen: Screen) -> list[str]:
    """`key  value` lines with the values aligned, long ones continued below."""
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


def scalar_facts(row: FloatFormat) -> dict[str, str]:
    """What there is to say about a format of single values."""
    facts = {
        "bits": f"{row.bits} ({row.signed:d} sign, {row.exponent_bits} exponent, {row.mantissa_bits} mantissa)",
        "max": decimal(row.max),
        "min normal": power_of_two(row.min_normal),
        "min positive": power_of_two(row.min_positive),
        "binades": f"{row.binades:.1f}",
    }
    if row.bits <= 6:
        facts["magnitudes"] = " ".join(decimal(row.magnitude(code)) for code in range(row.max_code + 1))
    return facts


def format_markdown(rows: Iterable[BlockFormat]) -> str:
    """The table as the README shows it."""
    titles = [column.title.replace("\n", " ") for column in _COLUMNS]
    marks = ["---:" if column.right else "---" for column in _COLUMNS]
    lines = [titles, marks, *([f"`{cells[0]}`", *cells[1:]] for cells in map(_cells, rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: BlockFormat) -> list[str]:
    element = row.element
    return [
        row.name,
        element.name,
        row.scale.name,
        row.block_name,
        row.tensor_scale.name if row.tensor_scale else ABSENT,
        f"{row.bits_per_element:.4g}",
        decimal(element.max),
        power_of_two(element.min_normal),
        power_of_two(element.min_positive),
        f"{element.binades:.1f}",
        ", ".join(row.aliases) or ABSENT,
    ]


def _block_words(row: BlockFormat) -> str:
    rows, columns = row.block
    if columns is None:
        return "tensor" if rows is None else "row"
    return f"block of {rows} x {columns} elements"


def rules_words(recipe: Scheme) -> str:
    """How scales and elements are rounded, after which transform and as whom: all that its bytes depend on."""
    seed = f" (seed {recipe.seed})" if recipe.rounding.is_random else ""
    after = f" after {recipe.hadamard.name}" if recipe.hadamard is not None else ""
    return (
        f"scale rounding {recipe.scale_rule.name}, element rounding {recipe.rounding.name}{seed}{after}, as "
        f"{recipe.dialect.name}"
    )
