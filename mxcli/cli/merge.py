"""`mxcli merge`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli import options
from mxcli.cli.arguments import STDOUT
from mxcli.cli.streams import deliver, refuse_existing


def merge(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", show_default=False, help="The directory that all shares were written to.")
    ],
    json: options.Json = None,
    force: options.Force = False,
    debug: options.Debug = False,
) -> None:
    """Complete an output written in shares.

    Nothing is computed: the shares are checked to be there, finished and of one output, then index, configuration
    and record are added and every file gets its final name. The result is the same to the last byte as from one
    machine. Its path is printed on stdout.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format nvfp4 -o shared --max-shard-size 200K --shard-range 1/2
      mxcli quantize samples/tiny-llama --format nvfp4 -o shared --max-shard-size 200K --shard-range 2/2
      mxcli merge shared
    """
    refuse_existing([json], force=force, sources=[folder])
    from mxcli.flows.write.records import merge_shares
    from mxcli.output.export import json_text

    merged = merge_shares(folder, force=force)
    if json is not None:
        content = {"output": folder, "shares": merged.shares, "files": list(merged.files)}
        deliver(json_text("merge", content), json)
    if json != STDOUT:
        deliver(folder)
