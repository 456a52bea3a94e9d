"""`mxcli verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli import options
from mxcli.cli.forms import Forms, check_forms, deliver_forms
from mxcli.cli.machine import machine, open_backend
from mxcli.cli.progress import progress
from mxcli.cli.streams import talk_on_stderr
from mxcli.errors import LimitError


def verify(
    source: options.Source,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SOURCE",
            help="What it was made from: then errors are measured, and the rule that made the bytes is named.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tp",
            min=1,
            metavar="N",
            help="Also whether the weights divide over N devices in whole blocks (tensor parallelism).",
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
    """Check whether a quantized checkpoint is sound.

    Whoever made it: tensors are held against the configuration, scales and codes looked at one by one, the list of
    ignored modules read as its loaders read it, and scales compared within the layers that loaders fuse. Problems
    end with exit code 5, warnings and notes do not. With --against, errors are those of the values as loaders
    decode them. The text shows ten findings of a check, or --top; JSON has all, and says how each check is made.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format nvfp4 -o tiny-llama-nvfp4
      mxcli verify tiny-llama-nvfp4
      mxcli verify tiny-llama-nvfp4 --against samples/tiny-llama --tp 2
      mxcli verify tiny-llama-nvfp4 --json | jq '.findings[] | select(.severity == "problem")'
    """
    forms = Forms(json, None, csv, "name", top, wide, no_color, markdown)
    where = machine(device, threads, max_memory)
    check_forms(forms, force=force, sources=[source, against])
    talk = talk_on_stderr(quiet=quiet, no_color=no_color)
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.verify.subject import subject_of
    from mxcli.flows.verify.verify import checked_originals, memory_to_verify, verify_subject
    from mxcli.flows.write.restore import open_floats
    from mxcli.output.verification import failure_sentence, verification_csv, verification_json, verification_text

    subject = subject_of(open_checkpoint(source), tensor_parallel)
    originals = None if against is None else checked_originals(open_floats(against, requantize=True), subject)
    backend = open_backend(where, talk)
    check_memory(memory_to_verify(subject, originals), where.max_memory, backend.name)
    with progress("verify", talk) as show:
        result = verify_subject(
            source, subject, backend=backend, against=against, originals=originals, on_progress=show
        )
    talk.notes(result.notes)
    deliver_forms(
        forms,
        json=lambda: verification_json(result),
        csv=lambda: verification_csv(result),
        lines=lambda streamed: (),
        text=lambda screen: verification_text(result, screen, top),
    )
    if not result.is_sound:
        raise LimitError(failure_sentence(result))
