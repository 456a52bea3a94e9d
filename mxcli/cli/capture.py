"""`mxcli capture`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.cli import options, writing
from mxcli.cli.arguments import STDOUT, listed
from mxcli.cli.machine import machine, memory_size
from mxcli.cli.progress import progress
from mxcli.cli.streams import INTERRUPTED, deliver, refuse_existing, stdout_screen, talk_on_stderr, tell
from mxcli.errors import EnvironmentFailure, InputError, UsageError, printable

if TYPE_CHECKING:
    from mxcli.flows.capture.model import Text

_STDIN = "-"
_THREADS_A_PROCESSOR = 16

ModelDirectory = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_DIR",
        show_default=False,
        help="A directory with a causal language model that transformers loads.",
    ),
]
TextFile = Annotated[
    str | None, typer.Option("--text", metavar="FILE", help="The text that the model reads, UTF-8; - is stdin.")
]
ForwardOnly = Annotated[
    bool, typer.Option("--forward-only", help="Inputs and weights only: nothing is computed backward.")
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        "--layers",
        metavar="SELECTOR",
        help="Linear layers to record, as --include takes them: '*layers.1.*', '*.q_proj', re:REGEX. May be repeated; "
        "a layer that any of them matches is taken.  [default: all]",
    ),
]
Roles = Annotated[
    str | None,
    typer.Option(
        "--roles",
        metavar="ROLE[,ROLE...]",
        help="What to record: activation, gradient, weight.  [default: all three]",
    ),
]
SampleRows = Annotated[
    int | None,
    typer.Option(
        "--sample-rows",
        min=1,
        metavar="N",
        help="Keep N tokens of each step, the same in all layers, chosen by --seed.  [default: all]",
    ),
]
Steps = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Steps to record, a file each: the text is read on and on.")
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        metavar="N",
        help="Tokens in a window, which the model reads at a time.  [default: 256, or what the model can]",
    ),
]
Batch = Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Windows in a step, one after another.")]
LearningRate = Annotated[
    float,
    typer.Option(
        "--learning-rate",
        min=0.0,
        metavar="X",
        help="Change the weights after each step by X times their gradient (plain SGD); 0 leaves them as they are.",
    ),
]
MaxDisk = Annotated[
    str | None,
    typer.Option("--max-disk", metavar="SIZE", help="Most disk for all files, such as 8G; more is refused beforehand."),
]


def capture(
    model: ModelDirectory,
    output: options.Output = None,
    text: TextFile = None,
    forward_only: ForwardOnly = False,
    layers: Layers = None,
    roles: Roles = None,
    sample_rows: SampleRows = None,
    steps: Steps = 1,
    tokens: Tokens = None,
    batch: Batch = 1,
    learning_rate: LearningRate = 0.0,
    seed: options.Seed = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    max_disk: MaxDisk = None,
    dry_run: options.DryRun = False,
    resume: writing.Resume = False,
    force: options.Force = False,
    json: options.Json = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Record activations, gradients and weights of a model.

    The model reads a text in windows, forward and backward, to predict each next token. Of every linear layer its
    input, the gradient of the mean loss with respect to its output, and its weight go to a file per step, in a
    directory that is a source for the other verbs; its path is printed on stdout. Dropout is off. Values are what the
    device and number of threads compute. A run that was cut short is gone on with by --resume: with a learning rate it
    computes the steps that are there once more. --force replaces the files of another run one by one, and removes those
    of later steps at the end. `mxcli.capture` does the same in a training loop of your own.

    \b
    Examples:
      mxcli capture samples/tiny-llama -o tiny-llama-steps --text samples/README.md --steps 2 --tokens 64
      mxcli report tiny-llama-steps/step-000001.safetensors --format nvfp4 --top 5
      mxcli capture samples/tiny-llama -o inputs --text samples/README.md --forward-only --sample-rows 16
      mxcli capture samples/tiny-llama -o more --text samples/README.md --steps 2 --batch 4 --dry-run
    """
    where = machine(device, threads, max_memory)
    disk = None if max_disk is None else memory_size(max_disk, "--max-disk")
    refuse_existing([json], force=force, sources=[model, None if text == _STDIN else text])
    if output is None:
        raise UsageError("missing option '-o/--output DIR': name the directory to write.")
    if text is None:
        raise UsageError("missing option '--text FILE': name the text that the model is to read, or - for stdin.")
    if not text:
        raise UsageError("--text '': names no file; give one, or - for stdin.")
    if forward_only and learning_rate:
        raise UsageError("--learning-rate with --forward-only: without gradients nothing is learned; leave one out.")
    if not math.isfinite(learning_rate):
        raise UsageError(
            f"--learning-rate {learning_rate}: give a finite number, or 0 to leave the weights as they are."
        )
    from mxcli.flows.capture.arguments import known_roles
    from mxcli.flows.capture.model import compute_device, stated_dtype
    from mxcli.flows.capture.plan import CaptureFolder, CaptureRequest, plan_capture
    from mxcli.flows.capture.run import capture_model
    from mxcli.output.capture import capture_json, capture_plan_json, capture_plan_text

    asked = CaptureRequest(
        steps=steps,
        batch=batch,
        tokens=tokens,
        layers=layers,
        roles=known_roles(listed(roles, "--roles") or None),
        forward_only=forward_only,
        sample_rows=sample_rows,
        seed=seed or 0,
        learning_rate=learning_rate,
        dtype=stated_dtype(dtype),
    )
    if not asked.recorded:
        raise UsageError("--roles gradient with --forward-only: there would be nothing to record; leave one out.")
    _check_threads(where.threads)
    talk = talk_on_stderr(quiet=quiet, no_color=no_color)
    read = _read_text(text)
    if not Path(model).is_dir():
        raise InputError(f"{printable(model)}: no such directory; give one with a model that transformers loads.")
    from mxcli.files.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    _use_threads(where.threads)
    place = CaptureFolder(Path(output), force, resume, disk, where.max_memory)
    plan = plan_capture(model, checkpoint, read, asked, place)
    talk.notes(plan.notes)
    if dry_run:
        if json is not None:
            deliver(capture_plan_json(plan), json)
        if json != STDOUT:
            deliver(capture_plan_text(plan, stdout_screen(no_color=no_color, wide=wide)))
        return
    with progress("capture", talk) as show, writing.stopping("step") as stop:
        captured = capture_model(plan, device=compute_device(where.device), stop=stop, on_step=show)
    talk.notes(captured.notes)
    if plan.kept:
        talk.notes([f"Resumed: {len(plan.kept):,} of {steps:,} steps were there before."])
    if not captured.complete:
        tell(
            f"{printable(output)}: {len(captured.losses):,} of {steps:,} steps are there; the same command with "
            "--resume goes on from there."
        )
        raise typer.Exit(INTERRUPTED)
    if json is not None:
        deliver(capture_json(captured), json)
    if json != STDOUT:
        deliver(output)


def _read_text(file: str) -> Text:
    from mxcli.flows.capture.model import stated_text

    if file == _STDIN:
        return stated_text("stdin", sys.stdin.buffer.read())
    return stated_text(file, Path(file).read_bytes())


def _check_threads(threads: int | None) -> None:
    """Raises EnvironmentFailure for more threads than the machine can start: torch dies of it without a word."""
    most = _THREADS_A_PROCESSOR * (os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise EnvironmentFailure(
            f"--threads {threads}: more than {most}, {_THREADS_A_PROCESSOR} for each processor of this machine; ask "
            "for fewer."
        )


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
