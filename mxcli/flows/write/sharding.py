"""The files of an output: the sharding of the source, unless another size is requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mxcli.errors import RefusedError, printable, together
from mxcli.files.captures import CAPTURE_KEY
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import Entry
from mxcli.files.safetensors import STALE_METADATA
from mxcli.files.shard_file import Shard
from mxcli.flows.write.names import is_whole, model_name, names_of

_DROPPED = STALE_METADATA | {CAPTURE_KEY}

Unit = tuple[Entry, ...]
"""Tensors that stay in one file: the codes of a weight and its scales."""


def shards_of(
    checkpoint: Checkpoint, units: Mapping[Path, Sequence[Unit]], max_bytes: int | None = None
) -> tuple[Shard, ...]:
    """Return a shard for every file of the source with output, with the metadata of that file; with `max_bytes` shards
    filled in order up to that many bytes of tensors, which only a single larger unit exceeds.

    The metadata of captures is dropped: names and values are no longer those it describes. Raises RefusedError with
    every tensor that would occur twice.
    """
    counts = Counter(entry.name for of_file in units.values() for unit in of_file for entry in unit)
    problems = [
        f"'{printable(name)}' would be written {count} times: a tensor of the source has the name of another's codes "
        "or scales. Keep that weight plain with --exclude, or rename the tensor."
        for name, count in counts.items()
        if count > 1
    ]
    if problems:
        raise together(RefusedError, printable(checkpoint.root), problems)
    files = [file for file in checkpoint.files if units.get(file)]
    if max_bytes is not None:
        return _filled(checkpoint, [(file, unit) for file in files for unit in units[file]], max_bytes)
    names = names_of(checkpoint, files)
    return tuple(
        Shard(name, tuple(entry for unit in units[file] for entry in unit), _metadata(checkpoint, [file]))
        for file, name in zip(files, names, strict=True)
    )


def is_indexed(shards: Sequence[Shard]) -> bool:
    """Return whether shards need an index: always, except for the single file with the name of a whole model."""
    return len(shards) != 1 or not is_whole(shards[0].name)


def index_of(shards: Sequence[Shard]) -> dict[str, object]:
    """Return the index of the shards."""
    return {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {entry.name: shard.name for shard in shards for entry in shard.entries},
    }


def _filled(checkpoint: Checkpoint, units: Sequence[tuple[Path, Unit]], max_bytes: int) -> tuple[Shard, ...]:
    """Return shards filled in order."""
    filled: list[list[tuple[Path, Unit]]] = []
    room = 0
    for file, unit in units:
        needed = sum(entry.nbytes for entry in unit)
        if not filled or needed > room:
            filled.append([])
            room = max_bytes
        filled[-1].append((file, unit))
        room -= needed
    names = model_name(checkpoint).files(len(filled))
    return tuple(
        Shard(
            name,
            tuple(entry for _, unit in held for entry in unit),
            _metadata(checkpoint, list(dict.fromkeys(file for file, _ in held))),
        )
        for name, held in zip(names, filled, strict=True)
    )


def _metadata(checkpoint: Checkpoint, files: Sequence[Path]) -> dict[str, str]:
    """Return the metadata that all files have in common."""
    metadata = [set(checkpoint.metadata.get(file, {}).items()) for file in files]
    return {key: text for key, text in sorted(set.intersection(*metadata)) if key not in _DROPPED}
