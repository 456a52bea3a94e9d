"""The accounting of a source whose output is written: all of its files, and the tensors of its weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mxcli.files.accounting import Accounted, Accounting, Tensors
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import SHARD_NAME
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG, RECORD
from mxcli.files.model_folder import folder_entries
from mxcli.files.tensors import LeftOut
from mxcli.flows.write.names import place_of
from mxcli.flows.write.omitted import OMITTED_ENDINGS, kinds_omitted
from mxcli.flows.write.restore import PlainView, plain_view

QUANTIZED, DEQUANTIZED, KEPT, TIED, OMITTED = "quantized", "dequantized", "kept", "tied", "left_out"
CONVERTED = "converted"
OTHER_SHARD = "another shard of the model"
_NEW = "not there when the source was opened"


def accounting_of(checkpoint: Checkpoint, view: PlainView | None = None) -> Accounting:
    """Return the accounting of a source: of the folder of a model, or of a file by itself with the configuration next
    to it and the other shards of its set. `view` is the plain view of a source that is dequantized."""
    documents = [path for path in _documents(checkpoint) if path.is_file()]
    return Accounting(
        tuple(_accounted(checkpoint, path) for path in (*checkpoint.files, *documents)),
        tuple(_accounted(checkpoint, path) for path in checkpoint.side_files),
        tuple(_left_out(checkpoint, {*documents, *checkpoint.side_files})),
        (*(checkpoint.stored or checkpoint).parts_left_out, *_omitted(checkpoint, view)),
    )


def _omitted(checkpoint: Checkpoint, view: PlainView | None) -> Iterator[LeftOut]:
    """Yield the tensors of a quantized source that have no plain equivalent, by what they are."""
    if view is not None:
        stored, names = view.source.tensors, list(view.unused)
    else:
        stored = {} if checkpoint.stored is None else checkpoint.stored.tensors
        names = [name for name in stored if name.endswith(OMITTED_ENDINGS) and name not in checkpoint.tensors]
    for what, alike in kinds_omitted(names).items():
        yield LeftOut(alike[0], what, len(alike), sum(stored[name].nbytes for name in alike))


def _documents(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield the documents that are read with the weights: of codes also those that describe them."""
    yield checkpoint.root / CONFIG
    if checkpoint.index is not None:
        yield checkpoint.index
    if checkpoint.producer_config is not None:
        yield checkpoint.root / PRODUCER_CONFIG
    if checkpoint.dialect is not None or checkpoint.stored is not None:
        yield checkpoint.root / RECORD


def quantized_tensors(checkpoint: Checkpoint, decided: Iterable[tuple[str, str]]) -> dict[str, Tensors]:
    """Return the tensors of a source by what is done with them: quantized, kept or tied, each with its name; those that
    have no place in an output are left out."""
    view = None if checkpoint.stored is None else plain_view(checkpoint.stored)
    sizes: dict[str, list[int]] = {what: [] for what in (QUANTIZED, KEPT, TIED, OMITTED)}
    for name, what in decided:
        sizes[what].append(_stored_bytes(checkpoint, view, name))
    if view is not None:
        sizes[OMITTED] += [view.source.tensors[name].nbytes for name in view.unused]
    return _with_parts(checkpoint, {what: Tensors(len(each), sum(each)) for what, each in sizes.items()})


def dequantized_tensors(view: PlainView) -> dict[str, Tensors]:
    """Return the tensors of a quantized source by what is done with them: dequantized, kept or left out."""
    return _tensors_of_view(view, DEQUANTIZED)


def converted_tensors(view: PlainView) -> dict[str, Tensors]:
    """Return the tensors of a quantized source by what is done with them: converted, kept or left out."""
    return _tensors_of_view(view, CONVERTED)


def _tensors_of_view(view: PlainView, done: str) -> dict[str, Tensors]:
    sizes: dict[str, list[int]] = {what: [] for what in (done, KEPT, OMITTED)}
    for name in view.tensors:
        what = done if name in view.dtypes else KEPT
        sizes[what].append(_stored_bytes(view.source, view, name))
    sizes[OMITTED] = [view.source.tensors[name].nbytes for name in view.unused]
    return _with_parts(view.source, {what: Tensors(len(each), sum(each)) for what, each in sizes.items()})


def _with_parts(checkpoint: Checkpoint, tensors: dict[str, Tensors]) -> dict[str, Tensors]:
    """Add the tensors of the parts of weight files that are left out."""
    parts, omitted = (checkpoint.stored or checkpoint).parts_left_out, tensors[OMITTED]
    count, nbytes = (sum(part.tensors for part in parts), sum(part.nbytes for part in parts))
    return {**tensors, OMITTED: Tensors(omitted.count + count, omitted.nbytes + nbytes)}


def _stored_bytes(checkpoint: Checkpoint, view: PlainView | None, name: str) -> int:
    """Return the bytes of a tensor in the source, with its scales if it is quantized there."""
    return checkpoint.tensors[name].nbytes if view is None else view.stored_bytes(name)


def _left_out(checkpoint: Checkpoint, known: set[Path]) -> Iterator[Accounted]:
    """Yield what is neither read nor carried."""
    if not (checkpoint.side_files or checkpoint.left_out):
        yield from (_accounted(checkpoint, path, OTHER_SHARD) for path in _other_shards(checkpoint))
        return
    tensors = (checkpoint if checkpoint.stored is None else checkpoint.stored).tensors
    shapes = {name: info.shape for name, info in tensors.items()}
    for entry in folder_entries(checkpoint.root, checkpoint.files, shapes):
        if entry.path not in known:
            yield _accounted(checkpoint, entry.path, entry.reason or _NEW)


def _other_shards(checkpoint: Checkpoint) -> list[Path]:
    """Return the other shards of the set that a file by itself belongs to."""
    match = SHARD_NAME.fullmatch(checkpoint.files[0].name) if len(checkpoint.files) == 1 else None
    if match is None:
        return []
    found = []
    for path in sorted(checkpoint.root.iterdir()):
        other = SHARD_NAME.fullmatch(path.name)
        if other is not None and path not in checkpoint.files and other.group(1, 3, 4) == match.group(1, 3, 4):
            found.append(path)
    return found


def _accounted(checkpoint: Checkpoint, path: Path, reason: str | None = None) -> Accounted:
    name = place_of(checkpoint, path)
    if path.is_dir() and not path.is_symlink():
        sizes = [_size(Path(folder, file)) for folder, _, files in os.walk(path) for file in files]
        return Accounted(f"{name}/", sum(sizes), reason, len(sizes))
    return Accounted(name, _size(path), reason)


def _size(path: Path) -> int:
    """Return the bytes of a file, links followed; 0 if there are none to see."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0
