"""The machine and the directory of a run, as plans show them."""

from __future__ import annotations

from dataclasses import dataclass

from mxcli.backends import CPU
from mxcli.flows.plan.memory import Need
from mxcli.output.numbers import byte_size


@dataclass(frozen=True, slots=True)
class Site:
    """A run's output directory (None: not named) and the bytes free there, its device, and the memory that it may use
    on that device (None: no limit)."""

    folder: str | None
    free_bytes: int | None
    device: str
    max_memory: int | None


def memory_words(need: Need, site: Site) -> str:
    """Return the peak memory of a run, and the limit."""
    peak = f"peak memory about {byte_size(need.peak_bytes)}"
    if site.max_memory is None:
        return peak
    allowed = f"{byte_size(site.max_memory)} allowed (--max-memory)"
    return f"{peak} of {allowed}" if site.device == CPU else f"{peak}; on {site.device} {allowed}"


def memory_record(need: Need, site: Site) -> dict[str, object]:
    """Return the same for JSON."""
    return {"peak_memory_bytes": need.peak_bytes, "max_memory_bytes": site.max_memory, "device": site.device}
