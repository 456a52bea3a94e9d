"""The checks of values that an output passes before it has its final names where its run did not make them: codes that
were carried over, and shares of other runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read
from mxcli.files.finite import not_finite
from mxcli.flows.measure.nonfinite import plain_refusal
from mxcli.flows.verify.alone import summaries_of
from mxcli.flows.verify.checks.check import Findings
from mxcli.flows.verify.checks.plain import plain_tensors
from mxcli.flows.verify.doubts import CERTAIN_CHECKS
from mxcli.flows.verify.subject import Subject, subject_of
from mxcli.flows.verify.written import check_written, problems


def check_written_values(folder: Path, output: str | Path) -> None:
    """Check what was written like `check_written`, and that plain tensors are finite and codes and scales sound.

    Raises RefusedError with every value that `mxcli verify` would call a problem: those of the source are.
    """
    check_written(folder, output)
    checkpoint = open_checkpoint(folder)
    subject = None if checkpoint.dialect is None else subject_of(checkpoint)
    found = [problem.replace(str(folder), str(output)) for problem in _problems(checkpoint, subject)]
    if found:
        headline = f"{printable(output)}: its values are not sound (with --no-verify it gets its names as it is)"
        raise together(RefusedError, headline, [f"{headline}: {found[0]}"] if len(found) == 1 else found)


def _problems(checkpoint: Checkpoint, subject: Subject | None) -> Iterator[str]:
    weights = {} if subject is None else subject.weights
    quantized = frozenset(part.entry.name for stored in weights.values() for part in stored.contents)
    for info in plain_tensors(checkpoint, quantized):
        bad = not_finite(read(checkpoint, info), info.name, info.dtype, info.shape)
        if bad is not None:
            yield plain_refusal(info.name, bad.text(info.shape))
    if subject is None:
        return
    blocks = {name: _nan_blocks(each) for name, each in subject.recorded_tensors.items()}
    if weights.keys() <= {name for name, count in blocks.items() if count is not None}:
        # Their own run counted them as it made them.
        yield from (f"{printable(name)}: {count:,} blocks became NaN" for name, count in blocks.items() if count)
        return
    findings = Findings()
    for _, summary in summaries_of(subject):
        findings.run(CERTAIN_CHECKS, summary)
    yield from problems(findings, CERTAIN_CHECKS)


def _nan_blocks(record: Mapping[str, object]) -> int | None:
    """Return the number of blocks of a tensor that became NaN when it was quantized; None if the record has none."""
    statistics = record.get("statistics")
    count = statistics.get("nan_blocks") if isinstance(statistics, Mapping) else None
    return count if isinstance(count, int) else None
