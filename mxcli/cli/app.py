"""The console entry point, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from mxcli.cli import (
    bench,
    bench_gemm,
    capture,
    compare,
    dequantize,
    diff,
    doctor,
    explain,
    formats,
    inspect,
    merge,
    quantize,
    recommend,
    report,
    verify,
)
from mxcli.cli.arguments import normalized
from mxcli.cli.streams import INTERRUPTED, silence, tell
from mxcli.errors import EnvironmentFailure, InputError, MxcliError, UsageError, printable

_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS}

app = typer.Typer(
    name="mxcli",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for verb in (
    inspect.inspect,
    quantize.quantize,
    merge.merge,
    report.report,
    compare.compare,
    recommend.recommend,
    dequantize.dequantize,
    capture.capture,
    verify.verify,
    diff.diff,
    formats.formats,
    explain.explain,
    doctor.doctor,
):
    app.command()(verb)
bench.bench.command()(bench_gemm.gemm)
app.add_typer(bench.bench, name="bench")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="[FILE]", help="With --version: versions as JSON, on stdout or in FILE."),
    ] = None,
) -> None:
    """Quantize, measure and compare block-scaled low-precision formats (OCP MX, NVFP4, FP8), bit for bit.

    \b
    Start here:
      mxcli inspect samples/tiny-llama
      mxcli report samples/tiny-llama --format nvfp4
      mxcli compare samples/tiny-llama --formats mxfp8
      mxcli quantize samples/tiny-llama --format mxfp8_e4m3 -o tiny-llama-mxfp8
      mxcli explain rceil

    Results go to stdout, everything else to stderr. Exit codes: 0 complete, 1 a bug of mxcli, 2 usage,
    3 input unreadable, 4 refused by policy, 5 a limit or verification failed, 6 environment, 130 interrupted.
    """
    if version:
        doctor.print_version(json)
        raise typer.Exit
    if context.invoked_subcommand is None:
        tell(context.get_help())
        raise typer.Exit(UsageError.exit_code)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line (of this process by default) and exits with its code."""
    _open_closed_streams()
    code = run(sys.argv[1:] if arguments is None else arguments)
    # All is said and done: a signal that still comes need not be told of in Python's words.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line, after its error, if any, is told on stderr."""
    try:
        code = app(args=normalized(arguments), prog_name="mxcli", standalone_mode=False, obj=tuple(arguments))
        sys.stdout.flush()
        return _told_interruption(code) if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort) as interruption:
        _tell_notes(interruption)
        return _told_interruption(INTERRUPTED)
    except Exception as error:
        failure = _failure(error)
        if "--debug" in arguments or os.environ.get("MXCLI_DEBUG", "0") not in ("", "0"):
            traceback.print_exception(error)
        tell(f"error: {failure}")
        _tell_notes(error)
        _flush_or_silence()
        return failure.exit_code


def _open_closed_streams() -> None:
    """A shell's `>&-` leaves no stream at all: what is said there goes nowhere, and is not an error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def _flush_or_silence() -> None:
    """What a full or closed stdout still holds would otherwise fail once more, and unseen, at the very end."""
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout.fileno())


def _tell_notes(error: BaseException) -> None:
    """What was noted on an error on its way, such as what it left behind."""
    for note in getattr(error, "__notes__", ()):
        tell(f"note: {note}")


def _told_interruption(code: int) -> int:
    if code == INTERRUPTED:
        tell("interrupted")
    return code


def _failure(error: Exception) -> MxcliError:
    """What any exception means to the user."""
    if isinstance(error, MxcliError):
        return error
    if usage := getattr(error, "format_message", None):
        return UsageError(_usage_sentence(error, usage()))
    if isinstance(error, MemoryError):
        return EnvironmentFailure("out of memory: free some, or work on fewer or smaller tensors (--include).")
    if isinstance(error, OSError):
        kind = EnvironmentFailure if error.errno in _EXHAUSTED else InputError
        where = f"{printable(error.filename)}: " if error.filename is not None else ""
        return kind(f"{where}{error.strerror or printable(error)}")
    return MxcliError(
        f"{type(error).__name__}: {printable(error)}. This is a bug: please report it with the output of "
        "`mxcli doctor` and of this command with --debug."
    )


def _usage_sentence(error: Exception, message: str) -> str:
    """Typer's sentence with its capital lowered, suggestions as a question, and the help that applies."""
    possible = getattr(error, "possibilities", None)
    if possible:
        message = f"{getattr(error, 'message', message)}. Did you mean {' or '.join(sorted(possible))}?"
    context = getattr(error, "ctx", None)
    verb = context.command_path if context is not None else "mxcli"
    end = "" if message.endswith((".", "?")) else "."
    return f"{message[:1].lower()}{message[1:]}{end} `{verb} --help` lists what there is."
