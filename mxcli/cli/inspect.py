"""`mxcli inspect`."""

from __future__ import annotations

from mxcli.cli import options
from mxcli.cli.arguments import STDOUT
from mxcli.cli.streams import deliver, refuse_existing, stdout_screen


def inspect(
    source: options.Source,
    json: options.Json = None,
    wide: options.Wide = False,
    force: options.Force = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """List what a checkpoint holds, from its headers only.

    Shows each tensor's dtype, shape and role, totals by dtype and role, tied weights, the layout if it is
    already quantized, and notes on everything odd about it; of captures also layers, steps and ranks.

    \b
    Examples:
      mxcli inspect samples/tiny-llama
      mxcli inspect samples/tiny-llama-captures.safetensors
      mxcli inspect samples/tiny-llama --json | jq '.by_role'
    """
    refuse_existing([json], force=force, sources=[source])
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.measure.inspect import inspect_checkpoint
    from mxcli.output.export import json_text
    from mxcli.output.inspection import inspection_record, inspection_text

    inspection = inspect_checkpoint(source, open_checkpoint(source))
    if json is not None:
        deliver(json_text("inspect", inspection_record(inspection)), json)
    if json != STDOUT:
        deliver(inspection_text(inspection, stdout_screen(no_color=no_color, wide=wide)))
