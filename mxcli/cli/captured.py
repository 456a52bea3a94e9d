"""Captures that a verb is given, or makes of a text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mxcli.cli.machine import Machine
from mxcli.cli.progress import progress
from mxcli.cli.terminal import Messages
from mxcli.cli.texts import read_text
from mxcli.cli.threads import check_threads, use_threads
from mxcli.cli.writing import stopping
from mxcli.errors import EnvironmentFailure, InputError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint

STEPS = 8
"""Windows of a text that are read, of as many tokens as `mxcli capture` takes by default."""


class Wanted(Protocol):
    """Options of a verb that takes captures or a text."""

    @property
    def captures(self) -> str | None:
        """The captures."""

    @property
    def text(self) -> str | None:
        """The text."""

    @property
    def dry_run(self) -> bool:
        """True if nothing is to be computed."""


@contextmanager
def captured(wanted: Wanted, model: str, machine: Machine, messages: Messages) -> Iterator[Checkpoint | None]:
    """Yield the captures of a verb: those given, those of a text in a folder that is gone afterwards, or None."""
    from mxcli.files.checkpoint import open_checkpoint

    if wanted.captures is not None:
        yield open_checkpoint(wanted.captures)
    elif wanted.text is None or wanted.dry_run:
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="mxcli-") as folder:
            _capture(model, wanted.text, Path(folder), machine, messages)
            yield open_checkpoint(folder)


def _capture(model: str, text: str, folder: Path, machine: Machine, messages: Messages) -> None:
    """Record inputs and gradients of all layers for the beginning of a text; raises KeyboardInterrupt if stopped."""
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.files.roles import ACTIVATION, GRADIENT
    from mxcli.flows.capture.model import compute_device
    from mxcli.flows.capture.plan import CaptureFolder, CaptureRequest, plan_capture
    from mxcli.flows.capture.run import capture_model

    if not Path(model).is_dir():
        raise InputError(f"{printable(model)}: no such directory; --text needs one with a model of transformers.")
    check_threads(machine.threads)
    use_threads(machine.threads)
    request = CaptureRequest(STEPS, roles=(ACTIVATION, GRADIENT))
    where = CaptureFolder(folder, max_memory=machine.max_bytes)
    plan = plan_capture(model, open_checkpoint(model), read_text(text), request, where)
    with progress("read text", messages) as show, stopping("step") as stop:
        run = capture_model(plan, device=compute_device(machine.device), stop=stop, on_step=show)
    messages.notes((*plan.notes, *run.notes))
    if run.stopped is not None:
        raise EnvironmentFailure(f"--text {printable(text)}: {run.stopped}.")
    if not run.complete:
        raise KeyboardInterrupt
