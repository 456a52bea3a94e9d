""".npy and .npz files of any byte order and memory order, never a pickle."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.tensors import IN_MEMORY

MATRIX = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">f8", "<f2", "<i8", ">i2", "|u1", "|b1", "<c8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(3, 4), (12,), ()])
@pytest.mark.parametrize("ending", ["npy", "npz", "compressed"])
def test_arrays_read_back_as_little_endian_rows(
    tmp_path: Path, dtype: str, order: Any, shape: tuple[int, ...], ending: str
) -> None:
    values = MATRIX.ravel()[: int(np.prod(shape))].reshape(shape)
    array = np.asarray(values.astype(dtype), order=order)
    path = tmp_path / f"acts.{ending.replace('compressed', 'npz')}"
    if ending == "npy":
        np.save(path, array)
    else:
        (np.savez if ending == "npz" else np.savez_compressed)(path, acts=array)
    checkpoint = open_checkpoint(path)
    assert checkpoint.kind == "numpy"
    back = read(checkpoint, checkpoint.tensors["acts"])
    assert back.tolist() == values.astype(dtype).tolist()
    assert back.flags.c_contiguous
    assert not back.flags.writeable
    assert back.dtype == np.dtype(dtype).newbyteorder("<")
    assert back.nbytes == checkpoint.tensors["acts"].nbytes


def test_where_the_bytes_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", c=MATRIX, f=np.asfortranarray(MATRIX))
    offsets = {name: info.offset for name, info in open_checkpoint(tmp_path / "a.npz").tensors.items()}
    assert offsets["f"] == IN_MEMORY
    stored = (tmp_path / "a.npz").read_bytes()[offsets["c"] :][: MATRIX.nbytes]
    assert stored == MATRIX.tobytes()


def test_names_roles_and_empty_arrays(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "m.npz",
        **{"layers.0.q_proj.weight": MATRIX, "arr": MATRIX, "none": np.zeros((0, 4), ">f4")},
    )
    checkpoint = open_checkpoint(tmp_path)
    described = [(name, info.dtype, info.shape, info.role) for name, info in checkpoint.tensors.items()]
    assert described == [
        ("layers.0.q_proj.weight", "F64", (3, 4), "weight"),
        ("arr", "F64", (3, 4), "weight"),
        ("none", "F32", (0, 4), "weight"),
    ]
    assert read(checkpoint, checkpoint.tensors["none"]).shape == (0, 4)


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (
            np.array([{}], dtype=object),
            "holds Python objects, which only a pickle can load; save plain numbers",
        ),
        (np.array(["text"]), "dtype <U4 has no safetensors counterpart"),
        (np.zeros(2, "<c16"), "dtype complex128 has no safetensors counterpart; convert it to float32"),
        (np.zeros(2, [("a", "<f4")]), "has no safetensors counterpart"),
        (np.zeros(2, "V4"), "has no safetensors counterpart"),
        (
            np.zeros(2, "V2"),
            "dtype |V2 does not state which type its 16 bits are; save it with the type's name, such as "
            "array.view([('bfloat16', 'u2')])",
        ),
        (
            np.zeros(2, "V1"),
            "dtype |V1 does not state which type its 8 bits are; save it with the type's name, such as "
            "array.view([('float8_e4m3fn', 'u1')])",
        ),
        (np.zeros(2, [("bfloat16", "<u4")]), "has no safetensors counterpart"),
        (np.zeros(2, [("bfloat16", "<f2")]), "has no safetensors counterpart"),
        (np.zeros(2, [("bfloat16", "<u2"), ("more", "<u2")]), "has no safetensors counterpart"),
        (np.zeros(2, [("bfloat", "<u2")]), "has no safetensors counterpart"),
    ],
)
def test_only_plain_numbers_are_accepted(tmp_path: Path, array: Any, fault: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=array, y=array, allow_pickle=True)
    with pytest.raises(InputError, match=re.escape(fault)):
        open_checkpoint(tmp_path / "a.npy")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path / "a.npz")
    assert len([reason for reason in caught.value.reasons if fault in reason]) == 2


def _npy(array: Any = MATRIX) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "empty file (0 bytes)"),
        (_npy()[:-1], "truncated: its header needs 224 bytes, it has 223"),
        (_npy() + b"x", "too long: its header needs 224 bytes, it has 225"),
        (_npy()[:20], "its .npy header is damaged"),
        (_npy().replace(b"(3, 4)", b"(-3,4)"), "shape (-3, 4) must be a tuple of whole numbers from 0"),
        (_npy().replace(b"(3, 4)", b"(3, x)"), "its .npy header is damaged; write it again"),
        (_npy().replace(b"(3, 4)", b"(9**9)"), "its .npy header is damaged; write it again"),
        (_npy().replace(b"<f8", b"<q9"), "dtype <q9 is unknown"),
        (_npy().replace(b"(3, 4)", b"((3, 4"), "its .npy header is damaged; write it again"),
        (_npy().replace(b"(3, 4)", b"[3, 4]"), "shape [3, 4] must be a tuple of whole numbers from 0"),
        (_npy().replace(b"(3, 4), }", b"(True,8),}"), "shape (True, 8) must be a tuple of whole numbers from 0"),
        (_npy().replace(b"(3, 4), }", b"(9e9, 4),}"), "shape (9000000000.0, 4) must be a tuple of whole numbers"),
        (_npy().replace(b"(3, 4)", b"(3,) *4"), "its .npy header is damaged; write it again"),
        (_npy().replace(b"False", b"[]   "), "fortran_order [] must be True or False"),
        (_npy().replace(b"False", b"0    "), "fortran_order 0 must be True or False"),
        (_npy().replace(b"False", b"'no' "), "fortran_order no must be True or False"),
        (_npy().replace(b"'<f8'", b"{3:4}"), "dtype {3: 4} is unknown"),
        (_npy().replace(b"'<f8'", b"b'<f'"), "is unknown"),
        (_npy().replace(b"'descr'", b"'shape'"), "its .npy header needs descr, fortran_order, shape and nothing else"),
        (_npy().replace(b"'descr'", b"99     "), "its .npy header needs descr, fortran_order, shape and nothing else"),
        (_npy().replace(b"{'descr'", b"['descr'"), "its .npy header is damaged; write it again"),
        (b"\x93NUMPY\x02\0" + b"\xff" * 64, "its .npy header states 4,294,967,295 bytes; the limit is 65,536"),
        (b"\x93NUMPY\x09\0" + bytes(64), "version 9.0 of the .npy format is not supported"),
        (b"<html>", "an HTML page"),
        (b"random", "not a .npy file"),
    ],
)
def test_damaged_npy_files(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(fault)) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_damaged_npz_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=MATRIX)
    whole = path.read_bytes()
    for content, fault in (
        (whole[:-1], "damaged zip archive"),
        (whole[:10], "damaged zip archive"),
        (b"not a zip", "not a .npz file"),
        (b"<!doctype html>", "an HTML page"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=re.escape(fault)):
            open_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", _npy() + b"more")
        archive.writestr("y.npy", b"short")
        archive.writestr("readme.txt", b"hello")
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert caught.value.details[0] == f"{path}: tensor 'x': needs 224 bytes and has 228."
    assert caught.value.details[1].startswith(f"{path}: tensor 'y': ")


def test_repeated_and_foreign_members(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", _npy())
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x.npy", _npy())
    with pytest.raises(InputError, match=r"'x\.npy' occurs twice"):
        open_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", _npy())
        archive.writestr("readme.txt", b"hello")
    assert open_checkpoint(path).notes == (
        f"{path}: 1 members that are not .npy arrays are not read.",
        "1 tensor ('x') of F64, rounded to binary32 before being quantized or measured.",
    )


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_that_state_more_than_they_hold(tmp_path: Path, method: int) -> None:
    """In the header of the array and in both places of the archive."""
    path = tmp_path / "a.npz"
    header = _npy()[: -MATRIX.nbytes].replace(b"(3, 4), }", b"(9999,9)}")
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", header + bytes(24))
        size = archive.infolist()[0].file_size
    stated = len(header) + 9999 * 9 * 8
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", size), struct.pack("<I", stated)))
    with pytest.raises(
        InputError, match=r"tensor 'x': needs [\d,]+ bytes, which its [\d,]+ cannot hold|ends at byte|damaged"
    ):
        open_checkpoint(path)


def test_damage_found_only_when_decoding_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=1000))
    content = bytearray(path.read_bytes())
    content[4000] ^= 0xFF
    path.write_bytes(content)
    checkpoint = open_checkpoint(path)
    with pytest.raises(InputError, match="tensor 'x'"):
        read(checkpoint, checkpoint.tensors["x"])
