"""`mxcli dequantize`."""

from __future__ import annotations

import typer

from mxcli.cli import options, writing
from mxcli.cli.arguments import STDOUT, repeatable
from mxcli.cli.machine import machine, open_backend
from mxcli.cli.streams import INTERRUPTED, deliver, refuse_existing, talk_on_stderr
from mxcli.errors import UsageError


def dequantize(
    context: typer.Context,
    source: options.Source,
    output: options.Output = None,
    dtype: options.Dtype = None,
    json: options.Json = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    max_shard_size: writing.MaxShardSize = None,
    shard_range: writing.ShardRange = None,
    resume: writing.Resume = False,
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Write a quantized checkpoint back as plain floats.

    The weights are scaled back under the names they had, everything else is copied. The output appears whole or
    not at all; its path is printed on stdout. A run that was cut short is gone on with by --resume.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format nvfp4 -o tiny-llama-nvfp4
      mxcli dequantize tiny-llama-nvfp4 -o tiny-llama-back
      mxcli dequantize tiny-llama-nvfp4 -o tiny-llama-f32 --dtype f32
    """
    where = machine(device, threads, max_memory)
    how = writing.asked(force=force, resume=resume, max_shard_size=max_shard_size, shard_range=shard_range)
    refuse_existing([json], force=force, sources=[source])
    if output is None:
        raise UsageError("missing option '-o/--output DIR': name the directory to write.")
    talk = talk_on_stderr(quiet=quiet, no_color=no_color)
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.write.dequantize import dequantize_checkpoint, memory_to_dequantize
    from mxcli.output.export import json_text

    checkpoint = open_checkpoint(source)
    named = None if dtype is None else dtype.upper()
    need = memory_to_dequantize(checkpoint, named)
    backend = open_backend(where, talk)
    check_memory(need, where.max_memory, backend.name)
    with writing.manner("dequantize", how, talk) as manner:
        restored = dequantize_checkpoint(
            checkpoint,
            output,
            backend=backend,
            dtype=named,
            max_shard_bytes=how.max_shard_bytes,
            manner=manner,
            command=repeatable(context.obj or ()),
        )
    talk.notes((*checkpoint.notes, *restored.notes, *writing.resumed_notes(restored.outcome)))
    if not restored.outcome.complete:
        writing.tell_unfinished(restored.outcome, output)
        raise typer.Exit(INTERRUPTED)
    if json is not None:
        content = {
            "source": source,
            "output": output,
            "layout": restored.layout,
            "dtypes": restored.dtypes,
            "notes": [*checkpoint.notes, *restored.notes],
        }
        deliver(json_text("dequantize", content), json)
    if json != STDOUT:
        deliver(output)
