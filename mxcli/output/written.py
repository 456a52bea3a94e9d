"""Outputs of `mxcli quantize`: their files, and a line and a record on one that is complete or a share."""

from __future__ import annotations

from collections.abc import Sequence

from mxcli.errors import printable
from mxcli.files.accounting import ACCOUNTING, Accounted, Accounting
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.model_files import RECORD
from mxcli.files.progress import Share
from mxcli.files.tensors import LeftOut
from mxcli.flows.measure.report import Report
from mxcli.flows.write.accounting import accounting_of
from mxcli.flows.write.arrange import Arrangement
from mxcli.flows.write.dequantize import Restored
from mxcli.flows.write.names import model_name
from mxcli.flows.write.sharding import is_indexed
from mxcli.output.loaders import LOADER
from mxcli.output.numbers import byte_size, counted

_SHOWN = 3
"""Weights carried along that a line names."""


def output_files(checkpoint: Checkpoint, arrangement: Arrangement) -> list[str]:
    """Return the names of the files of an output, its record last."""
    index = [model_name(checkpoint).index] if is_indexed(arrangement.shards) else []
    names = [*(shard.name for shard in arrangement.shards), *index]
    carried = [path.relative_to(checkpoint.root).as_posix() for path in checkpoint.side_files]
    return [*names, *arrangement.configs, *carried, RECORD]


def output_size(report: Report, arrangement: Arrangement) -> str:
    """Return the size of an output, and how it compares with the source."""
    before, after = report.total.bytes, arrangement.output_bytes
    share = f", {100 * after / before:.0f}% of the source's {byte_size(before)}" if before else ""
    return f"{byte_size(after)}{share}"


def accounting_words(accounting: Accounting) -> str:
    """Return what was done with the files of a source: read, carried, left out and why."""
    return (
        f"{_read(accounting.read)}, carried {_carried(accounting.carried)}, left out {_left_out(accounting.left_out)}"
        f"{_parts(accounting.parts)}"
    )


def _parts(parts: Sequence[LeftOut]) -> str:
    """Return the parts of the files read that are left out, largest first; nothing without any."""
    if not parts:
        return ""
    ranked = sorted(parts, key=lambda part: -part.nbytes)
    listed = ", ".join(f"{part.what} ({printable(part.name)}, {byte_size(part.nbytes)})" for part in ranked[:_SHOWN])
    more = f" and {len(ranked) - _SHOWN:,} more" if ranked[_SHOWN:] else ""
    return f"; of the files read, left out {byte_size(sum(part.nbytes for part in parts))}: {listed}{more}"


def _read(files: Sequence[Accounted]) -> str:
    return f"read {counted(len(files), 'file')} ({_bytes(files)})"


def _carried(files: Sequence[Accounted]) -> str:
    if not files:
        return "none"
    weights = [printable(each.name) for each in files if each.is_weights]
    more = f" and {len(weights) - _SHOWN:,} more" if weights[_SHOWN:] else ""
    named = f", weights: {', '.join(weights[:_SHOWN])}{more}" if weights else ""
    return f"{counted(len(files), 'file')} ({_bytes(files)}{named})"


def _left_out(files: Sequence[Accounted]) -> str:
    if not files:
        return "none"
    by_reason: dict[str, list[Accounted]] = {}
    for each in files:
        by_reason.setdefault(str(each.reason), []).append(each)
    ranked = sorted(by_reason.items(), key=lambda alike: -sum(each.nbytes for each in alike[1]))
    reasons = [f"{reason} ({_named(alike)})" for reason, alike in ranked]
    return f"{counted(sum(each.files for each in files), 'file')} ({_bytes(files)}): {', '.join(reasons)}"


def _named(files: Sequence[Accounted]) -> str:
    """Return the largest of some files, how many others there are, and their bytes."""
    largest = max(files, key=lambda each: each.nbytes)
    more = f" and {len(files) - 1:,} more" if files[1:] else ""
    return f"{printable(largest.name)}{more}, {_bytes(files)}"


def _bytes(files: Sequence[Accounted]) -> str:
    return byte_size(sum(each.nbytes for each in files))


def restored_line(restored: Restored) -> str:
    """Return a line on a complete output of plain floats."""
    return (
        f"written to {printable(restored.folder)}: {counted(len(restored.dtypes), 'weight')} dequantized; "
        f"{accounting_words(restored.accounting)}"
    )


def written_line(report: Report, checkpoint: Checkpoint, arrangement: Arrangement, folder: str) -> str:
    """Return a line on a complete output."""
    return (
        f"written to {printable(folder)}: {counted(len(output_files(checkpoint, arrangement)), 'file')}, "
        f"layout {arrangement.layout.name}, weights {output_size(report, arrangement)}; "
        f"{accounting_words(accounting_of(checkpoint))}"
    )


def written_record(checkpoint: Checkpoint, arrangement: Arrangement, folder: str) -> dict[str, object]:
    """Return the same for the JSON of a report."""
    return {
        "output": folder,
        "layout": arrangement.layout.name,
        "files": output_files(checkpoint, arrangement),
        "output_bytes": arrangement.output_bytes,
        "ignored": list(arrangement.ignored),
        ACCOUNTING: accounting_of(checkpoint).record(),
        "loaders": [LOADER.record(verdict) for verdict in arrangement.loaders],
    }


def share_line(arrangement: Arrangement, folder: str, share: Share) -> str:
    """Return a line on a share of an output, and how to complete it."""
    return (
        f"share {share} in {printable(folder)}: {counted(len(arrangement.shards), 'shard')}, "
        f"{byte_size(arrangement.output_bytes)}; when all {share.of:,} are there, `mxcli merge` completes the output"
    )


def share_record(arrangement: Arrangement, folder: str, share: Share) -> dict[str, object]:
    """Return the same for the JSON of a report."""
    return {
        "output": folder,
        "layout": arrangement.layout.name,
        "share": {"number": share.number, "of": share.of},
        "files": [shard.name for shard in arrangement.shards],
        "output_bytes": arrangement.output_bytes,
    }
