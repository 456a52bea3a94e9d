"""Which file of the output holds what: the sharding of the source is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mxcli.errors import RefusedError, printable, together
from mxcli.files.captures import CAPTURE_KEY
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import SAFETENSORS, SOLE
from mxcli.files.layouts import Entry
from mxcli.files.writer_shards import Shard

INDEX = "model.safetensors.index.json"


def shards_of(checkpoint: Checkpoint, entries: Mapping[Path, Sequence[Entry]]) -> tuple[Shard, ...]:
    """A shard for every file of the source that has something to write, with the metadata of that file.

    What a capture says of its tensors is left out: their names and values are no longer those it describes.
    Raises RefusedError naming every tensor that would occur twice.
    """
    counts = Counter(entry.name for found in entries.values() for entry in found)
    problems = [
        f"'{printable(name)}' would be written {count} times: a tensor of the source has the name of another's codes "
        "or scales. Leave one of them out with --exclude."
        for name, count in counts.items()
        if count > 1
    ]
    if problems:
        raise together(RefusedError, printable(checkpoint.root), problems)
    files = [file for file in checkpoint.files if entries.get(file)]
    names = _names(files, indexed=checkpoint.index is not None)
    return tuple(
        Shard(
            name,
            tuple(entries[file]),
            {key: text for key, text in sorted(checkpoint.metadata.get(file, {}).items()) if key != CAPTURE_KEY},
        )
        for file, name in zip(files, names, strict=True)
    )


def index_of(shards: Sequence[Shard]) -> dict[str, object]:
    """The index of the shards."""
    return {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {entry.name: shard.name for shard in shards for entry in shard.entries},
    }


def _names(files: Sequence[Path], *, indexed: bool) -> list[str]:
    """Names of the source's files as safetensors files; a single file without index is the sole model file."""
    if len(files) == 1 and not indexed:
        return [SOLE[SAFETENSORS]]
    names = [f"{file.stem.replace('pytorch_model', 'model')}.safetensors" for file in files]
    if len(set(names)) == len(names):
        return names
    return [f"model-{place:05}-of-{len(files):05}.safetensors" for place in range(1, len(files) + 1)]
