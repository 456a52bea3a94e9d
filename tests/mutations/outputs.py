"""An output folder to damage: where every tensor's bytes are, and ways to change bytes, tables and documents.

Weights are located through the layout that reads the sound output; files are parsed and written here, byte by byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.gguf import block_sizes
from mxcli.files.layouts.gguf import BLOCK_TYPES
from mxcli.files.models.fused import fused_sets
from mxcli.files.tensors import TensorInfo
from mxcli.flows.write.restore import plain_view
from mxcli.numerics.formats import BlockFormat

RECORD, CONFIG, INDEX = "mxcli.json", "config.json", "model.safetensors.index.json"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
NUMBERS = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "F64": np.float64}


@dataclass(frozen=True)
class Cells:
    """Bytes of one tensor, or of a part of its blocks: the file and the place of each byte in it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    at: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def nbytes(self) -> int:
        return int(self.at.size)


@dataclass(frozen=True)
class Stored:
    """A quantized weight: its codes, its block scales and its tensor scale (None: it has none)."""

    name: str
    format: BlockFormat
    codes: Cells
    scales: Cells | None
    tensor_scale: Cells | None
    entries: tuple[str, ...]
    spread: bool

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def layer(self) -> int | None:
        numbers = [int(part) for part in self.name.split(".") if part.isdigit()]
        return numbers[0] if numbers else None

    @property
    def parts(self) -> Iterator[Cells]:
        """Return what is stored of it."""
        yield from (cells for cells in (self.codes, self.scales, self.tensor_scale) if cells is not None)


@dataclass
class Row:
    """A tensor of a weight file: its dtype (the number of its type in GGUF), shape and bytes."""

    name: str
    dtype: str | int
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Layer:
    """The tensors of a numbered layer by the rest of their names."""

    prefix: str
    names: dict[str, str]


