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
    assert "\n15 cases, " in done.stdout


def test_a_case_is_repeated_by_its_number(tmp_path: Path) -> None:
    """The same damage and the same outcome, in another process."""
    once, again = (
        _fuzz("--case", 7, "--seed", 5, "--kind", "safetensors,record", "--keep", tmp_path) for _ in range(2)
    )
    counts = [[line for line in done.stdout.splitlines() if " cases: " in line] for done in (once, again)]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 4
