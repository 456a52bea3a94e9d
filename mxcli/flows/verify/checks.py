"""The table of all checks, and the collector of their findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mxcli.flows.verify.check import SEVERITIES, Check, Finding, Result
from mxcli.flows.verify.check_against import JUDGED_CHECKS, ORIGINAL_CHECKS, SOURCE_CHECKS
from mxcli.flows.verify.check_config import CONFIG_CHECKS, DEVICE_CHECKS
from mxcli.flows.verify.check_files import FILE_CHECKS
from mxcli.flows.verify.check_foreign import FOREIGN_CHECKS
from mxcli.flows.verify.check_fused import FUSED_CHECKS
from mxcli.flows.verify.check_model import MODEL_CHECKS
from mxcli.flows.verify.check_parameters import PARAMETER_CHECKS
from mxcli.flows.verify.check_plain import PLAIN_CHECKS
from mxcli.flows.verify.check_record import RECORD_CHECKS
from mxcli.flows.verify.check_rules import RULE_CHECKS
from mxcli.flows.verify.check_siblings import LAYER_CHECKS, PLAIN_SIBLING_CHECKS, SIBLING_CHECKS
from mxcli.flows.verify.check_values import WEIGHT_CHECKS

CHECKPOINT_CHECKS = (*FILE_CHECKS, *RULE_CHECKS, *CONFIG_CHECKS, *DEVICE_CHECKS)
CHECKS: tuple[Check[Any], ...] = (
    *CHECKPOINT_CHECKS,
    *RECORD_CHECKS,
    *MODEL_CHECKS,
    *PARAMETER_CHECKS,
    *LAYER_CHECKS,
    *PLAIN_CHECKS,
    *PLAIN_SIBLING_CHECKS,
    *WEIGHT_CHECKS,
    *SIBLING_CHECKS,
    *FUSED_CHECKS,
    *FOREIGN_CHECKS,
    *SOURCE_CHECKS,
    *ORIGINAL_CHECKS,
    *JUDGED_CHECKS,
)


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

    def results(self, checks: Sequence[Check[Any]] = CHECKS) -> tuple[Result, ...]:
        """Return a result for every check: worst severity first, then in table order."""
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
