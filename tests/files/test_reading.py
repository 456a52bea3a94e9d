"""Tensors are read one at a time into memory of their own, and a file that changes while in use is refused, whatever
its kind."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raw_checkpoint import safetensors_bytes
from raw_gguf import F32, gguf_bytes

from mxcli.errors import InputError
from mxcli.files import reading
from mxcli.files.checkpoint import Checkpoint, check_source, open_checkpoint, read, read_rows, source_changes
from mxcli.files.identity import identity
from mxcli.files.reading import will_need
from mxcli.files.tensors import IN_MEMORY, TensorInfo

MEGABYTES = 8
COUNT = 16
TICK = 0.02
"""Seconds after which the system gives a file another time."""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    data = np.arange(MEGABYTES << 18, dtype="<u4").tobytes()
    tensors = {f"t{n}.weight": ("F32", [MEGABYTES, 1 << 18], data) for n in range(COUNT)}
    path.write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    return open_checkpoint(path)


def test_rows_without_columns_are_empty(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes({"w": ("F32", [4, 0], b"")}, {}))
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert read_rows(checkpoint, checkpoint.tensors["w"], [0, 2], 1).shape == (2, 1, 0)


def test_rows_are_read_and_nothing_else(tmp_path: Path) -> None:
    """Of a tensor that begins at an odd byte; its leading dimensions count as rows."""
    x = np.arange(6 * 5 * 3, dtype="<u2").reshape(6, 5, 3)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": ("U8", [1], b"\1"), "b": ("BF16", [6, 5, 3], x.tobytes())}, {}))
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["b"]
    assert info.offset % 2
    found = read_rows(checkpoint, info, [4, 28, 0], 2)
    assert found.dtype == np.dtype("<u2")
    assert found.tolist() == [x.reshape(30, 3)[first : first + 2].tolist() for first in (4, 28, 0)]
    os.truncate(path, info.offset + 60)
    with pytest.raises(InputError, match="changed while in use: it had 325 bytes and now has 205"):
        read_rows(checkpoint, info, [4], 2)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(checkpoint, info, [0], 2)


def test_one_of_a_stack_is_read_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(4 * 3 * 2, dtype="<f4").reshape(4, 3, 2)
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes({"b": ("F32", [4, 3, 2], x.tobytes())}, {}))
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    wanted: list[int] = []
    fill = reading._fill
    monkeypatch.setattr(reading, "_fill", lambda *arguments: (wanted.append(len(arguments[-1])), fill(*arguments)))
    assert read(checkpoint, checkpoint.tensors["b"], 2).tolist() == x[2].tolist()
    assert wanted == [24]
    np.save(tmp_path / "y.npy", np.asfortranarray(x))
    decoded = open_checkpoint(tmp_path / "y.npy")
    assert read(decoded, decoded.tensors["y"], 3).tolist() == x[3].tolist()


def _resident_megabytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_an_array_is_memory_of_its_own(big: Checkpoint) -> None:
    array = read(big, big.tensors["t3.weight"])
    assert array.dtype == np.dtype("<f4")
    assert array.shape == (MEGABYTES, 1 << 18)
    assert array.flags.owndata
    assert not array.flags.writeable
    assert array.view("<u4")[-1, -1] == (MEGABYTES << 18) - 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_does_not_accumulate(big: Checkpoint) -> None:
    before = _resident_megabytes()
    for info in big.tensors.values():
        read(big, info).view("<u4").sum()
    gc.collect()
    assert _resident_megabytes() - before < 3 * MEGABYTES


X = np.arange(24, dtype="<f4").reshape(4, 6)


def _npz(path: Path, **arrays: Any) -> None:
    np.savez(path, **arrays)


def _npz_deflated(path: Path) -> None:
    np.savez_compressed(path, x=X)


# Every way to a tensor: in place or decoded, of every kind of file.
CONTAINERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "safetensors": (
        "x.safetensors",
        lambda path: path.write_bytes(safetensors_bytes({"x": ("F32", [4, 6], X.tobytes())}, {"format": "pt"})),
    ),
    "gguf": ("x.gguf", lambda path: path.write_bytes(gguf_bytes([("x", (4, 6), F32, X.tobytes())]))),
    "npy": ("x.npy", lambda path: np.save(path, X)),
    "npy, column by column": ("x.npy", lambda path: np.save(path, np.asfortranarray(X))),
    "npy, big-endian": ("x.npy", lambda path: np.save(path, X.astype(">f4"))),
    "npz": ("x.npz", lambda path: _npz(path, x=X)),
    "npz, column by column": ("x.npz", lambda path: _npz(path, x=np.asfortranarray(X))),
    "npz, deflated": ("x.npz", _npz_deflated),
    "PyTorch": ("x.pt", lambda path: torch.save({"x": torch.from_numpy(X)}, path)),
    "PyTorch, a view": ("x.pt", lambda path: torch.save({"x": torch.from_numpy(X.T.copy()).T}, path)),
    "PyTorch, not a zip archive": (
        "x.pt",
        lambda path: torch.save({"x": torch.from_numpy(X)}, path, _use_new_zipfile_serialization=False),
    ),
}
CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "emptied": (lambda path: os.truncate(path, 0), r"it had [\d,]+ bytes and now has 0, modified at 20"),
    "cut short": (
        lambda path: os.truncate(path, path.stat().st_size - 10),
        r"it had [\d,]+ bytes and now has [\d,]+, modified at 20",
    ),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), r"it had [\d,]+ bytes and now has"),
    "overwritten": (lambda path: _overwrite(path), r"modified at 20\d\d-"),
    "overwritten, its time put back": (lambda path: _overwrite(path, keep_time=True), "changed at 20.*is the same"),
    "replaced": (lambda path: _replace(path), "replaced by another file"),
    "replaced, its time put back": (lambda path: _replace(path, keep_time=True), "replaced by another file"),
}


def _overwrite(path: Path, *, keep_time: bool = False) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(bytes(status.st_size // 4))
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replace(path: Path, *, keep_time: bool = False) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other) if keep_time else shutil.copy(path, other)
    os.replace(other, path)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_that_changes_after_it_was_opened(container: str, change: str, tmp_path: Path) -> None:
    name, write = CONTAINERS[container]
    path = tmp_path / name
    write(path)
    checkpoint = open_checkpoint(path)
    assert read(checkpoint, checkpoint.tensors["x"]).tolist() == X.tolist()
    assert source_changes(checkpoint) == []
    time.sleep(TICK)
    apply, words = CHANGES[change]
    apply(path)
    refused = rf"x\.\w+: changed while in use: {words}.*\(reading tensor 'x'\); run again"
    with pytest.raises(InputError, match=refused):
        read(checkpoint, checkpoint.tensors["x"])
    with pytest.raises(InputError, match=rf"changed while in use: {words}"):
        check_source(checkpoint)
    assert len(source_changes(checkpoint)) == 1


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in ("longer",)])
@pytest.mark.parametrize("container", ["safetensors", "gguf", "npy", "npz", "PyTorch"])
def test_a_file_that_changes_while_a_tensor_is_read(
    container: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes when the first bytes of the tensor are about to be read."""
    name, write = CONTAINERS[container]
    write(tmp_path / name)
    checkpoint = open_checkpoint(tmp_path / name)
    time.sleep(TICK)
    fill = reading._fill

    def changing(*arguments: Any) -> None:
        CHANGES[change][0](tmp_path / name)
        fill(*arguments)

    monkeypatch.setattr(reading, "_fill", changing)
    with pytest.raises(InputError, match=r"changed while in use: .*tensor 'x'"):
        read(checkpoint, checkpoint.tensors["x"])


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_that_vanishes(container: str, tmp_path: Path) -> None:
    name, write = CONTAINERS[container]
    write(tmp_path / name)
    checkpoint = open_checkpoint(tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read(checkpoint, checkpoint.tensors["x"])
    assert source_changes(checkpoint) == [
        f"{tmp_path / name}: changed while in use: it cannot be found any more (No such file or directory); run again "
        "once nothing writes it."
    ]


def test_a_file_that_changes_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"x": ("F32", [4, 6], X.tobytes())}, {"format": "pt"}))
    time.sleep(TICK)
    from mxcli.files.checkpoint import READERS

    whole = READERS["safetensors"]

    def changing(path: Path) -> Any:
        found = whole(path)
        os.utime(path)
        return found

    monkeypatch.setitem(READERS, "safetensors", changing)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="changed while in use: modified at"):
        open_checkpoint(path)


