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

HERE = Path(__file__).parent


@functools.cache
def results(instruction_set: str | None) -> dict[str, Any]:
    """What `instruction_set_digest.py` prints when the kernel is asked for that build; None: not asked."""
    environment = {name: value for name, value in os.environ.items() if name != "MXCLI_ISA"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    if instruction_set:
        environment["MXCLI_ISA"] = instruction_set
    script = [sys.executable, "-W", "ignore", str(HERE / "instruction_set_digest.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_computes_the_same(instruction_set: str) -> None:
    default, other = results(None), results(instruction_set)
    if other["instruction_set"] != instruction_set:
        pytest.skip(f"this processor, or this build of the kernel, has no {instruction_set}")
    different = [case for case, digest in default["digests"].items() if other["digests"][case] != digest]
    assert different == []
    assert other["digests"].keys() == default["digests"].keys()


def test_the_default_is_the_widest() -> None:
    order = ["baseline", "avx2", "avx512"]
    assert order.index(results(None)["instruction_set"]) >= order.index(results("baseline")["instruction_set"])
