"""Quantization of a checkpoint into a new directory, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from mxcli.backends.backend import Backend
from mxcli.backends.cpu import Cpu
from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.finite import FLOAT_BITS, not_finite
from mxcli.files.model_folder import left_out_notes
from mxcli.files.progress import Share
from mxcli.files.tensors import IN_MEMORY, Array
from mxcli.flows.measure.amax import SharedAmax
from mxcli.flows.measure.nonfinite import (
    nonfinite_refusal,
    nonfinite_values,
    plain_refusal,
    refuse_nonfinite,
    unsound_refusal,
)
from mxcli.flows.measure.report import Report, Tally, TensorStats
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.write.arrange import Arrangement, Task, arrange
from mxcli.flows.write.pipeline import Outcome, Work, WriteJob, WriteOptions, shards_of_share, write_checkpoint
from mxcli.flows.write.records import Counted, add_counted, counted_of, counted_record, planned_record, with_statistics
from mxcli.flows.write.split import Piece, read_piece
from mxcli.numerics.stats import Stats
from mxcli.numerics.streams import stream_of


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a run or its share: the directory, the arrangement, every planned tensor in order with the
    statistics of quantized ones (None: not done), and the progress."""

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
    engines: Sequence[str] = (),
    devices: int | None = None,
    options: WriteOptions = WriteOptions(),
    command: Sequence[str] = (),
) -> Written:
    """Quantize a checkpoint as planned and write it to the directory `output`: complete under final names, or not at
    all.

    Peak memory is about the largest tensor with its output (`Arrangement.need`). The bytes depend only on source, plan,
    layout and shard size, not on the backend or on interruptions. Raises RefusedError for a layout or directory that
    cannot be used, and with the names of all tensors that are not finite under the policy `error` or, if the output is
    checked, would be so in it; EnvironmentFailure if the disk or the backend fails, after which, as after a signal, the
    run can be resumed.
    """
    arrangement = arrange(checkpoint, plan, layout, max_shard_bytes=max_shard_bytes, engines=engines, devices=devices)
    run = _Run(checkpoint, arrangement, backend, is_verified=options.check is not None)
    work = Work(
        shards=arrangement.shards,
        jobs=tuple(run.jobs()),
        configs=arrangement.configs,
        record=planned_record(checkpoint, plan, arrangement, command),
        finish=run.finished,
    )
    outcome = write_checkpoint(checkpoint, Path(output), work, options)
    mine = arrangement if options.share is None else share_of(checkpoint, arrangement, options.share)
    layers = tuple((task.planned, run.stats_of(task)) for task in mine.tasks)
    return Written(Path(output), mine, layers, outcome)


def report_from_stats(
    source: str, checkpoint: Checkpoint, plan: Plan, arrangement: Arrangement, layers: TensorStats = ()
) -> Report:
    """Return the report on a plan as arranged, with the statistics gathered while writing."""
    noted = replace(checkpoint, notes=(*checkpoint.notes, *left_out_notes(checkpoint.left_out, arrangement.configs)))
    tally = Tally(source, noted, replace(plan, tensors=arrangement.tensors, notes=arrangement.notes))
    for planned, stats in layers:
        if stats is not None:
            tally.add(planned, stats)
    return tally.report()


def write_jobs(checkpoint: Checkpoint, arrangement: Arrangement, backend: Backend) -> tuple[WriteJob, ...]:
    """Return the jobs that make the tensors of an arrangement."""
    return tuple(_Run(checkpoint, arrangement, backend).jobs())


def share_of(checkpoint: Checkpoint, arrangement: Arrangement, share: Share) -> Arrangement:
    """Return the shards that one of several machines writes, with the tasks entirely in them."""
    jobs = list(_Run(checkpoint, arrangement, Cpu()).jobs())
    names = shards_of_share(arrangement.shards, jobs, share)
    shards = tuple(shard for shard in arrangement.shards if shard.name in names)
    held = {entry.name for shard in shards for entry in shard.entries}
    tasks = tuple(task for task in arrangement.tasks if task.entries and held.issuperset(e.name for e in task.entries))
    return replace(arrangement, tasks=tasks, shards=shards)


