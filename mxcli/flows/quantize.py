"""A checkpoint quantized into a new directory, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mxcli.backends import Backend
from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.reading import release_pages
from mxcli.files.tensors import Array
from mxcli.flows.arrange import Arrangement, Task, arrange
from mxcli.flows.pieces import Piece
from mxcli.flows.plan import Plan, Step
from mxcli.flows.records import quantize_record
from mxcli.flows.writing import Job, Progress, write_checkpoint
from mxcli.numerics.stats import Stats


@dataclass(frozen=True, slots=True)
class Written:
    """What a run wrote: where, how it was laid out, and every step in order with the statistics of the quantized."""

    folder: Path
    arrangement: Arrangement
    layers: tuple[tuple[Step, Stats | None], ...]


def quantize_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    output: str | Path,
    *,
    backend: Backend,
    layout: str | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
    command: Sequence[str] = (),
) -> Written:
    """Quantize a checkpoint as planned and write it to the directory `output`, all or nothing.

    Peak memory is about the largest tensor with what is written for it (`Arrangement.need`). The bytes
    depend on source, plan and layout only, on no backend. Raises RefusedError where the layout or the directory
    will not do, and, under the policy `error`, naming every tensor that is not finite; EnvironmentFailure where
    the disk or the backend fails.
    """
    arrangement = arrange(checkpoint, plan, layout)
    run = _Run(checkpoint, arrangement, backend)
    try:
        write_checkpoint(
            checkpoint,
            Path(output),
            arrangement.shards,
            run.jobs(),
            configs=arrangement.configs,
            record=lambda: quantize_record(checkpoint, plan, arrangement, run.stats, command),
            force=force,
            on_progress=on_progress,
        )
    except _NotFinite as found:
        raise together(RefusedError, "Values that are not finite", run.not_finite_from(found.task)) from None
    layers = tuple((task.step, run.stats.get(task.step.tensor.name)) for task in arrangement.tasks)
    return Written(Path(output), arrangement, layers)


class _NotFinite(Exception):  # noqa: N818 - it ends the writing, and is no error of its own
    def __init__(self, task: Task) -> None:
        super().__init__(task.step.tensor.name)
        self.task = task


class _Run:
    """The computing side of one run: its statistics so far, and tensor scales that sets of weights share."""

    def __init__(self, checkpoint: Checkpoint, arrangement: Arrangement, backend: Backend) -> None:
        self._checkpoint = checkpoint
        self._tasks = arrangement.tasks
        self._backend = backend
        self._amax: dict[str, float] = {}
        self._sharing: dict[str, list[tuple[Task, Piece]]] = {}
        for task in self._tasks:
            for piece in task.pieces:
                if piece.shared is not None:
                    self._sharing.setdefault(piece.shared, []).append((task, piece))
        self.stats: dict[str, Stats] = {}

    def jobs(self) -> list[Job]:
        """A job for every task that writes something."""
        return [
            Job(
                task.step.tensor.name,
                task.step.tensor.nbytes,
                tuple(entry.name for entry in task.entries),
                partial(self._made, task),
            )
            for task in self._tasks
            if task.entries
        ]

    def not_finite_from(self, first: Task) -> list[str]:
        """A refusal for every tensor to be quantized, from this one on, that holds NaN or infinities."""
        return [
            refusal
            for task in self._tasks[self._tasks.index(first) :]
            if task.pieces and (refusal := self._not_finite(task)) is not None
        ]

    def _made(self, task: Task) -> Iterator[tuple[str, Array]]:
        info = task.step.tensor
        x = read(self._checkpoint, info)
        if not task.pieces:
            yield info.name, x
            return
        for piece in task.pieces:
            part = piece.of(x, task.step.axis)
            quantized = self._backend.quantize(
                part, info.dtype, piece.weight.recipe, tensor_amax=self._shared_amax(piece)
            )
            assert quantized.stats is not None
            self._count(task, quantized.stats)
            for content in piece.contents:
                yield content.entry.name, content.of(quantized)
        release_pages(x)

    def _count(self, task: Task, stats: Stats) -> None:
        if task.step.recipe and task.step.recipe.nonfinite == "error" and stats.nan + stats.infinite:
            raise _NotFinite(task)
        name = task.step.tensor.name
        self.stats[name] = self.stats[name] + stats if name in self.stats else stats

    def _shared_amax(self, piece: Piece) -> float | None:
        """The largest finite magnitude of all weights that share this one's tensor scale; None where none do."""
        if piece.shared is None:
            return None
        if piece.shared not in self._amax:
            self._amax[piece.shared] = max(self._amax_of(*sharing) for sharing in self._sharing[piece.shared])
        return self._amax[piece.shared]

    def _amax_of(self, task: Task, piece: Piece) -> float:
        x = read(self._checkpoint, task.step.tensor)
        value = self._backend.amax(piece.of(x, task.step.axis), task.step.tensor.dtype).value
        release_pages(x)
        return value

    def _not_finite(self, task: Task) -> str | None:
        info = task.step.tensor
        x = read(self._checkpoint, info)
        found = self._backend.amax(x, info.dtype)
        release_pages(x)
        if not found.nonfinite:
            return None
        place = [int(index) for index in np.unravel_index(found.first_nonfinite, info.shape)]
        return (
            f"{printable(info.name)}: {found.nonfinite:,} of {info.elements:,} values are NaN or infinite, the first "
            f"at {place}. Use --nonfinite saturate or nan-block, or --exclude '{printable(info.name)}'."
        )
