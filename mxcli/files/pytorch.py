"""PyTorch checkpoints (.pt, .pth, .bin, .ckpt), loaded weights-only: the model in them, names flattened with dots,
never any code."""

from __future__ import annotations

import mmap
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.errors import EnvironmentFailure, InputError, printable, together
from mxcli.files.memory import free_memory, memory_limit
from mxcli.files.nested import flatten
from mxcli.files.numpy import UNREADABLE_MEMBER
from mxcli.files.plain import HEAD_BYTES, foreign_content, read_head
from mxcli.files.reading import member_start, read_span
from mxcli.files.roles import role_of
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, FileContents, LeftOut, TensorInfo, byte_count
from mxcli.files.trainers.names import EXTRA_STATE, OF_ENGINE, as_model
from mxcli.files.trainers.parts import bytes_of, find_model, is_dense, is_tensor, notes_of
from mxcli.files.weights_only import load_weights, needs_code, skipped_class

SKIPPED = re.compile(r"transformer_engine(_torch)?\.")
"""Classes of packages whose objects are skipped wherever they are."""
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
    found = _load(path, zipped=zipped, mapped=bool(records))
    described = _described_all(found, shown)
    base = _mapped_at(found.stored, records) if records else None
    if records and base is None:
        found = _load(path, zipped=zipped, mapped=False)
    tensors, in_memory, strided = [], dict[str, Any](), dict[str, Strided]()
    for name, (dtype, shape, nbytes) in described.items():
        tensor, offset = found.leaves[name], IN_MEMORY
        if base is None or not nbytes:
            in_memory[name] = tensor
        elif _is_plain(tensor):
            offset = tensor.data_ptr() - base
        else:
            strided[name] = strided_of(tensor, base)
        tensors.append(TensorInfo(name, dtype, shape, role_of(name, shape, dtype), path, offset, nbytes))
    tied = _shared(found.leaves)
    found.leaves.clear()  # which closes the map

    def decode(info: TensorInfo) -> Array:
        held = in_memory.get(info.name)
        return _as_array(strided[info.name].read(info) if held is None else held, info)

    contents = FileContents(tuple(tensors), notes=found.notes, tied=tied, decode=decode, left_out=found.left_out)
    return as_model(contents, path, trained=found.is_part)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded file: the tensors of its model by flattened name, all that have a storage, whether the model is a part
    of it, notes on everything that is not read, and a problem per name that occurs twice. `empty` says what there is
    without tensors."""

    leaves: dict[str, Any]
    stored: list[Any]
    is_part: bool
    notes: tuple[str, ...]
    problems: list[str]
    empty: str
    left_out: tuple[LeftOut, ...]


def _load(path: Path, *, zipped: bool, mapped: bool) -> Loaded:
    """Load a file and find the model in it. Raises InputError like `read_pytorch`."""
    loaded = load_weights(path, zipped=zipped, mapped=mapped)
    shown = printable(path)
    stored, others, objects = [], 0, 0
    for name, leaf in flatten(loaded, path):
        if is_tensor(leaf):
            stored += [leaf.detach()] if is_dense(leaf) else []
        elif not EXTRA_STATE.search(name):
            objects += skipped_class(leaf) is not None
            others += skipped_class(leaf) is None
    model = find_model(loaded, path)
    leaves, extra, problems = _tensors_of(model.value, path)
    notes, left_out = list(notes_of(model, path)), model.left_out
    if extra:
        in_tensors = [bytes_of(leaf) for leaf in extra if is_tensor(leaf)]
        left_out += (LeftOut("_extra_state", OF_ENGINE, len(in_tensors), sum(in_tensors)),)
        notes.append(
            f"{shown}: left out: '_extra_state', {OF_ENGINE} ({len(extra):,} of them, {sum(in_tensors):,} bytes in "
            "tensors)."
        )
    if others:
        notes.append(f"{shown}: {others:,} values that are not tensors (steps, options, names) are not read.")
    if objects:
        notes.append(f"{shown}: {OBJECTS} are not read: {objects:,}.")
    empty = _without_tensors(shown, others, objects)
    return Loaded(leaves, stored, bool(model.names), tuple(notes), problems, empty, left_out)


def _described_all(found: Loaded, shown: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return dtype, shape and bytes of each tensor. Raises InputError with all that cannot be read, EnvironmentFailure
    for one that repeats its elements beyond the memory of the machine."""
    described: dict[str, tuple[str, tuple[int, ...], int]] = {}
    problems = list(found.problems)
    for name, tensor in found.leaves.items():
        try:
            dtype, shape = _described(tensor)
            described[name] = dtype, shape, byte_count(dtype, shape)
        except ValueError as fault:
            problems.append(f"{shown}: tensor '{printable(name)}': {fault}.")
            continue
        _check_expanded(tensor, f"{shown}: tensor '{printable(name)}'", described[name][2], memory_limit())
    if problems:
        raise together(InputError, shown, problems)
    if not found.leaves:
        raise InputError(found.empty)
    return described


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


def _tensors_of(model: Any, path: Path) -> tuple[dict[str, Any], list[Any], list[str]]:
    """Return the tensors of a model by flattened name, what is under `_extra_state`, and a problem per name that occurs
    twice.

    Raises InputError for an object that only code can load.
    """
    leaves: dict[str, Any] = {}
    extra, problems = [], []
    for name, leaf in flatten(model, path):
        of = skipped_class(leaf)
        if EXTRA_STATE.search(name):
            extra.append(leaf)
        elif of is not None and not SKIPPED.match(of):
            raise InputError(f"{printable(path)}: {needs_code(of)}")
        elif not is_tensor(leaf):
            continue
        elif name in leaves:
            problems.append(f"{printable(path)}: two tensors flatten to the name '{printable(name)}'.")
        else:
            leaves[name] = leaf.detach()
    return leaves, extra, problems


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


def _check_expanded(tensor: Any, what: str, nbytes: int, most: int | None) -> None:
    """Raise EnvironmentFailure for a tensor that repeats elements of its file, if the copy that is read takes more than
    `most` bytes."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if most is not None and nbytes > most and tensor.numel() > span:
        raise EnvironmentFailure(
            f"{what}, stored with strides {list(tensor.stride())}, needs {nbytes:,} bytes of memory, and there are "
            f"{most:,}; save it without expand(), as the {span:,} elements that it has."
        )


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
    _check_expanded(tensor, f"{printable(info.file)}: tensor '{printable(info.name)}'", info.nbytes, free_memory())
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
