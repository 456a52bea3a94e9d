"""Streams of a verb: the result goes to stdout or a file, everything else to stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, ClassVar

import typer

from mxcli.cli.arguments import STDOUT
from mxcli.errors import EnvironmentFailure, InputError, RefusedError, UsageError, printable
from mxcli.output.screen import Screen, detect, spelled

INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit code that a shell reports for a program ended by a closed pipe."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages on stderr, and the looks of both streams."""

    heading: ClassVar[str] = "Messages"
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only: no progress, notes or hints.")] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also report why each tensor is quantized or kept.")
    ] = False
    no_color: Annotated[bool, typer.Option("--no-color", help="No colors (also NO_COLOR and TERM=dumb).")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback with an error (also MXCLI_DEBUG=1).")] = (
        False
    )

    def notes(self, notes: Iterable[str]) -> None:
        """Print remarks that the user may want to know, unless quiet."""
        for note in notes if not self.quiet else ():
            say(f"note: {note}")

    def detail(self, text: str) -> None:
        """Print a remark if verbose."""
        if self.verbose and not self.quiet:
            say(text)

    def stderr(self) -> Screen:
        """Return the screen behind stderr."""
        return detect(sys.stderr, os.environ, no_color=self.no_color)

    def stdout(self, *, wide: bool = False) -> Screen:
        """Return the screen behind stdout; with `wide`, lines may have any length."""
        screen = detect(sys.stdout, os.environ, no_color=self.no_color)
        return Screen(None, screen.color, screen.unicode) if wide else screen


def say(text: str) -> None:
    """Print a line on stderr; a closed or full stderr is ignored."""
    try:
        print(spelled(text, detect(sys.stderr, os.environ)), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr.fileno())


def deliver(text: str, file: str = STDOUT, *, verbatim: bool = False) -> None:
    """Write the result and a newline to stdout, or to `file`, which appears whole or not at all.

    Text for people is spelled as the locale can show it; `verbatim` text keeps every character that the stream can
    encode. A closed pipe ends the program silently. The first interruption waits until everything is written, so that
    no line is torn; a second one does not wait.
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
    """Refuse, before any work, a file that belongs to one of the `sources`, exists (without `force`) or has no
    directory."""
    named = tuple(source for source in sources if source)
    for file in files:
        if file is None or file == STDOUT:
            continue
        if not file:
            raise UsageError("the name of an output FILE is empty: give it one.")
        path = Path(file)
        if not path.parent.is_dir():
            raise InputError(f"{printable(file)}: its directory does not exist; create it first.")
        if path.is_dir():
            raise RefusedError(f"{printable(file)}: a directory; name a file in it.")
        refuse_source([path], named)
        if path.is_file() and not force:
            raise RefusedError(f"{printable(file)}: exists; use --force to replace it, or another name.")


def refuse_source(files: Iterable[Path], sources: Sequence[str]) -> None:
    """Raise RefusedError for a file that belongs to one of the sources, with --force too."""
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
    """Turn an error of writing to `path` into EnvironmentFailure."""
    try:
        yield
    except OSError as error:
        why = error.strerror or printable(error)
        raise EnvironmentFailure(f"{printable(path)}: cannot be written: {why}.") from error


def silence(descriptor: int) -> None:
    """Discard what is buffered for a broken descriptor, so that exiting does not report it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def _whole() -> Iterator[None]:
    """Hold a KeyboardInterrupt back until the end of the `with` block; raise a second one at once."""
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
    """Replace a regular file as a whole; write into anything else, such as a pipe."""
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
