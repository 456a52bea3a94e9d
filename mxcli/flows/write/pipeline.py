"""The writing of all checkpoints: job after job into its shard, then index, configuration, side files, record."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.complete import check_complete, is_complete, refuse_unverified
from mxcli.files.finite import not_finite
from mxcli.files.layouts import Entry
from mxcli.files.model_files import CONFIG, RECORD, CarriedFile, permissions
from mxcli.files.output_dir import Check, Output
from mxcli.files.output_folder import check_output_folder
from mxcli.files.preflight import check_draft, refuse_names_of
from mxcli.files.progress import Draft, Share
from mxcli.files.reading import will_need
from mxcli.files.record import as_written
from mxcli.files.shard_file import Shard
from mxcli.files.source_watch import SourceWatch, watching
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.measure.nonfinite import CORRECT, plain_refusal, refuse_nonfinite
from mxcli.flows.write.names import model_name
from mxcli.flows.write.sharding import index_of, is_indexed

Progress = Callable[[int, int, str], None]
"""A callback with bytes of the source done, bytes in all, and the tensor just done."""
Record = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The tensors written for a tensor `name` of the source, or for a part of it with `nbytes`; `make` computes them
    when they are needed, from the tensors in `reads`.

    `remember` then returns a JSON value, which `recall` takes in a resumed run that skips the job. `refusals` names
    all that is not finite from this job on, if the source can say so.
    """

    name: str
    nbytes: int
    entries: tuple[str, ...]
    make: Callable[[], Iterable[tuple[str, Array]]]
    reads: tuple[TensorInfo, ...] = ()
    remember: Callable[[], object] = lambda: None
    recall: Callable[[Any], None] = lambda memo: None
    refusals: Callable[[], Sequence[str]] = lambda: ()


@dataclass(frozen=True, slots=True)
class Work:
    """The parts of an output checkpoint: shards, the jobs that fill them, configuration files by name, and the record,
    which `finish` completes when all jobs are done. `way_out` is for values that are not finite."""

    shards: tuple[Shard, ...]
    jobs: tuple[WriteJob, ...]
    configs: Mapping[str, Mapping[str, object]]
    record: Record
    finish: Callable[[dict[str, object]], dict[str, object]] = lambda record: record
    way_out: str = CORRECT


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a run that writes.

    `force` replaces an output, `resume` continues an interrupted run, a `share` restricts the run to its part. The run
    ends before the next tensor if `stop` returns True. `check` looks at a whole output before it has its final names.
    `others` are files that are written afterwards and must not replace one of the output; `inputs` those that the run
    reads besides the source, which the output must not replace.
    """

    force: bool = False
    resume: bool = False
    share: Share | None = None
    stop: Callable[[], bool] = lambda: False
    on_progress: Progress = lambda done, total, name: None
    check: Check | None = None
    others: tuple[Path, ...] = ()
    inputs: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The progress of a run: whether it is complete, and the bytes of the source that are `done` by this run, `kept`
    from an earlier one, and `left`; `has_progress` if there is something to resume, `was_complete` if nothing was left
    to do. `stayed` are files of the output before this one that were changed since, and so were not removed."""

    complete: bool
    done: int
    kept: int
    left: int
    has_progress: bool = False
    was_complete: bool = False
    stayed: tuple[str, ...] = ()


def write_checkpoint(checkpoint: Checkpoint, folder: Path, work: Work, options: WriteOptions) -> Outcome:
    """Write a checkpoint: complete under final names, or not at all.

    One thread writes the output of a job while the next one computes; another prefetches the input of the job after
    that. A resumed run of a complete output checks it, and with `force` replaces it if it is not as it would be. Raises
    RefusedError if the output may not be written there, InputError if the source changes meanwhile, and
    EnvironmentFailure if the disk fails; exceptions of jobs and of `options.check` propagate.
    """
    with watching(checkpoint) as watch:
        draft = draft_of(checkpoint, work, watch, options.share)
        refuse_names_of(folder, (*draft.names, RECORD), options.others)
        if options.resume and is_complete(folder):
            with suppress(RefusedError, InputError) if options.force else nullcontext():
                check_complete(folder, draft, watch)
                if options.check is not None:
                    refuse_unverified(folder)
                return Outcome(True, 0, sum(job.nbytes for job in work.jobs), 0, was_complete=True)
        target = check_output_folder(
            folder, checkpoint, draft.names, force=options.force, resume=options.resume, inputs=options.inputs
        )
        check_draft(draft, folder)
        keeps_all = options.check is None
        with Output(target, draft, watch, resume=options.resume, force=options.force, keeps_all=keeps_all) as output:
            outcome = _write_shards(output, draft.written, work, watch, options)
            if outcome.complete:
                watch.finish()
            if outcome.complete and options.share is None:
                output.publish(work.finish(output.record), options.check)
            elif outcome.complete:
                output.complete()
    return replace(outcome, has_progress=output.has_progress, stayed=output.stayed)


def draft_of(checkpoint: Checkpoint, work: Work, watch: SourceWatch, share: Share | None = None) -> Draft:
    """Return the draft of an output, or of a share of it."""
    return replace(
        planned_draft(checkpoint, work.shards, work.configs, work.record),
        sampled=watch.samples() if share else {},
        share=share,
        own_shards=frozenset(shards_of_share(work.shards, work.jobs, share) if share else ()),
    )


