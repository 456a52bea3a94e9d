"""Valid inputs are damaged at random and given to every verb, or to the readers, in this process.

    python tests/fuzz/fuzz.py --seconds 60 --seed 0 --kind safetensors,gguf --verbs inspect,report --jobs 2

A case fails for an exit code that is not one of 0, 2, 3, 4, 5 and 6, a traceback, a message of many kilobytes, more
than 10 seconds of computing or 1 GB of memory, a file written or removed outside its output folder, code that ran, or a
program or connection that was started. A run fails if memory, open files or threads grow from case to case. The input
of a failed case is kept, and the command that repeats it is printed. Cases through verbs and through readers alone
(opened, every tensor read, records and logs parsed) are counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))

from commands import COMMANDS, RARE, Command
from guard import MOST_CHARACTERS, Guard, Watchdog, Watched, end_cases_by_signals, held, watched
from readers import read_everything
from seeds import KINDS, Kind
from trees import Tree, change_late, listed

from mxcli.cli.app import run

sys.dont_write_bytecode = True
os.environ |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "100"}
CODES = frozenset({0, 2, 3, 4, 5, 6})
LEVELS = VERBS, READERS = "verbs", "readers"
RARE_SHARE = 1 / 400
MOST_ALIKE = 2
"""Failures of one sort that are kept."""
GROWTH_BYTES, GROWTH_FILES = 200 << 20, 16
SAMPLE_CASES = 500


@dataclass
class Outcome:
    """The number of cases by level, kind and code, the failed ones, the time they took, and memory, open files and
    threads in between."""

    codes: Counter[tuple[str, str, int | str]] = field(default_factory=Counter)
    verbs: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    sorts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    seconds_by_level: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0.0))
    cpu_seconds: float = 0.0
    samples: list[tuple[int, int, int]] = field(default_factory=list)

    def cases(self, level: str = "") -> int:
        """The number of cases, of one level or all."""
        return sum(count for (of, _, _), count in self.codes.items() if level in ("", of))

    def growth(self) -> list[str]:
        """What grew from the first fifth of the run to its end."""
        if len(self.samples) < 20:
            return []
        (first, files, threads), last = self.samples[len(self.samples) // 5], self.samples[-1]
        found = [f"memory grew from {first:,} to {last[0]:,} bytes"] if last[0] - first > GROWTH_BYTES else []
        if last[1] - files > GROWTH_FILES or last[2] - threads > GROWTH_FILES:
            found.append(f"open files grew from {files} to {last[1]}, threads from {threads} to {last[2]}")
        return found


class Fuzzer:
    """Valid inputs in a scratch folder, and the cases that damage them."""

    def __init__(
        self, scratch: Path, seed: int, kinds: Sequence[str], levels: Sequence[str], verbs: Sequence[str], keep: Path
    ) -> None:
        self.scratch, self.seed, self.kinds, self.levels, self.verbs, self.keep = (
            scratch,
            seed,
            kinds,
            levels,
            verbs,
            keep,
        )
        self.outcome, self.guard = Outcome(), Guard()
        self.out, self.to, self.temporary = (scratch / name for name in ("out", "to", "temporary"))
        for name in ("out", "to", "temporary", "working", "valid", "in"):
            (scratch / name).mkdir()
        made = {*kinds, "recipe", "capture"}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for name in made:
                (scratch / "valid" / name).mkdir()
                KINDS[name].write(scratch / "valid" / name)
        self.trees: dict[str, Tree] = {}
        for name in kinds:
            shutil.copytree(scratch / "valid" / name, scratch / "in" / name)
            self.trees[name] = Tree(scratch / "in" / name)
        self.wanted = {
            name: [
                path.relative_to(scratch / "valid" / name).as_posix()
                for path in KINDS[name].files(scratch / "valid" / name)
            ]
            for name in kinds
        }
        self.running = os.open(keep / f"running-{seed}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        tempfile.tempdir = str(self.temporary)
        os.chdir(scratch / "working")
        end_cases_by_signals()
        sys.addaudithook(self.guard)

    def case(self, kind: Kind, number: int, *, debug: bool = False) -> Watched | None:
        """Run one case, and return what came of it; None if it is of no wanted level or verb."""
        random = Random(f"{self.seed}:{kind.name}:{number}")
        level = VERBS if random.random() < 0.5 else READERS
        if level not in self.levels:
            return None
        command = self._command(kind, random) if level == VERBS else None
        if command is not None and self.verbs and command.words.split()[0] not in self.verbs:
            return None
        tree = self.trees[kind.name]
        tree.reset()
        self._empty()
        file = tree.folder / tree.damage(self.wanted[kind.name], random)
        if tree.late is not None:
            late = tree.late
            self.guard.countdown, self.guard.late = (
                random.choice((3, 10, 30, 100, 300)),
                lambda: change_late(late, random),
            )
        began = time.monotonic()
        if command is None:
            self.guard.allowed = (str(self.temporary),)
            found = watched(lambda: read_everything(tree.folder, file, random), self.guard)
            words = ["(readers)", str(file)]
        else:
            words = self._words(command, kind, tree.folder, file, random) + ["--debug"] * debug
            found = watched(lambda: run(words), self.guard)
            if not debug:
                self._judge(found, words)
        self._look(found, tree, words)
        if not debug:
            self.outcome.codes[level, kind.name, found.code] += 1
            self.outcome.verbs[words[0]] += 1
            self.outcome.seconds_by_level[level] += time.monotonic() - began
            if found.found:
                self._note(kind, number, found, words, level)
        return found

    def _command(self, kind: Kind, random: Random) -> Command:
        commands = RARE if random.random() < RARE_SHARE else COMMANDS
        fitting = [each for each in commands if not each.needs or kind.name in each.needs]
        return random.choices(fitting, [each.weight for each in fitting])[0]

    def _words(self, command: Command, kind: Kind, folder: Path, file: Path, random: Random) -> list[str]:
        """The words of a command with the places of the case, and where it may write."""
        valid = self.scratch / "valid"
        places = {
            "{in}": folder, "{file}": file, "{out}": self.out / "made", "{to}": self.to, "{valid}": valid / kind.name,
            "{source}": valid / "recipe", "{valid-model}": valid / "recipe",
            "{captures}": valid / "capture" / "captures.safetensors",
            "{text}": valid / "recipe" / "recipe.toml",
        }  # fmt: skip
        made = command.made(random)
        for name, place in places.items():
            made = [word.replace(name, str(place)) for word in made]
        allowed = [str(self.temporary), str(self.to), os.environ["MPLCONFIGDIR"]]
        if "--dry-run" not in made and "-o" in made:
            allowed.append(str(Path(made[made.index("-o") + 1])))
        if made[0] == "merge":
            allowed.append(made[1])
        if "--repair" in made:
            allowed.append(str(folder))
        self.guard.allowed = tuple(allowed)
        return made

    def _judge(self, found: Watched, words: Sequence[str]) -> None:
        code, text = found.code, found.text
        if code not in CODES and not found.found:
            found.found.append(f"exit code {code}: {text[-2000:]}")
        if "Traceback" in text:
            found.found.append(f"a traceback: {text[-2000:]}")
        if code not in (0, 5) and "error: " not in text and words[0] != "doctor":
            found.found.append(f"exit code {code} without a word: {text[-500:]}")
        if len(text) > MOST_CHARACTERS:
            found.found.append(f"{len(text):,} characters on stderr: {text[:300]}")
        if words[0] in ("doctor", "bench"):  # these ask the system for what it has
            found.found = [each for each in found.found if "subprocess.Popen" not in each and "posix_spawn" not in each]

    def _look(self, found: Watched, tree: Tree, words: Sequence[str]) -> None:
        """Note what changed in the input, but for what the case may write, and code that ran."""
        if str(tree.folder) not in self.guard.allowed:
            now = listed(str(tree.folder))
            changed = {name for name, _ in now.items() ^ tree.state.items()}
            for allowed in self.guard.allowed:
                if allowed.startswith(f"{tree.folder}/"):
                    below = os.path.relpath(allowed, tree.folder)
                    changed = {name for name in changed if name != below and not name.startswith(f"{below}/")}
            if tree.late is not None:
                changed.discard(os.path.relpath(tree.late, tree.folder))
            found.found += [f"changed {name}" for name in sorted(changed)]
        if os.path.lexists("executed"):
            found.found.append("code of the input ran")
            os.unlink("executed")

    def _empty(self) -> None:
        for folder in (self.out, self.to, self.temporary):
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)

    def _note(self, kind: Kind, number: int, found: Watched, words: Sequence[str], level: str) -> None:
        """Keep a failed case, run again for its traceback if it was a bug, unless there are enough of its sort."""
        detail = ""
        if level == VERBS and found.code == 1:
            kept = self._keep(kind, number)
            again = self.case(kind, number, debug=True)
            detail = again.text[-2500:] if again else ""
        else:
            kept = self._keep(kind, number)
        frames = re.findall(r'File "[^"]*/(mxcli/[^"]+)", line (\d+)', detail or found.found[0])
        sort = f"{frames[-1]}" if frames else re.sub(r"[\d,.]+|/\S+", "_", found.found[0])[:100]
        self.outcome.sorts[sort] += 1
        if self.outcome.sorts[sort] > MOST_ALIKE:
            shutil.rmtree(kept, ignore_errors=True)
            return
        shown = shlex.join(["mxcli", *words]).replace(str(self.scratch / "in" / kind.name), str(kept))
        again_with = f"{Path(__file__)} --seed {self.seed} --kind {kind.name} --case {number}"
        self.outcome.failed.append(f"{shown}\n  python {again_with}\n  " + "\n  ".join([*found.found, detail]))
        print(self.outcome.failed[-1], flush=True)

    def _keep(self, kind: Kind, number: int) -> Path:
        kept = self.keep / f"{kind.name}-{self.seed}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self.trees[kind.name].folder, kept, symlinks=True, ignore=_pipes)
        return kept

    def fuzz(self, seconds: float, only: int | None) -> Outcome:
        """Run cases of each kind in turn until the time is over, or one `only`."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        watchdog = Watchdog()
        watchdog.start()
        began, number, sampled = time.monotonic(), only or 0, 0
        used = time.process_time()
        while time.monotonic() - began < seconds:
            for name in self.kinds:
                if number % KINDS[name].every and only is None:
                    continue
                os.pwrite(self.running, f"{name} {number} ".encode().ljust(60), 0)
                self.case(KINDS[name], number)
                watchdog.cases += 1
            number += 1
            if only is not None:
                break
            if number * len(self.kinds) - sampled >= SAMPLE_CASES:
                sampled = number * len(self.kinds)
                self.outcome.samples.append(held())
        self.outcome.seconds = time.monotonic() - began
        self.outcome.cpu_seconds = time.process_time() - used
        os.unlink(self.keep / f"running-{self.seed}")
        return self.outcome


