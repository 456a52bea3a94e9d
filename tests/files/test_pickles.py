"""Pickles that build much from little are refused before they are loaded, and those of real checkpoints are not."""

from __future__ import annotations

import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read

MARK, STOP, TUPLE, EMPTY_TUPLE, TUPLE1, TUPLE2, NONE = b"(", b".", b"t", b")", b"\x85", b"\x86", b"N"
EMPTY_DICT, EMPTY_LIST, SETITEM, APPENDS, REDUCE, NEWOBJ = b"}", b"]", b"s", b"e", b"R", b"\x81"
BEGIN = b"\x80\x02"


def put(at: int) -> bytes:
    return b"q" + bytes([at])


def get(at: int) -> bytes:
    return b"h" + bytes([at])


def text(content: str) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def doubled(times: int, first: bytes = EMPTY_TUPLE) -> bytes:
    """A tuple of two of a tuple of two of …."""
    return first + put(0) + b"".join(get(at) + TUPLE2 + put(at + 1) for at in range(times))


def doubled_lists(times: int, tensor: bytes) -> bytes:
    return (
        tensor
        + put(0)
        + b"".join(
            b"0" * (at > 0) + EMPTY_LIST + MARK + get(at) + get(at) + APPENDS + put(at + 1) for at in range(times)
        )
    )


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n"
    + MARK
    + MARK
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + text("0")
    + text("cpu")
    + number(1)
    + TUPLE
    + b"Q"
    + number(0)
    + number(1)
    + TUPLE1
    + number(1)
    + TUPLE1
    + b"\x89"
    + b"ccollections\nOrderedDict\n"
    + EMPTY_TUPLE
    + REDUCE
    + TUPLE
    + REDUCE
)

BOMBS = {
    "a key of doubled tuples": (
        EMPTY_DICT + doubled(40) + NONE + SETITEM,
        "its pickle holds more than 20,000,000 objects, shared ones each time counted",
    ),
    "a tuple nested in a tuple": (EMPTY_DICT + EMPTY_TUPLE + TUPLE1 * 300 + NONE + SETITEM, "nests more than 200 deep"),
    "a long tuple nested without end": (EMPTY_TUPLE + TUPLE1 * 1_000_000, "nests more than 200 deep"),
    "lists of one tensor, doubled": (doubled_lists(30, TENSOR), "more than 20,000,000 objects|nest without end"),
    "text encoded again and again": (
        text("a")
        + put(0)
        + b"".join(b"c_codecs\nencode\n" + get(0) + text("hex_codec") + TUPLE2 + REDUCE + put(0) for _ in range(40)),
        "its pickle calls _codecs encode for something other than bytes",
    ),
    "bytes that are all zero": (
        b"c__builtin__\nbytearray\n" + number(2_000_000_000) + TUPLE1 + REDUCE,
        "its pickle calls __builtin__.bytearray",
    ),
    "a tensor without storage": (
        b"ctorch\nTensor\n" + number(100_000) + number(100_000) + TUPLE2 + REDUCE,
        "its pickle calls torch.Tensor",
    ),
    "another tensor without storage": (
        b"ctorch\nFloatTensor\n" + number(2_000_000_000) + TUPLE1 + NEWOBJ,
        "its pickle calls torch.FloatTensor",
    ),
    "a storage of its own": (
        b"ctorch.storage\nUntypedStorage\n" + number(2_000_000_000) + TUPLE1 + REDUCE,
        "its pickle calls torch.storage.UntypedStorage",
    ),
}


def zipped(path: Path, content: bytes) -> Path:
    """A checkpoint in the zip format with a storage `0` of one binary32 number."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", struct.pack("<f", 1.5))
        archive.writestr("archive/version", b"3\n")
    return path


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickles_that_build_too_much(bomb: str, tmp_path: Path) -> None:
    content, fault = BOMBS[bomb]
    began = time.monotonic()
    with pytest.raises(InputError, match=fault):
        open_checkpoint(zipped(tmp_path / "x.pt", BEGIN + content + STOP))
    plain = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    (tmp_path / "old.pt").write_bytes(b"".join(plain) + BEGIN + content + STOP + pickle.dumps([], protocol=2))
    with pytest.raises(InputError):
        open_checkpoint(tmp_path / "old.pt")
    assert time.monotonic() - began < 10


def test_lengths_beyond_the_file(tmp_path: Path) -> None:
    """Text and bytes of 2^46 bytes in files of a hundred."""
    plain = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    for opcode in (b"\x8e", b"\x8d", b"\x96"):
        content = BEGIN + opcode + struct.pack("<Q", 1 << 46) + b"abc" + STOP
        (tmp_path / "old.pt").write_bytes(b"".join(plain) + content)
        for path in (tmp_path / "old.pt", zipped(tmp_path / "x.pt", content)):
            with pytest.raises(InputError, match=r"\.pt: truncated, damaged or not a PyTorch checkpoint: "):
                open_checkpoint(path)


def test_a_tensor_written_by_hand_is_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(zipped(tmp_path / "x.pt", BEGIN + TENSOR + STOP))
    assert [read(checkpoint, info).tolist() for info in checkpoint.tensors.values()] == [[1.5]]


def test_what_training_saves_is_read(tmp_path: Path) -> None:
    """Optimizer state, random states, bytes, sets of one tensor under many names, and a long list."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(50)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    saved: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "note": b"bytes \xff",
        "seen": list(range(50_000)),
        "again": [model[0].weight.detach()] * 100,
        "tuple": tuple((number, (number,)) for number in range(1000)),
    }
    for zip_format in (True, False):
        torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=zip_format)
        checkpoint = open_checkpoint(tmp_path / "x.pt")
        assert list(checkpoint.tensors) == [f"{at}.{kind}" for at in range(50) for kind in ("weight", "bias")]
        assert checkpoint.notes[:2] == (
            f"{tmp_path / 'x.pt'}: its part 'model' is read as the model.",
            f"{tmp_path / 'x.pt'}: left out: 'optimizer', optimizer state (300 tensors, 8,400 bytes); "
            "'rng', random states (1 tensor, 5,056 bytes); "
            "'again', the tensors of the model again (100 tensors, 6,400 bytes).",
        )
