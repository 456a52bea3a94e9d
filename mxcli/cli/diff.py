"""`mxcli diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, open_backend
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.progress import progress
from mxcli.cli.terminal import Messages
from mxcli.errors import LimitError

_RESULTS = vary(
    only=("top", "wide", "json", "csv", "markdown", "force"),
    help={"top": "Tensors to show.  [default: 20]"},
)


@verb
def diff(
    a: Annotated[str, typer.Argument(metavar="A", show_default=False, help="A checkpoint, quantized or plain.")],
    b: Annotated[str, typer.Argument(metavar="B", show_default=False, help="Another one of the same model.")],
    results: Annotated[Results, _RESULTS],
    machine: Machine,
    messages: Annotated[Messages, vary(without=("verbose",))],
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor",
            metavar="SELECTOR",
            help="Only matching tensors: a glob over whole dotted segments, re:REGEX or @role. May be repeated.",
        ),
    ] = None,
    by_record: Annotated[
        bool,
        typer.Option(
            "--by-record",
            help="Do not read tensors that have the same hash in the records of both: fast, and blind to damage since.",
        ),
    ] = False,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    Weights of the same format, axis and transform are compared by codes and scales, in any layout; others by their
    dequantized values. For power-of-two scales, names the two rules that explain the difference, as far as codes and
    scales show them. Exits with code 0 if nothing differs, else with code 5. The text shows twenty tensors, or --top;
    JSON and CSV have all. Of two outputs of mxcli, --by-record reads only what has other hashes in their records, or
    was written after them.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format mxfp8 -o tiny-llama-ct
      mxcli quantize samples/tiny-llama --format mxfp8 --layout modelopt -o tiny-llama-modelopt
      mxcli diff tiny-llama-ct tiny-llama-modelopt
      mxcli diff tiny-llama-ct tiny-llama-modelopt --tensor '*.layers.0.*' --json | jq '.conclusion[]'
    """
    results.check([a, b])
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.verify.diff import diff_sides, memory_to_diff
    from mxcli.flows.verify.sides import sides_of
    from mxcli.output.difference import difference_csv, difference_json, difference_text, failure_sentence

    sides = sides_of((a, open_checkpoint(a)), (b, open_checkpoint(b)), by_record=by_record)
    backend = open_backend(machine, messages, memory_to_diff(*sides))
    with progress("diff", messages) as show:
        result = diff_sides(*sides, backend=backend, selectors=tensors or (), on_progress=show)
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: difference_json(result),
        csv=lambda: difference_csv(result),
        text=lambda screen: difference_text(result, screen, results.top),
    )
    if result.differing:
        raise LimitError(failure_sentence(result))