def _pipes(folder: str, names: list[str]) -> set[str]:
    """What cannot be copied."""
    paths = {name: Path(folder, name) for name in names}
    return {
        name
        for name, path in paths.items()
        if not (path.is_symlink() or path.is_dir() or path.is_file()) or path.lstat().st_size > 1 << 28
    }


def _write_caches() -> None:
    """Let matplotlib list the fonts of the system, which starts a program, before any case is watched."""
    with contextlib.suppress(ImportError):
        from matplotlib import font_manager

        font_manager.fontManager.get_font_names()


def fuzz(
    seconds: float,
    seed: int,
    kinds: Sequence[str],
    levels: Sequence[str],
    verbs: Sequence[str],
    keep: Path,
    only: int | None = None,
) -> Outcome:
    """Run cases in a new scratch folder, in memory where there is such a file system."""
    faulthandler.enable()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    keep.mkdir(parents=True, exist_ok=True)
    here, memory = Path.cwd(), Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="mxcli-fuzz-", dir=memory if os.access(memory, os.W_OK) else None
    ) as scratch:
        os.environ["MPLCONFIGDIR"] = str(Path(scratch, "matplotlib"))
        try:
            _write_caches()
            return Fuzzer(Path(scratch), seed, kinds, levels, verbs, keep).fuzz(seconds, only)
        finally:
            os.chdir(here)
            tempfile.tempdir = None


