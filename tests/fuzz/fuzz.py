"""Valid inputs are damaged at random and given to every verb, in this process: each must end with a known exit code.

    python tests/fuzz/fuzz.py --seconds 60 --seed 0 --kind safetensors,gguf --verbs inspect,report

A case fails for an exit code that is not one of 0, 2, 3, 4, 5 and 6, a traceback, a message of many kilobytes, more
than 10 seconds of computing or 1 GB of memory, a file written or removed outside its output folder, or code that ran.
Its input is kept, and the command that repeats it is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mutations import damaged
from seeds import KINDS, Kind

from mxcli.cli.app import run

CODES = frozenset({0, 2, 3, 4, 5, 6})
MOST_SECONDS, MOST_BYTES, MOST_CHARACTERS = 10.0, 1 << 30, 60_000
_STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.startfile")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod")


@dataclass
class Guard:
    """The watch over what this process starts and writes: `allowed` are the folders in which a case may write."""

    allowed: tuple[str, ...] = ()
    active: bool = False
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an event of Python that a case must not cause."""
        if not self.active:
            return
        if event in _STARTS:
            self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event in _CHANGES and arguments[-1] == -1:
            self._look(event, arguments[0])  # a path below an open folder was looked at when that was opened
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            self._look(event, arguments[0])

    def _look(self, event: str, path: object) -> None:
        if isinstance(path, int):
            return
        text = os.path.abspath(os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path))
        if text != os.devnull and not any(text == folder or text.startswith(folder + "/") for folder in self.allowed):
            self.seen.append(f"{event} of {text[:200]}")


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged input and the command that reads it."""

    kind: Kind
    seed: int
    number: int

    @property
    def random(self) -> Random:
        """The random numbers of this case alone."""
        return Random(f"{self.seed}:{self.kind.name}:{self.number}")

    def prepared(self, valid: Path, folder: Path, verbs: Sequence[str]) -> list[str] | None:
        """Copy the valid input, damage it, and return the command; None if no verb is wanted."""
        random = self.random
        source = folder / "in"
        shutil.copytree(valid, source, symlinks=True)
        files = [source / path.relative_to(valid) for path in self.kind.files(valid)]
        file = random.choice(files)
        file.write_bytes(damaged(file.read_bytes(), file.name, random))
        wanted = [command for command in self.kind.commands if not verbs or command.split()[0] in verbs]
        if not wanted:
            return None
        words = random.choice(wanted).split()
        places = {"{in}": source, "{file}": file, "{out}": folder / "out"}
        for name, place in places.items():
            words = [word.replace(name, str(place)) for word in words]
        return words


def failures(command: Sequence[str], folder: Path, guard: Guard) -> tuple[int | str, list[str]]:
    """Run a command, and return its exit code and what it must not have done."""
    found: list[str] = []
    source = folder / "in"
    before = _listed(source)
    written = folder / ("in/made" if "{in}/made" in " ".join(command) or str(source / "made") in command else "out")
    guard.allowed, guard.seen = (str(written), str(folder / "temporary")), []
    (folder / "temporary").mkdir()
    tempfile.tempdir = str(folder / "temporary")
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    began, peak = time.process_time(), _peak()
    code: int | str
    guard.active = True
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _alarm(3 * MOST_SECONDS):
            code = run(command)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not str(error):
            raise
        code = type(error).__name__
        found.append("raised " + "".join(traceback.format_exception(error))[-2000:])
    finally:
        guard.active = False
    err.flush()
    text = err.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    seconds, grown = time.process_time() - began, _peak() - peak
    if code not in CODES and not found:
        found.append(f"exit code {code}: {text[-2000:]}")
    if "Traceback" in text:
        found.append(f"a traceback: {text[-2000:]}")
    if code not in (0, 5) and "error: " not in text:
        found.append(f"exit code {code} without a word: {text[-500:]}")
    if len(text) > MOST_CHARACTERS:
        found.append(f"{len(text):,} characters on stderr: {text[:300]}")
    if seconds > MOST_SECONDS:
        found.append(f"took {seconds:.1f} s")
    if grown > MOST_BYTES:
        found.append(f"took {grown:,} bytes of memory")
    found += [f"did {each}" for each in guard.seen]
    changed = {path for path, state in _listed(source).items() ^ before.items() if not path.is_relative_to(written)}
    found += [f"changed {path}" for path in sorted(changed)]
    if Path("executed").exists():
        found.append("code of the input ran")
    return code, found


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _listed(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*") if not path.is_dir()}


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Interrupt a case that does not end."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("it does not end")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Outcome:
    """The number of cases by kind and exit code, the failed ones, and the time they took."""

    codes: Counter[tuple[str, int | str]] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """The number of cases."""
        return sum(self.codes.values())


def fuzz(
    seconds: float, seed: int, kinds: Sequence[str], verbs: Sequence[str], keep: Path, only: int | None = None
) -> Outcome:
    """Run cases of each kind in turn until the time is over, or one `only`."""
    outcome, guard = Outcome(), Guard()
    sys.addaudithook(guard)
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mxcli-fuzz-") as scratch:
        valid = {name: Path(scratch, "valid", name) for name in kinds}
        for name, folder in valid.items():
            folder.mkdir(parents=True)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                KINDS[name].write(folder)
        working = Path(scratch, "working")
        working.mkdir()
        os.chdir(working)
        try:
            began, number = time.monotonic(), only or 0
            while time.monotonic() - began < seconds:
                for name in kinds:
                    _run_case(
                        Case(KINDS[name], seed, number), valid[name], Path(scratch, "case"), verbs, keep, guard, outcome
                    )
                number += 1
                if only is not None:
                    break
            outcome.seconds = time.monotonic() - began
        finally:
            os.chdir(here)
    return outcome


def _run_case(
    case: Case, valid: Path, folder: Path, verbs: Sequence[str], keep: Path, guard: Guard, outcome: Outcome
) -> None:
    folder.mkdir()
    try:
        command = case.prepared(valid, folder, verbs)
        if command is None:
            return
        code, found = failures(command, folder, guard)
        outcome.codes[case.kind.name, code] += 1
        if found:
            kept = keep / f"{case.kind.name}-{case.seed}-{case.number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept, symlinks=True)
            shown = shlex.join(["mxcli", *command]).replace(str(folder), str(kept))
            again = f"{Path(__file__)} --seed {case.seed} --kind {case.kind.name} --case {case.number}"
            more = f" --verbs {','.join(verbs)}" if verbs else ""
            outcome.failed.append(f"{shown}\n  python {again}{more}\n  " + "\n  ".join(found))
    finally:
        Path("executed").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the fuzzer from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--verbs", default="", help="the verbs to run (default: all that read the kind)")
    parser.add_argument("--case", type=int, help="one case alone")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir(), "mxcli-fuzz-failures"))
    asked = parser.parse_args()
    kinds, verbs = asked.kind.split(","), [verb for verb in asked.verbs.split(",") if verb]
    unknown = set(kinds) - set(KINDS)
    if unknown:
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}")
    outcome = fuzz(asked.seconds, asked.seed, kinds, verbs, asked.keep.resolve(), asked.case)
    print("\n".join(outcome.failed))
    for name in kinds:
        codes = {code: count for (kind, code), count in sorted(outcome.codes.items(), key=str) if kind == name}
        print(f"{name}: " + ", ".join(f"{count} x {code}" for code, count in codes.items()))
    rate = outcome.cases / max(outcome.seconds, 1e-9)
    print(f"{outcome.cases} cases, {rate:.1f} a second, {len(outcome.failed)} failed")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
