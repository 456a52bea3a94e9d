"""Damaged inputs of every kind, for MXCLI_FUZZ_SECONDS (60 by default) altogether, with seeds that never change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")
SEEDS = (1, 2, 3)


def _fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(FUZZ), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_inputs_end_with_a_known_exit_code(tmp_path: Path, seed: int) -> None:
    seconds = float(os.environ.get("MXCLI_FUZZ_SECONDS", "60")) / len(SEEDS)
    done = _fuzz("--seconds", seconds, "--seed", seed, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]


def test_a_case_of_every_kind(tmp_path: Path) -> None:
    done = _fuzz("--case", 0, "--seed", 1, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "\n16 cases, " in done.stdout


def test_a_case_is_repeated_by_its_number(tmp_path: Path) -> None:
    """The same damage and the same outcome, in another process."""
    once, again = (
        _fuzz("--case", 7, "--seed", 5, "--kind", "safetensors,record", "--keep", tmp_path) for _ in range(2)
    )
    counts = [[line for line in done.stdout.splitlines() if " cases: " in line] for done in (once, again)]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 4


def test_a_case_ends_by_the_time_it_computes(tmp_path: Path) -> None:
    """A machine with much else to do makes no case fail; one that computes on and on, or waits, is ended."""
    code = f"""
import sys, time
sys.path.insert(0, {str(FUZZ.parent)!r})
import guard
guard._TIMERS = tuple((timer, number, seconds / 300) for timer, number, seconds in guard._TIMERS)
guard.MOST_SECONDS = 0.03
guard.end_cases_by_signals()
def compute(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return 0
for work in (lambda: compute(5), lambda: time.sleep(5), lambda: time.sleep(0.2) or 0):
    outcome = guard.watched(work, guard.Guard())
    print(outcome.code, [each.split()[0] for each in outcome.found])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["KeyboardInterrupt ['raised', 'took']", "KeyboardInterrupt ['raised']", "0 []"]


@pytest.mark.slow
def test_the_fonts_are_listed_before_a_case_is_watched(tmp_path: Path) -> None:
    done = _fuzz("--seed", 1000, "--kind", "gguf", "--case", 1769, "--verbs", "report", "--keep", tmp_path)
    assert done.returncode == 0, done.stdout
