"""Where a verb computes and within how much memory: as typed, checked, and opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from mxcli.backends import check_device, choose_backend, find_device
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.backends.backend import Backend
    from mxcli.cli.streams import Talk

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Machine:
    """The device word, the threads of the CPU, and the most memory in bytes; None: as many, as much as there is."""

    device: str
    threads: int | None
    max_memory: int | None


def machine(device: str, threads: int | None, max_memory: str | None) -> Machine:
    """What was typed; raises UsageError for what means nothing, before anything heavy is imported."""
    check_device(device)
    return Machine(device, threads, None if max_memory is None else memory_size(max_memory))


def memory_size(text: str, option: str = "--max-memory") -> int:
    """Bytes of a size such as 8G, 512M, 1.5GiB or 1000000: units are binary, with or without iB or B."""
    found = _SIZE.fullmatch(text.strip())
    size = int(Fraction(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if size < 1:
        raise UsageError(
            f"{option} '{printable(text)}' is no size: give bytes, or a number with K, M, G or T such as 8G, 512M "
            "or 1.5GiB."
        )
    return size


def open_backend(asked: Machine, talk: Talk) -> Backend:
    """The backend to compute with; why a GPU is left alone is said on stderr."""
    return choose_backend(
        asked.device,
        threads=asked.threads,
        max_memory=asked.max_memory,
        on_note=lambda note: talk.notes([note]),
    )


def found_device(asked: Machine, talk: Talk) -> str:
    """The name of the device that would be computed on; nothing is opened."""
    return find_device(asked.device, lambda note: talk.notes([note]))
