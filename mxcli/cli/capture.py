"""`mxcli capture`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NoReturn

import typer

from mxcli.cli.arguments import listed
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, memory_size
from mxcli.cli.options import DryRun, Dtype
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.progress import progress
from mxcli.cli.terminal import INTERRUPTED, Messages, say
from mxcli.cli.texts import STDIN, check_text, read_text
from mxcli.cli.threads import check_threads, use_threads
from mxcli.cli.writing import Writing, stopping
from mxcli.errors import EnvironmentFailure, InputError, UsageError, printable

if TYPE_CHECKING:
    from mxcli.flows.capture.plan import CapturePlan, CaptureRequest
    from mxcli.flows.capture.run import CaptureRun


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """The layers to record and the text that the model reads."""

    heading: ClassVar[str] = "Recording"
    text: Annotated[
        str | None, typer.Option("--text", metavar="FILE", help="The text that the model reads, UTF-8; - is stdin.")
    ] = None
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            metavar="SELECTOR",
            help="Linear layers to record: a glob over whole dotted segments such as '*layers.1.*' or '*.q_proj', or "
            "re:REGEX. May be repeated.  [default: all]",
        ),
    ] = None
    roles: Annotated[
        str | None,
        typer.Option(
            "--roles",
            metavar="ROLE[,ROLE...]",
            help="Tensors to record: activation, gradient, weight.  [default: all three]",
        ),
    ] = None
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Record inputs and weights only, without a backward pass.")
    ] = False
    sample_rows: Annotated[
        int | None,
        typer.Option(
            "--sample-rows",
            min=1,
            metavar="N",
            help="Keep N tokens of each step, the same in all layers, drawn by --seed.  [default: all]",
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of --sample-rows.  [default: 0]")
    ] = None


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The steps to run."""

    heading: ClassVar[str] = "Steps"
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, metavar="N", help="Steps to record, a file each; the text repeats when it ends."
        ),
    ] = 1
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, metavar="N", help="Tokens in a window.  [default: 256, or the most the model supports]"
        ),
    ] = None
    batch: Annotated[
        int, typer.Option("--batch", min=1, metavar="N", help="Windows in a step, computed one after another.")
    ] = 1
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate",
            min=0.0,
            metavar="X",
            help="Update the weights after each step by X times their gradient (plain SGD); 0 leaves them unchanged.",
        ),
    ] = 0.0
    dtype: Dtype = None


@dataclass(frozen=True, slots=True)
class CaptureWriting(Writing):
    """The directory to write and the disk space to use."""

    max_disk: Annotated[
        str | None,
        typer.Option(
            "--max-disk", metavar="SIZE", help="Disk limit for all files, such as 8G; more is refused beforehand."
        ),
    ] = None
    on_error: Annotated[
        str,
        typer.Option(
            "--on-error",
            metavar="warn|raise",
            help="When a step cannot be recorded, as on a full disk: warn, report the steps written and exit with 6, "
            "or raise, the error alone with its own exit code.",
        ),
    ] = "warn"
    dry_run: DryRun = False


_WRITING = vary(
    only=("output", "resume", "max_disk", "on_error", "dry_run"),
    help={
        "resume": "Continue an interrupted run. With --learning-rate, finished steps are recomputed (not rewritten) to "
        "restore the weights."
    },
)

_DEVICE_HELP = {"device": "Device to compute on: auto is the first usable NVIDIA GPU, else the CPU."}


