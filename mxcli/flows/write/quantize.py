"""A checkpoint quantized into a new directory, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from mxcli.backends.backend import Backend
from mxcli.backends.cpu import Cpu
from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.progress import Share
from mxcli.files.reading import release_pages
from mxcli.files.tensors import IN_MEMORY, Array
from mxcli.flows.measure.amax import SharedAmax
from mxcli.flows.measure.nonfinite import nonfinite_refusal, nonfinite_values, refuse_nonfinite
from mxcli.flows.measure.report import Report, Tally, TensorStats
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.write.arrange import Arrangement, Task, arrange
from mxcli.flows.write.pipeline import Outcome, Work, WriteJob, WriteOptions, shards_of_share, write_checkpoint
from mxcli.flows.write.records import Counted, add_counted, counted_of, counted_record, planned_record, with_statistics
from mxcli.flows.write.split import Piece
from mxcli.numerics.stats import Stats
from mxcli.numerics.streams import stream_of


@dataclass(frozen=True, slots=True)
class Written:
    """What a run wrote, all of it or its share: where, how it was laid out, every step in order with the statistics of
    the quantized (None: not done), and how far it came."""

    folder: Path
    arrangement: Arrangement
    layers: tuple[tuple[TensorPlan, Stats | None], ...]
    outcome: Outcome


def quantize_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    output: str | Path,
    *,
    backend: Backend,
    layout: str | None = None,
    max_shard_bytes: int | None = None,
    manner: WriteOptions = WriteOptions(),
    command: Sequence[str] = (),
) -> Written:
    """Quantize a checkpoint as planned and write it to the directory `output`: under final names all or nothing.

    Peak memory is about the largest tensor with what is written for it (`Arrangement.need`). The bytes depend on
    source, plan, layout and the size of files only: on no backend, and not on how often the run was cut short and
    resumed. Raises RefusedError where the layout or the directory will not do, and, under the policy `error`, naming
    every tensor that is not finite; EnvironmentFailure where the disk or the backend fails: then what is finished can
    be resumed, as after a signal.
    """
    arrangement = arrange(checkpoint, plan, layout, max_shard_bytes=max_shard_bytes)
    run = _Run(checkpoint, arrangement, backend)
    work = Work(
        shards=arrangement.shards,
        jobs=tuple(run.jobs()),
        configs=arrangement.configs,
        record=planned_record(checkpoint, plan, arrangement, command),
        finish=lambda record: with_statistics(record, run.stats),
    )
    outcome = write_checkpoint(checkpoint, Path(output), work, manner)
    mine = arrangement if manner.share is None else share_of(checkpoint, arrangement, manner.share)
    layers = tuple((task.step, run.stats_of(task)) for task in mine.tasks)
    return Written(Path(output), mine, layers, outcome)


def report_from_stats(
    source: str, checkpoint: Checkpoint, plan: Plan, arrangement: Arrangement, layers: TensorStats = ()
) -> Report:
    """Return the report on a plan as its layout lets it be carried out, with the statistics gathered on the way."""
    steps = tuple(task.step for task in arrangement.tasks)
    tally = Tally(source, checkpoint, replace(plan, tensors=steps, notes=arrangement.notes))
    for step, stats in layers:
        if stats is not None:
            tally.add(step, stats)
    return tally.report()


def share_of(checkpoint: Checkpoint, arrangement: Arrangement, share: Share) -> Arrangement:
    """Return the shards that one of several machines writes, with the tasks that have no part in others."""
    jobs = list(_Run(checkpoint, arrangement, Cpu()).jobs())
    names = shards_of_share(arrangement.shards, jobs, share)
    shards = tuple(shard for shard in arrangement.shards if shard.name in names)
    held = {entry.name for shard in shards for entry in shard.entries}
    tasks = tuple(task for task in arrangement.tasks if task.entries and held.issuperset(e.name for e in task.entries))
    return replace(arrangement, tasks=tasks, shards=shards)


class _Run:
    """The computing side of one run: its statistics so far, and tensor scales that sets of weights share."""

    def __init__(self, checkpoint: Checkpoint, arrangement: Arrangement, backend: Backend) -> None:
        self._checkpoint = checkpoint
        self._tasks, self._constants = arrangement.tasks, arrangement.constants
        self._shard_of = {entry.name: shard.name for shard in arrangement.shards for entry in shard.entries}
        self._backend = backend
        self._shared: dict[str, tuple[Task, Piece]] = {}
        sets: dict[str, list[str]] = {}
        for task in self._tasks:
            for piece in task.pieces:
                if piece.shared is not None:
                    self._shared[piece.weight.name] = task, piece
                    sets.setdefault(piece.shared, []).append(piece.weight.name)
        self._amax = SharedAmax(sets.values(), self._find_amax)
        self.stats: dict[str, Stats] = {}
        self._counted = Counter[str]()

    def jobs(self) -> Iterator[WriteJob]:
        """Yield a job for every task that writes something; for one in pieces one for each of them, or, where reading
        the tensor decodes all of it, for those of each shard."""
        for task in self._tasks:
            if task.pieces:
                yield from (self._quantizing(task, part) for part in self._parts(task))
            elif task.entries:
                yield self._copying(task)
        for name, array in self._constants.items():
            yield WriteJob(name, 0, (name,), partial(iter, [(name, array)]))

    def stats_of(self, task: Task) -> Stats | None:
        """Return the statistics of a tensor of which every piece was counted; None without."""
        name = task.step.tensor.name
        return self.stats.get(name) if self._counted[name] == len(task.pieces) else None

    def not_finite_from(self, first: Task) -> list[str]:
        """Return a refusal for every tensor to be quantized, from this one on, that holds NaN or infinities."""
        return [
            refusal
            for task in self._tasks[self._tasks.index(first) :]
            if task.pieces and (refusal := self._not_finite(task)) is not None
        ]

    def _parts(self, task: Task) -> list[slice]:
        """Return the pieces of a tensor that are worked on together."""
        shards = [self._shard_of[piece.entries[0].name] for piece in task.pieces]
        keys = shards if task.step.tensor.offset == IN_MEMORY else range(len(task.pieces))
        runs = [len(list(run)) for _, run in groupby(keys)]
        return [slice(sum(runs[:at]), sum(runs[: at + 1])) for at in range(len(runs))]

    def _copying(self, task: Task) -> WriteJob:
        info, target = task.step.tensor, task.target
        assert target is not None

        def make() -> Iterator[tuple[str, Array]]:
            yield target.name, target.of(read(self._checkpoint, info), info.dtype)

        return WriteJob(info.name, info.nbytes, (target.name,), make, (info,))

    def _quantizing(self, task: Task, part: slice) -> WriteJob:
        """Yield the job for some pieces of a tensor; what it remembers is their statistics, so that those of the tensor
        add up in the order of its pieces whoever counted them."""
        info, pieces, counted = task.step.tensor, task.pieces[part], list[Stats]()

        def make() -> Iterator[tuple[str, Array]]:
            x = read(self._checkpoint, info)
            for piece in pieces:
                plain = piece.of(x, task.step.axis)
                quantized = self._backend.quantize(
                    plain,
                    info.dtype,
                    piece.weight.scheme,
                    tensor_amax=None if piece.shared is None else self._amax.of(piece.weight.name),
                    stream=stream_of(info.name if piece.expert is None else piece.weight.name),
                )
                assert quantized.stats is not None
                self._check(task, quantized.stats)
                counted.append(quantized.stats)
                for content in piece.contents:
                    yield content.entry.name, content.of(quantized)
            release_pages(x)

        def remember() -> Counted:
            stats = counted.copy()
            counted.clear()
            self._count(info.name, stats)
            return counted_record(info.name, part.start, stats)

        begin, end = (info.nbytes * at // len(task.pieces) for at in (part.start, part.stop))
        # Pieces lie one after another; of a tensor that is decoded whole no part is asked for.
        span = info if info.offset == IN_MEMORY else replace(info, offset=info.offset + begin, nbytes=end - begin)
        return WriteJob(
            name=info.name,
            nbytes=end - begin,
            entries=tuple(entry.name for piece in pieces for entry in piece.entries),
            make=make,
            reads=(span,),
            remember=remember,
            recall=lambda memo: self._count(info.name, counted_of(memo)),
        )

    def _count(self, tensor: str, stats: Sequence[Stats]) -> None:
        add_counted(self.stats, tensor, stats)
        self._counted[tensor] += len(stats)

    def _check(self, task: Task, stats: Stats) -> None:
        if task.step.scheme and task.step.scheme.nonfinite == "error" and stats.nan + stats.infinite:
            refuse_nonfinite(self.not_finite_from(task))

    def _find_amax(self, weight: str) -> float:
        """Return the largest finite magnitude of a weight that shares its tensor scale."""
        task, piece = self._shared[weight]
        x = read(self._checkpoint, task.step.tensor)
        plain = piece.of(x, task.step.axis)
        value = self._backend.amax(plain, task.step.tensor.dtype, piece.weight.scheme.hadamard).value
        release_pages(x)
        return value

    def _overflows(self, task: Task, x: Array) -> bool:
        """Return whether a transform makes finite values infinite."""
        dtype = task.step.tensor.dtype
        return any(
            piece.weight.scheme.hadamard is not None
            and self._backend.amax(piece.of(x, task.step.axis), dtype, piece.weight.scheme.hadamard).nonfinite > 0
            for piece in task.pieces
        )

    def _not_finite(self, task: Task) -> str | None:
        info = task.step.tensor
        x = read(self._checkpoint, info)
        found = self._backend.amax(x, info.dtype)
        overflows = not found.nonfinite and self._overflows(task, x)
        release_pages(x)
        if overflows:
            return (
                f"{printable(info.name)}: values that overflow binary32 under the Hadamard transform. Use --exclude "
                f"'{printable(info.name)}'."
            )
        if not found.nonfinite:
            return None
        values = nonfinite_values(found.nonfinite, info.elements, info.shape, found.first_nonfinite)
        return nonfinite_refusal(info.name, values)
