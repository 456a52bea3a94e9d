"""bfloat16 and FP8 in .npy and .npz files, as ml_dtypes saves them or under their names."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.tensors import IN_MEMORY

WORDS = np.array([[0x3F80, 0x4000, 0xC040], [0x0001, 0x7F80, 0x8000]], np.uint16)
BYTES = np.array([[0x38, 0x40, 0xC4], [0x01, 0x7E, 0x80]], np.uint8)


def npy(described: str, array: np.ndarray, fortran: bool = False) -> bytes:
    """A .npy file of the array's bytes whose header describes them as given."""
    stream = io.BytesIO()
    header = {"descr": "<u2", "fortran_order": fortran, "shape": array.shape}
    np.lib.format.write_array_header_1_0(stream, header)
    length = len(stream.getvalue())
    text = stream.getvalue().replace(b"'<u2'", described.encode())
    # The header is padded with spaces and ends with a line break.
    text = text[:-1].rstrip(b" ").ljust(length - 1, b" ") + b"\n"
    assert len(text) == length
    return text + array.tobytes("F" if fortran else "C")


@pytest.mark.parametrize(
    ("described", "array", "dtype"),
    [
        ("'<V2'", WORDS, "BF16"),
        ("'<f1'", BYTES, "F8_E5M2"),
        ("'bfloat16'", WORDS, "BF16"),
        ("'float8_e4m3fn'", BYTES, "F8_E4M3"),
        ("'float8_e4m3fnuz'", BYTES, "F8_E4M3FNUZ"),
        ("'float8_e5m2fnuz'", BYTES, "F8_E5M2FNUZ"),
        ("'float8_e8m0fnu'", BYTES, "F8_E8M0"),
        ("[('bfloat16', '<u2')]", WORDS, "BF16"),
        ("[('bfloat16', '|V2')]", WORDS, "BF16"),
        ("[('float8_e4m3fn', '|u1')]", BYTES, "F8_E4M3"),
        ("[('float8_e5m2', '|V1')]", BYTES, "F8_E5M2"),
    ],
)
@pytest.mark.parametrize("fortran", [False, True])
def test_types_that_numpy_lacks_are_read(
    tmp_path: Path, described: str, array: np.ndarray, dtype: str, fortran: bool
) -> None:
    (tmp_path / "a.npy").write_bytes(npy(described, array, fortran))
    checkpoint = open_checkpoint(tmp_path / "a.npy")
    info = checkpoint.tensors["a"]
    assert (info.dtype, info.shape, info.nbytes) == (dtype, (2, 3), array.nbytes)
    assert (info.offset == IN_MEMORY) == fortran
    assert np.array_equal(read(checkpoint, info), array)


def test_big_endian_words_of_a_named_type_are_swapped(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", WORDS.astype(">u2").view([("bfloat16", ">u2")]))
    checkpoint = open_checkpoint(tmp_path / "a.npy")
    assert checkpoint.tensors["a"].dtype == "BF16"
    assert np.array_equal(read(checkpoint, checkpoint.tensors["a"]), WORDS)


def test_8_bits_as_ml_dtypes_saves_most_of_them_are_refused_with_the_way_to_state_their_type(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy("'<V1'", BYTES))
    with pytest.raises(InputError, match=re.escape("save it with the type's name, such as array.view([('float8_e4m3")):
        open_checkpoint(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", BYTES.view("V1").view([("float8_e4m3fn", "u1")]))
    assert open_checkpoint(tmp_path / "b.npy").tensors["b"].dtype == "F8_E4M3"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_ml_dtypes_saves_is_read_bit_for_bit(tmp_path: Path, save: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(4, 16)
    half, five = values.astype(ml_dtypes.bfloat16), values.astype(ml_dtypes.float8_e5m2)
    four = values.astype(ml_dtypes.float8_e4m3fn).view([("float8_e4m3fn", "u1")])
    save(tmp_path / "a.npz", half=half, five=five, four=four, columns=np.asfortranarray(half))
    checkpoint = open_checkpoint(tmp_path / "a.npz")
    found = {name: (info.dtype, read(checkpoint, info)) for name, info in checkpoint.tensors.items()}
    assert {name: dtype for name, (dtype, _) in found.items()} == {
        "half": "BF16",
        "five": "F8_E5M2",
        "four": "F8_E4M3",
        "columns": "BF16",
    }
    assert np.array_equal(found["half"][1], half.view(np.uint16))
    assert np.array_equal(found["columns"][1], half.view(np.uint16))
    assert np.array_equal(found["five"][1], five.view(np.uint8))
    assert np.array_equal(found["four"][1], four.view(np.uint8))
