"""`mxcli dequantize`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli.arguments import repeatable
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, open_backend
from mxcli.cli.options import Dtype, Source
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.terminal import INTERRUPTED, Messages
from mxcli.cli.writing import Writing, outcome_notes, report_unfinished, write_options

Unscaled = Annotated[
    bool,
    typer.Option("--unscaled", help="Read FP8 weights without scales as plain casts: each code is its value."),
]


@verb
def dequantize(
    context: typer.Context,
    source: Source,
    writing: Writing,
    results: Annotated[Results, vary(only=("json", "force"))],
    machine: Machine,
    messages: Annotated[Messages, vary(without=("verbose",))],
    dtype: Dtype = None,
    unscaled: Unscaled = False,
) -> None:
    """Write a quantized checkpoint back as plain floats.

    Dequantizes the weights under their original names and copies everything else. The output appears whole or not at
    all; the line on stdout has its path, and what is in it of the source. --resume continues an interrupted run.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format nvfp4 -o tiny-llama-nvfp4
      mxcli dequantize tiny-llama-nvfp4 -o tiny-llama-back
      mxcli dequantize tiny-llama-nvfp4 -o tiny-llama-f32 --dtype f32
      mxcli dequantize flux1-dev-fp8.safetensors -o flux-bf16 --unscaled
    """
    results.check([source])
    output = writing.folder
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.files.model_folder import left_out_notes
    from mxcli.flows.write.casts import as_casts
    from mxcli.flows.write.dequantize import dequantize_checkpoint, memory_to_dequantize
    from mxcli.output.export import json_text
    from mxcli.output.written import restored_line

    checkpoint = as_casts(open_checkpoint(source)) if unscaled else open_checkpoint(source)
    named = None if dtype is None else dtype.upper()
    backend = open_backend(machine, messages, memory_to_dequantize(checkpoint, named))
    with write_options("dequantize", writing, messages, force=results.force, others=results.paths) as manner:
        restored = dequantize_checkpoint(
            checkpoint,
            output,
            backend=backend,
            dtype=named,
            max_shard_bytes=writing.max_shard_bytes,
            options=manner,
            command=repeatable(context.obj or ()),
        )
    notes = [*checkpoint.notes, *left_out_notes(checkpoint.left_out), *restored.notes]
    messages.notes((*notes, *outcome_notes(restored.outcome)))
    if not restored.outcome.complete:
        report_unfinished(restored.outcome, output)
        raise typer.Exit(INTERRUPTED)
    record = {"source": source, "output": output, "layout": restored.layout, "dtypes": restored.dtypes, "notes": notes}
    record["accounting"] = restored.accounting.record()
    deliver_forms(
        results,
        messages.stdout(),
        json=lambda: json_text("dequantize", record),
        text=lambda screen: restored_line(restored),
    )
