"""Checks of a quantized checkpoint and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
SEVERITIES = (PROBLEM, WARNING, NOTE)
"""Worst first: loading or values are wrong; they may be wrong; nothing is wrong."""

Checked = TypeVar("Checked", contravariant=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a check at a tensor, module or file: the value there, the value needed, and the fix."""

    where: str
    value: str
    need: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Check(Generic[Checked]):
    """A check: its severity, what a finding means for a loader, the method (`how`), and the function that finds."""

    name: str
    severity: str
    meaning: str
    how: str
    find: Callable[[Checked], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check: its findings, or the reason why it was `skipped`."""

    name: str
    severity: str
    meaning: str
    how: str
    findings: tuple[Finding, ...] = ()
    skipped: str | None = None


def some(names: Iterable[str], most: int = 3) -> str:
    """Return the first names and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
