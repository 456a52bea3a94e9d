"""Headers are distrusted: every fault is named with the file, the value and the need."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_checkpoint import safetensors_bytes, with_header, zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.safetensors import read_safetensors
from mxcli.files.tensors import DTYPES, FileContents, TensorInfo

GOOD = safetensors_bytes({"a": ("F32", [2, 2], bytes(16)), "b": ("U8", [3], b"\1\2\3")})


def _entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FAULTS = [
    pytest.param(b"", "empty file (0 bytes)", id="empty"),
    pytest.param(b"\x10", "1 bytes, too short", id="one byte"),
    pytest.param(GOOD[:-1], "truncated: the header describes 139 bytes and the file has 138 (1 missing)", id="cut"),
    pytest.param(GOOD[:40], "truncated: the header needs 120 bytes and the file has 40", id="cut header"),
    pytest.param(GOOD + b"xy", "2 bytes after the last tensor belong to no tensor", id="trailing"),
    pytest.param(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n",
        "a Git LFS pointer, not the file itself (the real file has 4,976,698,672 bytes); fetch the real "
        "file with 'git lfs pull'",
        id="lfs",
    ),
    pytest.param(b"<!DOCTYPE html><html>404</html>", "31 bytes, an HTML page, probably a failed download", id="html"),
    pytest.param(b"\n  <HTML>login</HTML>", "an HTML page", id="html upper"),
    pytest.param(b"Entry not found", "an error message of a server", id="server"),
    pytest.param(b"GGUF\3\0\0\0" + bytes(64), "a GGUF file", id="gguf"),
    pytest.param(b"PK\3\4" + bytes(64), "a zip archive (PyTorch or npz); give it the ending .pt", id="zip"),
    pytest.param(b"\x80\2}q\0." + bytes(64), "a Python pickle", id="pickle"),
    pytest.param(b"\xff" * 64, "header length 18,446,744,073,709,551,615 is above the limit of 100,000,000", id="len"),
    pytest.param(struct.pack("<Q", 16) + b"hello world 1234", "its header does not begin with '{'", id="text"),
    pytest.param(with_header('{"a": '), "its header is not valid JSON", id="json"),
    pytest.param(with_header("{" * 8), "its header is not valid JSON", id="braces"),
    pytest.param(with_header('{"a":' * 100_000), "its header is not valid JSON", id="deep"),
    pytest.param(with_header('{"a":{"shape":[' + "9" * 5000 + "]}}"), "its header is not valid JSON", id="digits"),
    pytest.param(struct.pack("<Q", 4) + b'{"\xff"', "its header is not valid JSON", id="utf8"),
    pytest.param(
        with_header(
            '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
        ),
        "'a' occurs twice in its header",
        id="duplicate",
    ),
    pytest.param(with_header({"a": 3}), "tensor 'a': its entry is int, not an object", id="entry"),
    pytest.param(with_header({"a": {"dtype": "U8"}}), "tensor 'a': its entry lacks shape, data_offsets", id="lacks"),
    pytest.param(with_header({"a": _entry("F5")}, bytes(4)), "tensor 'a': dtype F5 is unknown; known are F64", id="dt"),
    pytest.param(with_header({"a": _entry(["U8"])}, bytes(4)), "dtype ['U8'] is unknown", id="dtype list"),
    pytest.param(with_header({"a": _entry("")}, bytes(4)), "dtype  is unknown", id="dtype empty"),
    pytest.param(with_header({"a": _entry(shape=[-4])}, bytes(4)), "shape [-4] must be a list of whole", id="neg"),
    pytest.param(with_header({"a": _entry(shape=[4.0])}, bytes(4)), "shape [4.0] must be a list of", id="float"),
    pytest.param(with_header({"a": _entry(shape=[True])}, bytes(4)), "shape [True] must be a list of", id="bool"),
    pytest.param(with_header({"a": _entry(shape=4)}, bytes(4)), "shape 4 must be a list of whole", id="scalar"),
    pytest.param(with_header({"a": _entry(shape=[2**63])}, bytes(4)), "from 0 to 2^63 - 1", id="huge"),
    pytest.param(with_header({"a": _entry(shape=[2**62, 2**62])}, bytes(4)), "overflows 2^63 - 1", id="overflow"),
    pytest.param(with_header({"a": _entry(shape=[0, 2**62, 8], offsets=[0, 0])}), "overflows 2^63 - 1", id="zero over"),
    pytest.param(with_header({"a": _entry(shape=[1] * 40, offsets=[0, 1])}, b"\0"), "40 dimensions", id="dims"),
    pytest.param(with_header({"a": _entry(offsets=[4, 0])}, bytes(4)), "must be two ascending whole", id="descending"),
    pytest.param(with_header({"a": _entry(offsets=[-4, 0])}, bytes(4)), "data_offsets [-4, 0] must be", id="neg off"),
    pytest.param(with_header({"a": _entry(offsets=[0])}, bytes(4)), "data_offsets [0] must be two", id="one offset"),
    pytest.param(
        with_header({"a": _entry("F32", [3], [0, 4])}, bytes(4)),
        "tensor 'a': F32 [3] needs 12 bytes and its offsets hold 4",
        id="mismatch",
    ),
    pytest.param(with_header({"a": _entry(offsets=[0, 4])}, bytes(3)), "(1 missing)", id="outside"),
    pytest.param(
        with_header({"a": _entry(offsets=[2, 6])}, bytes(6)),
        "2 bytes before tensor 'a' belong to no",
        id="hole",
    ),
    pytest.param(
        with_header({"a": _entry(), "b": _entry(offsets=[2, 6])}, bytes(6)),
        "tensors 'a' and 'b' overlap by 2 bytes",
        id="overlap",
    ),
    pytest.param(
        with_header({"a": _entry(), "b": _entry(shape=[2], offsets=[1, 3])}, bytes(4)),
        "tensors 'a' and 'b' overlap by 2 bytes",
        id="inside",
    ),
    pytest.param(
        with_header({"__metadata__": {"ok": "1", "a": 1}}),
        "__metadata__: the value of 'a' is 1; it must be text",
        id="metadata",
    ),
    pytest.param(
        with_header({"__metadata__": {"a": {"b": []}}}),
        "__metadata__: the value of 'a' is an object; it must be text",
        id="metadata object",
    ),
    pytest.param(
        with_header({"__metadata__": {"\x1b[2J": None}}),
        "__metadata__: the value of '\\x1b[2J' is null; it must be text",
        id="metadata null",
    ),
    pytest.param(
        with_header({"__metadata__": ["format"]}),
        "__metadata__ is a list; it must map text to text",
        id="metadata list",
    ),
    pytest.param(with_header({"__metadata__": 7}), "__metadata__ is 7; it must map text to text", id="metadata number"),
    pytest.param(
        with_header('{"\\ud800":' + json.dumps(_entry()) + "}", bytes(4)), "not valid Unicode", id="surrogate"
    ),
    pytest.param(
        with_header({"a": _entry("F4", [3, 3], [0, 5])}, bytes(5)),
        "shape [3, 3]: F4 packs 2 elements into 1 byte, so its last dimension must be a multiple of 2, not 3",
        id="F4 odd",
    ),
    pytest.param(with_header({"a": _entry("F4", [], [0, 1])}, b"\0"), "must be a multiple of 2, not 1", id="F4 0-dim"),
    pytest.param(
        with_header({"a": _entry("F6_E2M3", [2, 6], [0, 9])}, bytes(9)),
        "F6_E2M3 packs 4 elements into 3 bytes, so its last dimension must be a multiple of 4, not 6",
        id="F6 odd",
    ),
    pytest.param(with_header("{}"), "holds no tensors", id="nothing"),
]


@pytest.mark.parametrize(("content", "fault"), FAULTS)
def test_faults_are_named_with_the_path(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(fault)) as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 3
    assert all(str(path) in reason for reason in caught.value.reasons)


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(with_header({f"t{i:02d}": _entry("F5") for i in range(30)}))
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert len(caught.value.details) == 30
    shown = str(caught.value).splitlines()
    assert shown[0] == f"{path}: 30 problems."
    assert len(shown) == 12
    assert shown[-1].strip() == "and 20 more"


def test_control_characters_are_escaped_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(with_header({"\x1b[31mred\n\u202e": _entry("F5")}))
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert "\\x1b[31mred\\n\\u202e" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_what_is_not_a_regular_file_is_never_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.safetensors"
    os.mkfifo(fifo)
    with pytest.raises(InputError, match="a named pipe; a regular file or a directory is needed"):
        open_checkpoint(fifo)
    with pytest.raises(InputError, match="a device file"):
        open_checkpoint("/dev/zero")
    with pytest.raises(InputError, match="a named pipe"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_denied_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    path.chmod(0)
    with pytest.raises(InputError, match="permission denied; make it readable"):
        open_checkpoint(path)


def test_faults_of_the_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fail)
        with pytest.raises(InputError) as caught:
            open_checkpoint(path)
    assert "model.safetensors: cannot be read: [Errno 5] Input/output error" in str(caught.value)


def test_permission_denied_by_the_system_call_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="permission denied; make it readable"):
        open_checkpoint(path)


@pytest.mark.parametrize("shift", range(8))
def test_unaligned_data_reads_correctly_and_is_noted(tmp_path: Path, shift: int) -> None:
    values = np.arange(6, dtype="<f4")
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"x": ("F32", [2, 3], values.tobytes())}, {"format": "pt"}, 8, shift))
    checkpoint = open_checkpoint(path)
    array = read(checkpoint, checkpoint.tensors["x"])
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert array.flags.aligned
    assert not array.flags.writeable
    expected = () if shift % 4 == 0 else ("1 tensor ('x') not aligned to the element size.",)
    assert checkpoint.notes == expected


def test_offsets_unaligned_within_aligned_data(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"b": ("U8", [1], b"\7"), "x": ("F32", [1], struct.pack("<f", 1.5))}))
    checkpoint = open_checkpoint(path)
    assert read(checkpoint, checkpoint.tensors["x"]).tolist() == [1.5]


def test_empty_and_zero_dimensional_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    shapes: dict[str, list[int]] = {"s": [], "e": [0], "w": [0, 32], "h": [5, 0], "x": [0, 10]}
    path.write_bytes(safetensors_bytes({n: zeros("BF16", *shape) for n, shape in shapes.items()}, {"format": "pt"}))
    checkpoint = open_checkpoint(path)
    assert {n: list(read(checkpoint, i).shape) for n, i in checkpoint.tensors.items()} == shapes
    assert checkpoint.tensors["s"].elements == 1
    assert checkpoint.tensors["w"].elements == 0
    assert checkpoint.notes == ("4 tensors ('e', …) without elements.",)


def test_narrow_dtypes_have_logical_shapes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(
        safetensors_bytes(
            {
                "f4.weight": ("F4", [2, 8], bytes(range(8))),
                "f6.weight": ("F6_E3M2", [2, 4], bytes(range(6))),
                "s.weight_scale": ("F8_E8M0", [2, 1], b"\x7f\x80"),
            }
        )
    )
    checkpoint = open_checkpoint(path)
    f4, f6, scale = checkpoint.tensors.values()
    assert f4 == TensorInfo("f4.weight", "F4", (2, 8), "codes", path, f4.offset, 8)
    assert read(checkpoint, f4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (f6.shape, read(checkpoint, f6).tolist()) == ((2, 4), [[0, 1, 2], [3, 4, 5]])
    assert (scale.role, read(checkpoint, scale).tolist()) == ("scale", [[127], [128]])


def test_tensors_are_in_file_order_for_any_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(with_header({"z": _entry(offsets=[4, 8]), "a": _entry(offsets=[0, 4])}, bytes(range(8))))
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == ["a", "z"]
    assert read(checkpoint, checkpoint.tensors["z"]).tolist() == [4, 5, 6, 7]


def test_files_of_the_real_producer(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {
        "bf16": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),
        "f16": torch.tensor([0.5], dtype=torch.float16),
        "f64": torch.tensor(3.25, dtype=torch.float64),
        "e4m3": torch.tensor([448.0, -0.5]).to(torch.float8_e4m3fn),
        "e5m2": torch.tensor([57344.0]).to(torch.float8_e5m2),
        "e8m0": torch.tensor([0, 127, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "f4": torch.tensor([[0x21, 0x43]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "i64": torch.tensor([-1, 2**40]),
        "bool": torch.tensor([True, False]),
        "c64": torch.tensor([1 + 2j], dtype=torch.complex64),
    }
    path = tmp_path / "real.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(path)
    arrays = {name: (info.dtype, read(checkpoint, info)) for name, info in checkpoint.tensors.items()}
    assert {name: (dtype, array.tolist()) for name, (dtype, array) in arrays.items()} == {
        "bf16": ("BF16", [[0x3F80, 0xC000]]),
        "f16": ("F16", [0.5]),
        "f64": ("F64", 3.25),
        "e4m3": ("F8_E4M3", [0b0_1111_110, 0b1_0110_000]),
        "e5m2": ("F8_E5M2", [0b0_11110_11]),
        "e8m0": ("F8_E8M0", [0, 127, 255]),
        "f4": ("F4", [[0x21, 0x43]]),
        "i64": ("I64", [-1, 2**40]),
        "bool": ("BOOL", [True, False]),
        "c64": ("C64", [1 + 2j]),
    }
    assert checkpoint.tensors["f4"].shape == (1, 4)
    assert checkpoint.metadata == {path: {"format": "pt"}}


@pytest.mark.parametrize("length", [0x0280, 0x0480, 0x3C20])
def test_a_header_length_may_spell_another_kind_of_file(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    content = with_header({"a": _entry()}, bytes(range(4)), pad_to=1 << 20, shift=8 + length)
    assert struct.unpack("<Q", content[:8])[0] == length
    for name in ("a.safetensors", "no ending"):
        path = tmp_path / name
        path.write_bytes(content)
        checkpoint = open_checkpoint(path)
        assert read(checkpoint, checkpoint.tensors["a"]).tolist() == [0, 1, 2, 3]


def test_every_byte_cut_off_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(InputError):
            read_safetensors(path)


def test_every_header_byte_flipped_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "flip.safetensors"
    for position in range(120):
        for bit in (0, 3, 7):
            damaged = bytearray(GOOD)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                contents = read_safetensors(path)
            except InputError:
                continue
            assert sum(info.nbytes for info in contents.tensors) == 19
            assert listed_by_the_library(path) == listed(contents)


def listed(contents: FileContents) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {info.name: (info.dtype, info.shape) for info in contents.tensors}


def listed_by_the_library(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor as the safetensors library lists them."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=4), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.none()
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(codec="utf-8"))),
    st.integers(0, 7),
)
def test_the_library_reads_the_same_of_every_dtype(
    tensors: dict[str, tuple[str, list[int], bool]], metadata: dict[str, str] | None, shift: int
) -> None:
    """Every dtype, F4, F6 and F8_E8M0 included: safetensors 0.6 and later know them all."""
    entries = {}
    for name, (dtype, shape, packed) in tensors.items():
        full = [*shape, 4] if packed else shape
        entries[name] = dtype, full, bytes(math.prod(full) * DTYPES[dtype].bits // 8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        path.write_bytes(safetensors_bytes(entries, metadata, shift=shift))
        try:
            contents = read_safetensors(path)
        except InputError:
            assert any(DTYPES[dtype].bits < 8 for dtype, _, _ in entries.values()), "elements that fill no byte"
            return
        assert listed_by_the_library(path) == listed(contents)


@pytest.mark.parametrize(
    ("field", "fault"),
    [("NaN", "expected value"), ('"\\ud800"', "hex escape"), ("[" * 200 + "]" * 200, "recursion limit")],
    ids=["NaN", "surrogate", "deep"],
)
def test_the_library_refuses_json_that_ours_reads(tmp_path: Path, field: str, fault: str) -> None:
    """In fields that nobody reads: `mxcli verify` reports such files."""
    from safetensors import SafetensorError

    path = tmp_path / "a.safetensors"
    path.write_bytes(with_header(f'{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":{field}}}}}', b"1"))
    assert listed(read_safetensors(path)) == {"a": ("U8", (1,))}
    with pytest.raises(SafetensorError, match=fault):
        listed_by_the_library(path)
