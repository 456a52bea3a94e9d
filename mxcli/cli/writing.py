"""Writing a checkpoint from the command line: options, the first of two signals, and interrupted runs."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.machine import memory_size
from mxcli.cli.options import DryRun, Engines, TensorParallel
from mxcli.cli.progress import progress
from mxcli.cli.terminal import INTERRUPTED, say
from mxcli.errors import UsageError, printable
from mxcli.files.loaders.engine import engines_of

if TYPE_CHECKING:
    from pathlib import Path

    from mxcli.cli.terminal import Messages
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.files.progress import Draft, Share
    from mxcli.flows.write.pipeline import Outcome, WriteOptions

_SHARE = re.compile(r"([0-9]{1,30})/([0-9]{1,30})")
_MOST_SHARES = 999_999
_SHOWN = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


NoVerify = Annotated[
    bool,
    typer.Option(
        "--no-verify",
        help="Do not check values, headers, index and configuration of what was written before it gets its final "
        "names; the record then says so.",
    ),
]


@dataclass(frozen=True, slots=True)
class Writing:
    """The directory to write, whether to resume, and the split into files and shares.

    Raises UsageError for an unreadable size or share.
    """

    heading: ClassVar[str] = "Writing"
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="DIR", help="Directory to write; it must be new or empty (or --force)."),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run of this command: finished tensors are kept if they and their source "
            "still have their hashes, and the result has the same bytes. Starts from scratch if nothing was finished. "
            "A complete output is checked.",
        ),
    ] = False
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Most bytes of tensors in a file, such as 5G or 500M. Files are split or joined in order; a weight "
            "and its scales stay together, and a larger one has its own file.  [default: as the source is split]",
        ),
    ] = None
    shard_range: Annotated[
        str | None,
        typer.Option(
            "--shard-range",
            metavar="I/N",
            help="Write only the I-th of N shares of the files (I from 1 to N), to divide the work among N machines "
            "with a common directory; `mxcli merge` completes the output.",
        ),
    ] = None

    no_verify: NoVerify = False

    def __post_init__(self) -> None:
        if self.max_shard_size is not None:
            memory_size(self.max_shard_size, "--max-shard-size")
        if self.shard_range is not None:
            share_of(self.shard_range)

    @property
    def share(self) -> Share | None:
        """The share of the files to write; None: all of them."""
        return None if self.shard_range is None else share_of(self.shard_range)

    @property
    def max_shard_bytes(self) -> int | None:
        """The most bytes of tensors in a file; None: as the source is split."""
        return None if self.max_shard_size is None else memory_size(self.max_shard_size, "--max-shard-size")

    @property
    def folder(self) -> str:
        """The directory to write; raises UsageError if none is named."""
        if self.output is None:
            raise UsageError("missing option '-o/--output DIR': name the directory to write.")
        return self.output


@dataclass(frozen=True, slots=True)
class WritingFor(Writing):
    """The directory to write, and the engines and devices that must load it."""

    dry_run: DryRun = False
    engines: Engines = None
    tensor_parallel: TensorParallel = None

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the engines that must load the output. Raises UsageError for an unknown one."""
        return engines_of(self.engines)


def share_of(text: str) -> Share:
    """Return the share that I/N means; raises UsageError for other text."""
    from mxcli.files.progress import Share

    found = _SHARE.fullmatch(text.strip())
    share = Share(int(found[1]), int(found[2])) if found else None
    if share is None or not 1 <= share.number <= share.of:
        raise UsageError(
            f"--shard-range '{printable(text)}' is not a share: give I/N with I from 1 to N, such as 1/4 to 4/4 on "
            "four machines."
        )
    if share.of > _MOST_SHARES:
        raise UsageError(f"--shard-range '{printable(text)}': N is too large: the most shares are {_MOST_SHARES:,}.")
    return share


