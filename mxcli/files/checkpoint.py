"""A checkpoint of any kind, opened from its headers: its tensors, their positions and roles, and notes on anything
odd."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.capture_source import Captures, as_captures
from mxcli.files.captures import Capture
from mxcli.files.dialect import detect_dialect, file_notes, remarks
from mxcli.files.directory import (
    GGUF,
    NUMPY,
    PYTORCH,
    SAFETENSORS,
    ShardIndex,
    absent_tensors,
    index_notes,
    listing,
    without_weights,
)
from mxcli.files.gguf import read_gguf
from mxcli.files.hashes import CHUNK_BYTES, ContentHash, hash_of, hash_of_chunks
from mxcli.files.identity import FileIdentity, changes, identity
from mxcli.files.model_files import Configs, read_config, read_producer_config
from mxcli.files.model_folder import side_files
from mxcli.files.models.known import UNKNOWN, Model, known_model
from mxcli.files.reading import read_chunks, read_in_place, unchanged
from mxcli.files.reading import read_rows as rows_in_place
from mxcli.files.roles import MTP, WEIGHT, mtp_prefixes
from mxcli.files.safetensors import read_safetensors
from mxcli.files.source import Source, locate
from mxcli.files.structure import tied_by_config
from mxcli.files.tensors import IN_MEMORY, Array, FileContents, LeftOut, TensorInfo
from mxcli.files.trainers.names import as_model


def _read_pytorch(path: Path) -> FileContents:
    from mxcli.files.pytorch import read_pytorch

    return read_pytorch(path)


def _read_numpy(path: Path) -> FileContents:
    from mxcli.files.numpy import read_npy, read_npz

    return read_npz(path) if path.suffix == ".npz" else read_npy(path)


READERS: Mapping[str, Callable[[Path], FileContents]] = {
    SAFETENSORS: lambda path: as_model(read_safetensors(path), path),
    PYTORCH: _read_pytorch,
    GGUF: read_gguf,
    NUMPY: _read_numpy,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The result of `open_checkpoint`.

    `kind` is "safetensors", "pytorch", "gguf" or "numpy"; `root` the directory of the source and `files` its weight
    files in order. `tensors` is in file order and by position within a file. `metadata` holds each safetensors file's
    `__metadata__`. `config` is the parsed config.json, `producer_config` ModelOpt's hf_quant_config.json, `side_files`
    what an output must carry along (paths under `root`; empty for a file opened by itself). `tied` maps an alias to the
    stored name; the alias is in `tensors` too if the file stores it as a second view (PyTorch). `captures` holds the
    capture record of each captured tensor, and `layers_of_model` the names of all linear layers of the model if the
    captures list them. `dialect` names the quantized layout, None for plain tensors; `restored_from` the layout whose
    codes are dequantized on reading, and `stored` is then the source as it is stored. `index` is the shard index
    followed. `notes` are sentences about anything odd, `left_out` the files that an output does not carry along,
    by the reason, `parts_left_out` the parts of weight files that are not the model.
    `observers` are called with every tensor that is read of the stored source, and the index of its first dimension if
    only that is read.
    `identities` has what each weight file was when it was opened.
    """

    kind: str
    root: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[Path, Mapping[str, str]]
    config: Mapping[str, object] | None
    producer_config: Mapping[str, object] | None
    side_files: tuple[Path, ...]
    tied: Mapping[str, str]
    captures: Mapping[str, Capture]
    dialect: str | None
    index: Path | None
    notes: tuple[str, ...]
    decoders: Mapping[Path, Callable[[TensorInfo], Array]] = field(repr=False, compare=False)
    identities: Mapping[Path, FileIdentity] = field(repr=False, compare=False)
    restored_from: str | None = None
    layers_of_model: tuple[str, ...] = ()
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    parts_left_out: tuple[LeftOut, ...] = ()
    model: Model = UNKNOWN
    stored: Checkpoint | None = field(default=None, repr=False, compare=False)
    observers: list[Callable[[TensorInfo, Array, int | None], None]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def where(self) -> Path:
        """Return the path to name the source by: its one weight file, or the directory of several."""
        return self.files[0] if len(self.files) == 1 else self.root


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open the checkpoint at `source`, from headers only (PyTorch files are unpickled, weights-only).

    Raises InputError naming every problem of the source at once.
    """
    located = locate(source)
    notes, problems = list(located.notes), list[str]()
    contents: dict[Path, FileContents] = {}
    identities: dict[Path, FileIdentity] = {}
    for path in located.files:
        with _collecting(problems):
            identities[path] = identity(path)
            contents[path] = READERS[located.kind](path)
            problems += changes(identities, [path])
    found = Captures(contents, {}, is_capture=False)
    with _collecting(problems):
        found = as_captures(located.root, contents, is_foreign=located.may_be_dump)
    if located.is_dump and not found.is_capture and not problems:
        problems.append(without_weights(located.root, listing(located.root)))
    tensors: dict[str, TensorInfo] = {}
    if not problems:
        tensors = _by_name(located.index, found.contents, notes, problems)
    notes += found.notes
    configs = Configs()
    # A configuration next to a file opened by itself may not belong to it, so it cannot make the file unreadable.
    with _collecting(problems if located.is_model else notes):
        configs = replace(configs, model=read_config(located.root))
    with _collecting(problems):
        configs = replace(configs, producer=read_producer_config(located.root) if located.is_model else None)
    if not tensors and not problems:
        problems.append(f"{printable(source)}: holds no tensors.")
    if problems:
        raise together(InputError, printable(source), problems)
    keys = {key for part in found.contents.values() for key in part.metadata}
    dialect, dialect_notes = detect_dialect(tensors, configs.model, configs.producer, keys)
    model = known_model(configs.model)
    return _described(
        located,
        with_roles(model.with_roles(tensors), found.records),
        model,
        found,
        configs,
        dialect,
        identities,
        notes + dialect_notes,
    )


def _described(
    located: Source,
    tensors: Mapping[str, TensorInfo],
    model: Model,
    found: Captures,
    configs: Configs,
    dialect: str | None,
    identities: Mapping[Path, FileIdentity],
    notes: list[str],
) -> Checkpoint:
    """Return the record of a source without problems, with its ties, side files and all remaining notes."""
    contents = found.contents
    notes += file_notes(contents)
    tied = {alias: stored for part in contents.values() for alias, stored in part.tied.items()}
    carried, left_out = tuple[Path, ...](), dict[str, list[str]]()
    if located.is_model:
        ties, tie_notes = tied_by_config(tensors, configs.model)
        carried, left_out = side_files(located.root, contents)
        tied |= ties
        notes += tie_notes
    if located.index:
        notes += index_notes(located.index, tensors)
    metadata = {path: part.metadata for path, part in contents.items() if located.kind == SAFETENSORS}
    notes += remarks(tensors, metadata, tied, configs.model)
    return Checkpoint(
        kind=located.kind,
        root=located.root,
        files=tuple(contents),
        tensors=tensors,
        metadata=metadata,
        config=configs.model,
        producer_config=configs.producer,
        side_files=carried,
        tied=tied,
        captures=found.records,
        layers_of_model=found.layers_of_model,
        dialect=dialect,
        index=located.index.path if located.index else None,
        notes=tuple(notes),
        left_out=left_out,
        parts_left_out=tuple(part for each in contents.values() for part in each.left_out),
        model=model,
        decoders={path: part.decode for path, part in contents.items() if part.decode},
        identities=identities,
    )


def read(checkpoint: Checkpoint, info: TensorInfo, at: int | None = None) -> Array:
    """Read one tensor, read-only and C-contiguous: BF16 as uint16, FP8 and narrower as bytes, else its numpy type.

    With `at` only that index of the first dimension is returned, and read if the bytes are in place. The array is the
    caller's; no other tensor is held in memory. Raises InputError if the file has changed since it was opened; with
    observers, which have the hash of what was read, not for chmod or a new link alone.
    """
    known = checkpoint.identities[info.file]
    known = replace(known, is_hashed=True) if checkpoint.observers else known
    if info.offset == IN_MEMORY:
        with unchanged(info, known):
            whole = checkpoint.decoders[info.file](info)
        found = whole if at is None else whole[at]
    else:
        found = read_in_place(info if at is None else _at(info, at), known)
    if checkpoint.stored is None or info.offset != IN_MEMORY:
        # What is decoded from tensors of the stored source was seen when those were read.
        for observe in checkpoint.observers:
            observe(info, found, at)
    return found


def content_hash(checkpoint: Checkpoint, info: TensorInfo) -> ContentHash:
    """Return the hash of a tensor's bytes, of which a chunk is held at a time if they are in place. Raises InputError
    like `read`."""
    if info.offset == IN_MEMORY or checkpoint.observers:
        return hash_of(read(checkpoint, info))
    return hash_of_chunks(read_chunks(info, checkpoint.identities[info.file], CHUNK_BYTES))


def read_rows(checkpoint: Checkpoint, info: TensorInfo, firsts: Sequence[int], rows: int) -> Array:
    """Read `rows` rows from each of `firsts` on, leading dimensions folded into rows: [firsts, rows, columns]. The
    tensor must be in place; nothing else of the file is read. Raises InputError like `read`."""
    return rows_in_place(info, firsts, rows, checkpoint.identities[info.file])


def source_changes(checkpoint: Checkpoint) -> list[str]:
    """Return a sentence for every weight file that is not what it was when it was opened: what was made of it may be
    half of one model and half of another."""
    return changes(checkpoint.identities)


def check_source(checkpoint: Checkpoint) -> None:
    """Raise InputError with all of `source_changes`, at the end of a run."""
    found = source_changes(checkpoint)
    if found:
        raise together(InputError, printable(checkpoint.where), found)


def _at(info: TensorInfo, at: int) -> TensorInfo:
    """Return one index of the first dimension of a tensor in place."""
    nbytes = info.nbytes // info.shape[0]
    return replace(info, shape=info.shape[1:], offset=info.offset + at * nbytes, nbytes=nbytes)


@contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """Append InputError and OSError to the problems instead of raising them."""
    try:
        yield
    except InputError as error:
        problems += error.reasons
    except OSError as error:
        problems.append(f"{printable(error.filename)}: cannot be read: {printable(error.strerror)}.")


def _by_name(
    index: ShardIndex | None, contents: Mapping[Path, FileContents], notes: list[str], problems: list[str]
) -> dict[str, TensorInfo]:
    """Return the tensors by name in file order; of a repeated name the one in the index, without an index a problem."""
    tensors: dict[str, TensorInfo] = {}
    for info in (info for part in contents.values() for info in part.tensors):
        first = tensors.setdefault(info.name, info)
        if first is info:
            continue
        where = f"'{printable(info.name)}' is in {printable(first.file.name)} and {printable(info.file.name)}"
        if index is None or info.name not in index.weight_map:
            problems.append(f"{printable(info.file.parent)}: tensor {where}; keep one of them.")
            continue
        if index.weight_map[info.name] == info.file:
            tensors[info.name] = info
        notes.append(f"{where}; the one in the index is read.")
    if index:
        problems += absent_tensors(index, tensors)
    return tensors


def with_roles(tensors: Mapping[str, TensorInfo], captures: Mapping[str, Capture]) -> dict[str, TensorInfo]:
    """Set what names alone do not show: role and layer of captured tensors, and the role of weights in MTP blocks."""
    prefixes = mtp_prefixes(tensors)
    inside = re.compile("|".join(map(re.escape, sorted(prefixes)))) if prefixes else None
    changed = {}
    for name, info in tensors.items():
        if name in captures:
            record = captures[name]
            changed[name] = replace(info, role=str(record["role"]), layer=str(record["layer"]))
        elif inside and info.role == WEIGHT and inside.match(name):
            changed[name] = replace(info, role=MTP)
    return {name: changed.get(name, info) for name, info in tensors.items()}
