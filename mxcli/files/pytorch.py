"""PyTorch checkpoints (.pt, .pth, .bin), loaded weights-only: names flattened with dots, never any code."""

from __future__ import annotations

import mmap
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.errors import EnvironmentFailure, InputError, import_extra, printable, together
from mxcli.files.numpy import UNREADABLE_MEMBER
from mxcli.files.pickles import check_pickles
from mxcli.files.plain import HEAD_BYTES, foreign_content, read_head
from mxcli.files.reading import member_start, read_span
from mxcli.files.roles import role_of
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, FileContents, TensorInfo, byte_count

MAX_LEAVES = 5_000_000
MAX_REPEATED, MAX_NESTING, MAX_NAME_CHARACTERS = 100_000, 200, 1 << 16
SKIPPED = re.compile(r"transformer_engine(_torch)?\.")
"""Pickle names of packages whose objects are skipped."""
ATTRIBUTE = "builtins.getattr"
"""The pickle name that looks up methods of classes, those of skipped objects too."""


class SkippedObject:
    """A stand-in for an object whose code is not run."""

    def __new__(cls, *args: object) -> SkippedObject:
        """Create a stand-in; its arguments are dropped."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


def _skipped(*args: object) -> type[SkippedObject]:
    """Replace getattr, which is not run either."""
    return SkippedObject


def load_weights(path: Path, *, mapped: bool) -> Any:
    """Load the object in the file; skipped objects become SkippedObject. With `mapped` (zip format only) its tensors
    have addresses in a map of the file and no memory: the map shows where they are and must not be read.

    Raises InputError for pickles that need code and for damaged files, EnvironmentFailure if PyTorch is missing.
    """
    import_extra("torch", f"{printable(path)}: reading PyTorch files")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _loaded(path, mapped)
    except MemoryError:
        raise
    except Exception as error:  # torch raises any exception for a damaged pickle
        raise InputError(f"{printable(path)}: {_load_fault(error)}") from error


def _check_pickles(path: Path, *, zipped: bool) -> None:
    try:
        check_pickles(path, zipped=zipped)
    except (ValueError, *UNREADABLE_MEMBER) as error:
        raise InputError(f"{printable(path)}: {_load_fault(error)}") from error


def _loaded(path: Path, mapped: bool) -> Any:
    """Load a file with torch; if that needs code, once more with stand-ins if there are any for it."""
    import pickle

    from torch import load
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    try:
        return load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        unsafe = set(get_unsafe_globals_in_checkpoint(path)) if mapped else set()
        names = [name for name in unsafe if SKIPPED.match(name)]
        if not names:
            raise
        methods = [(_skipped, ATTRIBUTE)] if ATTRIBUTE in unsafe else []
        with safe_globals([*((SkippedObject, name) for name in names), *methods]):
            return load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _load_fault(error: Exception) -> str:
    """Return torch's error as one sentence: which code a pickle needs, or that the file is damaged."""
    text = str(error)
    wanted = re.search(r"GLOBAL (\S+)", text)
    if wanted:
        return (
            f"its pickle needs code ({printable(wanted[1])}), which is never run; "
            "save the state_dict alone with torch.save or safetensors."
        )
    if "Weights only load failed" in text:
        return "not a weights-only PyTorch checkpoint; save the state_dict alone with torch.save or safetensors."
    first = text.strip().splitlines()[0].split(". ")[0] if text.strip() else type(error).__name__
    return f"truncated, damaged or not a PyTorch checkpoint: {printable(first)}."


