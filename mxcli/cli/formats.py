"""`mxcli formats`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli.groups import vary, verb
from mxcli.cli.options import FORMAT_NAMES, completes
from mxcli.cli.outputs import Results
from mxcli.cli.terminal import Messages, deliver

_RESULTS = vary(
    only=("wide", "json", "markdown", "force"),
    help={
        "wide": "All columns, for any width of the terminal.",
        "markdown": "The formats as a Markdown table in FILE (- is stdout).",
    },
)


@verb
def formats(
    results: Annotated[Results, _RESULTS],
    messages: Annotated[Messages, vary(only=("no_color", "debug"))],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[FORMAT]",
            show_default=False,
            autocompletion=completes(FORMAT_NAMES),
            help="A name, or ELEMENT:SCALE:BLOCK[:TENSOR_SCALE]; without it, lists all formats.",
        ),
    ] = None,
) -> None:
    """List the formats with their derived numbers, or one in full.

    Binades are log2 of the largest over the smallest positive value of the element; bits per element are those of a
    code and its part of the block's scale.

    \b
    Examples:
      mxcli formats
      mxcli formats nvfp4
      mxcli formats e3m2:e8m0:1x16
      mxcli formats --json | jq '.formats[].name'
    """
    from mxcli.numerics.formats import FORMATS, find_format
    from mxcli.output.export import json_text
    from mxcli.output.formats import format_markdown, format_page, format_record, format_table

    results.check()
    found = [find_format(name)] if name else list(FORMATS.values())
    screen = messages.stdout(wide=results.wide)
    if results.json is not None:
        deliver(json_text("formats", {"formats": [format_record(fmt) for fmt in found]}), results.json)
    if results.markdown is not None:
        deliver(format_markdown(found), results.markdown)
    if not results.takes_stdout:
        deliver("\n".join(format_page(found[0], screen)) if name else format_table(found, screen))