@dataclass(frozen=True)
class Output:
    """A sound output: its folder, the plain source it was made from, and outputs to mix in by what differs."""

    folder: Path
    source: Path
    others: dict[str, Path]

    def copied(self, folder: Path) -> Output:
        """Return the same output in another folder that holds a copy; what was found in the first is kept."""
        moved = replace(self, folder=folder)
        moved.__dict__["stored"], moved.__dict__["plain"] = self.stored, self.plain
        return moved

    @cached_property
    def _view(self) -> Any:
        return plain_view(open_checkpoint(self.folder))

    @cached_property
    def stored(self) -> tuple[Stored, ...]:
        """The quantized weights."""
        return tuple(self._located(weight) for weight in self._view.weights.values())

    @cached_property
    def plain(self) -> dict[str, tuple[str, Cells]]:
        """Role and bytes of every tensor that is not part of a quantized weight."""
        taken = {entry for weight in self.stored for entry in weight.entries}
        tensors = self._view.source.tensors
        return {name: (info.role, _cells(info)) for name, info in tensors.items() if name not in taken}

    def _located(self, stored: Any) -> Stored:
        parts: dict[str, Cells] = {}
        spread = False
        for content in stored.contents:
            info: TensorInfo = self._view.source.tensors[content.entry.name]
            if info.block_type:
                parts |= _blocks(info)
            else:
                parts[content.holds.name] = _cells(info)
                spread |= content.holds.name == "codes" and content.entry.nbytes * 8 > (
                    stored.weight.format.element.bits * np.prod(stored.weight.shape)
                )
        scale = parts.get("encode", parts.get("decode"))
        entries = tuple(content.entry.name for content in stored.contents)
        fmt = stored.weight.format
        return Stored(stored.weight.name, fmt, parts["codes"], parts.get("scales"), scale, entries, spread)

    @property
    def shards(self) -> list[str]:
        """The weight files."""
        return sorted(path.name for path in self.folder.iterdir() if path.suffix in (".safetensors", ".gguf"))

    @property
    def is_gguf(self) -> bool:
        return self.shards[0].endswith(".gguf")

    def fused(self) -> list[tuple[Stored, ...]]:
        """Return sets of weights that loaders fuse."""
        by_name = {weight.name: weight for weight in self.stored}
        columns = {name: self._view.tensors[name].shape[-1] for name in by_name}
        sets = fused_sets(self._view.source.config).among(columns)
        return [tuple(by_name[name] for name in names) for names in sets.values()]

    def alike(self) -> list[list[Stored]]:
        """Return groups of weights of one kind and shape in several layers."""
        groups: dict[tuple[object, ...], list[Stored]] = {}
        for weight in self.stored:
            kind = ".".join("*" if part.isdigit() else part for part in weight.name.split("."))
            groups.setdefault((kind, weight.codes.shape, weight.format.name), []).append(weight)
        return [group for group in groups.values() if len(group) > 1]

    def layers(self) -> list[Layer]:
        """Return the numbered layers with all their tensors."""
        found: dict[str, Layer] = {}
        for shard in self.shards:
            for row in self.table(shard):
                parts = row.name.split(".")
                at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
                if at is not None:
                    prefix = ".".join(parts[: at + 1])
                    found.setdefault(prefix, Layer(prefix, {})).names[".".join(parts[at + 1 :])] = row.name
        return sorted(found.values(), key=lambda layer: int(layer.prefix.rpartition(".")[2]))

    # Bytes.

    def get(self, cells: Cells) -> Bytes:
        return np.fromfile(self.folder / cells.file, np.uint8)[cells.at]

    def put(self, cells: Cells, content: Bytes) -> None:
        data = np.fromfile(self.folder / cells.file, np.uint8)
        data[cells.at] = content.reshape(-1).view(np.uint8)
        (self.folder / cells.file).write_bytes(data.tobytes())

    def numbers(self, cells: Cells) -> np.ndarray[Any, Any]:
        """Return what is stored as binary32 (F32, BF16, F16), else the bytes; change it with `set_numbers`."""
        content = self.get(cells).view(NUMBERS.get(cells.dtype, np.uint8)).reshape(cells.shape)
        if cells.dtype == "BF16":
            return (content.astype(np.uint32) << 16).view(np.float32)
        return content.copy()

    def set_numbers(self, cells: Cells, numbers: np.ndarray[Any, Any]) -> None:
        if cells.dtype == "BF16":
            numbers = (np.ascontiguousarray(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        kind = NUMBERS.get(cells.dtype, np.uint8)
        self.put(cells, np.ascontiguousarray(numbers, kind).view(np.uint8))

    # Tables of tensors.

    def table(self, shard: str) -> list[Row]:
        content = (self.folder / shard).read_bytes()
        return (_gguf_rows if shard.endswith(".gguf") else _safetensors_rows)(content)

    def write_table(self, shard: str, rows: list[Row]) -> None:
        """Write a file with these tensors, and the settings or metadata that it has."""
        path = self.folder / shard
        path.write_bytes((_gguf_file if shard.endswith(".gguf") else _safetensors_file)(path.read_bytes(), rows))

    def change_tables(self, change: Callable[[list[Row]], list[Row]]) -> None:
        """Change the tensors of every file, and the index so that it fits."""
        for shard in self.shards:
            rows = self.table(shard)
            changed = change([replace(row) for row in rows])
            if changed != rows:
                self.write_table(shard, changed)
        if (self.folder / INDEX).is_file():
            index = self.document(INDEX)
            held = {row.name: shard for shard in self.shards for row in self.table(shard)}
            index["weight_map"] = dict(sorted(held.items()))
            if "total_size" in index.get("metadata", {}):
                tables = (self.table(shard) for shard in self.shards)
                index["metadata"]["total_size"] = sum(len(row.data) for rows in tables for row in rows)
            self.write_document(INDEX, index)

    def shard_of(self, name: str) -> str:
        return next(shard for shard in self.shards if any(row.name == name for row in self.table(shard)))

    # Documents.

    def document(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    def write_document(self, name: str, content: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=2))

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()


def _cells(info: TensorInfo) -> Cells:
    at = np.arange(info.offset, info.offset + info.nbytes)
    return Cells(info.name, info.file.name, info.dtype, info.shape, at)


def _blocks(info: TensorInfo) -> dict[str, Cells]:
    """Return codes and scales of a tensor of GGUF blocks, each of which begins with its scales."""
    row = BLOCK_TYPES[info.block_type]
    at = np.arange(info.offset, info.offset + info.nbytes).reshape(-1, row.nbytes)
    lines = info.shape[0]

    def of(places: np.ndarray[Any, Any], dtype: str) -> Cells:
        shape = (lines, places.size // lines)
        return Cells(info.name, info.file.name, dtype, shape, np.ascontiguousarray(places).reshape(-1))

    scale = "U8" if row.scales == 1 else "F8_E4M3"
    return {"scales": of(at[:, : row.scales], scale), "codes": of(at[:, row.scales :], "U8")}


def _safetensors_rows(content: bytes) -> list[Row]:
    (length,) = struct.unpack("<Q", content[:8])
    header, start = json.loads(content[8 : 8 + length]), 8 + length
    header.pop("__metadata__", None)
    return [
        Row(name, entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    ]


def _safetensors_file(before: bytes, rows: list[Row]) -> bytes:
    (length,) = struct.unpack("<Q", before[:8])
    metadata = json.loads(before[8 : 8 + length]).get("__metadata__")
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for row in rows:
        header[row.name] = {
            "dtype": row.dtype,
            "shape": list(row.shape),
            "data_offsets": [end, end + len(row.data)],
        }
        end += len(row.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(row.data for row in rows)


_ALIGNMENT = 32


def _gguf_start(content: bytes) -> int:
    """Return where the list of tensors begins: the settings are before it."""
    at = 24
    (settings,) = struct.unpack("<Q", content[16:24])
    for _ in range(settings):
        at = _gguf_text_end(content, at)
        (kind,) = struct.unpack_from("<I", content, at)
        at = _gguf_value_end(content, at + 4, kind)
    return at


_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _gguf_text_end(content: bytes, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", content, at)[0])


def _gguf_value_end(content: bytes, at: int, kind: int) -> int:
    if kind == 8:
        return _gguf_text_end(content, at)
    if kind != 9:
        return at + _WIDTHS[kind]
    inner, count = struct.unpack_from("<IQ", content, at)
    at += 12
    for _ in range(count):
        at = _gguf_value_end(content, at, inner)
    return at


def _gguf_rows(content: bytes) -> list[Row]:
    (count,) = struct.unpack("<Q", content[8:16])
    at, found = _gguf_start(content), []
    for _ in range(count):
        end = _gguf_text_end(content, at)
        name = content[at + 8 : end].decode()
        (dimensions,) = struct.unpack_from("<I", content, end)
        sizes = struct.unpack_from(f"<{dimensions}Q", content, end + 4)
        kind, offset = struct.unpack_from("<IQ", content, end + 4 + 8 * dimensions)
        at = end + 16 + 8 * dimensions
        found.append((name, tuple(reversed(sizes)), kind, offset))
    start = -(-at // _ALIGNMENT) * _ALIGNMENT
    rows = []
    for name, shape, kind, offset in found:
        _, elements, nbytes = block_sizes()[kind]
        length = int(np.prod(shape)) // elements * nbytes
        rows.append(Row(name, kind, shape, content[start + offset : start + offset + length]))
    return rows


def _gguf_file(before: bytes, rows: list[Row]) -> bytes:
    header = before[:8] + struct.pack("<Q", len(rows)) + before[16 : _gguf_start(before)]
    end, data = 0, b""
    for row in rows:
        name, sizes = row.name.encode(), tuple(reversed(row.shape))
        header += struct.pack("<Q", len(name)) + name
        header += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, int(row.dtype), end)
        data += row.data + bytes(-len(row.data) % _ALIGNMENT)
        end = len(data)
    return header + bytes(-len(header) % _ALIGNMENT) + data
