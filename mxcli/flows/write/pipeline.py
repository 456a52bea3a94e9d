"""The one way a checkpoint is written: job after job into its shard, then index, configuration, side files, record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mxcli.files.checkpoint import Checkpoint
from mxcli.files.output_dir import Output
from mxcli.files.partials import check_output_folder
from mxcli.files.progress import Draft, Share
from mxcli.files.reading import will_need
from mxcli.files.shard_file import Shard
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.write.sharding import INDEX, index_of, is_indexed

Progress = Callable[[int, int, str], None]
"""Called with bytes of the source done, bytes in all, and the tensor just done."""
Record = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The tensors written for one tensor of the source, `name` of `nbytes`, or for part of it; `make` computes them, at
    the last moment, and reads what is in `reads`.

    After that `remember` tells, in values that JSON holds, what another run must know that need not do it again:
    `recall` takes it there.
    """

    name: str
    nbytes: int
    entries: tuple[str, ...]
    make: Callable[[], Iterable[tuple[str, Array]]]
    reads: tuple[TensorInfo, ...] = ()
    remember: Callable[[], object] = lambda: None
    recall: Callable[[Any], None] = lambda memo: None


@dataclass(frozen=True, slots=True)
class Work:
    """What a checkpoint is written from: shards, the jobs that fill them, configuration files by name, and the record,
    which `finish` completes when all jobs are done."""

    shards: tuple[Shard, ...]
    jobs: tuple[WriteJob, ...]
    configs: Mapping[str, Mapping[str, object]]
    record: Record
    finish: Callable[[dict[str, object]], dict[str, object]] = lambda record: record


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a run goes about writing.

    With `force` it replaces an output, with `resume` it goes on where an earlier run was cut short, with a `share` it
    writes its part only. It ends before the next tensor when `stop` says so.
    """

    force: bool = False
    resume: bool = False
    share: Share | None = None
    stop: Callable[[], bool] = lambda: False
    on_progress: Progress = lambda done, total, name: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a run came: whether all that it had to write is written, and bytes of the source by what became of them:
    `done` by this run, `kept` from an earlier one, `left`; `has_progress` where there is something to resume."""

    complete: bool
    done: int
    kept: int
    left: int
    has_progress: bool = False


def write_checkpoint(checkpoint: Checkpoint, folder: Path, work: Work, manner: WriteOptions) -> Outcome:
    """Write a checkpoint: under final names all or nothing.

    A thread writes what one job made while the next one computes, and another asks for what that one will read. Raises
    RefusedError where the output may not go and EnvironmentFailure where the disk fails; whatever a job raises passes
    through.
    """
    draft = draft_of(checkpoint, work, manner.share)
    target = check_output_folder(folder, checkpoint, draft.names, force=manner.force, resume=manner.resume)
    with Output(target, draft, resume=manner.resume, force=manner.force) as output:
        outcome = _write_shards(output, draft.written, work.jobs, manner)
        if outcome.complete and manner.share is None:
            output.publish(work.finish(output.record))
        elif outcome.complete:
            output.complete()
    return replace(outcome, has_progress=output.has_progress)


def draft_of(checkpoint: Checkpoint, work: Work, share: Share | None = None) -> Draft:
    """Return the output of a work, or a share of it."""
    index = {INDEX: index_of(work.shards)} if is_indexed(work.shards) else {}
    return Draft(
        shards=work.shards,
        documents={**index, **work.configs},
        carried={path.relative_to(checkpoint.root).as_posix(): path for path in checkpoint.side_files},
        record=work.record,
        modified={path.name: path.stat().st_mtime_ns for path in checkpoint.files},
        share=share,
        own_shards=frozenset(shards_of_share(work.shards, work.jobs, share) if share else ()),
    )


def shards_of_share(shards: Sequence[Shard], jobs: Sequence[WriteJob], share: Share) -> list[str]:
    """Return the names of the shards that one of several machines writes: neighbours, and of each about the same bytes
    to read."""
    sizes = {name: sum(job.nbytes for job in jobs) for name, jobs in _by_shard(shards, jobs).items()}
    total, before = max(1, sum(sizes.values())), 0
    mine = []
    for name, size in sizes.items():
        middle = share.of * (2 * before + size) // (2 * total)
        if min(middle, share.of - 1) == share.number - 1:
            mine.append(name)
        before += size
    return mine


def _write_shards(output: Output, shards: Sequence[Shard], jobs: Sequence[WriteJob], manner: WriteOptions) -> Outcome:
    by_shard = _by_shard(shards, jobs)
    mine = [job for shard in shards for job in by_shard[shard.name]]
    kept = output.finished
    there = sum(job.nbytes for job in mine if job.entries[0] in kept)
    done, total = 0, sum(job.nbytes for job in mine) - there
    with _reader([job for job in mine if job.entries[0] not in kept]) as ask, ThreadPoolExecutor(1, "writer") as pool:
        for shard in shards:
            output.begin_shard(shard)
            pending: Future[None] | None = None
            for job in by_shard[shard.name]:
                if job.entries[0] in kept:
                    job.recall(json.loads(kept[job.entries[0]]))
                    continue
                if manner.stop():
                    return Outcome(False, done, there, total - done)
                ask()
                for name, array in job.make():
                    if pending is not None:
                        pending.result()
                    pending = pool.submit(output.write, name, array)
                    del array
                pending = pool.submit(_finish, pending, output, job.entries, json.dumps(job.remember()))
                done += job.nbytes
                manner.on_progress(done, total, job.name)
            if pending is not None:
                pending.result()
            output.end_shard()
    return Outcome(True, done, there, 0)


def _finish(writing: Future[None] | None, output: Output, entries: tuple[str, ...], memo: str) -> None:
    """What the one thread does after the last writing for a job, unless that failed."""
    if writing is not None:
        writing.result()
    output.finish(entries, memo)


def _by_shard(shards: Sequence[Shard], jobs: Sequence[WriteJob]) -> dict[str, list[WriteJob]]:
    shard_of = {entry.name: shard.name for shard in shards for entry in shard.entries}
    found: dict[str, list[WriteJob]] = {shard.name: [] for shard in shards}
    for job in jobs:
        if job.entries[0] in shard_of:
            found[shard_of[job.entries[0]]].append(job)
    return found


@contextmanager
def _reader(jobs: Sequence[WriteJob]) -> Iterator[Callable[[], None]]:
    """Return to be called before each of the jobs: has the system read meanwhile what the one after it will need."""
    following = iter(jobs)
    next(following, None)
    with ThreadPoolExecutor(1, "reader") as pool:

        def ask() -> None:
            job = next(following, None)
            if job is not None:
                pool.submit(will_need, job.reads)

        yield ask
