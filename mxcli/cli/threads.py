"""The threads of torch."""

from __future__ import annotations

import os

from mxcli.errors import EnvironmentFailure, import_extra

_A_PROCESSOR = 16


def check_threads(threads: int | None) -> None:
    """Raise EnvironmentFailure for more threads than the machine can start: torch would end without a message."""
    most = _A_PROCESSOR * (os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise EnvironmentFailure(
            f"--threads {threads}: more than {most}, {_A_PROCESSOR} per processor of this machine; use fewer."
        )


def use_threads(threads: int | None) -> None:
    """Let torch compute with a number of threads."""
    if threads is not None:
        import_extra("torch", "computing with a model", "capture").set_num_threads(threads)
