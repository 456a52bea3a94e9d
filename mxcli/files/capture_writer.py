"""Capture files, one per step: written tensor by tensor, with their final name only once complete."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mxcli.atomic import name_new, sync_folder, whole_file
from mxcli.errors import EnvironmentFailure, InputError, RefusedError, UsageError, printable, together
from mxcli.files.captures import CAPTURE_KEY, CAPTURE_VERSION, INCOMPLETE, INCOMPLETE_SCHEMA, incomplete_path
from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.hashes import XXH3, hash_of
from mxcli.files.output_folder import OutputFolder
from mxcli.files.partials import Partials, json_bytes
from mxcli.files.plain import read_json_object
from mxcli.files.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES, METADATA, read_safetensors
from mxcli.files.shard_file import ALIGNMENT, CHUNK_BYTES, partial_path
from mxcli.files.tensors import LARGEST, Array, byte_count

STEP_FILE = re.compile(r"step-(\d{6,})(?:-rank-(\d+))?\.safetensors")
STEP_BYTES = 1 << 12
"""Bytes reserved for a step's own metadata."""
HEADER_KEY = "mxcli.capture.header"
"""The key of the metadata that has the hash of the header, made with zeros in its place."""
_NO_HASH = "0" * 32
_HASH_PLACE = f'"{HEADER_KEY}":"{_NO_HASH}"'.encode()
_BEGUN = b"mxcli.capture: not complete\n"
"""How a file begins until its header is written."""


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """A tensor of a layer as a file describes it: `tokens` are its rows, of `tokens_seen` that there were; None for a
    weight. `xxh3` is the content hash of its bytes."""

    layer: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    tokens: int | None = None
    tokens_seen: int | None = None
    xxh3: str = _NO_HASH

    @property
    def name(self) -> str:
        """Return its name in the file."""
        return f"{self.layer}.{self.role}"

    @property
    def nbytes(self) -> int:
        """Return the bytes of its data."""
        return byte_count(self.dtype, self.shape)

    def record(self, step: int, rank: int) -> dict[str, object]:
        """Return its record in the file's metadata."""
        counts = {"tokens": self.tokens, "tokens_seen": self.tokens_seen} if self.tokens is not None else {}
        return {
            "role": self.role,
            "layer": self.layer,
            "step": step,
            "rank": rank,
            "axis": "row",
            **counts,
            XXH3: self.xxh3,
        }


@dataclass(frozen=True, slots=True)
class StepName:
    """The step and rank of a file; `alone`: there is only one rank."""

    step: int
    rank: int = 0
    alone: bool = True

    def __str__(self) -> str:
        part = "" if self.alone and not self.rank else f"-rank-{self.rank}"
        return f"step-{self.step:06d}{part}.safetensors"


def step_files(folder: Path) -> list[str]:
    """Return the sorted names of capture files of steps in a directory; none without a directory."""
    return sorted(filter(STEP_FILE.fullmatch, os.listdir(folder))) if folder.is_dir() else []


def step_of(name: str) -> int:
    """Return the step in the name of a capture file."""
    found = STEP_FILE.fullmatch(name)
    if found is None:
        raise ValueError(name)
    return int(found[1])


def capture_metadata(path: Path) -> dict[str, object]:
    """Read the capture metadata of a file, even if its tensors are damaged. Raises InputError for another kind of file,
    or a damaged header."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError("not a regular file")
        parsed = json.loads(json.loads(_header_of(path))[METADATA][CAPTURE_KEY])
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict) or parsed.get("version") != CAPTURE_VERSION:
        raise InputError(f"{printable(path)}: not a capture file; move it away.")
    return parsed


def is_as_written(path: Path) -> bool:
    """Return whether a capture file has the bytes that were written: its header and every tensor have their hashes."""
    try:
        contents, header = read_safetensors(path), _header_of(path)
        records = json.loads(contents.metadata[CAPTURE_KEY])["tensors"]
        check = contents.metadata[HEADER_KEY]
        if hash_of(np.frombuffer(header.replace(check.encode(), _NO_HASH.encode(), 1), np.uint8)).xxh3 != check:
            return False
        with path.open("rb") as file:
            for info in contents.tensors:
                file.seek(info.offset)
                if hash_of(np.fromfile(file, np.uint8, info.nbytes)).xxh3 != records[info.name][XXH3]:
                    return False
    except (InputError, OSError, KeyError, TypeError, ValueError, RecursionError):
        return False
    return True


def _header_of(path: Path) -> bytes:
    """Return the header of a safetensors file, without its length; of another file the bytes that are there."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        return file.read(min(length, MAX_HEADER_BYTES))


