"""The checks that an output passes before it has its final names: those that need its headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxcli.errors import LimitError, MxcliError, printable, together
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.verify.checks.check import PROBLEM, Check, Findings
from mxcli.flows.verify.checks.config import LIST_CHECKS
from mxcli.flows.verify.checks.files import FILE_CHECKS
from mxcli.flows.verify.checks.rules import RULE_CHECKS
from mxcli.flows.verify.subject import subject_of

_CHECKS = (*FILE_CHECKS, *RULE_CHECKS, *LIST_CHECKS)
"""Checks of what was written. What the user chose, such as formats that loaders refuse together, is for `verify`."""


def check_written(folder: Path, output: str | Path) -> None:
    """Check what was written: that it opens, and of a quantized checkpoint its structure and configuration. The bytes
    themselves were hashed as they were written.

    `folder` has the files of the directory `output` by their final names. Raises LimitError with every problem.
    """
    found = [problem.replace(str(folder), str(output)) for problem in _problems(folder)]
    if found:
        headline = (
            f"{printable(output)}: what was written is not sound and has no final names; the same command with "
            "--resume writes again what was damaged since (with --no-verify it gets its names as it is)"
        )
        raise together(LimitError, headline, [f"{headline}: {found[0]}"] if len(found) == 1 else found)


def _problems(folder: Path) -> list[str]:
    try:
        checkpoint = open_checkpoint(folder)
        if checkpoint.dialect is None:
            return []
        subject = subject_of(checkpoint)
    except MxcliError as error:
        return list(error.reasons)
    findings = Findings()
    findings.run(_CHECKS, subject)
    return problems(findings, _CHECKS)


def problems(findings: Findings, checks: Sequence[Check[Any]]) -> list[str]:
    """Return the problems that checks found, one sentence each."""
    return [
        f"{result.name}: {printable(finding.where)}: {finding.value}; {finding.need}. {finding.way_out}".rstrip()
        for result in findings.results(checks)
        if result.severity == PROBLEM
        for finding in result.findings
    ]
