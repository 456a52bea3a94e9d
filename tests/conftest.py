"""What a run takes over from the shell that started it, and no test is about."""

from __future__ import annotations

import os
import signal
import sys


def pytest_configure() -> None:
    """Keep compiled modules, in folders that git ignores, also where the environment says not to: a run starts hundreds
    of processes, and half the time of a small command is compiling. A background command of a shell ignores SIGINT, and
    so would they."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
