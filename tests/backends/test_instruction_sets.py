"""Every build of the kernel that this processor runs gives the same bits and the same statistics."""

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
    """What `instruction_set_digest.py` prints when the kernel is asked for that build; None: not asked."""
    environment = {name: value for name, value in os.environ.items() if name != "MXCLI_ISA"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    asked = [instruction_set] if instruction_set else []
    if instruction_set:
        environment["MXCLI_ISA"] = instruction_set
    command = [sys.executable, "-P", "-W", "ignore", str(SCRIPT), *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_computes_the_same(instruction_set: str) -> None:
    """Codes, scales, dequantized values, every number of the statistics, every per-block array."""
    default, other = results(None), results(instruction_set)
    if not other["digests"]:
        pytest.skip(
            f"no {instruction_set} on this processor or in this build: the kernel ran on {other['instruction_set']}"
        )
    assert other["instruction_set"] == instruction_set
    different = [case for case, digest in default["digests"].items() if other["digests"].get(case) != digest]
    assert different == []
