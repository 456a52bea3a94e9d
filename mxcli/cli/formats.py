"""`mxcli formats`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli import completion, options
from mxcli.cli.arguments import STDOUT
from mxcli.cli.streams import deliver, refuse_existing, stdout_screen
from mxcli.errors import UsageError


def formats(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[FORMAT]",
            show_default=False,
            autocompletion=completion.formats,
            help="One format, named or spelled ELEMENT:SCALE:BLOCK[:TENSOR_SCALE]; lists all without it.",
        ),
    ] = None,
    markdown: options.Markdown = None,
    json: options.Json = None,
    wide: options.Wide = False,
    force: options.Force = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """List the formats with their derived numbers, or one in full.

    The binades are log2 of the largest over the smallest positive value of the element; bits per element
    count the stored code with its share of the block's scale.

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

    if markdown == json == STDOUT:
        raise UsageError("--markdown and --json both ask for stdout: give one of them a FILE.")
    refuse_existing([json, markdown], force=force, sources=[])
    rows = [find_format(name)] if name else list(FORMATS.values())
    screen = stdout_screen(no_color=no_color, wide=wide)
    if json is not None:
        deliver(json_text("formats", {"formats": [format_record(row) for row in rows]}), json)
    if markdown is not None:
        deliver(format_markdown(rows), markdown)
    if STDOUT not in (json, markdown):
        deliver("\n".join(format_page(rows[0], screen)) if name else format_table(rows, screen))
