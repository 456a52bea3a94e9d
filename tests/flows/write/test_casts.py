from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from command_line import command
from tiny_models import noise, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.write.casts import as_casts
from mxcli.flows.write.dequantize import dequantize_checkpoint

CODES = np.arange(256, dtype=np.uint8).reshape(4, 64)
WEIGHT, BIAS = "blocks.0.fc.weight", "blocks.0.fc.bias"


def casts(folder: Path, dtype: str = "F8_E4M3", **more: Any) -> Path:
    tensors = {WEIGHT: (dtype, CODES), BIAS: noise(4), **more}
    return write_model(folder, tensors, {"model_type": "no_such_model", "dtype": "bfloat16"})


@pytest.mark.parametrize(("dtype", "element"), [("F8_E4M3", "e4m3"), ("F8_E5M2", "e5m2")])
def test_every_code_is_its_value_in_the_type_of_the_model_or_the_one_requested(
    tmp_path: Path, dtype: str, element: str
) -> None:
    source = as_casts(open_checkpoint(casts(tmp_path / "m", dtype)))
    expected = oracle.decode(CODES, oracle.element_format(element))
    for requested, name, width in (None, "BF16", 2), ("F32", "F32", 4), ("F16", "F16", 2):
        dequantize_checkpoint(source, tmp_path / name, backend=Cpu(1), dtype=requested)
        stored, shape, data = read_raw(tmp_path / name / "model.safetensors")[WEIGHT]
        assert (stored, shape, len(data)) == (name, [4, 64], 256 * width)
        if name == "BF16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, "<f2" if name == "F16" else "<f4").astype(np.float32)
        np.testing.assert_array_equal(values.reshape(4, 64), expected.astype(np.float32))
        assert (
            read_raw(tmp_path / name / "model.safetensors")[BIAS]
            == read_raw(tmp_path / "m" / "model.safetensors")[BIAS]
        )


@pytest.mark.parametrize(
    ("more", "dtype", "found"),
    [
        (
            {"blocks.0.fc.weight_scale": ("F32", np.ones(1, np.float32))},
            "F8_E4M3",
            "the scale blocks.0.fc.weight_scale",
        ),
        (
            {"blocks.0.fc.scale_weight": ("F32", np.ones(1, np.float32))},
            "F8_E4M3",
            "the scale blocks.0.fc.scale_weight",
        ),
        ({}, "U8", "no FP8 weights"),
    ],
)
def test_codes_with_scales_and_sources_without_codes_are_refused(
    tmp_path: Path, more: dict[str, Any], dtype: str, found: str
) -> None:
    folder = casts(tmp_path / "m", dtype, **more)
    with pytest.raises(RefusedError, match=f"--unscaled is for FP8 weights without scales; it has {found}"):
        as_casts(open_checkpoint(folder))


def test_a_plain_model_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {WEIGHT: noise(4, 64)})
    with pytest.raises(RefusedError, match=r"m/model.safetensors: .* it has no FP8 weights. Omit it."):
        as_casts(open_checkpoint(folder))


def test_without_the_flag_the_refusal_names_it_and_with_it_a_file_loads(tmp_path: Path) -> None:
    finite = np.where(CODES & 127 == 127, 0, CODES).astype(np.uint8)
    folder = casts(tmp_path / "m", **{WEIGHT: ("F8_E4M3", finite)})
    refused = command("dequantize", folder, "-o", tmp_path / "out")
    assert refused.returncode == 4
    assert "--unscaled" in refused.stderr
    assert not (tmp_path / "out").exists()
    done = command("dequantize", folder / "model.safetensors", "-o", tmp_path / "out", "--unscaled", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dtypes"] == {WEIGHT: "BF16"}
