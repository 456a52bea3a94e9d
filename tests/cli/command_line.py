"""Running mxcli as a user does: in a process of its own, or in this one where only words and codes matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mxcli

REPOSITORY = Path(__file__).parents[2]
SAMPLE = REPOSITORY / "samples" / "tiny-llama"
CAPTURES = REPOSITORY / "samples" / "tiny-llama-captures.safetensors"
_LEFT_OUT = ("COLUMNS", "NO_COLOR", "TERM", "LANG", "LC_ALL", "LC_CTYPE", "MXCLI_DEBUG")


def environment(**more: str) -> dict[str, str]:
    """This environment without what changes the looks of output, with `more`, and the mxcli that this process tests."""
    inherited = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    return {**inherited, "LC_ALL": "C.UTF-8", "PYTHONPATH": str(Path(mxcli.__file__).parents[1]), **more}


def command(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """mxcli in a process of its own, with pipes for streams."""
    words = [sys.executable, "-m", "mxcli", *map(str, arguments)]
    return subprocess.run(
        words, env=environment(**(env or {})), cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def strict_json(text: str) -> dict[str, Any]:
    """Parsed JSON; a NaN or Infinity token is an error."""

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is no JSON")

    parsed: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return parsed
