"""Everything odd about a source that is no error, as sentences for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mxcli.errors import printable
from mxcli.files.orientation import stores_conv1d
from mxcli.files.tensors import DTYPES, FileContents, TensorInfo


def remarks(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[Path, Mapping[str, str]],
    tied: Mapping[str, str],
    config: Mapping[str, object] | None,
) -> list[str]:
    """Notes on alignment, empty tensors, missing metadata, adapters, shared storage and odd names."""
    infos = tensors.values()
    notes = []
    bare = [path.name for path, entries in metadata.items() if "format" not in entries]
    if bare:
        notes.append(f"{_counted(bare, 'file')} without a format in __metadata__; outputs get the usual 'pt'.")
    unaligned = [info.name for info in infos if info.file in metadata and not _aligned(info)]
    if unaligned:
        notes.append(f"{_counted(unaligned, 'tensor')} not aligned to the element size; read through a copy.")
    empty = [info.name for info in infos if not info.elements]
    if empty:
        notes.append(f"{_counted(empty, 'tensor')} without elements.")
    lora = [info.name for info in infos if info.role == "lora"]
    if lora:
        whole = len(lora) == len(tensors)
        notes.append(
            f"LoRA adapter: all {len(lora):,} tensors belong to it; it is no model by itself."
            if whole
            else f"{_counted(lora, 'tensor')} of a LoRA adapter among other tensors."
        )
    shared = [name for name, stored in tied.items() if name in tensors and stored in tensors]
    if shared:
        notes.append(f"{_counted(shared, 'tensor')} sharing the storage of another; listed under each name.")
    odd = [info.name for info in infos if not info.name.isprintable() or not info.name.strip()]
    if odd:
        notes.append(f"{_counted(odd, 'name')} empty or with control characters, shown escaped.")
    if stores_conv1d(tensors) and not _is_gpt2(config):
        notes.append("Fused attention weights are stored [in, out] as in GPT-2: their reduction runs over dimension 0.")
    return notes


def file_notes(contents: Mapping[Path, FileContents]) -> list[str]:
    """The notes of files; what is to be said of several is said once."""
    notes: dict[str, list[tuple[Path, str]]] = {}
    for path, part in contents.items():
        for note in part.notes:
            notes.setdefault(note.removeprefix(f"{printable(path)}: "), []).append((path, note))
    return [
        alike[0][1] if len(alike) == 1 else f"{_counted([path.name for path, _ in alike], 'file')}, each: {said}"
        for said, alike in notes.items()
    ]


def _aligned(info: TensorInfo) -> bool:
    return info.offset % DTYPES[info.dtype].storage_bytes == 0


def _is_gpt2(config: Mapping[str, object] | None) -> bool:
    return config is not None and config.get("model_type") == "gpt2"


def _counted(names: Iterable[str], noun: str) -> str:
    """Number, noun and the first name: "3 tensors ('a', …)"."""
    listed = list(names)
    plural = noun if len(listed) == 1 else f"{noun}s"
    return f"{len(listed):,} {plural} ('{printable(listed[0])}'{', …' if len(listed) > 1 else ''})"
