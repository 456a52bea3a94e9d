"""Console entry point, and the only place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, NoReturn

import typer

from mxcli.cli.arguments import normalized
from mxcli.cli.terminal import INTERRUPTED, say, silence
from mxcli.cli.verbs import VerbGroup
from mxcli.errors import EnvironmentFailure, InputError, MxcliError, UsageError, printable

_EXHAUSTED = {
    *(errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS, errno.EFBIG),
    errno.EBADF,  # a standard stream that is closed
}

_ROOM_BYTES = 150 << 20
_SHORT = "out of memory: this process may not use enough to load its libraries; raise its limit (ulimit -v, -d)."
_NO_THREAD = "can't start new thread"
"""What Python says when the system refuses it a thread."""
_NOT_LOADED = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")

app = typer.Typer(
    name="mxcli",
    cls=VerbGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


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
        from mxcli.cli.doctor import print_version

        print_version(json)
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(context.get_help())
        raise typer.Exit(UsageError.exit_code)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (that of this process by default) and exit with its code."""
    _open_closed_streams()
    code = run(sys.argv[1:] if arguments is None else arguments)
    # Default SIGINT again: no traceback while exiting.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line, print its error on stderr, and return its exit code."""
    try:
        _check_room()
        words = normalized(arguments)
        code = _program().main(args=words, prog_name="mxcli", standalone_mode=False, obj=tuple(arguments))
        sys.stdout.flush()
        return _report_interruption(code) if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort) as interruption:
        if _is_importing(interruption) and _is_limited():
            say(f"error: {_SHORT}")
            return EnvironmentFailure.exit_code
        _print_notes(interruption)
        return _report_interruption(INTERRUPTED)
    except Exception as error:
        failure = _failure(error)
        if "--debug" in arguments or os.environ.get("MXCLI_DEBUG", "0") not in ("", "0"):
            traceback.print_exception(error)
        say(f"error: {failure}")
        _print_notes(error)
        _flush_or_silence()
        return failure.exit_code


@cache
def _program() -> Any:
    """Return the program, built once: its verbs and their options are kept for the next command line."""
    return typer.main.get_command(app)


def _check_room() -> None:
    """Raise EnvironmentFailure if a limit of this process leaves too little memory to load numpy, whose BLAS would end
    the process by itself."""
    if _is_limited():
        try:
            mmap.mmap(-1, _ROOM_BYTES).close()
        except (OSError, ValueError) as error:
            raise EnvironmentFailure(_SHORT) from error


def _is_limited() -> bool:
    """Return whether the memory of this process is limited (`ulimit -v` or `-d`)."""
    if sys.platform == "win32":
        return False
    import resource

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _is_importing(error: BaseException) -> bool:
    """Return whether an error was raised while a module was loaded. numpy's BLAS interrupts its process if it cannot
    start its threads."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and "importlib" in last.tb_frame.f_code.co_filename


def _open_closed_streams() -> None:
    """Open the null device for streams that a shell closed, as with `>&-`: stdout for reading only, so that a result
    that goes nowhere is an error."""
    for descriptor, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # the lowest number that is free: this one
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


def _flush_or_silence() -> None:
    """Write stdout out now, since a full or closed one would fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout.fileno())


def _print_notes(error: BaseException) -> None:
    """Print the notes that an error carries, such as what it left behind."""
    for note in getattr(error, "__notes__", ()):
        say(f"note: {note}")


def _report_interruption(code: int) -> int:
    if code == INTERRUPTED:
        say("interrupted")
    return code


def _failure(error: Exception) -> MxcliError:
    """Return the error that an exception is to the user."""
    if isinstance(error, MxcliError):
        return error
    if usage := getattr(error, "format_message", None):
        return UsageError(_usage_sentence(error, usage()))
    if isinstance(error, MemoryError):
        return EnvironmentFailure("out of memory: free some, or work on fewer or smaller tensors (--include).")
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return EnvironmentFailure(
            "this process may start no more threads: raise its limits (ulimit -u, -v), or end other programs."
        )
    if isinstance(error, ImportError | OSError) and any(words in str(error) for words in _NOT_LOADED):
        return EnvironmentFailure(_SHORT)
    if isinstance(error, OSError):
        kind = EnvironmentFailure if error.errno in _EXHAUSTED else InputError
        where = f"{printable(error.filename)}: " if error.filename is not None else ""
        return kind(f"{where}{error.strerror or printable(error)}")
    return MxcliError(
        f"{type(error).__name__}: {printable(error)}. This is a bug: please report it with the output of "
        "`mxcli doctor` and of this command with --debug."
    )


def _usage_sentence(error: Exception, message: str) -> str:
    """Return typer's message with its capital lowered, suggestions as a question, and the help to read."""
    possible = getattr(error, "possibilities", None)
    if possible:
        message = f"{getattr(error, 'message', message)}. Did you mean {' or '.join(sorted(possible))}?"
    context = getattr(error, "ctx", None)
    verb = context.command_path if context is not None else "mxcli"
    end = "" if message.endswith((".", "?")) else "."
    return f"{message[:1].lower()}{message[1:]}{end} See `{verb} --help`."
