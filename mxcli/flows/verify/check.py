"""What a check of a quantized checkpoint is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
SEVERITIES = (PROBLEM, WARNING, NOTE)
"""Worst first: loaders or values are wrong; some loader or some value may be; nothing is wrong."""

Looked = TypeVar("Looked", contravariant=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that a check objects to: a tensor, module or file, what is there, what is needed, and the way out."""

    where: str
    value: str
    need: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Check(Generic[Looked]):
    """One way to be unsound: how bad it is, what it means for whoever loads the checkpoint, how it is found."""

    name: str
    severity: str
    meaning: str
    how: str
    of: Callable[[Looked], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a check: its findings, or (`skipped`) why it could not be made."""

    name: str
    severity: str
    meaning: str
    how: str
    findings: tuple[Finding, ...] = ()
    skipped: str | None = None


def some(names: Iterable[str], most: int = 3) -> str:
    """Return the first names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
