"""The kinds of weight files that an output may have: the destinations of a source's tensors in them, and the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import GGUF, SAFETENSORS, SOLE
from mxcli.files.gguf import ALIGNMENT
from mxcli.files.gguf_metadata import gguf_header, require_int
from mxcli.files.gguf_model import outline_of
from mxcli.files.gguf_tokenizer import vocabulary_of
from mxcli.files.layouts import Entry, Weight
from mxcli.files.layouts.gguf import file_type
from mxcli.files.outline import OutputOutline, unchanged_outline
from mxcli.files.shard_file import Form, Shard
from mxcli.files.tensors import TensorInfo
from mxcli.flows.write.sharding import Unit, shards_of

Units = Mapping[Path, Sequence[Unit]]


@dataclass(frozen=True, slots=True)
class Container:
    """A kind of weight file.

    `outline(checkpoint, tensors)` returns the destinations of a source's tensors, and raises RefusedError with every
    reason why such files cannot hold the model. `shards(checkpoint, outline, units by file of the source, weights,
    requested size limit)` returns the files.
    """

    outline: Callable[[Checkpoint, Sequence[TensorInfo]], OutputOutline]
    shards: Callable[[Checkpoint, OutputOutline, Units, Sequence[Weight], int | None], tuple[Shard, ...]]


def _gguf_outline(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> OutputOutline:
    outline = outline_of(checkpoint.config, infos)
    assert checkpoint.config is not None
    size = require_int(checkpoint.config, "vocab_size")
    vocabulary = vocabulary_of(checkpoint.root, size)
    settings = (*outline.settings, lambda writer: vocabulary.write(writer, size))
    return replace(outline, settings=settings, remarks=(*outline.remarks, *vocabulary.remarks))


def _gguf_shards(
    checkpoint: Checkpoint, outline: OutputOutline, units: Units, weights: Sequence[Weight], max_bytes: int | None
) -> tuple[Shard, ...]:
    """Return one file for any source. Raises RefusedError if it exceeds the requested size, and for tensors that would
    occur twice."""
    entries = [Entry(name, "F32", array.shape) for name, array in outline.constants.items()]
    entries += [entry for file in checkpoint.files for unit in units.get(file, ()) for entry in unit]
    counts = Counter(entry.name for entry in entries)
    twice = [
        f"'{printable(name)}' would be written {count} times: two tensors of the source have this name in the "
        f"architecture {outline.architecture}. Remove one of them."
        for name, count in counts.items()
        if count > 1
    ]
    if twice:
        raise together(RefusedError, printable(checkpoint.root), twice)
    header = gguf_header(outline.architecture, file_type(weights), outline.settings, entries)
    shard = Shard(SOLE[GGUF], tuple(entries), form=Form(lambda shard: header, tuple, ALIGNMENT))
    if max_bytes is not None and shard.data_bytes > max_bytes:
        raise RefusedError(
            f"{printable(checkpoint.root)}: the layout gguf writes one file, here with {shard.data_bytes:,} bytes of "
            f"tensors; --max-shard-size allows {max_bytes:,}. Omit it."
        )
    return (shard,)


CONTAINERS: Mapping[str, Container] = {
    SAFETENSORS: Container(
        lambda checkpoint, infos: unchanged_outline(infos),
        lambda checkpoint, outline, units, weights, max_bytes: shards_of(checkpoint, units, max_bytes),
    ),
    GGUF: Container(_gguf_outline, _gguf_shards),
}
