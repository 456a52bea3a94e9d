"""Tensors are mapped one at a time, and their pages can be given back."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from raw_checkpoint import safetensors_bytes

from mxcli.errors import InputError
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read
from mxcli.files.reading import read_rows, release_pages, will_need
from mxcli.files.tensors import IN_MEMORY, TensorInfo

MEGABYTES = 8
COUNT = 16


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    data = np.arange(MEGABYTES << 18, dtype="<u4").tobytes()
    tensors = {f"t{n}.weight": ("F32", [MEGABYTES, 1 << 18], data) for n in range(COUNT)}
    path.write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    return open_checkpoint(path)


def test_rows_are_read_and_nothing_else(tmp_path: Path) -> None:
    """Of a tensor that begins at an odd byte; its leading dimensions count as rows."""
    x = np.arange(6 * 5 * 3, dtype="<u2").reshape(6, 5, 3)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": ("U8", [1], b"\1"), "b": ("BF16", [6, 5, 3], x.tobytes())}, {}))
    info = open_checkpoint(path).tensors["b"]
    assert info.offset % 2
    found = read_rows(info, [4, 28, 0], 2)
    assert found.dtype == np.dtype("<u2")
    assert found.tolist() == [x.reshape(30, 3)[first : first + 2].tolist() for first in (4, 28, 0)]
    os.truncate(path, info.offset + 60)
    assert read_rows(info, [4], 2).tolist() == [x.reshape(30, 3)[4:6].tolist()]
    with pytest.raises(InputError, match="changed while in use: tensor 'b' ends at byte"):
        read_rows(info, [0, 28], 2)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(info, [0], 2)


def _resident_megabytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_an_array_is_a_view_of_the_file(big: Checkpoint) -> None:
    array = read(big, big.tensors["t3.weight"])
    assert array.dtype == np.dtype("<f4")
    assert array.shape == (MEGABYTES, 1 << 18)
    assert not array.flags.owndata
    assert not array.flags.writeable
    assert array.view("<u4")[-1, -1] == (MEGABYTES << 18) - 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_pages_do_not_accumulate(big: Checkpoint) -> None:
    before = _resident_megabytes()
    for info in big.tensors.values():
        read(big, info).view("<u4").sum()
    gc.collect()
    assert _resident_megabytes() - before < 3 * MEGABYTES


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_pages_of_living_arrays_can_be_released(big: Checkpoint) -> None:
    before = _resident_megabytes()
    arrays = [read(big, info).view("<u4") for info in big.tensors.values()]
    sums = []
    for array in arrays:
        sums.append(int(array.sum(dtype=np.uint64)))
        release_pages(array)
    assert _resident_megabytes() - before < 3 * MEGABYTES
    assert [int(array[0, 1]) for array in arrays] == [1] * COUNT
    assert len(set(sums)) == 1


def test_releasing_what_is_not_mapped_does_nothing() -> None:
    array = np.ones(4)
    release_pages(array)
    assert array.sum() == 4


def test_a_file_that_shrinks_or_vanishes_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"x": ("F32", [4], bytes(16))}))
    checkpoint = open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(InputError, match="changed while in use: tensor 'x' ends at byte 80 and the file now has 76"):
        read(checkpoint, checkpoint.tensors["x"])
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read(checkpoint, checkpoint.tensors["x"])


def test_what_will_be_needed_is_only_a_hint(tmp_path: Path) -> None:
    will_need([TensorInfo("gone", "BF16", (4,), "weight", tmp_path / "gone", 0, 8)])
    will_need([TensorInfo("decoded", "BF16", (4,), "weight", tmp_path / "gone", IN_MEMORY, 8)])
    (tmp_path / "there").write_bytes(bytes(8))
    will_need([TensorInfo("there", "BF16", (4,), "weight", tmp_path / "there", 0, 1 << 40)])