@verb
def capture(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_DIR",
            show_default=False,
            help="A directory with a causal language model that transformers loads.",
        ),
    ],
    record: RecordOptions,
    schedule: StepOptions,
    writing: Annotated[CaptureWriting, _WRITING],
    results: Annotated[Results, vary(only=("wide", "json", "force"))],
    machine: Annotated[Machine, vary(help=_DEVICE_HELP)],
    messages: Annotated[Messages, vary(without=("verbose",))],
) -> None:
    """Record activations, gradients and weights of a model.

    The model reads a text in windows, forward and backward, predicting each next token. For every linear layer, its
    input, the gradient of the mean loss with respect to its output, and its weight are written to a file per step, in
    a directory that is a source for the other verbs; its path is printed on stdout. Dropout is off. Values depend on
    the device and the number of threads. --resume continues an interrupted run. --force replaces the files of another
    run one by one, and removes those of later steps at the end. `mxcli.capture` does the same in your own training
    loop.

    \b
    Examples:
      mxcli capture samples/tiny-llama -o tiny-llama-steps --text samples/README.md --steps 2 --tokens 64
      mxcli report tiny-llama-steps/step-000001.safetensors --format nvfp4 --top 5
      mxcli capture samples/tiny-llama -o inputs --text samples/README.md --forward-only --sample-rows 16
      mxcli capture samples/tiny-llama -o more --text samples/README.md --steps 2 --batch 4 --dry-run
    """
    max_disk = None if writing.max_disk is None else memory_size(writing.max_disk, "--max-disk")
    results.check([model, None if record.text == STDIN else record.text])
    output = writing.folder
    _check(record, schedule)
    request = _request(record, schedule, writing.on_error)
    check_threads(machine.threads)
    text = read_text(check_text(record.text))
    if not Path(model).is_dir():
        raise InputError(f"{printable(model)}: no such directory; give one with a model that transformers loads.")
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.files.preflight import refuse_names_of
    from mxcli.flows.capture.plan import CaptureFolder, plan_capture

    checkpoint = open_checkpoint(model)
    use_threads(machine.threads)
    inputs = () if record.text in (None, STDIN) else (Path(str(record.text)),)
    folder = CaptureFolder(Path(output), results.force, writing.resume, max_disk, machine.max_bytes, inputs)
    plan = plan_capture(model, checkpoint, text, request, folder)
    refuse_names_of(folder.folder, plan.names, results.paths)
    messages.notes(plan.notes)
    if writing.dry_run:
        _deliver_plan(plan, results, messages)
        return
    captured = _capture(plan, machine, messages)
    if captured.stopped is not None:
        _deliver_stopped(captured, results, messages)
    if not captured.complete:
        say(
            f"{printable(output)}: {len(captured.losses):,} of {schedule.steps:,} steps are written; the same command "
            "with --resume continues from there."
        )
        raise typer.Exit(INTERRUPTED)
    from mxcli.output.capture import capture_json

    deliver_forms(results, messages.stdout(), json=lambda: capture_json(captured), text=lambda screen: output)


def _check(record: RecordOptions, schedule: StepOptions) -> None:
    """Raise UsageError for a missing text and for options that exclude each other."""
    check_text(record.text)
    if record.forward_only and schedule.learning_rate:
        raise UsageError("--learning-rate needs gradients, which --forward-only omits: leave one of them out.")
    if not math.isfinite(schedule.learning_rate):
        raise UsageError(
            f"--learning-rate {schedule.learning_rate}: give a finite number, or 0 to leave the weights unchanged."
        )


def _request(record: RecordOptions, schedule: StepOptions, on_error: str) -> CaptureRequest:
    from mxcli.flows.capture.arguments import ON_ERROR, parse_roles
    from mxcli.flows.capture.model import parse_dtype
    from mxcli.flows.capture.plan import CaptureRequest

    if on_error not in ON_ERROR:
        raise UsageError(f"--on-error {printable(on_error)}: give {' or '.join(ON_ERROR)}.")
    request = CaptureRequest(
        steps=schedule.steps,
        batch=schedule.batch,
        tokens=schedule.tokens,
        layers=record.layers,
        roles=parse_roles(listed(record.roles, "--roles") or None),
        forward_only=record.forward_only,
        sample_rows=record.sample_rows,
        seed=record.seed or 0,
        learning_rate=schedule.learning_rate,
        dtype=parse_dtype(schedule.dtype),
        on_error=on_error,
    )
    if not request.recorded:
        raise UsageError("--roles gradient with --forward-only leaves nothing to record: leave one of them out.")
    return request


def _deliver_plan(plan: CapturePlan, results: Results, messages: Messages) -> None:
    from mxcli.output.plans import capture_plan_json, capture_plan_text

    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: capture_plan_json(plan),
        text=lambda screen: capture_plan_text(plan, screen),
    )


def _deliver_stopped(captured: CaptureRun, results: Results, messages: Messages) -> NoReturn:
    """Report the steps that are written, as JSON where requested, and the error that ended the recording."""
    if results.json is not None:
        from mxcli.output.capture import capture_json

        deliver_forms(results, messages.stdout(), json=lambda: capture_json(captured), text=lambda screen: "")
    written, steps = len(captured.losses), captured.plan.request.steps
    say(f"error: {captured.stopped}.")
    if written:
        say(
            f"{printable(captured.plan.output.folder)}: {written:,} of {steps:,} steps are written; the same command "
            "with --resume continues from there."
        )
    raise typer.Exit(EnvironmentFailure.exit_code)


def _capture(plan: CapturePlan, machine: Machine, messages: Messages) -> CaptureRun:
    from mxcli.flows.capture.model import compute_device
    from mxcli.flows.capture.run import capture_model

    with progress("capture", messages) as show, stopping("step") as stop:
        captured = capture_model(plan, device=compute_device(machine.device), stop=stop, on_step=show)
    messages.notes(captured.notes)
    if plan.earlier:
        messages.notes([f"Resumed: {len(plan.earlier):,} of {plan.request.steps:,} steps were there before."])
    return captured
