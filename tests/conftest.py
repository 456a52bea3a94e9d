"""Two costs that no test is about: compiling modules again and again, and waiting for the disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Keep compiled modules, in folders that git ignores, also where the environment says not to: a run starts hundreds
    of processes, and half the time of a small command is compiling."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Only a loss of power shows whether `os.fsync` did its work, so here it only checks what it is given. Processes
    that tests start have the real one."""

    def fsync(file: int) -> None:
        os.fstat(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield
