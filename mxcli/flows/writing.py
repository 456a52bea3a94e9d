"""The one way a checkpoint is written: job after job into its shard, then index, configuration, side files, record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mxcli.files.checkpoint import Checkpoint
from mxcli.files.tensors import Array
from mxcli.files.writer import Output
from mxcli.files.writer_place import check_place
from mxcli.files.writer_shards import Shard
from mxcli.flows.sharding import INDEX, index_of

Progress = Callable[[int, int, str], None]
"""Called with bytes of the source done, bytes in all, and the tensor just done."""


@dataclass(frozen=True, slots=True)
class Job:
    """The tensors written for one tensor of the source, `name` of `nbytes`; `make` computes them, last moment."""

    name: str
    nbytes: int
    entries: tuple[str, ...]
    make: Callable[[], Iterable[tuple[str, Array]]]


def write_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    shards: Sequence[Shard],
    jobs: Sequence[Job],
    *,
    configs: Mapping[str, Mapping[str, object]],
    record: Callable[[], dict[str, object]],
    force: bool,
    on_progress: Progress | None,
) -> None:
    """Write a checkpoint: all or nothing. `configs` are configuration files by name; `record` is asked for when all
    jobs are done.

    A thread writes what one job made while the next one computes. Raises RefusedError where the output may not go
    and EnvironmentFailure where the disk fails, leaving nothing under a final name; whatever a job raises passes
    through.
    """
    carried = [(path, path.relative_to(checkpoint.root).as_posix()) for path in checkpoint.side_files]
    indexed = len(shards) > 1 or checkpoint.index is not None
    names = [shard.name for shard in shards] + [INDEX] * indexed + list(configs)
    place = check_place(folder, checkpoint, [*names, *(name for _, name in carried)], force=force)
    needed = sum(shard.nbytes for shard in shards) + sum(path.stat().st_size for path, _ in carried)
    with Output(place, [*names, *(name for _, name in carried)], needed) as output:
        _write_shards(output, shards, jobs, on_progress)
        if indexed:
            output.write_json(INDEX, index_of(shards))
        for name, config in configs.items():
            output.write_json(name, config)
        for path, name in carried:
            output.copy(path, name)
        output.publish(record())


def _write_shards(output: Output, shards: Sequence[Shard], jobs: Sequence[Job], on_progress: Progress | None) -> None:
    shard_of = {entry.name: shard for shard in shards for entry in shard.entries}
    by_shard: dict[str, list[Job]] = {shard.name: [] for shard in shards}
    for job in jobs:
        by_shard[shard_of[job.entries[0]].name].append(job)
    done, total = 0, sum(job.nbytes for job in jobs)
    with ThreadPoolExecutor(1, "writer") as pool:
        for shard in shards:
            output.begin_shard(shard)
            pending: Future[None] | None = None
            for job in by_shard[shard.name]:
                for name, array in job.make():
                    if pending is not None:
                        pending.result()
                    pending = pool.submit(output.write, name, array)
                    del array
                done += job.nbytes
                if on_progress is not None:
                    on_progress(done, total, job.name)
            if pending is not None:
                pending.result()
            output.end_shard()
