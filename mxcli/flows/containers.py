"""The kinds of weight files that an output is written in, as rows: where tensors go, and in which files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import GGUF, SAFETENSORS, SOLE
from mxcli.files.gguf_file import ALIGNMENT
from mxcli.files.gguf_header import header_of
from mxcli.files.gguf_model import outline_of
from mxcli.files.gguf_settings import as_number
from mxcli.files.gguf_vocabulary import vocabulary_of
from mxcli.files.layouts import Entry, Weight
from mxcli.files.layouts.gguf import file_type
from mxcli.files.outline import Outline, as_it_is
from mxcli.files.tensors import TensorInfo
from mxcli.files.writer_shards import Form, Shard
from mxcli.flows.sharding import Unit, shards_of

Units = Mapping[Path, Sequence[Unit]]


@dataclass(frozen=True, slots=True)
class Container:
    """A kind of weight file.

    `outline(checkpoint, tensors)` says where tensors of a source go, and raises RefusedError with every reason why such
    files cannot hold the model. `shards(checkpoint, outline, units by file of the source, weights, largest size asked
    for)` are the files.
    """

    outline: Callable[[Checkpoint, Sequence[TensorInfo]], Outline]
    shards: Callable[[Checkpoint, Outline, Units, Sequence[Weight], int | None], tuple[Shard, ...]]


def _gguf_outline(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> Outline:
    outline = outline_of(checkpoint.config, infos)
    assert checkpoint.config is not None
    size = as_number(checkpoint.config, "vocab_size")
    vocabulary = vocabulary_of(checkpoint.root, size)
    settings = (*outline.settings, lambda writer: vocabulary.write(writer, size))
    return replace(outline, settings=settings, remarks=(*outline.remarks, *vocabulary.remarks))


def _gguf_shards(
    checkpoint: Checkpoint, outline: Outline, units: Units, weights: Sequence[Weight], max_bytes: int | None
) -> tuple[Shard, ...]:
    """One file, whatever the source has; raises RefusedError where a size is asked for that it would exceed, and for
    tensors that would occur twice."""
    entries = [Entry(name, "F32", array.shape) for name, array in outline.constants.items()]
    entries += [entry for file in checkpoint.files for unit in units.get(file, ()) for entry in unit]
    counts = Counter(entry.name for entry in entries)
    twice = [
        f"'{printable(name)}' would be written {count} times: two tensors of the source are the same one of the "
        f"architecture {outline.architecture}. Leave one of them out."
        for name, count in counts.items()
        if count > 1
    ]
    if twice:
        raise together(RefusedError, printable(checkpoint.root), twice)
    header = header_of(outline.architecture, file_type(weights), outline.settings, entries)
    shard = Shard(SOLE[GGUF], tuple(entries), form=Form(lambda shard: header, tuple, ALIGNMENT))
    if max_bytes is not None and shard.data_bytes > max_bytes:
        raise RefusedError(
            f"{printable(checkpoint.root)}: the layout gguf writes one file, here of {shard.data_bytes:,} bytes of "
            f"tensors; --max-shard-size allows {max_bytes:,}. Leave it out."
        )
    return (shard,)


CONTAINERS: Mapping[str, Container] = {
    SAFETENSORS: Container(
        lambda checkpoint, infos: as_it_is(infos),
        lambda checkpoint, outline, units, weights, max_bytes: shards_of(checkpoint, units, max_bytes),
    ),
    GGUF: Container(_gguf_outline, _gguf_shards),
}