@contextmanager
def write_options(
    verb: str,
    writing: Writing,
    messages: Messages,
    *,
    force: bool,
    others: tuple[Path, ...] = (),
    inputs: tuple[Path, ...] = (),
) -> Iterator[WriteOptions]:
    """Yield the options of a write: with a progress display, and stopping at the end of a tensor after a signal.
    `others` are files to write afterwards, `inputs` those that are read besides the source."""
    from mxcli.flows.write.pipeline import WriteOptions

    with progress(verb, messages) as show, stopping() as stop:
        check = output_check(writing.folder, skipped=writing.no_verify, reads_values=verb == "convert")
        yield WriteOptions(force, writing.resume, writing.share, stop, show, check, others, inputs)


def output_check(output: str, *, skipped: bool, reads_values: bool) -> Callable[[Path], None] | None:
    """Return the check of an output before it gets its final names; None if it is skipped. It `reads_values` that this
    run did not look at."""
    if skipped:
        return None
    if reads_values:
        from mxcli.flows.verify.written_values import check_written_values as check
    else:
        from mxcli.flows.verify.written import check_written as check
    return lambda folder: check(folder, output)


def check_output(
    checkpoint: Checkpoint,
    draft: Draft,
    folder: Path | None,
    writing: Writing,
    *,
    force: bool,
    others: tuple[Path, ...] = (),
    inputs: tuple[Path, ...] = (),
) -> None:
    """Refuse what writing a draft would refuse; without a folder, only what is wrong with the source."""
    from mxcli.files.complete import is_complete
    from mxcli.files.model_files import RECORD
    from mxcli.files.output_folder import check_output_folder
    from mxcli.files.preflight import check_draft, refuse_names_of
    from mxcli.files.progress import progress_path, read_progress, refuse_unfinished

    if folder is None:
        check_draft(draft, None)
        return
    refuse_names_of(folder, (*draft.names, RECORD), others)
    if writing.resume and is_complete(folder):
        return
    check_output_folder(folder, checkpoint, draft.names, force=force, resume=writing.resume, inputs=inputs)
    check_draft(draft, folder)
    if not (force or writing.resume):
        refuse_unfinished(folder, writing.share, read_progress(progress_path(folder, writing.share)))


@contextmanager
def stopping(what: str = "tensor") -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT, SIGTERM or SIGHUP came; a second signal ends the process at once.
    Those that the process was started to ignore, as by nohup, stay ignored.

    A separate thread waits for signals, since the main one sees them only between two steps of Python.
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
                say("interrupted")
                os._exit(INTERRUPTED)
            stop.set()
            say(f"interrupted: finishing the current {what}; a second signal stops at once")

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    heard = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, lambda *_: None) for each in heard}
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


def report_unfinished(outcome: Outcome, output: str) -> None:
    """Report what an interrupted run leaves, and how to continue it."""
    from mxcli.output.numbers import byte_size

    if not outcome.has_progress:
        say(f"{printable(output)}: nothing was finished, and nothing is left behind.")
        return
    done = outcome.done + outcome.kept
    say(
        f"{printable(output)}: {byte_size(done)} of {byte_size(done + outcome.left)} of the source are finished and "
        "kept; the same command with --resume continues from there."
    )


def outcome_notes(outcome: Outcome) -> list[str]:
    """Return notes on the work that an earlier run had finished, and on files of an earlier output that are kept."""
    return [*_resumed_notes(outcome), *stayed_notes(outcome.stayed)]


def stayed_notes(names: Sequence[str]) -> list[str]:
    """Return a note on files of an earlier output that were changed since."""
    if not names:
        return []
    more = f" and {len(names) - _SHOWN:,} more" if names[_SHOWN:] else ""
    shown = ", ".join(map(printable, names[:_SHOWN]))
    return [f"Kept, since they are not as mxcli wrote them in the output before: {shown}{more}."]


def _resumed_notes(outcome: Outcome) -> list[str]:
    from mxcli.output.numbers import byte_size

    if outcome.was_complete:
        return ["Nothing to do: the output is complete, and it and its source have the recorded hashes."]
    total = outcome.done + outcome.kept + outcome.left
    if outcome.kept == total and total:
        return ["Nothing to quantize: everything was finished before, and still has its hash."]
    return [f"Resumed: {byte_size(outcome.kept)} of {byte_size(total)} were finished before."] if outcome.kept else []
