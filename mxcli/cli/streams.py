"""Where a verb's words go: the result to stdout or a file, everything else to stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import typer

from mxcli.cli.arguments import STDOUT
from mxcli.errors import EnvironmentFailure, InputError, RefusedError, UsageError, printable
from mxcli.output.screen import Screen, detect, spelled

INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell reports for a program that a closed pipe ended."""


@dataclass(frozen=True, slots=True)
class Talk:
    """What may be said on stderr: nothing with `quiet`, reasons too with `verbose`."""

    screen: Screen
    quiet: bool = False
    verbose: bool = False

    def notes(self, notes: Iterable[str]) -> None:
        """Remarks the user may want to know."""
        for note in notes if not self.quiet else ():
            tell(f"note: {note}")

    def detail(self, text: str) -> None:
        """A remark for those who asked for more."""
        if self.verbose and not self.quiet:
            tell(text)


def talk_on_stderr(*, quiet: bool, verbose: bool = False, no_color: bool = False) -> Talk:
    """Talk fitted to the stderr of this process."""
    return Talk(detect(sys.stderr, os.environ, no_color=no_color), quiet, verbose)


def stdout_screen(*, no_color: bool = False, wide: bool = False) -> Screen:
    """The screen behind stdout; with `wide` lines may be as long as they need."""
    screen = detect(sys.stdout, os.environ, no_color=no_color)
    return Screen(None, screen.color, screen.unicode) if wide else screen


def tell(text: str) -> None:
    """A line on stderr; a stderr that is closed or full is no error."""
    try:
        print(spelled(text, detect(sys.stderr, os.environ)), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr.fileno())


def deliver(text: str, file: str = STDOUT, *, verbatim: bool = False) -> None:
    """The result, ending in a newline, to stdout or to `file`, which appears whole or not at all.

    Text for people is spelled as the locale can show it; with `verbatim` all that the stream can encode stays as it is.
    A reader that closed the pipe ends the program silently. An interruption waits until all is written, so that no
    line is torn; a second one does not.
    """
    if file != STDOUT:
        _write(Path(file), text)
        return
    screen = detect(sys.stdout, os.environ)
    if verbatim:
        screen = Screen(unicode="utf" in (sys.stdout.encoding or "").lower())
    try:
        with _whole():
            print(spelled(text, screen), flush=True)
    except BrokenPipeError:
        silence(sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


def refuse_existing(files: Iterable[str | None], *, force: bool, sources: Iterable[str | None]) -> None:
    """Before any work: raises for a file that belongs to one of the `sources`, exists (without `force`) or has no
    directory to lie in."""
    named = tuple(source for source in sources if source)
    for file in files:
        if file is None or file == STDOUT:
            continue
        if not file:
            raise UsageError("a FILE is asked for by an empty name: give it one.")
        path = Path(file)
        if not path.parent.is_dir():
            raise InputError(f"{printable(file)}: its directory does not exist; create it first.")
        if path.is_dir():
            raise RefusedError(f"{printable(file)}: a directory; name a file in it.")
        refuse_source([path], named)
        if path.is_file() and not force:
            raise RefusedError(f"{printable(file)}: exists; use --force to replace it, or another name.")


def refuse_source(files: Iterable[Path], sources: Sequence[str]) -> None:
    """Raises RefusedError for a file that belongs to one of the sources: no --force lets it be written."""
    if not sources:
        return
    from mxcli.files.source import source_of

    for file in files:
        if source := source_of(file, sources):
            raise RefusedError(
                f"{printable(file)}: belongs to the source {printable(source)}; give another name, the source is never "
                "written to."
            )


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Turns an error of writing there into EnvironmentFailure."""
    try:
        yield
    except OSError as error:
        why = error.strerror or printable(error)
        raise EnvironmentFailure(f"{printable(path)}: cannot be written: {why}.") from error


def silence(descriptor: int) -> None:
    """Let what is still buffered for a broken descriptor vanish, so that exiting says nothing of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def _whole() -> Iterator[None]:
    """Raises a KeyboardInterrupt that comes meanwhile at the end of the `with` block, and a second one at once."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # only the main thread is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _write(path: Path, text: str) -> None:
    """Replaces the file as a whole; what is no regular file, such as a pipe, is written to."""
    replaces = path.is_file() or not path.exists()
    target = path.with_name(path.name + ".partial") if replaces else path
    with on_disk(path):
        try:
            target.write_text(text + "\n", encoding="utf-8")
            if replaces:
                target.replace(path)
        except OSError:
            if replaces:
                with suppress(OSError):
                    target.unlink(missing_ok=True)
            raise
