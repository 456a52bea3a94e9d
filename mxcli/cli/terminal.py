"""Streams of a verb: the result goes to stdout or a file, everything else to stderr."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, ClassVar

import typer

from mxcli.atomic import whole_file
from mxcli.cli.arguments import STDOUT
from mxcli.errors import (
    EnvironmentFailure,
    InputError,
    MxcliError,
    RefusedError,
    UsageError,
    printable,
    together,
    written_to,
)
from mxcli.output.screen import Screen, detect, spelled

INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit code that a shell reports for a program ended by a closed pipe."""
_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")
_NEW = 0o666
"""Permissions of a new file, before the umask."""


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
    encode, but to a terminal control characters are escaped. A closed pipe ends the program silently. The first
    interruption waits until everything is written, so that no line is torn; a second one does not wait.
    """
    if file != STDOUT:
        _write(Path(file), text)
        return
    screen = detect(sys.stdout, os.environ)
    if verbatim:
        screen = Screen(unicode="utf" in (sys.stdout.encoding or "").lower())
        text = _visible(text) if sys.stdout.isatty() else text
    try:
        with _whole():
            print(spelled(text, screen), flush=True)
    except BrokenPipeError:
        silence(sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except OSError as error:
        raise EnvironmentFailure(f"standard output cannot be written: {error.strerror}.") from error


def refuse_existing(files: Iterable[str | None], *, force: bool, sources: Iterable[str | None]) -> None:
    """Refuse, before any work, files that cannot be written or may not be; raises one error for all of them."""
    refuse_all(output_problems(files, force=force, sources=sources))


def output_problems(
    files: Iterable[str | None], *, force: bool, sources: Iterable[str | None], streams: bool = True
) -> Iterator[MxcliError]:
    """Yield why each file may not be written: it has no directory, cannot be written, belongs to one of the `sources`,
    exists (without `force`), or is a pipe or terminal (without `streams`)."""
    named = tuple(source for source in sources if source)
    for file in files:
        if file is None or file == STDOUT:
            continue
        try:
            _check_output(file, force=force, sources=named, streams=streams)
        except MxcliError as problem:
            yield problem


def refuse_all(problems: Iterable[MxcliError]) -> None:
    """Raise an error for all problems, if there are any: with several the exit code is that of the first."""
    found = list(problems)
    if len(found) == 1:
        raise found[0]
    if found:
        raise together(type(found[0]), "outputs", [reason for problem in found for reason in problem.reasons])


def _check_folder_of(path: Path) -> None:
    """Refuse a file or directory whose name is too long, or whose directory is missing or cannot be written to."""
    shown, folder = printable(path), path.parent
    try:
        if not folder.is_dir():
            raise InputError(f"{shown}: its directory does not exist; create it first.")
        longest = os.pathconf(folder, "PC_NAME_MAX")
    except OSError as error:
        raise InputError(f"{shown}: {error.strerror}.") from error
    if len(os.fsencode(path.name)) > longest:
        raise UsageError(f"{shown}: a name of {len(os.fsencode(path.name)):,} bytes; the most there is {longest:,}.")
    _check_writable(folder, path)


def _check_writable(folder: Path, output: Path) -> None:
    """Refuse an output in a directory that nothing can be written to."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentFailure(f"{printable(output)}: cannot be written: no permission for {printable(folder)}.")


def folder_problems(option: str, name: str) -> Iterator[MxcliError]:
    """Yield why a directory of results cannot be made or written to."""
    folder = Path(name)
    try:
        if not name.strip():
            raise UsageError(f"{option}: the name of the directory is empty: give it one.")
        if os.path.lexists(folder) and not folder.is_dir():
            raise RefusedError(f"{printable(name)}: a file; {option} takes a directory.")
        if folder.is_dir():
            _check_writable(folder, folder)
        else:
            _check_folder_of(folder)
    except MxcliError as problem:
        yield problem


def _check_output(file: str, *, force: bool, sources: Sequence[str], streams: bool) -> None:
    if not file.strip():
        raise UsageError("the name of an output FILE is empty: give it one.")
    if "\0" in file:
        raise UsageError(f"{printable(file)}: a name cannot hold a NUL character.")
    path = Path(file)
    shown = printable(file)
    if is_stream(path) and not streams:
        raise UsageError(f"{shown}: a pipe or device, and this output is not written in order; name a file.")
    if not is_stream(path):
        _check_folder_of(path)
    refuse_source([path], sources)
    if is_stream(path):
        return
    if path.is_dir():
        raise RefusedError(f"{shown}: a directory; name a file in it.")
    if path.exists() and not path.is_file():
        raise RefusedError(f"{shown}: a device or socket; name a file.")
    if os.path.lexists(path) and not force:
        raise RefusedError(f"{shown}: exists; use --force to replace it, or another name.")


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


def _visible(text: str) -> str:
    """Return the text with every character escaped that could control a terminal, but for line ends and tabs."""
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def is_stream(path: Path) -> bool:
    """Return whether a path is a pipe, terminal, null device or open descriptor: written into, not replaced."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path such as /dev/stdout or /dev/fd/3 names, if any."""
    if str(path) in _STREAMS:
        return _STREAMS[str(path)]
    found = _DESCRIPTOR.fullmatch(str(path))
    return int(found[1]) if found else None


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, or write into a stream; what UTF-8 cannot encode is escaped."""
    content = f"{text}\n".encode(errors="backslashreplace")
    with written_to(path):
        if not is_stream(path):
            with whole_file(path, replace=True, mode=_mode(path)) as file:
                file.write(content)
            return
        descriptor = _descriptor(path)
        sys.stdout.flush()
        with open(path if descriptor is None else os.dup(descriptor), "wb") as stream:
            stream.write(content)


def _mode(path: Path) -> int:
    """Return the permissions of a file that is replaced, or those of a new one."""
    try:
        return stat.S_IMODE(path.lstat().st_mode) & _NEW if path.is_file() and not path.is_symlink() else _NEW
    except OSError:
        return _NEW
