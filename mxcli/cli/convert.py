"""`mxcli convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.arguments import repeatable
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine
from mxcli.cli.options import LayoutName, Source
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.terminal import INTERRUPTED, Messages
from mxcli.cli.writing import WritingFor, check_output, outcome_notes, report_unfinished, write_options
from mxcli.errors import UsageError

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.write.convert import Conversion

RoundScales = Annotated[
    bool,
    typer.Option(
        "--round-tensor-scales",
        help="Store the nearest number where the layout stores a tensor scale as its reciprocal and binary32 has no "
        "exact one; otherwise such weights are refused.",
    ),
]


@dataclass(frozen=True, slots=True)
class ConvertOptions(WritingFor):
    """The output to write, its layout, and the engines that must load it."""

    heading: ClassVar[str] = "Writing"
    layout: LayoutName = None
    round_tensor_scales: RoundScales = False


@verb
def convert(
    context: typer.Context,
    source: Source,
    writing: ConvertOptions,
    results: Annotated[Results, vary(only=("json", "force"))],
    machine: Annotated[Machine, vary(only=("max_memory",))],
    messages: Annotated[Messages, vary(without=("verbose",))],
) -> None:
    """Write a quantized checkpoint in another layout.

    Codes and scales are carried over as they are, renamed and reordered; plain tensors are copied. What the layout
    cannot hold is refused by name before the first byte is written. Tensors of GGUF files get the names and the order
    of rows of Hugging Face, and the other way round.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format mxfp8 -o tiny-llama-ct
      mxcli convert tiny-llama-ct --layout mlx -o tiny-llama-mlx --dry-run
      mxcli convert tiny-llama-ct --layout mlx -o tiny-llama-mlx
      mxcli convert tiny-llama-mlx --layout modelopt -o tiny-llama-carried --for vllm
    """
    results.check([source])
    if writing.layout is None:
        raise UsageError("missing option '--layout LAYOUT': name the layout to write.")
    if writing.output is None and not writing.dry_run:
        raise UsageError("missing option '-o/--output DIR': name the directory to write, or use --dry-run.")
    engines = writing.named
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.files.layouts import find_layout
    from mxcli.flows.write.convert import plan_conversion

    layout, checkpoint = find_layout(writing.layout), open_checkpoint(source)
    conversion = plan_conversion(
        checkpoint,
        layout,
        max_shard_bytes=writing.max_shard_bytes,
        engines=engines,
        devices=writing.tensor_parallel,
        rounds_scales=writing.round_tensor_scales,
    )
    work = _Work(source, checkpoint, conversion, writing)
    if writing.dry_run:
        _deliver_plan(work, results, machine, messages)
    else:
        _write(work, results, machine, messages, repeatable(context.obj or ()))


@dataclass(frozen=True, slots=True)
class _Work:
    """A source, its planned conversion, and the options to write it."""

    source: str
    checkpoint: Checkpoint
    conversion: Conversion
    writing: ConvertOptions

    @property
    def notes(self) -> list[str]:
        """The notes on the source, on what is left out of it, and on the output."""
        from mxcli.files.model_folder import left_out_notes

        arrangement = self.conversion.arrangement
        left_out = left_out_notes(self.checkpoint.left_out, arrangement.configs)
        return [*self.checkpoint.notes, *left_out, *arrangement.notes]


def _deliver_plan(work: _Work, results: Results, machine: Machine, messages: Messages) -> None:
    """Deliver the plan, after every refusal that the output would meet."""
    from mxcli.backends import CPU
    from mxcli.flows.doctor import free_bytes
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.write.convert import conversion_record
    from mxcli.flows.write.pipeline import planned_draft
    from mxcli.output.converted import conversion_json, conversion_text
    from mxcli.output.site import Site

    checkpoint, conversion, output = work.checkpoint, work.conversion, work.writing.output
    messages.notes(work.notes)
    site = Site(output, None if output is None else free_bytes(Path(output)), CPU, machine.max_bytes)
    check_memory(conversion.need, site.max_memory, site.device)
    arrangement = conversion.arrangement
    record = conversion_record(checkpoint, conversion, ())
    draft = planned_draft(checkpoint, arrangement.shards, arrangement.configs, record)
    folder = None if output is None else Path(output)
    check_output(checkpoint, draft, folder, work.writing, force=results.force, others=results.paths)
    deliver_forms(
        results,
        messages.stdout(),
        json=lambda: conversion_json(work.source, checkpoint, conversion, site, work.notes),
        text=lambda screen: conversion_text(checkpoint, conversion, site, screen),
    )


def _write(work: _Work, results: Results, machine: Machine, messages: Messages, command: list[str]) -> None:
    from mxcli.backends import CPU
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.write.convert import convert_checkpoint
    from mxcli.output.converted import converted_json, converted_line

    writing = work.writing
    check_memory(work.conversion.need, machine.max_bytes, CPU)
    with write_options("convert", writing, messages, force=results.force, others=results.paths) as manner:
        converted = convert_checkpoint(
            work.checkpoint, work.conversion, writing.folder, options=manner, command=command
        )
    messages.notes((*work.notes, *outcome_notes(converted.outcome)))
    if not converted.outcome.complete:
        report_unfinished(converted.outcome, writing.folder)
        raise typer.Exit(INTERRUPTED)
    deliver_forms(
        results,
        messages.stdout(),
        json=lambda: converted_json(work.source, work.checkpoint, converted, writing.share, work.notes),
        text=lambda screen: converted_line(converted, writing.share),
    )