def _printed(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> int:
    """Print what came of all workers, and return the number of failures."""
    failed = 0
    for level in LEVELS:
        for name in kinds:
            codes: Counter[str] = Counter()
            for outcome in outcomes:
                codes.update(
                    {
                        str(code): count
                        for (of, kind, code), count in outcome.codes.items()
                        if (of, kind) == (level, name)
                    }
                )
            print(
                f"{level} {name}: {sum(codes.values())} cases: "
                + ", ".join(f"{count} x {code}" for code, count in sorted(codes.items()))
            )
    verbs: Counter[str] = Counter()
    for outcome in outcomes:
        verbs.update(outcome.verbs)
        failed += sum(outcome.sorts.values()) + len(outcome.growth())
        print(
            "\n".join(
                [*outcome.growth(), *(f"{count} failures at {sort}" for sort, count in outcome.sorts.most_common())]
            )
        )
        if outcome.samples:
            shown = [
                f"{memory / 2**20:.0f} MB, {files} files, {threads} threads"
                for memory, files, threads in outcome.samples[:: max(1, len(outcome.samples) // 5)]
            ]
            print(f"held: {'; '.join(shown)}; at the end {outcome.samples[-1][0] / 2**20:.0f} MB")
    print(", ".join(f"{count} x {verb}" for verb, count in verbs.most_common()))
    for level in LEVELS:
        count, spent = (
            sum(each.cases(level) for each in outcomes),
            sum(each.seconds_by_level[level] for each in outcomes),
        )
        print(f"{count} cases through {level}, {count / max(spent, 1e-9):.0f} a second of their own")
    count, longest = sum(each.cases() for each in outcomes), max(each.seconds for each in outcomes)
    used = sum(each.cpu_seconds for each in outcomes)
    rates = f"{count / max(longest, 1e-9):.1f} a second, {count / max(used, 1e-9):.1f} a second of a core"
    print(f"{count} cases, {rates}, {failed} failed")
    return failed


def main() -> int:
    """Run the fuzzer from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--level", default=",".join(LEVELS), help="verbs, readers or both")
    parser.add_argument("--verbs", default="", help="the verbs to run (default: all that read the kind)")
    parser.add_argument("--case", type=int, help="one case of each kind alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a further seed")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir(), "mxcli-fuzz-failures"))
    asked = parser.parse_args()
    kinds, levels, verbs = (
        asked.kind.split(","),
        asked.level.split(","),
        [verb for verb in asked.verbs.split(",") if verb],
    )
    if unknown := set(kinds) - set(KINDS) | set(levels) - set(LEVELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    same = (kinds, levels, verbs, asked.keep.resolve(), asked.case)
    if asked.jobs == 1:
        outcomes = [fuzz(asked.seconds, asked.seed, *same)]
    else:
        with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
            runs = [pool.submit(fuzz, asked.seconds, asked.seed + at, *same) for at in range(asked.jobs)]
            outcomes = [each.result() for each in runs]
    return 1 if _printed(outcomes, kinds) else 0


if __name__ == "__main__":
    sys.exit(main())
