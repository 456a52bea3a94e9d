"""`mxcli merge`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli.groups import vary, verb
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.terminal import Messages
from mxcli.cli.writing import NoVerify, output_check, stayed_notes
from mxcli.errors import UsageError


@verb
def merge(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", show_default=False, help="The directory that all shares were written to.")
    ],
    results: Annotated[Results, vary(only=("json", "force"))],
    messages: Annotated[Messages, vary(only=("debug",))],
    no_verify: NoVerify = False,
) -> None:
    """Complete an output that was written in shares.

    Checks that all shares are present, finished, as they were written, and of the same output and source; adds index,
    configuration and record, and gives every file its final name. A complete output is checked against its record.
    Nothing is computed: the result has the same bytes as from one machine. Its path
    is printed on stdout.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format nvfp4 -o shared --max-shard-size 200K --shard-range 1/2
      mxcli quantize samples/tiny-llama --format nvfp4 -o shared --max-shard-size 200K --shard-range 2/2
      mxcli merge shared
    """
    if not folder.strip():
        raise UsageError("DIR is empty: name the directory of the shares.")
    results.check([folder])
    from mxcli.flows.write.records import merge_shares
    from mxcli.output.export import json_text

    merged = merge_shares(folder, force=results.force, check=output_check(folder, skipped=no_verify, reads_values=True))
    if not merged.shares:
        messages.notes(["Nothing to do: the output is complete, and its files have the recorded hashes."])
    messages.notes(stayed_notes(merged.stayed))
    record = {"output": folder, "shares": merged.shares, "files": list(merged.files)}
    deliver_forms(results, messages.stdout(), json=lambda: json_text("merge", record), text=lambda screen: folder)
