"""The watch over a case: what it starts, connects to and writes, what it prints, and how long and large it gets."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

MOST_SECONDS, MOST_BYTES, MOST_CHARACTERS = 10.0, 1 << 30, 60_000
_TIMERS = (
    (signal.ITIMER_PROF, signal.SIGPROF, 3 * MOST_SECONDS),
    (signal.ITIMER_REAL, signal.SIGALRM, 9 * MOST_SECONDS),
)
"""Timers that end a case, by the time that this process computes, and by the clock if it waits; with their signals."""
_STARTS = frozenset(
    ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
     "socket.connect", "socket.getaddrinfo", "socket.bind", "urllib.Request", "pty.spawn", "webbrowser.open")
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = frozenset(
    ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "os.chown",
     "os.utime", "os.setxattr", "shutil.rmtree", "shutil.move")
)  # fmt: skip


@dataclass
class Guard:
    """The watch over what this process starts and writes: `allowed` are the folders in which a case may write, `late`
    is called once after as many events as `countdown` says."""

    allowed: tuple[str, ...] = ()
    active: bool = False
    seen: list[str] = field(default_factory=list)
    countdown: int = 0
    late: Callable[[], None] | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an event of Python that a case must not cause."""
        if not self.active:
            return
        if self.late is not None:
            self._count()
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & _WRITES:
                self._look(event, arguments[0])
        elif event in _CHANGES:
            paths = (
                arguments[1:2] if event in ("os.link", "os.symlink") else arguments[: 2 if event == "os.rename" else 1]
            )
            if event in ("os.truncate", "shutil.rmtree", "shutil.move") or arguments[-1] == -1:
                for path in paths:  # a path below an open folder was looked at when that was opened
                    self._look(event, path)
        elif event in _STARTS:
            self.seen.append(f"{event} {str(arguments)[:200]}")

    def _count(self) -> None:
        self.countdown -= 1
        if self.countdown == 0 and self.late is not None:
            late, self.late, self.active = self.late, None, False
            late()
            self.active = True

    def _look(self, event: str, path: object) -> None:
        if isinstance(path, int):
            return
        text = os.path.abspath(os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path))
        if text != os.devnull and not any(text == folder or text.startswith(folder + "/") for folder in self.allowed):
            self.seen.append(f"{event} of {text[:200]}")


@dataclass
class Watched:
    """What came of a case: its exit code or other outcome, its stderr, and what it must not have done."""

    code: int | str = ""
    text: str = ""
    found: list[str] = field(default_factory=list)


def end_cases_by_signals() -> None:
    """Let the timers of cases end them."""
    for _, number, _ in _TIMERS:
        signal.signal(number, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """End a case that does not end by itself."""
    raise KeyboardInterrupt("it does not end")


def watched(work: Callable[[], int | str], guard: Guard) -> Watched:
    """Do the work of a case under watch."""
    outcome = Watched()
    err = io.StringIO()
    began, peak = time.process_time(), peak_bytes()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8"), err
    for timer, _, seconds in _TIMERS:
        signal.setitimer(timer, seconds)
    guard.seen, guard.active = [], True
    try:
        outcome.code = work()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not str(error):
            raise
        outcome.code = type(error).__name__
        outcome.found.append("raised " + "".join(traceback.format_exception(error))[-2500:])
    finally:
        guard.active, guard.late = False, None
        for timer, _, _ in _TIMERS:
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(timer, 0)
        sys.stdout, sys.stderr = before
    outcome.text = err.getvalue()
    seconds, grown = time.process_time() - began, peak_bytes() - peak
    if seconds > MOST_SECONDS:
        outcome.found.append(f"took {seconds:.1f} s")
    if grown > MOST_BYTES:
        outcome.found.append(f"took {grown:,} bytes of memory")
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again at what there is now
    outcome.found += [f"did {each}" for each in guard.seen]
    return outcome


class Watchdog(threading.Thread):
    """A thread that ends the process, with the stacks of all threads, if a case hangs where no signal interrupts it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.cases = 0

    def run(self) -> None:
        """Look at the number of cases now and then."""
        seen, since = 0, time.monotonic()
        while True:
            time.sleep(5)
            if seen != self.cases:
                seen, since = self.cases, time.monotonic()
            elif time.monotonic() - since > 12 * MOST_SECONDS:
                print("a case hangs; the file running-SEED names it", file=sys.__stderr__)
                faulthandler.dump_traceback(2)
                os._exit(1)


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held() -> tuple[int, int, int]:
    """Bytes of memory, open files and threads of this process now."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
