"""What a verb that writes nothing would measure, and what that takes, before it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.tensors import TensorInfo
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.plan.memory import Need
from mxcli.output.numbers import byte_size, counted, shape_text
from mxcli.output.plan import Site, memory_words
from mxcli.output.screen import Screen, folded_lines
from mxcli.output.table import Column, Row, aligned

_TENSORS = (
    Column("tensor", right=False),
    Column("dtype", right=False, drop=3),
    Column("shape", right=False, drop=2),
    Column("size", drop=1),
    Column("why", right=False, drop=4),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """What measuring takes: the tensors, each read once, how many `measurements` of them, under which `ways` in words,
    the memory, where it would be, and how many bytes are read (None: all of the tensors)."""

    tensors: Sequence[TensorInfo]
    measurements: int
    ways: str
    need: Need
    site: Site
    bytes_read: int | None = None


class Planned(Protocol):
    """A tensor and what is to become of it."""

    @property
    def name(self) -> str:
        """As the source has it."""

    @property
    def dtype(self) -> str:
        """Its type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def role(self) -> str:
        """What it is for."""

    @property
    def decision(self) -> str:
        """What becomes of it, in a word."""

    @property
    def reason(self) -> str:
        """Why."""


def effort_lines(effort: Effort, screen: Screen) -> list[str]:
    """Sentences on what measuring takes."""
    tensors = counted(len(effort.tensors), "tensor")
    under = f" under {effort.ways}: {effort.measurements:,} measurements, " if effort.ways else ": "
    needs = [
        f"would measure {tensors}{under}{byte_size(_bytes(effort))} read once",
        memory_words(effort.need, effort.site),
        f"would compute on {effort.site.device}",
    ]
    return [line for text in needs for line in folded_lines(text, screen)]


def effort_record(effort: Effort) -> dict[str, object]:
    """The same for JSON."""
    return {
        "measurements": effort.measurements,
        "bytes_read": _bytes(effort),
        "peak_memory_bytes": effort.need.peak_bytes,
        "max_memory_bytes": effort.site.max_memory,
        "device": effort.site.device,
    }


def source_record(source: str, checkpoint: Checkpoint) -> dict[str, object]:
    """What the source holds, for JSON."""
    infos = checkpoint.tensors.values()
    total, by_dtype = Total.of(infos), totals_by(lambda info: info.dtype, infos)
    return {
        "source": source,
        "elements": total.elements,
        "bytes": total.bytes,
        "by_dtype": {dtype: asdict(each) for dtype, each in by_dtype.items()},
    }


def tensor_lines(planned: Iterable[Planned], checkpoint: Checkpoint, screen: Screen) -> list[str]:
    """The table of all tensors, and why each is measured or kept."""
    rows: list[Row] = [
        [
            printable(each.name),
            each.dtype,
            shape_text(each.shape),
            byte_size(checkpoint.tensors[each.name].nbytes),
            each.reason,
        ]
        for each in planned
    ]
    return aligned(_TENSORS, rows, screen)


def tensor_records(planned: Iterable[Planned], checkpoint: Checkpoint) -> list[dict[str, object]]:
    """The same for JSON."""
    return [
        {
            "name": each.name,
            "dtype": each.dtype,
            "shape": list(each.shape),
            "role": each.role,
            "decision": each.decision,
            "reason": each.reason,
            "bytes": checkpoint.tensors[each.name].nbytes,
        }
        for each in planned
    ]


def _bytes(effort: Effort) -> int:
    return sum(info.nbytes for info in effort.tensors) if effort.bytes_read is None else effort.bytes_read
