"""The sides of a comparison of two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mxcli.errors import InputError
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.directory import GGUF
from mxcli.files.gguf_names import named_as_gguf
from mxcli.files.hashes import ContentHash
from mxcli.files.model_files import RECORD
from mxcli.files.progress import header_hash
from mxcli.files.record import read_record
from mxcli.files.safetensors import LENGTH_BYTES
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.write.hugging_face import as_hugging_face, hugging_face_fault
from mxcli.flows.write.restore import PlainView, StoredWeight, plain_view


@dataclass(frozen=True, slots=True)
class Side:
    """A side of the comparison: its name, its checkpoint, the plain view of a quantized one (None: plain), and the
    hashes of stored tensors that its record has and that can still be so."""

    name: str
    checkpoint: Checkpoint
    view: PlainView | None
    recorded: Mapping[str, ContentHash] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Plain tensors by name."""
        return self.checkpoint.tensors if self.view is None else self.view.tensors

    @property
    def layout(self) -> str | None:
        """Name of its layout; None if it is plain."""
        return None if self.view is None else self.view.layout.name

    def stored(self, name: str) -> StoredWeight | None:
        """Return the quantized weight of that name."""
        return None if self.view is None else self.view.weights.get(name)

    def read(self, info: TensorInfo) -> Array:
        """Return a tensor that is not a quantized weight."""
        return read(self.checkpoint, info) if self.view is None else self.view.read(info)

    def kind(self, name: str) -> str | None:
        """Return the format of a tensor, or its dtype if it is plain; None if it is missing."""
        if name not in self.tensors:
            return None
        stored = self.stored(name)
        return self.tensors[name].dtype if stored is None else stored.weight.format.name


def side_of(name: str, checkpoint: Checkpoint, *, by_record: bool = False) -> Side:
    """Return a checkpoint to compare, plain or quantized; raises like `plain_view`. Its record is used with
    `by_record`."""
    view = None if checkpoint.dialect is None else plain_view(checkpoint, "F32")
    return Side(name, checkpoint, view, _recorded(checkpoint) if by_record else {})


def _recorded(checkpoint: Checkpoint) -> dict[str, ContentHash]:
    """Return the recorded hashes of the tensors in safetensors files with the recorded header that were not written to
    after the record; empty without a record."""
    try:
        record = read_record(checkpoint.root)
    except InputError:
        record = None
    found: dict[str, ContentHash] = {}
    for file in checkpoint.files if record is not None else ():
        header = record.headers.get(file.name) if record is not None else None
        if record is not None and header is not None and header == _header_hash(file, checkpoint.root / RECORD):
            found |= record.stored.get(file.name, {})
    return found


def _header_hash(file: Path, record: Path) -> str | None:
    """Return the hash of a file's header; None if the file was written to after its record, or cannot be read."""
    try:
        if file.stat().st_mtime_ns > record.stat().st_mtime_ns:
            return None
        with file.open("rb") as opened:
            start = opened.read(LENGTH_BYTES)
            return header_hash(start + opened.read(min(int.from_bytes(start, "little"), file.stat().st_size)))
    except OSError:
        return None


def sides_of(
    one: tuple[str, Checkpoint], other: tuple[str, Checkpoint], *, by_record: bool = False
) -> tuple[Side, Side]:
    """Return two checkpoints to compare, each with its name. Next to a GGUF file, a plain one of another kind has the
    names and rows of GGUF; raises RefusedError for a model for which they are not known. Next to a quantized one, the
    GGUF file has those of Hugging Face, if they are known."""
    a, b = (side_of(*each, by_record=by_record) for each in (one, other))
    if (a.checkpoint.kind == GGUF) == (b.checkpoint.kind == GGUF):
        return a, b
    return _named_alike(a, b) if a.checkpoint.kind == GGUF else _named_alike(b, a)[::-1]


def _named_alike(gguf: Side, other: Side) -> tuple[Side, Side]:
    """Return a GGUF file and another checkpoint with the same names and order of rows."""
    if other.view is None:
        return gguf, replace(other, checkpoint=named_as_gguf(other.checkpoint), recorded={})
    if gguf.view is None or hugging_face_fault(gguf.view):
        return gguf, other
    return replace(gguf, view=as_hugging_face(gguf.view, "F32"), recorded={}), other
