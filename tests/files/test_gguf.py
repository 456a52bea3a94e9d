"""GGUF files: what they hold, and that no damage is more than an error in one sentence."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_gguf import BF16, F16, F32, LIST, MXFP4, Q4_0, Q8_0, TEXT, gguf_bytes, text, u32

from mxcli.errors import EnvironmentFailure, InputError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.gguf import block_sizes, read_settings

pytest.importorskip("gguf")

MATRIX = np.arange(8, dtype=np.float32).reshape(2, 4)
NAME = ("general.architecture", TEXT, text("llama"))
TOKENS = ("tokenizer.ggml.tokens", LIST, struct.pack("<IQ", TEXT, 2) + text("a") + text("b"))
LISTS = ("odd", LIST, struct.pack("<IQIQ", LIST, 1, 0, 3) + b"abc")
TENSORS = (
    ("token_embd.weight", (2, 4), F16, MATRIX.astype(np.float16).tobytes()),
    ("blk.0.attn_norm.weight", (4,), F32, MATRIX[0].tobytes()),
    ("blk.0.attn_q.weight", (3, 64), MXFP4, bytes(range(102))),
    ("blk.0.attn_q.scale", (1,), F32, bytes(4)),
    ("output.weight", (2, 4), BF16, (MATRIX.view(np.uint32) >> 16).astype(np.uint16).tobytes()),
)
WHOLE = gguf_bytes(TENSORS, (NAME, TOKENS, u32("general.alignment", 32), LISTS))


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    def store(content: bytes, name: str = "m.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return store


Store = Callable[..., Path]


def test_tensors_are_in_place_under_their_names(stored: Store) -> None:
    checkpoint = open_checkpoint(stored(WHOLE))
    assert checkpoint.kind == "gguf"
    assert checkpoint.dialect == "gguf"
    described = [(i.name, i.dtype, i.shape, i.role, i.block_type) for i in checkpoint.tensors.values()]
    assert described == [
        ("token_embd.weight", "F16", (2, 4), "embedding", ""),
        ("blk.0.attn_norm.weight", "F32", (4,), "norm", ""),
        ("blk.0.attn_q.weight", "U8", (3, 34), "codes", "MXFP4"),
        ("blk.0.attn_q.scale", "F32", (1,), "scale", ""),
        ("output.weight", "BF16", (2, 4), "lm_head", ""),
    ]
    tensors = checkpoint.tensors
    assert read(checkpoint, tensors["token_embd.weight"]).tolist() == MATRIX.tolist()
    assert read(checkpoint, tensors["output.weight"]).tolist() == (MATRIX.view(np.uint32) >> 16).tolist()
    assert read(checkpoint, tensors["blk.0.attn_q.weight"]).tobytes() == bytes(range(102))
    assert checkpoint.notes == (
        "m.gguf: blocks of GGUF types are read as bytes: 1 MXFP4; shapes and elements count bytes.",
    )
    assert read_settings(stored(WHOLE)) == {"general.architecture": "llama", "general.alignment": 32}


def test_a_file_without_blocks_is_plain(stored: Store) -> None:
    checkpoint = open_checkpoint(stored(gguf_bytes(TENSORS[:2], version=2)))
    assert (checkpoint.dialect, checkpoint.notes) == (None, ())


def test_another_alignment_holds(stored: Store) -> None:
    content = gguf_bytes(TENSORS[:2], [u32("general.alignment", 128)], alignment=128)
    checkpoint = open_checkpoint(stored(content))
    assert read(checkpoint, checkpoint.tensors["blk.0.attn_norm.weight"]).tolist() == [0, 1, 2, 3]


def test_a_file_is_known_by_its_first_bytes_and_a_directory_by_its_one_file(stored: Store, tmp_path: Path) -> None:
    assert open_checkpoint(stored(WHOLE, "weights")).kind == "gguf"
    (tmp_path / "weights").unlink()
    stored(WHOLE, "m-00001-of-00001.gguf")
    assert open_checkpoint(tmp_path).kind == "gguf"
    stored(WHOLE, "m.Q4_0.gguf")
    with pytest.raises(InputError, match=r"2 files .* are separate models; give one of them as the source"):
        open_checkpoint(tmp_path)
    stored(WHOLE, "model.gguf")
    assert [path.name for path in open_checkpoint(tmp_path).files] == ["model.gguf"]


def test_parts_of_one_model_are_read_together(stored: Store, tmp_path: Path) -> None:
    stored(gguf_bytes(TENSORS[:1]), "m-00001-of-00002.gguf")
    stored(gguf_bytes(TENSORS[1:2]), "m-00002-of-00002.gguf")
    assert list(open_checkpoint(tmp_path).tensors) == ["token_embd.weight", "blk.0.attn_norm.weight"]


def test_a_file_given_by_name_is_read_next_to_other_weights(stored: Store, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert open_checkpoint(stored(WHOLE, "model.gguf")).kind == "gguf"


HUGE = 1 << 60


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"GGUF", "its header is truncated: its version needs 4 bytes from byte 4 on"),
        (b"PK\x03\x04" + bytes(64), "a zip archive"),
        (b"ggjt" + bytes(64), r"not a GGUF file: it begins with b'ggjt', not b'GGUF'"),
        (
            gguf_bytes(TENSORS, version=1),
            "a GGUF file of version 1; little-endian ones of versions 2 and 3 can be read",
        ),
        (gguf_bytes(TENSORS, version=3 << 24), "a GGUF file of big-endian numbers"),
        (gguf_bytes(TENSORS, tensor_count=HUGE), f"its header states {HUGE:,} tensors, which its .* cannot hold"),
        (gguf_bytes(TENSORS, setting_count=HUGE), f"its header states {HUGE:,} settings"),
        (gguf_bytes(TENSORS, tensor_count=6), "tensor|text|type|header"),
        (
            gguf_bytes([], [(NAME[0], LIST, struct.pack("<IQ", 4, HUGE))]),
            f"its header states {HUGE:,} values of 'general",
        ),
        (gguf_bytes([], [(NAME[0], TEXT, struct.pack("<Q", HUGE))]), "'general.architecture' is .* bytes long"),
        (gguf_bytes([], [(NAME[0], 99, b"")]), "'general.architecture' is of the unknown type 99"),
        (gguf_bytes([], [NAME, NAME]), "the setting 'general.architecture' occurs twice"),
        (gguf_bytes([], [("deep", LIST, struct.pack("<IQ", LIST, 1) * 9)]), "lists in lists, more than 4 deep"),
        (gguf_bytes([], [u32("general.alignment", 48)]), "general.alignment is 48; it must be a power of two"),
        (gguf_bytes([], [u32("general.alignment", 0)]), "general.alignment is 0"),
        (gguf_bytes([], [NAME]), "holds no tensors"),
        (gguf_bytes([("a", (4,), 77, bytes(4))]), "tensor 'a': its type 77 is unknown"),
        (gguf_bytes([("a", (2, 40), Q8_0, bytes(68))]), r"its rows of 40 are not whole blocks of 32 \(Q8_0\)"),
        (gguf_bytes([("a", (1 << 40, 1 << 40), F32, b"")]), "its byte count overflows"),
        (gguf_bytes([("a", (1 << 50, 1), F32, b"")]), "truncated: the header describes"),
        (gguf_bytes([("a", (1,) * 40, F32, bytes(4))]), "40 dimensions; at most 32 can be held"),
        (gguf_bytes(TENSORS[:2], offsets=[0, 96]), "begins at 96 of the data; the tensor before it ends at 32"),
        (gguf_bytes(TENSORS[:2], offsets=[HUGE, 0]), f"begins at {HUGE:,} of the data"),
        (gguf_bytes([TENSORS[1], TENSORS[1]]), "'blk.0.attn_norm.weight' occurs twice"),
        (gguf_bytes([("zz", (4,), F32, bytes(16))]).replace(text("zz"), text(b"z\xff")), "is not valid UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_one_sentence(stored: Store, content: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        open_checkpoint(stored(content))


def test_a_file_cut_anywhere_is_refused(stored: Store) -> None:
    last = len(WHOLE) - 16  # what pads the last tensor may be missing
    for length in range(1, last, 7):
        with pytest.raises(InputError):
            open_checkpoint(stored(WHOLE[:length]))
    assert open_checkpoint(stored(WHOLE[:last])).tensors


def test_bytes_behind_the_last_tensor_are_reported(stored: Store) -> None:
    assert "3 bytes after the last tensor belong to no tensor" in open_checkpoint(stored(WHOLE + b"abc")).notes[1]


def test_no_change_of_a_byte_raises_anything_else(stored: Store) -> None:
    chosen, refused = random.Random(0), 0
    for _ in range(150):
        content = bytearray(WHOLE)
        content[chosen.randrange(500)] = chosen.choice([0, 1, 127, 128, 255, chosen.randrange(256)])
        try:
            open_checkpoint(stored(bytes(content)))
        except InputError:
            refused += 1
    assert refused > 40


def test_what_changes_while_it_is_read_is_reported(stored: Store) -> None:
    path = stored(WHOLE)
    checkpoint = open_checkpoint(path)
    path.write_bytes(WHOLE[:-64])
    with pytest.raises(InputError, match="changed while in use"):
        read(checkpoint, checkpoint.tensors["output.weight"])


def test_without_the_package_the_way_out_is_named(stored: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(gguf_bytes([("a", (32,), Q4_0, bytes(18))]))
    monkeypatch.setitem(sys.modules, "gguf", None)
    block_sizes.cache_clear()
    with pytest.raises(EnvironmentFailure, match=r"pip install 'mxcli\[gguf\]'"):
        open_checkpoint(path)


def test_the_package_reads_the_same(stored: Store) -> None:
    gguf: Any = pytest.importorskip("gguf")
    path = stored(WHOLE)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    checkpoint = open_checkpoint(path)
    assert list(theirs) == list(checkpoint.tensors)
    for name, info in checkpoint.tensors.items():
        assert info.offset == theirs[name].data_offset
        assert read(checkpoint, info).tobytes() == theirs[name].data.tobytes()
