"""Content hashes: known answers, the place of a change, and records that state none."""

import hashlib
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.errors import InputError
from mxcli.files.checkpoint import Checkpoint, content_hash, open_checkpoint, read
from mxcli.files.hashes import CHUNK_BYTES, ContentHash, differing_bytes, hash_of, recorded_hash, sha256_of
from mxcli.files.reading import read_chunks

LONG = np.arange(3 * CHUNK_BYTES // 2 + 5, dtype=np.uint8)


def test_known_answers() -> None:
    # XXH3_128bits of nothing, from the reference implementation.
    assert hash_of(np.empty(0, np.uint8)) == ContentHash("99aa06d3014798d86001c324468d497f")
    assert hash_of(np.frombuffer(b"abc", np.uint8)).xxh3 == "06b05ab6733a618578af5f94892f3950"


def test_a_hash_is_of_the_bytes_in_order() -> None:
    matrix = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert hash_of(matrix.T) == hash_of(np.ascontiguousarray(matrix.T)) != hash_of(matrix)
    assert hash_of(matrix) == hash_of(matrix.reshape(-1).view(np.uint8))


def test_long_tensors_have_a_hash_per_chunk() -> None:
    assert len(hash_of(LONG).chunks) == 2
    assert recorded_hash(hash_of(LONG).record) == hash_of(LONG)
    assert recorded_hash(hash_of(LONG[:5]).record) == hash_of(LONG[:5])


@pytest.mark.parametrize(
    ("at", "ranges"),
    [
        ([0], [(0, CHUNK_BYTES)]),
        ([CHUNK_BYTES - 1, CHUNK_BYTES], [(0, LONG.nbytes)]),
        ([LONG.nbytes - 1], [(CHUNK_BYTES, LONG.nbytes)]),
        ([], []),
    ],
)
def test_a_change_is_located(at: list[int], ranges: list[tuple[int, int]]) -> None:
    changed = LONG.copy()
    changed[at] ^= 1
    assert list(differing_bytes(hash_of(LONG), hash_of(changed), LONG.nbytes)) == ranges


def test_without_chunks_the_whole_tensor_differs() -> None:
    assert list(differing_bytes(ContentHash("0" * 32), hash_of(LONG), LONG.nbytes)) == [(0, LONG.nbytes)]


@pytest.mark.parametrize(
    "record",
    [
        None,
        "99aa06d3014798d86001c324468d497f",
        {},
        {"xxh3_128": 1},
        {"xxh3_128": "xyz"},
        {"xxh3_128": "0" * 32, "chunks_xxh3_64": "0" * 16},
        {"xxh3_128": "0" * 32, "chunks_xxh3_64": [1]},
    ],
)
def test_other_records_state_no_hash(record: object) -> None:
    assert recorded_hash(record) is None


def test_sha256_agrees_with_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LONG.tobytes() * 12)
    listed = subprocess.run(["sha256sum", "file"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert listed.split()[0] == sha256_of(tmp_path / "file") == hashlib.sha256(LONG.tobytes() * 12).hexdigest()
    with pytest.raises(InputError, match="absent: cannot be read"):
        sha256_of(tmp_path / "absent")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        _socket,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/null"),
        lambda path: path.symlink_to(path),
    ],
    ids=["pipe", "socket", "folder", "endless device", "empty device", "link to itself"],
)
def test_what_is_no_file_has_no_sha256(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe waits for its writer, and a device never ends."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make(Path("odd"))
    with pytest.raises(InputError, match=r"^odd: cannot be read: "):
        sha256_of(Path("odd"))


def test_a_file_without_a_size_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/proc/kmsg")
    (tmp_path / "empty").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_of(tmp_path / "empty") == empty
    if os.access(tmp_path / "log", os.R_OK):
        assert sha256_of(tmp_path / "log") == empty


def _checkpoint(folder: Path) -> Checkpoint:
    tensors = {"empty": np.empty((0, 4), np.uint8), "long": LONG, "short": LONG[:5]}
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["empty", "long", "short"])
def test_a_tensor_in_place_is_hashed_in_chunks(tmp_path: Path, name: str) -> None:
    checkpoint = _checkpoint(tmp_path)
    info = checkpoint.tensors[name]
    assert content_hash(checkpoint, info) == hash_of(read(checkpoint, info))


def test_a_tensor_that_is_decoded_is_hashed_whole(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=LONG)
    checkpoint = open_checkpoint(tmp_path / "x.npz")
    assert content_hash(checkpoint, checkpoint.tensors["x"]) == hash_of(LONG)


@pytest.mark.parametrize("name", ["long", "short"])
def test_a_file_that_was_cut_short_has_no_hash(tmp_path: Path, name: str) -> None:
    checkpoint = _checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 90)
    with pytest.raises(InputError, match=r"and now has 90"):
        content_hash(checkpoint, checkpoint.tensors[name])


def test_a_file_that_changes_between_two_chunks_has_no_hash(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path)
    info = checkpoint.tensors["long"]
    chunks = read_chunks(info, checkpoint.identities[info.file], CHUNK_BYTES)
    assert bytes(next(chunks)) == LONG[:CHUNK_BYTES].tobytes()
    os.truncate(tmp_path / "model.safetensors", info.offset + CHUNK_BYTES + 10)
    with pytest.raises(InputError, match=r"it ends at byte [\d,]+, within the tensor"):
        next(chunks)


def test_the_hash_of_a_file_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(3 << 20))
    stops = iter([False, True])
    with pytest.raises(CancelledError):
        sha256_of(path, lambda: next(stops))
    assert sha256_of(path) == hashlib.sha256(bytes(3 << 20)).hexdigest()
