"""How much memory a run needs at a time, and the refusal where that is more than the user allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxcli.backends import CPU
from mxcli.errors import EnvironmentFailure, printable

PROGRAM_BYTES = 1 << 26
"""Memory of the interpreter and its libraries, about."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """Most memory used at a time, about, and the tensor that takes most of it (None: no tensor does)."""

    peak_bytes: int
    tensor: str | None


def need_of(working: Iterable[tuple[str, int]], pending_bytes: int = 0) -> Need:
    """Return what tensors need that are worked on one after another, with the bytes that each takes meanwhile.

    `pending_bytes` is the most that may still be on its way to the disk.
    """
    tensor, most = max(working, key=lambda pair: pair[1], default=(None, 0))
    return Need(PROGRAM_BYTES + pending_bytes + most, tensor)


def check_memory(need: Need, max_memory: int | None, device: str) -> None:
    """Raise EnvironmentFailure where a run on the CPU needs more memory than is allowed.

    On a GPU the limit is for the memory of the GPU, which the backend keeps by working in parts.
    """
    if max_memory is None or device != CPU or need.peak_bytes <= max_memory:
        return
    sufficient = -(-need.peak_bytes // _MIB)
    what = printable(need.tensor) if need.tensor is not None else "this source"
    raise EnvironmentFailure(
        f"{what}: needs about {need.peak_bytes:,} bytes of memory, and --max-memory allows {max_memory:,}. "
        f"Use --max-memory {sufficient}M or more."
    )