def refuse_other_files(folder: Path, names: Iterable[str]) -> None:
    """Raise RefusedError for files among those to replace or remove that no recording wrote, and for such unfinished
    ones."""
    found = sorted(os.listdir(folder)) if folder.is_dir() else []
    problems = [
        f"{printable(folder / name)}: not of an unfinished capture, and is left as it is; move it away."
        for name in found
        if name.endswith(PARTIAL_SUFFIX) and STEP_FILE.fullmatch(name.removesuffix(PARTIAL_SUFFIX))
        if not _is_unfinished(folder / name)
    ]
    for name in names:
        try:
            capture_metadata(folder / name)
        except InputError:
            problems.append(f"{printable(folder / name)}: is not a capture file, and is left as it is; move it away.")
    problems += [
        f"{printable(folder / name)}: was not written by mxcli, and is left as it is; move it away."
        for name in found
        if INCOMPLETE.fullmatch(name) and not _is_incomplete_mark(folder / name)
    ]
    if problems:
        raise together(RefusedError, printable(folder), problems)


def _is_unfinished(path: Path) -> bool:
    """Return whether a recording began to write a file; an empty one counts."""
    with suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            with path.open("rb") as file:
                start = file.read(len(_BEGUN))
            return start in (b"", _BEGUN) or is_as_written(path)
    return False


def _is_incomplete_mark(path: Path) -> bool:
    """Return whether `mark_incomplete` wrote a file."""
    try:
        return not path.is_symlink() and read_json_object(path).get("schema") == INCOMPLETE_SCHEMA
    except InputError:
        return False


def mark_incomplete(folder: Path, name: StepName, reason: str) -> None:
    """Write next to the files of finished steps that recording stopped in that step; nothing if that fails too."""
    content = {"schema": INCOMPLETE_SCHEMA, "step": name.step, "rank": name.rank, "complete": False, "reason": reason}
    path = incomplete_path(folder, None if name.alone and not name.rank else name.rank)
    if os.path.lexists(path) and not _is_incomplete_mark(path):
        return
    with suppress(OSError), whole_file(path, replace=True) as file:
        file.write(json_bytes(content))


def mark_complete(folder: Path, rank: int, *, alone: bool) -> None:
    """Remove what an earlier recording wrote in `mark_incomplete`."""
    path = incomplete_path(folder, None if alone and not rank else rank)
    if _is_incomplete_mark(path):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def refuse_existing_steps(folder: Path, names: Iterable[StepName]) -> None:
    """Raise RefusedError if one of the files exists."""
    for name in names:
        if os.path.lexists(folder / str(name)):
            raise _exists(folder / str(name))


def _exists(path: Path) -> RefusedError:
    return RefusedError(f"{printable(path)}: exists; give another directory, or use force to replace it.")