def test_an_error_of_the_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"x": ("F32", [4, 6], X.tobytes())}, {"format": "pt"}))
    checkpoint = open_checkpoint(path)

    def failing(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reading, "_fill", failing)
    with pytest.raises(InputError, match=r"x\.safetensors: cannot be read: \[Errno 5\] Input/output error\."):
        read(checkpoint, checkpoint.tensors["x"])


def test_an_identity(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    os.utime(path, ns=(5, 1_700_000_000_000_000_001))
    status, known = path.stat(), identity(path)
    assert known.record == [status.st_dev, status.st_ino, 5, 1_700_000_000_000_000_001, status.st_ctime_ns]
    assert known.change_to(known) is None
    assert replace(known, modified=0).change_to(known) == "modified at 2023-11-14 22:13:20.000000001 UTC"
    hashed, chmod = replace(known, is_hashed=True), replace(known, changed=0, status=(0o100444, 0, 0, 1))
    assert (
        known.change_to(chmod)
        == "changed at 1970-01-01 00:00:00.000000000 UTC, though its time of modification is the same"
    )
    assert hashed.change_to(chmod) is None
    assert hashed.change_to(replace(known, changed=0)) == known.change_to(chmod)
    assert hashed.change_to(replace(chmod, size=6)) is not None
    assert known.change_to(replace(known, modified=10**30)) == f"modified at {10**21:,} seconds after 1970"


def test_what_will_be_needed_is_only_a_hint(tmp_path: Path) -> None:
    will_need([TensorInfo("gone", "BF16", (4,), "weight", tmp_path / "gone", 0, 8)])
    will_need([TensorInfo("decoded", "BF16", (4,), "weight", tmp_path / "gone", IN_MEMORY, 8)])
    (tmp_path / "there").write_bytes(bytes(8))
    will_need([TensorInfo("there", "BF16", (4,), "weight", tmp_path / "there", 0, 1 << 40)])
