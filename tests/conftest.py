"""Compiling modules again and again, a cost that no test is about."""

from __future__ import annotations

import os
import sys


def pytest_configure() -> None:
    """Keep compiled modules, in folders that git ignores, also where the environment says not to: a run starts hundreds
    of processes, and half the time of a small command is compiling."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
