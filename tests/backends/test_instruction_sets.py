"""All instruction set builds of the kernel that this CPU supports produce the same bits and statistics."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("instruction_set_digest.py")


@functools.cache
def results(instruction_set: str | None) -> dict[str, Any]:
    """Return the output of `instruction_set_digest.py` for a build of the kernel; None: the default."""
    environment = {name: value for name, value in os.environ.items() if name != "MXCLI_ISA"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = [instruction_set] if instruction_set else []
    if instruction_set:
        environment["MXCLI_ISA"] = instruction_set
    command = [sys.executable, "-P", "-W", "ignore", str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_instruction_sets_agree(instruction_set: str) -> None:
    """Codes, scales, dequantized values, all statistics and all per-block arrays."""
    default, other = results(None), results(instruction_set)
    if not other["digests"]:
        pytest.skip(
            f"no {instruction_set} on this processor or in this build: the kernel ran on {other['instruction_set']}"
        )
    assert other["instruction_set"] == instruction_set
    different = [case for case, digest in default["digests"].items() if other["digests"].get(case) != digest]
    assert different == []
