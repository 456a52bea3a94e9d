"""The machine of a verb: device, threads and memory, and the backend on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.backends import check_device, choose_backend, find_device
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.backends.backend import Backend
    from mxcli.cli.terminal import Messages
    from mxcli.flows.plan.memory import Need
    from mxcli.output.site import Site

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Machine:
    """The device, the threads of the CPU (None: one per processor), and the memory to use (None: no limit).

    Raises UsageError for an unknown device and an unreadable size.
    """

    heading: ClassVar[str] = "Machine"
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda[:N]",
            help="Device to compute on: auto is the first usable NVIDIA GPU, else the CPU. Results are the same on "
            "every device.",
        ),
    ] = "auto"
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads.  [default: one per processor]")
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            help="Memory limit, such as 8G, 512M or 1.5GiB: on the CPU, work that needs more is refused before it "
            "starts; on a GPU, it limits GPU memory.",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.max_memory is not None:
            memory_size(self.max_memory)

    @property
    def max_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.max_memory is None else memory_size(self.max_memory)


def memory_size(text: str, option: str = "--max-memory") -> int:
    """Return the bytes of a size such as 8G, 512M, 1.5GiB or 1000000: units are binary, with or without iB or B.

    Raises UsageError for other text.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(Fraction(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if size < 1:
        raise UsageError(
            f"{option} '{printable(text)}' is not a size: give bytes, or a number with K, M, G or T such as 8G, 512M "
            "or 1.5GiB."
        )
    return size


def open_backend(machine: Machine, messages: Messages, need: Need) -> Backend:
    """Return the backend to compute with; raises EnvironmentFailure if the work needs more memory than allowed.

    A note says why a GPU is present but not used.
    """
    from mxcli.flows.plan.memory import check_memory

    backend = choose_backend(
        machine.device,
        threads=machine.threads,
        max_memory=machine.max_bytes,
        on_note=lambda note: messages.notes([note]),
    )
    check_memory(need, machine.max_bytes, backend.name)
    return backend


def found_device(machine: Machine, messages: Messages) -> str:
    """Return the name of the device to compute on, without opening it."""
    return find_device(machine.device, lambda note: messages.notes([note]))


def planned_site(machine: Machine, messages: Messages, need: Need) -> Site:
    """Return the machine of a dry run that writes nothing; raises EnvironmentFailure like `open_backend`."""
    from mxcli.flows.plan.memory import check_memory
    from mxcli.output.site import Site

    site = Site(None, None, found_device(machine, messages), machine.max_bytes)
    check_memory(need, site.max_memory, site.device)
    return site
