"""How far a long run has come, on stderr: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from mxcli.cli.streams import Talk, tell
from mxcli.errors import printable
from mxcli.output.numbers import byte_size, duration
from mxcli.output.screen import shortened

SECONDS_BETWEEN_LINES = 5.0
_NAME_WIDTH = 40


class Progress(Protocol):
    """Takes bytes of the source done, bytes in all, and the tensor just done."""

    def __call__(self, done: int, total: int, name: str) -> None:
        """Shows it."""


@contextmanager
def progress(what: str, talk: Talk) -> Iterator[Progress]:
    """A progress display for the `with` block; nothing is shown with `quiet`."""
    if talk.quiet:
        yield lambda done, total, name: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(what, talk) as shown:
            yield shown
    else:
        yield _lines(what)


def _lines(what: str) -> Progress:
    began = told = time.monotonic()

    def show(done: int, total: int, name: str) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < SECONDS_BETWEEN_LINES or done >= total:
            return
        told = now
        tell(f"{what}: {progress_words(done, total, now - began)}, {printable(name)}")

    return show


def progress_words(done: int, total: int, seconds: float) -> str:
    """Bytes done of all, rate, and, once there is something to judge by, how long the rest will take at it."""
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {duration((total - done) / rate)} left" if done * 100 > total else ""
    return f"{byte_size(done)} of {byte_size(total)}, {byte_size(rate)}/s{left}"


@contextmanager
def _bar(what: str, talk: Talk) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, no_color=not talk.screen.color)
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[words]}", markup=False))
    began = time.monotonic()
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, words="")

        def show(done: int, total: int, name: str) -> None:
            words = progress_words(done, total, time.monotonic() - began)
            shown = shortened(printable(name), _NAME_WIDTH, talk.screen)
            bar.update(task, completed=done, total=total, words=f"{words} {shown}")

        yield show
