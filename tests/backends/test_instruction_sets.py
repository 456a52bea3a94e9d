"""Builds of the kernel for every instruction set of this CPU produce the same bits and statistics."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_except

SCRIPT = Path(__file__).with_name("instruction_set_digest.py")


INSTRUCTION_SETS = ["baseline", "avx2", "avx512"]


@functools.cache
def results(instruction_set: str | None, rules: str) -> dict[str, Any]:
    """Return the output of `instruction_set_digest.py` for a build of the kernel; None: the default, no digests."""
    environment = {name: value for name, value in os.environ.items() if name != "MXCLI_ISA"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if instruction_set:
        environment["MXCLI_ISA"] = instruction_set
    command = [sys.executable, "-P", "-W", "ignore", str(SCRIPT), instruction_set or "none", rules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("rules", slow_except(["default"], ["default", "every"]))
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS[1:])
def test_instruction_sets_agree(instruction_set: str, rules: str) -> None:
    """Codes, scales, dequantized values, all statistics and all per-block arrays."""
    baseline, other = results("baseline", rules), results(instruction_set, rules)
    if not other["digests"]:
        pytest.skip(f"no {instruction_set} on this CPU or in this build: the kernel ran on {other['instruction_set']}")
    assert (baseline["instruction_set"], other["instruction_set"]) == ("baseline", instruction_set)
    assert baseline["digests"].keys() == other["digests"].keys()
    different = [case for case, digest in baseline["digests"].items() if other["digests"][case] != digest]
    assert different == []


def test_default_is_the_widest() -> None:
    available = [name for name in INSTRUCTION_SETS if results(name, "default")["instruction_set"] == name]
    assert results(None, "default")["instruction_set"] == available[-1]
