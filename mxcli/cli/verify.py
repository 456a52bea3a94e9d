"""`mxcli verify`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, open_backend
from mxcli.cli.options import Serving, Source
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.progress import progress
from mxcli.cli.terminal import Messages
from mxcli.errors import LimitError, UsageError
from mxcli.files.loaders.engine import engines_of

if TYPE_CHECKING:
    from mxcli.flows.verify.repair import Repair

_RESULTS = vary(
    only=("top", "wide", "json", "csv", "markdown", "force"),
    help={
        "top": "Findings of a check to show.  [default: 10]",
        "csv": "CSV of the findings in FILE (- is stdout), with the names of the JSON; null is empty.",
    },
)


@verb
def verify(
    source: Source,
    serving: Serving,
    results: Annotated[Results, _RESULTS],
    machine: Machine,
    messages: Annotated[Messages, vary(without=("verbose",))],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SOURCE",
            help="The original: measures the error against it, and names the rule that produced the bytes.",
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="With --against: first make damaged files of an output of mxcli again, proven by its record.",
        ),
    ] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also compare names and shapes with the model that transformers builds from config.json (seconds).",
        ),
    ] = False,
) -> None:
    """Check a quantized checkpoint.

    Checks checkpoints from any producer: every byte against the record of mxcli, tensors against the model that the
    config states, every scale, code and plain value, layers against their siblings, the ignore list as loaders read it,
    the scales of fused layers, and what engines are known to refuse or to load wrongly. Problems exit with code 5, and
    so does a checkpoint of which nothing could be checked; warnings and notes do not. With --against, errors are those
    of the values that loaders decode. The text shows ten findings of a check, or --top; JSON has all of them, and the
    method of each check.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format nvfp4 -o tiny-llama-nvfp4
      mxcli verify tiny-llama-nvfp4
      mxcli verify tiny-llama-nvfp4 --against samples/tiny-llama --tp 2
      mxcli verify tiny-llama-nvfp4 --against samples/tiny-llama --repair
      mxcli verify tiny-llama-nvfp4 --for vllm,transformers
      mxcli verify tiny-llama-nvfp4 --json | jq '.findings[] | select(.severity == "problem")'
    """
    results.check([source, against])
    if repair and against is None:
        raise UsageError("--repair needs --against SOURCE: damaged tensors are made from the source again.")
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.verify.checks.record import Hashing
    from mxcli.flows.verify.subject import check_whole, subject_of

    engines = engines_of(serving.engines)
    check_whole(Path(source))
    repaired = _repaired(source, against) if repair and against is not None else ()
    subject = subject_of(open_checkpoint(source), serving.tensor_parallel, engines)
    with Hashing(subject) as hashing:  # while the checks are imported too
        from mxcli.flows.verify.verify import checked_originals, memory_to_verify, verify_subject
        from mxcli.flows.write.restore import open_floats
        from mxcli.output.verification import failure_sentence, verification_csv, verification_json, verification_text

        originals = None if against is None else checked_originals(open_floats(against, requantize=True), subject)
        backend = open_backend(machine, messages, memory_to_verify(subject, originals))
        with progress("verify", messages) as show:
            result = verify_subject(
                source,
                subject,
                backend=backend,
                against=against,
                originals=originals,
                deep=deep,
                hashing=hashing,
                on_progress=show,
            )
    result = dataclasses.replace(result, repaired=repaired)
    messages.notes(result.notes)
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: verification_json(result),
        csv=lambda: verification_csv(result),
        text=lambda screen: verification_text(result, screen, results.top),
    )
    if not result.is_sound:
        raise LimitError(failure_sentence(result))


def _repaired(source: str, against: str) -> tuple[Repair, ...]:
    """Restore the damaged files of an output; return them."""
    from mxcli.backends.cpu import Cpu
    from mxcli.flows.verify.repair import repair

    return repair(Path(source), against, Cpu())
