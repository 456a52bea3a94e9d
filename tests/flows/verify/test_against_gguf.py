"""GGUF files against the Hugging Face checkpoint that they were made from: verified, compared and repaired."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import found, quantized, source, values, verified
from tiny_models import LLAMA, llama

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.model_files import RECORD
from mxcli.flows.plan.plan import Options
from mxcli.flows.verify.diff import Diff, diff_sides
from mxcli.flows.verify.repair import repair
from mxcli.flows.verify.sides import sides_of
from mxcli.numerics.scheme import Rules

gguf = pytest.importorskip("gguf")
CONFIG: dict[str, object] = {
    **LLAMA,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
FILE, WEIGHT, NORM = "model.gguf", "blk.1.ffn_up.weight", "blk.1.attn_norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    model = source(folder / "m", llama(3), CONFIG)
    rules = Rules(nonfinite="error")
    made = {fmt: quantized(model, folder / fmt, Options(fmt, rules, layout="gguf")) for fmt in ("mxfp4", "nvfp4")}
    return {"m": model} | made


def damaged(folder: Path, output: Path, name: str, change: Callable[[Any], object], *, record: bool = False) -> Path:
    """A copy of an output with the bytes of one tensor changed."""
    shutil.copytree(folder, output)
    info = open_checkpoint(folder).tensors[name]
    content = bytearray((output / FILE).read_bytes())
    array = np.frombuffer(content, np.uint8)[info.offset : info.offset + info.nbytes]
    change(array)
    (output / FILE).write_bytes(content)
    if not record:
        (output / RECORD).unlink()
    return output


def diffed(a: Path, b: Path) -> Diff:
    return diff_sides(*sides_of((a.name, open_checkpoint(a)), (b.name, open_checkpoint(b))), backend=Cpu())


def nothing(array: Any) -> None:
    """Change nothing."""


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("record", [True, False])
def test_an_output_is_what_its_source_gives(
    tmp_path: Path, folders: dict[str, Path], format: str, record: bool
) -> None:
    folder = damaged(folders[format], tmp_path / "q", WEIGHT, nothing, record=record)
    result = verified(folder, folders["m"])
    assert found(result) == {}
    assert len(result.compared) == 21
    assert all(each.provenance is not None and each.provenance.exact for each in result.weights)


def flipped(array: Any) -> None:
    array[100] ^= 0x20


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_a_bit_of_a_code_is_found(tmp_path: Path, folders: dict[str, Path], format: str, record: bool) -> None:
    result = verified(damaged(folders[format], tmp_path / "q", WEIGHT, flipped, record=record), folders["m"])
    assert found(result)["other_bytes"] == [WEIGHT]


def test_a_bit_of_a_norm_is_found(tmp_path: Path, folders: dict[str, Path]) -> None:
    def nudged(array: Any) -> None:
        array[10] ^= 1

    result = verified(damaged(folders["mxfp4"], tmp_path / "q", NORM, nudged), folders["m"])
    assert found(result) == {"damaged": [NORM]}
    assert values(result, "damaged")[0].startswith("1 of 256 bytes differ from the source, the first at [2]; there ")


def test_weights_in_third_party_blocks_are_compared_by_their_values(tmp_path: Path, folders: dict[str, Path]) -> None:
    def write(output: Path, change: Callable[[Any], object]) -> Path:
        writer = gguf.GGUFWriter(output, "llama")
        for tensor in gguf.GGUFReader(folders["mxfp4"] / FILE).tensors:
            kind = tensor.tensor_type
            decoded = gguf.dequantize(tensor.data, kind)
            blocks = np.array(gguf.quantize(decoded, gguf.GGMLQuantizationType.Q8_0)) if decoded.ndim == 2 else decoded
            if tensor.name == WEIGHT:
                change(blocks)
            type_of = gguf.GGMLQuantizationType.Q8_0 if decoded.ndim == 2 else None
            writer.add_tensor(tensor.name, blocks, raw_dtype=type_of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return output

    def lost(array: Any) -> None:
        array[5] = 0

    sound = verified(write(tmp_path / "sound.gguf", nothing), folders["m"])
    assert found(sound) == {}
    result = verified(write(tmp_path / "damaged.gguf", lost), folders["m"])
    assert found(result) == {"far_foreign": [WEIGHT]}
    assert values(result, "far_foreign") == [
        "in 1 of 128 places the error is as large as the values, the first at row 5, columns 0 to 63"
    ]


def test_an_architecture_without_known_names_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    other = source(tmp_path / "other", llama(3), {**CONFIG, "model_type": "gemma2"})
    with pytest.raises(RefusedError, match="its model_type is 'gemma2', and the names of its tensors in GGUF files"):
        verified(folders["mxfp4"], other)
    with pytest.raises(RefusedError, match="cannot be compared with a GGUF file"):
        diffed(folders["mxfp4"], other)


@pytest.mark.parametrize("turned", [False, True])
def test_the_difference_from_the_source_is_that_of_the_formats(folders: dict[str, Path], turned: bool) -> None:
    pair = (folders["m"], folders["mxfp4"]) if turned else (folders["mxfp4"], folders["m"])
    result = diffed(*pair)
    assert dict(result.counts) == {"equal": 9, "format": 21}
    assert all(each.distance.relative_error < 0.2 for each in result.differing if each.distance is not None)


def test_a_damaged_file_is_repaired_from_its_source(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = damaged(folders["nvfp4"], tmp_path / "q", WEIGHT, flipped, record=True)
    (repaired,) = repair(folder, folders["m"], Cpu())
    assert (repaired.file, repaired.tensors) == (FILE, (WEIGHT,))
    assert (folder / FILE).read_bytes() == (folders["nvfp4"] / FILE).read_bytes()
    assert found(verified(folder, folders["m"])) == {}