def planned_draft(
    checkpoint: Checkpoint, shards: Sequence[Shard], configs: Mapping[str, Record], record: Record | None = None
) -> Draft:
    """Return the draft of a whole output, as far as it is known before its source is watched. Raises RefusedError for
    files to carry along with the names of others of the output."""
    index = {model_name(checkpoint).index: index_of(shards)} if is_indexed(shards) else {}
    documents = {**index, **configs}
    carried = {path.relative_to(checkpoint.root).as_posix(): path for path in checkpoint.side_files}
    _refuse_same_names(checkpoint, carried.keys() & {*(shard.name for shard in shards), *documents})
    return Draft(
        shards=tuple(shards),
        documents=documents,
        carried={name: CarriedFile.of(path) for name, path in carried.items()},
        record=record or {},
        mode=permissions([*checkpoint.files, *([checkpoint.root / CONFIG] if checkpoint.config else [])]),
    )


def _refuse_same_names(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Raise RefusedError for files of the source that an output would both write and carry along."""
    if names:
        raise together(
            RefusedError,
            printable(checkpoint.root),
            [
                f"{printable(checkpoint.root / name)}: an output has a file of this name, and would carry this one "
                "along too, which holds other tensors; move it away, or omit --max-shard-size."
                for name in sorted(names)
            ],
        )


def shards_of_share(shards: Sequence[Shard], jobs: Sequence[WriteJob], share: Share) -> list[str]:
    """Return the names of the shards that one of several machines writes: consecutive ones, with about the same bytes
    to read for each machine."""
    sizes = {name: sum(job.nbytes for job in jobs) for name, jobs in _by_shard(shards, jobs).items()}
    total, before = max(1, sum(sizes.values())), 0
    mine = []
    for name, size in sizes.items():
        middle = share.of * (2 * before + size) // (2 * total)
        if min(middle, share.of - 1) == share.number - 1:
            mine.append(name)
        before += size
    return mine


def _write_shards(
    output: Output, shards: Sequence[Shard], work: Work, watch: SourceWatch, options: WriteOptions
) -> Outcome:
    by_shard = _by_shard(shards, work.jobs)
    entries = {entry.name: entry for shard in shards for entry in shard.entries}
    mine = [job for shard in shards for job in by_shard[shard.name]]
    kept = output.finished
    kept_bytes = sum(job.nbytes for job in mine if job.entries[0] in kept)
    done, total = 0, sum(job.nbytes for job in mine) - kept_bytes
    with (
        _reader([job for job in mine if job.entries[0] not in kept]) as prefetch,
        ThreadPoolExecutor(1, "writer") as pool,
    ):
        for shard in shards:
            output.begin_shard(shard)
            pending: Future[None] | None = None
            for job in by_shard[shard.name]:
                if job.entries[0] in kept:
                    with as_written(job.name, "what the progress log has on it"):
                        job.recall(json.loads(kept[job.entries[0]]))
                    continue
                if options.stop():
                    return Outcome(False, done, kept_bytes, total - done)
                prefetch()
                for name, array in job.make():
                    if options.check is not None and _fault(entries[name], array, work) is not None:
                        refuse_nonfinite(_not_finite_from(job, mine, entries, work))
                    if pending is not None:
                        pending.result()
                    pending = pool.submit(output.write, name, array)
                    del array
                memo = json.dumps(job.remember())
                pending = pool.submit(_finish, pending, output, job.entries, memo, watch.take_job())
                done += job.nbytes
                options.on_progress(done, total, job.name)
            if pending is not None:
                pending.result()
            output.end_shard()
    return Outcome(True, done, kept_bytes, 0)


def _fault(entry: Entry, array: Array, work: Work) -> str | None:
    """Return the refusal of a plain tensor that is not finite and may not be so."""
    found = not_finite(array, entry.name, entry.dtype, entry.shape)
    return None if found is None else plain_refusal(entry.name, found.text(entry.shape), work.way_out)


def _not_finite_from(
    first: WriteJob, jobs: Sequence[WriteJob], entries: Mapping[str, Entry], work: Work
) -> Sequence[str]:
    """Return the refusal of every tensor that is not finite, from a job on."""
    found = first.refusals()
    if found:
        return found
    made = (pair for job in jobs[jobs.index(first) :] for pair in job.make())
    faults = (_fault(entries[name], array, work) for name, array in made)
    return [fault for fault in faults if fault is not None]


def _finish(
    writing: Future[None] | None, output: Output, entries: tuple[str, ...], memo: str, source: Mapping[str, str]
) -> None:
    """Finish a job in the writer thread, unless its last write failed."""
    if writing is not None:
        writing.result()
    output.finish(entries, memo, source)


def _by_shard(shards: Sequence[Shard], jobs: Sequence[WriteJob]) -> dict[str, list[WriteJob]]:
    shard_of = {entry.name: shard.name for shard in shards for entry in shard.entries}
    found: dict[str, list[WriteJob]] = {shard.name: [] for shard in shards}
    for job in jobs:
        if job.entries[0] in shard_of:
            found[shard_of[job.entries[0]]].append(job)
    return found


@contextmanager
def _reader(jobs: Sequence[WriteJob]) -> Iterator[Callable[[], None]]:
    """Yield a function to call before each job: it prefetches the input of the job after it."""
    following = iter(jobs)
    next(following, None)
    with ThreadPoolExecutor(1, "reader") as pool:

        def prefetch_next() -> None:
            job = next(following, None)
            if job is not None:
                pool.submit(will_need, job.reads)

        yield prefetch_next
