"""All checks, and how their findings are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mxcli.flows.verify.check import SEVERITIES, Check, Finding, Result
from mxcli.flows.verify.check_against import PAIR_CHECKS, SOURCE_CHECKS
from mxcli.flows.verify.check_config import CONFIG_CHECKS, DEVICE_CHECKS
from mxcli.flows.verify.check_files import FILE_CHECKS, RECORD_CHECKS
from mxcli.flows.verify.check_fused import SET_CHECKS
from mxcli.flows.verify.check_values import WEIGHT_CHECKS

CHECKPOINT_CHECKS = (*FILE_CHECKS, *RECORD_CHECKS, *CONFIG_CHECKS, *DEVICE_CHECKS)
CHECKS: tuple[Check[Any], ...] = (*CHECKPOINT_CHECKS, *WEIGHT_CHECKS, *SET_CHECKS, *SOURCE_CHECKS, *PAIR_CHECKS)


class Findings:
    """Findings by the check that made them."""

    def __init__(self) -> None:
        self._found: dict[str, list[Finding]] = {}
        self._skipped: dict[str, str] = {}

    def look(self, checks: Iterable[Check[Any]], at: object) -> list[Finding]:
        """Make the checks, and tells what they found."""
        new: list[Finding] = []
        for check in checks:
            found = list(check.of(at))
            self._found.setdefault(check.name, []).extend(found)
            new += found
        return new

    def skip(self, checks: Iterable[Check[Any]], why: str) -> None:
        """Leave checks out."""
        self._skipped |= {check.name: why for check in checks}

    def results(self, checks: Sequence[Check[Any]] = CHECKS) -> tuple[Result, ...]:
        """Return a result for every check, worst severity first, in the order of the tables within each."""
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
