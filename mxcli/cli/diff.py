"""`mxcli diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli import options
from mxcli.cli.forms import Forms, check_forms, deliver_forms
from mxcli.cli.machine import machine, open_backend
from mxcli.cli.progress import progress
from mxcli.cli.streams import talk_on_stderr
from mxcli.errors import LimitError


def diff(
    a: Annotated[str, typer.Argument(metavar="A", show_default=False, help="A checkpoint, quantized or plain.")],
    b: Annotated[str, typer.Argument(metavar="B", show_default=False, help="Another one of the same model.")],
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor",
            metavar="SELECTOR",
            help="Only tensors that it takes, in the spellings of --include; may be repeated.",
        ),
    ] = None,
    top: options.Top = None,
    wide: options.Wide = False,
    json: options.Json = None,
    csv: options.Csv = None,
    markdown: options.Markdown = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    Of weights in the same format, along the same axis and after the same transform codes and scales are compared,
    whatever the layouts; others by the values they stand for. For power-of-two scales the two rules that explain the
    difference are named, as far as codes and scales tell. Nothing differs: exit code 0; something does: 5. The text
    shows twenty tensors, or --top; JSON and CSV have all.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format mxfp8 -o tiny-llama-ct
      mxcli quantize samples/tiny-llama --format mxfp8 --layout modelopt -o tiny-llama-modelopt
      mxcli diff tiny-llama-ct tiny-llama-modelopt
      mxcli diff tiny-llama-ct tiny-llama-modelopt --tensor '*.layers.0.*' --json | jq '.conclusion[]'
    """
    forms = Forms(json, None, csv, "name", top, wide, no_color, markdown)
    where = machine(device, threads, max_memory)
    check_forms(forms, force=force, sources=[a, b])
    talk = talk_on_stderr(quiet=quiet, no_color=no_color)
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.verify.diff import diff_sides, memory_to_diff, side_of
    from mxcli.output.difference import difference_csv, difference_json, difference_text
    from mxcli.output.difference_words import failure_sentence

    sides = side_of(a, open_checkpoint(a)), side_of(b, open_checkpoint(b))
    backend = open_backend(where, talk)
    check_memory(memory_to_diff(*sides), where.max_memory, backend.name)
    with progress("diff", talk) as show:
        result = diff_sides(*sides, backend=backend, selectors=tensors or (), on_progress=show)
    deliver_forms(
        forms,
        json=lambda: difference_json(result),
        csv=lambda: difference_csv(result),
        lines=lambda streamed: (),
        text=lambda screen: difference_text(result, screen, top),
    )
    if result.differing:
        raise LimitError(failure_sentence(result))
