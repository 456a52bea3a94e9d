"""`mxcli inspect`."""

from __future__ import annotations

from typing import Annotated

from mxcli.cli.groups import vary, verb
from mxcli.cli.options import Source
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.terminal import Messages


@verb
def inspect(
    source: Source,
    results: Annotated[Results, vary(only=("json", "wide", "force"))],
    messages: Annotated[Messages, vary(only=("no_color", "debug"))],
) -> None:
    """List the tensors of a checkpoint, from its headers only.

    Shows dtype, shape and role of each tensor, totals by dtype and role, tied weights, the layout of an already
    quantized checkpoint, and notes on everything odd about it; for captures also layers, steps and ranks.

    \b
    Examples:
      mxcli inspect samples/tiny-llama
      mxcli inspect samples/tiny-llama-captures.safetensors
      mxcli inspect samples/tiny-llama --json | jq '.by_role'
    """
    results.check([source])
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.measure.inspect import inspect_checkpoint
    from mxcli.output.export import json_text
    from mxcli.output.inspection import inspection_record, inspection_text

    inspection = inspect_checkpoint(source, open_checkpoint(source))
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: json_text("inspect", inspection_record(inspection)),
        text=lambda screen: inspection_text(inspection, screen),
    )
