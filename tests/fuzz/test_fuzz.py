"""Damaged inputs of every kind, for MXCLI_FUZZ_SECONDS (60 by default), each run with another seed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


def _fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(FUZZ), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_damaged_inputs_end_with_a_known_exit_code(tmp_path: Path) -> None:
    seconds = os.environ.get("MXCLI_FUZZ_SECONDS", "60")
    seed = os.environ.get("MXCLI_FUZZ_SEED", str(int(time.time())))
    done = _fuzz("--seconds", seconds, "--seed", seed, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_case_of_every_kind(tmp_path: Path) -> None:
    done = _fuzz("--case", 0, "--seed", 1, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "13 cases" in done.stdout
