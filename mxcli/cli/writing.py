"""How a verb goes about writing a checkpoint: the options for it, checked, and what the first of two signals does."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.cli.machine import memory_size
from mxcli.cli.progress import progress
from mxcli.cli.streams import INTERRUPTED, tell
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.cli.streams import Talk
    from mxcli.files.progress import Share
    from mxcli.flows.write.pipeline import Outcome, WriteOptions

Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where an earlier run of this command was cut short, whatever ended it: finished tensors are kept, "
        "and the result is the same to the last byte. Begins anew where there is nothing to go on with.",
    ),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Most bytes of tensors in a file, such as 5G or 500M: files are split or joined to it, in order; a weight "
        "and its scales stay together, and one that is larger has a file of its own.  [default: as the source is "
        "split]",
    ),
]
ShardRange = Annotated[
    str | None,
    typer.Option(
        "--shard-range",
        metavar="I/N",
        help="Write the I-th of N shares of the files only, I from 1 to N: one on each of N machines with the same "
        "directory, in any order; `mxcli merge` then completes the output.",
    ),
]
_SHARE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Writing:
    """What was typed: whether to replace and to resume, which share of the files, and most bytes in one."""

    force: bool
    resume: bool
    share: Share | None = None
    max_shard_bytes: int | None = None


def asked(*, force: bool, resume: bool, max_shard_size: str | None, shard_range: str | None) -> Writing:
    """What was typed; raises UsageError for what means nothing."""
    size = None if max_shard_size is None else memory_size(max_shard_size, "--max-shard-size")
    return Writing(force, resume, None if shard_range is None else share_of(shard_range), size)


def share_of(text: str) -> Share:
    """The share that I/N means; raises UsageError for what means none."""
    from mxcli.files.progress import Share

    found = _SHARE.fullmatch(text.strip())
    share = Share(int(found[1]), int(found[2])) if found else None
    if share is None or not 1 <= share.number <= share.of:
        raise UsageError(
            f"--shard-range '{printable(text)}' is no share: give I/N with I from 1 to N, such as 1/4 to 4/4 on four "
            "machines."
        )
    return share


@contextmanager
def manner(verb: str, how: Writing, talk: Talk) -> Iterator[WriteOptions]:
    """How to write what was asked for: with a display of progress, and to the next tensor's end after a signal."""
    from mxcli.flows.write.pipeline import WriteOptions

    with progress(verb, talk) as show, stopping() as stop:
        yield WriteOptions(how.force, how.resume, how.share, stop, show)


@contextmanager
def stopping(what: str = "tensor") -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM came; a second one ends the process at once, as a kill would, whatever it is doing.

    A thread of its own waits for signals, since the main one sees them only between two steps of Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    stop = threading.Event()
    reading, written = os.pipe()
    os.set_blocking(written, False)

    def watch() -> None:
        while came := os.read(reading, 1):
            if came[0] not in _SIGNALS:
                continue
            if stop.is_set():
                tell("interrupted")
                os._exit(INTERRUPTED)
            stop.set()
            tell(f"interrupted: finishing the current {what}; a second time stops at once")

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    before = {each: signal.signal(each, lambda *_: None) for each in _SIGNALS}
    wakeup = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield stop.is_set
    finally:
        signal.set_wakeup_fd(wakeup)
        for each, handler in before.items():
            signal.signal(each, handler)
        os.close(written)
        watcher.join()
        os.close(reading)


def tell_unfinished(outcome: Outcome, output: str) -> None:
    """Says what an interrupted run leaves, and how to go on."""
    from mxcli.output.numbers import byte_size

    if not outcome.has_progress:
        tell(f"{printable(output)}: nothing was finished, and nothing is left behind.")
        return
    done = outcome.done + outcome.kept
    tell(
        f"{printable(output)}: {byte_size(done)} of {byte_size(done + outcome.left)} of the source are finished and "
        "kept; the same command with --resume goes on from there."
    )


def resumed_notes(outcome: Outcome) -> list[str]:
    """What a run did not have to do again."""
    from mxcli.output.numbers import byte_size

    total = outcome.done + outcome.kept + outcome.left
    return [f"Resumed: {byte_size(outcome.kept)} of {byte_size(total)} were finished before."] if outcome.kept else []