class CaptureFile:
    """A file of captured tensors under its partial name; disk errors are EnvironmentFailure.

    Tensors come in any order, and their row counts are known only then. So the header is written last, into a space
    large enough for all of `expected`. It also holds `about`, the run's metadata.
    """

    def __init__(
        self, folder: Path, name: StepName, expected: Sequence[CapturedTensor], about: Mapping[str, object]
    ) -> None:
        self._name, self._about = name, about
        self._partials = Partials(OutputFolder(folder), [str(name)], sum(tensor.nbytes for tensor in expected))
        self._partials.make_folders()
        self._partials.own([str(name)], [str(name)] if _is_unfinished(partial_path(folder / str(name))) else [])
        self._partials.check_space()
        self._path = folder / str(name)
        self._file = self._partials.create(str(name))
        self._tensors: list[CapturedTensor] = []
        self._data_bytes = 0
        largest = [
            CapturedTensor(each.layer, each.role, each.dtype, (LARGEST, LARGEST), LARGEST, LARGEST) for each in expected
        ]
        self._header_bytes = len(_header(largest, name, about, LARGEST)) + STEP_BYTES
        try:
            with self._on_disk():
                self._file.write(_BEGUN)
                self._file.seek(self._header_bytes)
        except BaseException:
            self.discard()
            raise

    @property
    def path(self) -> Path:
        """Return its final path."""
        return self._path

    def add(self, tensor: CapturedTensor, data: Array) -> None:
        """Append a tensor."""
        if data.nbytes != tensor.nbytes or not data.flags.c_contiguous:
            raise ValueError(f"{tensor.name}: {data.nbytes} bytes given, {tensor.nbytes} described")
        tensor = replace(tensor, xxh3=hash_of(data).xxh3)
        flat = data.reshape(-1).view("u1")
        self._partials.needed_bytes = max(self._partials.needed_bytes, self._data_bytes + tensor.nbytes)
        with self._on_disk():
            for start in range(0, data.nbytes, CHUNK_BYTES):
                self._file.write(flat[start : start + CHUNK_BYTES].data)
        self._tensors.append(tensor)
        self._data_bytes += tensor.nbytes

    @property
    def data_bytes(self) -> int:
        """Return the bytes of the tensors written so far."""
        return self._data_bytes

    def finish(self, about: Mapping[str, object], *, force: bool) -> int:
        """Write the header with `about`, the step's metadata, give the file its final name, and return its bytes.

        Raises RefusedError if that name was taken meanwhile, unless with `force`.
        """
        header = _header(self._tensors, self._name, {**self._about, **about})
        if len(header) > self._header_bytes:
            raise RefusedError(
                f"{printable(self._path)}: the metadata of the step takes more than {STEP_BYTES:,} bytes; shorten it."
            )
        text = header[8:] + b" " * (self._header_bytes - len(header))
        check = hash_of(np.frombuffer(text, np.uint8)).xxh3
        text = text.replace(_HASH_PLACE, _HASH_PLACE.replace(_NO_HASH.encode(), check.encode()), 1)
        with self._on_disk():
            self._file.seek(0)
            self._file.write(struct.pack("<Q", len(text)) + text)
            self._file.flush()
            os.fsync(self._file.fileno())
            size = os.fstat(self._file.fileno()).st_size
            if not self._is_ours():
                raise EnvironmentFailure(
                    f"{printable(partial_path(self._path))}: was replaced; another run is using the directory."
                )
            if force:
                os.replace(partial_path(self._path), self._path)
            else:
                _rename_to_free(partial_path(self._path), self._path)
            self._file.close()
            sync_folder(self._path.parent)
        return size

    def discard(self) -> None:
        """Remove the file unless it is finished."""
        if not self._file.closed:
            ours = [str(self._name)] if self._is_ours() else []
            with suppress(OSError):  # it closes even if its buffer cannot be written
                self._file.close()
            self._partials.remove(ours)

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        """Turn errors of the disk into EnvironmentFailure."""
        with self._partials.on_disk():
            try:
                yield
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                raise EnvironmentFailure(
                    f"{printable(self._path)}: exceeds the limit on file sizes; record less of a step, or raise "
                    "the limit (ulimit -f)."
                ) from error

    def _is_ours(self) -> bool:
        """Return whether the partial file is still the one this run created."""
        try:
            return os.path.samestat(partial_path(self._path).lstat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _rename_to_free(path: Path, name: Path) -> None:
    """Rename a file to a free name. Raises RefusedError if the name is taken, and leaves that file as it is."""
    try:
        name_new(path, name)
    except FileExistsError:
        raise _exists(name) from None


def _header(
    tensors: Sequence[CapturedTensor], name: StepName, about: Mapping[str, object], position: int | None = None
) -> bytes:
    """Return length and JSON of a header, padded; with `position`, every tensor is described as stored there."""
    records = {tensor.name: tensor.record(name.step, name.rank) for tensor in tensors}
    capture = {**about, "version": CAPTURE_VERSION, "tensors": records}
    try:
        metadata = json.dumps(capture, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: its metadata must be JSON values: {error}.") from error
    content: dict[str, object] = {METADATA: {HEADER_KEY: _NO_HASH, "format": "pt", CAPTURE_KEY: metadata}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes if position is None else 0
        offsets = [begin, end] if position is None else [position, position]
        content[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
