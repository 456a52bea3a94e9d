"""Checks of the files of a source: each is read, in the output, or left out with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mxcli.errors import InputError
from mxcli.files.accounting import ACCOUNTING, LEFT_OUT, LISTED, is_accounting
from mxcli.files.directory import GGUF
from mxcli.files.model_files import RECORD
from mxcli.files.record import record_content
from mxcli.flows.verify.against.checks import AgainstSource
from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding
from mxcli.flows.write.accounting import accounting_of


def _left_behind(against: AgainstSource, *, weights: bool) -> Iterator[Finding]:
    """Yield the files that an output of this source carries along, and that are neither here nor recorded as left out:
    `weights` of an output with an accounting, or all others. Programs that write none need not carry documents along,
    and a GGUF file is a whole model."""
    output = against.subject.checkpoint
    root, accounting = output.root, _recorded(output.root)
    if not accounting and output.kind == GGUF:
        return
    listed = accounting[LEFT_OUT][LISTED] if accounting else []
    left_out = {each["name"] for each in listed}
    unnamed = f", and {RECORD} does not account for it" if accounting else ""
    for each in accounting_of(against.originals.checkpoint).carried:
        is_there = each.name in left_out or (root / each.name).is_file()
        if not is_there and (accounting or each.is_weights) and (each.is_weights and bool(accounting)) == weights:
            yield Finding(
                each.name,
                f"{each.nbytes:,} bytes in the source, which were not read and are not here{unnamed}",
                "the file: a loader may need it",
                "Copy it from the source.",
            )


def _recorded(root: Path) -> Mapping[str, Any]:
    """Return the accounting in the record of an output; empty without one."""
    try:
        content = record_content(root)
    except InputError:
        return {}
    found = None if content is None else content.get(ACCOUNTING)
    return found if isinstance(found, Mapping) and is_accounting(found) else {}


ACCOUNTING_CHECKS: tuple[Check[AgainstSource], ...] = (
    Check(
        "weights_left_behind",
        PROBLEM,
        "weights in the source that are neither read nor in the output",
        f"every file of the source against the output, and against the files that {RECORD} says were left out",
        partial(_left_behind, weights=True),
    ),
    Check(
        "left_behind",
        WARNING,
        "files of the source that are neither read nor in the output",
        "every file of the source that is not left out for a reason; without an accounting only weights",
        partial(_left_behind, weights=False),
    ),
)
