"""Checks of a quantized checkpoint, their findings, and what collects these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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


class Findings:
    """Findings by check."""

    def __init__(self) -> None:
        self._found: dict[str, list[Finding]] = {}
        self._skipped: dict[str, str] = {}

    def run(self, checks: Iterable[Check[Any]], target: object) -> None:
        """Run checks on what they check."""
        for check in checks:
            self._found.setdefault(check.name, []).extend(check.find(target))

    def skip(self, checks: Iterable[Check[Any]], why: str) -> None:
        """Skip checks, with the reason."""
        self._skipped |= {check.name: why for check in checks}

    def results(self, checks: Sequence[Check[Any]]) -> tuple[Result, ...]:
        """Return a result for each of the checks: worst severity first, then in table order."""
        ordered = sorted(checks, key=lambda check: SEVERITIES.index(check.severity))
        return tuple(
            Result(
                check.name,
                check.severity,
                check.meaning,
                check.how,
                tuple(self._found.get(check.name, ())),
                self._skipped.get(check.name),
            )
            for check in ordered
        )


def some(names: Iterable[str], most: int = 3) -> str:
    """Return the first names and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
