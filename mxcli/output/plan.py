"""A plan before the work, and what was written after it."""

from __future__ import annotations

from dataclasses import dataclass

from mxcli.backends import CPU
from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.model_files import RECORD
from mxcli.files.progress import Share
from mxcli.flows.measure.report import Report, decision_of
from mxcli.flows.plan.memory import Need
from mxcli.flows.write.arrange import Arrangement, Task
from mxcli.flows.write.sharding import INDEX, is_indexed
from mxcli.output.export import json_text
from mxcli.output.numbers import ABSENT, byte_size, counted, shape_text
from mxcli.output.report import count_lines, headlines
from mxcli.output.screen import Screen, folded_lines
from mxcli.output.table import Column, Row, aligned

_COLUMNS = (
    Column("tensor", right=False),
    Column("dtype", right=False, drop=3),
    Column("shape", right=False, drop=2),
    Column("size", drop=4),
    Column("written", drop=1),
    Column("why", right=False, drop=5),
)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a plan is to be carried out: the directory to write (None: not named) and what is free there, the device,
    and the most memory allowed (None: no limit), which is the device's."""

    folder: str | None
    free_bytes: int | None
    device: str
    max_memory: int | None


def output_files(checkpoint: Checkpoint, arrangement: Arrangement) -> list[str]:
    """Names of the files of an output, its record last."""
    names = [shard.name for shard in arrangement.shards] + [INDEX] * is_indexed(arrangement.shards)
    carried = [path.relative_to(checkpoint.root).as_posix() for path in checkpoint.side_files]
    return [*names, *arrangement.configs, *carried, RECORD]


def plan_text(
    report: Report,
    checkpoint: Checkpoint,
    arrangement: Arrangement,
    site: Site,
    screen: Screen,
) -> str:
    """What will happen to every tensor and why, and what that takes; `report` measured nothing yet."""
    rows: list[Row] = [_row(task) for task in arrangement.tasks]
    lines = [
        *headlines(report, screen),
        "",
        *aligned(_COLUMNS, rows, screen),
        "",
        *count_lines(report, report.sum, screen),
    ]
    files = output_files(checkpoint, arrangement)
    needs = [
        f"layout {arrangement.layout.name}: {arrangement.layout.meaning}",
        f"final size {_sizes(report, arrangement)}; {memory_words(arrangement.need, site)}",
        f"would compute on {site.device}",
        f"would write {counted(len(files), 'file')}: {', '.join(map(printable, files))}",
    ]
    if site.free_bytes is not None:
        needs.append(f"free disk {byte_size(site.free_bytes)} at {printable(site.folder)}")
    return "\n".join([*lines, *(line for text in needs for line in folded_lines(text, screen))])


def plan_json(
    report: Report,
    checkpoint: Checkpoint,
    arrangement: Arrangement,
    site: Site,
) -> str:
    """The same as one JSON object."""
    return json_text(
        "plan",
        {
            "source": report.source,
            "layout": arrangement.layout.name,
            "counts": dict(report.counts),
            "source_bytes": report.total.bytes,
            "output_bytes": arrangement.output_bytes,
            "peak_memory_bytes": arrangement.need.peak_bytes,
            "max_memory_bytes": site.max_memory,
            "device": site.device,
            "free_disk_bytes": site.free_bytes,
            "output": site.folder,
            "files": output_files(checkpoint, arrangement),
            "notes": list(report.notes),
            "ignored": list(arrangement.ignored),
            "tensors": [
                {
                    "name": task.step.tensor.name,
                    "dtype": task.step.tensor.dtype,
                    "shape": list(task.step.tensor.shape),
                    "role": task.step.tensor.role,
                    "decision": decision_of(task.step),
                    "reason": task.step.reason,
                    "format": task.step.scheme.format.name if task.step.scheme else None,
                    "bytes": task.step.tensor.nbytes,
                    "output_bytes": _output_bytes(task),
                }
                for task in arrangement.tasks
            ],
        },
    )


def written_line(report: Report, checkpoint: Checkpoint, arrangement: Arrangement, folder: str) -> str:
    """Where the output lies and how large it is."""
    return (
        f"written to {printable(folder)}: {counted(len(output_files(checkpoint, arrangement)), 'file')}, "
        f"layout {arrangement.layout.name}, {_sizes(report, arrangement)}"
    )


def written_record(checkpoint: Checkpoint, arrangement: Arrangement, folder: str) -> dict[str, object]:
    """The same for the JSON of a report."""
    return {
        "output": folder,
        "layout": arrangement.layout.name,
        "files": output_files(checkpoint, arrangement),
        "output_bytes": arrangement.output_bytes,
        "ignored": list(arrangement.ignored),
    }


def share_line(arrangement: Arrangement, folder: str, share: Share) -> str:
    """What a share wrote, and what is left to do when all are there."""
    return (
        f"share {share} in {printable(folder)}: {counted(len(arrangement.shards), 'shard')}, "
        f"{byte_size(arrangement.output_bytes)}; when all {share.of:,} are there, `mxcli merge` completes the output"
    )


def share_record(arrangement: Arrangement, folder: str, share: Share) -> dict[str, object]:
    """The same for the JSON of a report."""
    return {
        "output": folder,
        "layout": arrangement.layout.name,
        "share": {"number": share.number, "of": share.of},
        "files": [shard.name for shard in arrangement.shards],
        "output_bytes": arrangement.output_bytes,
    }


def _output_bytes(task: Task) -> int:
    return sum(entry.nbytes for entry in task.entries)


def _row(task: Task) -> list[str]:
    info = task.step.tensor
    written = byte_size(_output_bytes(task)) if task.entries else ABSENT
    return [
        printable(info.name),
        info.dtype,
        shape_text(info.shape),
        byte_size(info.nbytes),
        written,
        task.step.reason,
    ]


def memory_words(need: Need, site: Site) -> str:
    """The memory needed, and of how much that is allowed."""
    peak = f"peak memory about {byte_size(need.peak_bytes)}"
    if site.max_memory is None:
        return peak
    allowed = f"{byte_size(site.max_memory)} allowed (--max-memory)"
    return f"{peak} of {allowed}" if site.device == CPU else f"{peak}; on {site.device} {allowed}"


def _sizes(report: Report, arrangement: Arrangement) -> str:
    before, after = report.total.bytes, arrangement.output_bytes
    share = f", {100 * after / before:.0f}% of the source's {byte_size(before)}" if before else ""
    return f"{byte_size(after)}{share}"
