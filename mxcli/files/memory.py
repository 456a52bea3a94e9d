"""The memory that a process may use, as the system reports it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc/meminfo")


def memory_limit() -> int | None:
    """Return the most memory that this process can have, None if the system does not report it."""
    return _least([_physical(), _group("memory.max"), _of_process()])


def free_memory() -> int | None:
    """Return the memory that this process can still have, None if the system does not report it."""
    limit, used = _group("memory.max"), _group("memory.current")
    left = None if limit is None or used is None else max(limit - used, 0)
    return _least([_available(), left, memory_limit()])


def _least(sizes: list[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _physical() -> int | None:
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _available() -> int | None:
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d{1,15}) kB$", _PROC.read_text(errors="replace"), re.MULTILINE)
        return int(found[1]) << 10 if found else None
    return None


def _group(name: str) -> int | None:
    """Return a number of the control group, None if there is none or no limit."""
    with suppress(OSError, ValueError):
        return int((_GROUP / name).read_text())
    return None


def _of_process() -> int | None:
    """Return the limit of the address space (`ulimit -v`)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None
