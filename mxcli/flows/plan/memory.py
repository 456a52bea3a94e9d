"""Peak memory of a run, and the refusal of more than the user allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxcli.backends import CPU
from mxcli.errors import EnvironmentFailure, printable

PROGRAM_BYTES = 1 << 26
"""Memory of the interpreter and its libraries, about."""
RESULT_BYTES = 6 << 10
"""Memory of what is known of a tensor at the end, about."""
RECORD_BYTES = 29 << 10
"""Memory of the statistics of a tensor in the record and in the progress log, with the check of the output, about."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """Estimated peak memory, and the tensor that takes most of it, if any."""

    peak_bytes: int
    tensor: str | None


def need_of(working: Iterable[tuple[str, int]], pending_bytes: int = 0, *, recorded: int = 0) -> Need:
    """Return the peak memory of tensors processed one after another, given the bytes that each takes.

    `pending_bytes` is the most that may still wait to be written to disk, `recorded` the number of tensors whose
    statistics go into the record of an output.
    """
    tensors = list(working)
    tensor, most = max(tensors, key=lambda pair: pair[1], default=(None, 0))
    results = len(tensors) * RESULT_BYTES + recorded * RECORD_BYTES
    return Need(PROGRAM_BYTES + results + pending_bytes + most, tensor)


def check_memory(need: Need, max_memory: int | None, device: str) -> None:
    """Raise EnvironmentFailure if a run on the CPU needs more memory than is allowed.

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