def flatten(loaded: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of every leaf of nested dicts, lists and tuples, in order."""
    if not isinstance(loaded, (dict, list, tuple)):
        yield path.stem, loaded
        return
    visited = repeated = 0
    open_containers, entered = {id(loaded)}, {id(loaded)}
    stack = [(id(loaded), "", _items(loaded))]
    while stack:
        container, prefix, items = stack[-1]
        entry = next(items, None)
        if entry is None:
            stack.pop()
            open_containers.discard(container)
            continue
        visited += 1
        name, leaf = f"{prefix}{entry[0]}", entry[1]
        is_container = isinstance(leaf, (dict, list, tuple))
        repeated += len(leaf) if is_container and id(leaf) in entered else 0
        endless = visited > MAX_LEAVES or repeated > MAX_REPEATED or len(stack) > MAX_NESTING
        if endless or id(leaf) in open_containers or len(name) > MAX_NAME_CHARACTERS:
            raise InputError(f"{printable(path)}: its containers nest without end; save a plain state_dict.")
        if is_container:
            open_containers.add(id(leaf))
            entered.add(id(leaf))
            stack.append((id(leaf), f"{name}.", _items(leaf)))
        else:
            yield name, leaf


def _items(container: Any) -> Iterator[tuple[object, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}


OBJECTS = "objects that only the program that wrote them can load"


def read_pytorch(path: Path) -> FileContents:
    """Read the tensors of one file in pickle order; those of the zip format stay in the file, others in memory.

    Raises InputError for TorchScript archives, pickles that need code, damaged files, clashing flattened names and
    tensors without a safetensors counterpart; EnvironmentFailure if PyTorch is missing.
    """
    head, size = read_head(path)
    shown = printable(path)
    foreign = foreign_content(path, head, size)
    if foreign and not head.startswith((b"PK", b"\x80")):
        raise InputError(foreign)
    zipped = head.startswith(b"PK")
    records = _records(path) if zipped else {}
    _check_pickles(path, zipped=zipped)
    leaves, others, skipped, problems = _tensors_of(load_weights(path, mapped=bool(records)), path)
    described: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, tensor in leaves.items():
        try:
            dtype, shape = _described(tensor)
            described[name] = dtype, shape, byte_count(dtype, shape)
        except ValueError as fault:
            problems.append(f"{shown}: tensor '{printable(name)}': {fault}.")
    if problems:
        raise together(InputError, shown, problems)
    if not leaves:
        raise InputError(_without_tensors(shown, others, skipped))
    base = _mapped_at(leaves.values(), records) if records else None
    if records and base is None:
        leaves, *_ = _tensors_of(load_weights(path, mapped=False), path)
    tensors, in_memory, strided = [], dict[str, Any](), dict[str, Strided]()
    for name, (dtype, shape, nbytes) in described.items():
        tensor, offset = leaves[name], IN_MEMORY
        if base is None or not nbytes:
            in_memory[name] = tensor
        elif _is_plain(tensor):
            offset = tensor.data_ptr() - base
        else:
            strided[name] = strided_of(tensor, base)
        tensors.append(TensorInfo(name, dtype, shape, role_of(name, shape, dtype), path, offset, nbytes))
    notes = []
    if others:
        notes.append(f"{shown}: {others:,} values that are not tensors (steps, options, names) are not read.")
    if skipped:
        notes.append(f"{shown}: {OBJECTS} are not read: {skipped:,}.")

    tied = _shared(leaves)
    leaves.clear()  # which closes the map

    def decode(info: TensorInfo) -> Array:
        held = in_memory.get(info.name)
        return _as_array(strided[info.name].read(info) if held is None else held, info)

    return FileContents(tuple(tensors), notes=tuple(notes), tied=tied, decode=decode)


def _records(path: Path) -> dict[int, int]:
    """Return position to size of every storage record of a zip checkpoint; none unless they can be mapped.

    Raises InputError for TorchScript archives and damaged files.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = archive.infolist()
            if any(member.filename.endswith("/constants.pkl") for member in members):
                raise InputError(
                    f"{printable(path)}: a TorchScript archive, which holds code; "
                    "save its state_dict() with torch.save or safetensors instead."
                )
            data = [member for member in members if re.search(r"/data/[^/]+$", member.filename)]
            orders = [member for member in members if member.filename.endswith("/byteorder")]
            if any(archive.read(order) != b"little" for order in orders if order.file_size < HEAD_BYTES):
                return {}
            if any(member.compress_type != zipfile.ZIP_STORED for member in data):
                return {}
            return {member_start(file, member): member.file_size for member in data if member.file_size}
    except UNREADABLE_MEMBER as error:
        raise InputError(f"{printable(path)}: truncated or damaged zip archive: {printable(error)}.") from error


def _without_tensors(shown: str, others: int, skipped: int) -> str:
    if skipped:
        return f"{shown}: holds no tensors, only {OBJECTS}: {skipped:,}. Dump tensors before quantization too."
    return f"{shown}: holds no tensors, only {others:,} other values."


def _tensors_of(loaded: Any, path: Path) -> tuple[dict[str, Any], int, int, list[str]]:
    """Return tensors by flattened name, the number of leaves that are not tensors, the number skipped, and a problem
    per name that occurs twice."""
    leaves: dict[str, Any] = {}
    problems = []
    others = skipped = 0
    for name, leaf in flatten(loaded, path):
        if isinstance(leaf, SkippedObject):
            skipped += 1
        elif not hasattr(leaf, "untyped_storage"):
            others += 1
        elif name in leaves:
            problems.append(f"{printable(path)}: two tensors flatten to the name '{printable(name)}'.")
        else:
            leaves[name] = leaf.detach()
    return leaves, others, skipped, problems


def _described(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Return safetensors dtype and logical shape. Raises ValueError for tensors that are not plain dense numbers."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    if layout != "strided" or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        kind = "without data" if tensor.is_meta else f"{'nested' if tensor.is_nested else layout} {dtype}"
        raise ValueError(f"{kind} tensors cannot be read; save it as a dense float tensor")
    if dtype not in NAMES:
        raise ValueError(f"dtype {dtype} has no safetensors counterpart; convert it to float32")
    shape = tuple(int(size) for size in tensor.shape)
    name = NAMES[dtype]
    per_byte = 8 // DTYPES[name].bits or 1
    return name, (*shape[:-1], shape[-1] * per_byte) if per_byte > 1 and shape else shape


def _is_plain(tensor: Any) -> bool:
    """Return whether the elements are contiguous and stored as they are, neither strided nor lazily conjugated."""
    return bool(tensor.is_contiguous()) and not tensor.is_conj() and not tensor.is_neg()


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor that is a view of bytes of its file: where they begin, its strides, and the signs left to apply."""

    begin: int
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugated: bool
    negated: bool

    def read(self, info: TensorInfo) -> Any:
        """Return the tensor, with the bytes of its file that it views in memory."""
        import torch

        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        stored = torch.from_numpy(read_span(info, self.begin, span * self.dtype.itemsize)).view(self.dtype)
        viewed = stored.as_strided(self.shape, self.strides)
        viewed = viewed.conj() if self.conjugated else viewed
        return -viewed if self.negated else viewed


def strided_of(tensor: Any, base: int) -> Strided:
    """Return a tensor in a file mapped at the address `base`."""
    begin = tensor.data_ptr() - base
    return Strided(begin, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _mapped_at(tensors: Iterable[Any], records: dict[int, int]) -> int | None:
    """Return the address of byte 0 of the mapped file, which begins a page; None unless every storage is a record."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    if not storages:
        return None
    first = min(storages)
    bases = (first - at for at, size in records.items() if size == storages[first])
    found = [
        base
        for base in bases
        if base % mmap.ALLOCATIONGRANULARITY == 0
        and all(records.get(address - base) == size for address, size in storages.items())
    ]
    return found[0] if len(found) == 1 else None


def _shared(leaves: dict[str, Any]) -> dict[str, str]:
    """Return later name to earlier name of tensors that are the same view of the same storage."""
    first: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in leaves.items():
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and first.setdefault(view, name) != name:
            tied[name] = first[view]
    return tied


def _as_array(tensor: Any, info: TensorInfo) -> Array:
    import torch

    words = {1: torch.uint8, 2: torch.uint16}
    try:
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        if DTYPES[info.dtype].is_raw:
            plain = plain.view(words[plain.element_size()])
        array: Array = plain.numpy()
    except (RuntimeError, MemoryError) as error:
        raise EnvironmentFailure(
            f"{printable(info.file)}: tensor '{printable(info.name)}', stored with strides {list(tensor.stride())}, "
            f"needs {info.nbytes:,} bytes of memory: {printable(error)}."
        ) from error
    array.flags.writeable = False
    return array