def copy_job(checkpoint: Checkpoint, task: Task) -> WriteJob:
    """Return the job that copies a tensor that is kept."""
    info, target = task.planned.tensor, task.target
    assert target is not None

    def make() -> Iterator[tuple[str, Array]]:
        yield target.name, target.of(read(checkpoint, info), info.dtype)

    return WriteJob(info.name, info.nbytes, (target.name,), make, (info,))


def constant_jobs(constants: Mapping[str, Array]) -> Iterator[WriteJob]:
    """Yield the jobs of tensors that the source lacks."""
    for name, array in constants.items():
        yield WriteJob(name, 0, (name,), partial(iter, [(name, array)]))


class _Run:
    """The computation of a run: its statistics so far, and the amaxes that sets of weights share. If it `is_verified`,
    no NaN is written, nor an infinity that the model does not need."""

    def __init__(
        self, checkpoint: Checkpoint, arrangement: Arrangement, backend: Backend, *, is_verified: bool = False
    ) -> None:
        self._checkpoint, self._is_verified = checkpoint, is_verified
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
        self._recalled: list[tuple[Task, Stats]] = []

    def jobs(self) -> Iterator[WriteJob]:
        """Yield a job for every task with output: one per piece, or, if reading the tensor decodes all of it, one for
        the pieces of each shard."""
        for task in self._tasks:
            if task.pieces:
                yield from (self._quantizing(task, part) for part in self._parts(task))
            elif task.entries:
                yield replace(copy_job(self._checkpoint, task), refusals=partial(self.not_finite_from, task))
        yield from constant_jobs(self._constants)

    def stats_of(self, task: Task) -> Stats | None:
        """Return the statistics of a tensor; None unless all its pieces are counted."""
        name = task.planned.tensor.name
        return self.stats.get(name) if self._counted[name] == len(task.pieces) else None

    def not_finite_from(self, first: Task) -> list[str]:
        """Return a refusal for every tensor, from this task on, that is not finite and may not be so."""
        found = (
            self._not_finite(task) if task.pieces else self._not_finite_copy(task) if self._is_verified else None
            for task in self._tasks[self._tasks.index(first) :]
            if task.entries
        )
        return [refusal for refusal in found if refusal is not None]

    def _parts(self, task: Task) -> list[slice]:
        """Return the pieces of a tensor that one job quantizes."""
        shards = [self._shard_of[piece.entries[0].name] for piece in task.pieces]
        keys = shards if task.planned.tensor.offset == IN_MEMORY else range(len(task.pieces))
        lengths = [len(list(run)) for _, run in groupby(keys)]
        return [slice(sum(lengths[:at]), sum(lengths[: at + 1])) for at in range(len(lengths))]

    def _quantizing(self, task: Task, part: slice) -> WriteJob:
        """Return the job of some pieces of a tensor; it logs their statistics, so that those of the tensor add up in
        the order of its pieces after interruptions too."""
        info, pieces, counted = task.planned.tensor, task.pieces[part], list[Stats]()

        def make() -> Iterator[tuple[str, Array]]:
            # Before this tensor is read: an amax reads others.
            amaxes = [None if piece.shared is None else self._amax.of(piece.weight.name) for piece in pieces]
            whole = read(self._checkpoint, info) if info.offset == IN_MEMORY else None
            for piece, amax in zip(pieces, amaxes, strict=True):
                plain = (
                    read_piece(self._checkpoint, info, piece, task.planned.axis)
                    if whole is None
                    else piece.of(whole, task.planned.axis)
                )
                quantized = self._backend.quantize(
                    plain,
                    info.dtype,
                    piece.weight.scheme,
                    tensor_amax=amax,
                    stream=stream_of(info.name if piece.expert is None else piece.weight.name),
                )
                assert quantized.stats is not None
                self._check(task, quantized.stats)
                counted.append(quantized.stats)
                for content in piece.contents:
                    yield content.entry.name, content.of(quantized)

        def remember() -> Counted:
            stats = counted.copy()
            counted.clear()
            self._count(info.name, stats)
            return counted_record(info.name, part.start, stats)

        begin, end = (info.nbytes * at // len(task.pieces) for at in (part.start, part.stop))
        # Pieces are consecutive; a tensor that is decoded whole is read whole.
        span = info if info.offset == IN_MEMORY else replace(info, offset=info.offset + begin, nbytes=end - begin)
        return WriteJob(
            name=info.name,
            nbytes=end - begin,
            entries=tuple(entry.name for piece in pieces for entry in piece.entries),
            make=make,
            reads=(span,),
            remember=remember,
            recall=lambda memo: self._recall(task, counted_of(memo)),
        )

    def _recall(self, task: Task, stats: Sequence[Stats]) -> None:
        """Count what an earlier run wrote; whether it may be kept is seen at the end, if no other tensor shows it."""
        self._count(task.planned.tensor.name, stats)
        self._recalled += [(task, each) for each in stats]

    def _count(self, tensor: str, stats: Sequence[Stats]) -> None:
        add_counted(self.stats, tensor, stats)
        self._counted[tensor] += len(stats)

    def finished(self, record: dict[str, object]) -> dict[str, object]:
        """Return the record with all statistics. Raises RefusedError for what an earlier run wrote and this one would
        not."""
        for task, stats in self._recalled:
            self._check(task, stats)
        return with_statistics(record, self.stats)

    def _check(self, task: Task, stats: Stats) -> None:
        scheme = task.planned.scheme
        is_refused = scheme is not None and scheme.nonfinite == "error" and stats.nan + stats.infinite
        if is_refused or (self._is_verified and (stats.nan or stats.nan_blocks)):
            refuse_nonfinite(self.not_finite_from(task))

    def _find_amax(self, weight: str) -> float:
        """Return the amax of a weight that shares its tensor scale."""
        task, piece = self._shared[weight]
        plain = read_piece(self._checkpoint, task.planned.tensor, piece, task.planned.axis)
        return self._backend.amax(plain, task.planned.tensor.dtype, piece.weight.scheme.hadamard).value

    def _overflows(self, task: Task, x: Array) -> bool:
        """Return whether a transform makes finite values infinite."""
        dtype = task.planned.tensor.dtype
        return any(
            piece.weight.scheme.hadamard is not None
            and self._backend.amax(piece.of(x, task.planned.axis), dtype, piece.weight.scheme.hadamard).nonfinite > 0
            for piece in task.pieces
        )

    def _not_finite(self, task: Task) -> str | None:
        info = task.planned.tensor
        x = read(self._checkpoint, info)
        found = self._backend.amax(x, info.dtype)
        if not found.nonfinite and self._overflows(task, x):
            return (
                f"{printable(info.name)}: values overflow binary32 under the Hadamard transform. Use --exclude "
                f"'{printable(info.name)}'."
            )
        if not found.nonfinite:
            return None
        values = nonfinite_values(found.nonfinite, info.elements, info.shape, found.first_nonfinite, dtype=info.dtype)
        if not self._is_verified:
            return nonfinite_refusal(info.name, values)
        scheme, bad = task.planned.scheme, not_finite(x, info.name, info.dtype, info.shape)
        has_nan = info.dtype not in FLOAT_BITS or (bad is not None and bad.nan > 0)
        is_stored = scheme is not None and scheme.nonfinite != "error" and not scheme.infinity_is_nan
        return None if is_stored and not has_nan else unsound_refusal(info.name, values, has_nan=has_nan)

    def _not_finite_copy(self, task: Task) -> str | None:
        info = task.planned.tensor
        bad = not_finite(read(self._checkpoint, info), info.name, info.dtype, info.shape)
        return None if bad is None else plain_refusal(info.name, bad.text(info.shape))
