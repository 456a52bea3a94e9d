"""Outputs of `mxcli quantize`: their files, and a line and a record on one that is complete or a share."""

from __future__ import annotations

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.model_files import RECORD
from mxcli.files.progress import Share
from mxcli.flows.measure.report import Report
from mxcli.flows.write.arrange import Arrangement
from mxcli.flows.write.sharding import INDEX, is_indexed
from mxcli.output.numbers import byte_size, counted


def output_files(checkpoint: Checkpoint, arrangement: Arrangement) -> list[str]:
    """Return the names of the files of an output, its record last."""
    names = [shard.name for shard in arrangement.shards] + [INDEX] * is_indexed(arrangement.shards)
    carried = [path.relative_to(checkpoint.root).as_posix() for path in checkpoint.side_files]
    return [*names, *arrangement.configs, *carried, RECORD]


def output_size(report: Report, arrangement: Arrangement) -> str:
    """Return the size of an output, and how it compares with the source."""
    before, after = report.total.bytes, arrangement.output_bytes
    share = f", {100 * after / before:.0f}% of the source's {byte_size(before)}" if before else ""
    return f"{byte_size(after)}{share}"


def written_line(report: Report, checkpoint: Checkpoint, arrangement: Arrangement, folder: str) -> str:
    """Return a line on a complete output."""
    return (
        f"written to {printable(folder)}: {counted(len(output_files(checkpoint, arrangement)), 'file')}, "
        f"layout {arrangement.layout.name}, weights {output_size(report, arrangement)}"
    )


def written_record(checkpoint: Checkpoint, arrangement: Arrangement, folder: str) -> dict[str, object]:
    """Return the same for the JSON of a report."""
    return {
        "output": folder,
        "layout": arrangement.layout.name,
        "files": output_files(checkpoint, arrangement),
        "output_bytes": arrangement.output_bytes,
        "ignored": list(arrangement.ignored),
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
