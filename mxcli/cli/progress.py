"""Progress of a long run on stderr: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from mxcli.cli.terminal import Messages, say
from mxcli.errors import printable
from mxcli.output.screen import shortened

SECONDS_BETWEEN_LINES = 5.0
_NAME_WIDTH = 40


class Progress(Protocol):
    """A display of bytes done, bytes in total, and the tensor just done."""

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show the progress."""


@contextmanager
def progress(what: str, messages: Messages, unit: str | None = None) -> Iterator[Progress]:
    """Yield a progress display for the `with` block, in bytes or in a `unit`; it shows nothing if messages are
    quiet."""
    if messages.quiet:
        yield lambda done, total, name: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(what, messages, unit) as shown:
            yield shown
    else:
        yield _lines(what, unit)


@contextmanager
def advancing(what: str, messages: Messages, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that adds bytes to a progress display of `total` bytes, with the name of the tensor just
    done."""
    done = 0
    with progress(what, messages) as show:

        def advance(nbytes: int, name: str) -> None:
            nonlocal done
            done += nbytes
            show(done, total, name)

        yield advance


def _lines(what: str, unit: str | None) -> Progress:
    began = shown = time.monotonic()

    def show(done: int, total: int, name: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < SECONDS_BETWEEN_LINES or done >= total:
            return
        shown = now
        say(f"{what}: {progress_words(done, total, now - began, unit)}, {printable(name)}")

    return show


def progress_words(done: int, total: int, seconds: float, unit: str | None = None) -> str:
    """Return bytes, or units, done of the total, the rate, and from 1 % on the time that is left."""
    from mxcli.output.numbers import byte_size, duration

    rate = done / seconds if seconds > 0 else 0.0
    left = f", {duration((total - done) / rate)} left" if done * 100 > total else ""
    if unit is not None:
        return f"{done:,} of {total:,} {unit}, {rate:,.0f}/s{left}"
    return f"{byte_size(done)} of {byte_size(total)}, {byte_size(rate)}/s{left}"


@contextmanager
def _bar(what: str, messages: Messages, unit: str | None) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    screen = messages.stderr()
    console = Console(stderr=True, no_color=not screen.color)
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[words]}", markup=False))
    began = time.monotonic()
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, words="")

        def show(done: int, total: int, name: str) -> None:
            words = progress_words(done, total, time.monotonic() - began, unit)
            shown = shortened(printable(name), _NAME_WIDTH, screen)
            bar.update(task, completed=done, total=total, words=f"{words} {shown}")

        yield show
