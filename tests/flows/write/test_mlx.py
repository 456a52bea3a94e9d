"""The layout mlx from a model to files and back: the same codes and scales as in our own layout, and damage found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import SHARD, Tensors, found, quantized, source, values, verified
from tiny_models import read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.numerics.scheme import Rules

NVFP4 = "e2m1:e4m3:1x16"
UP = "model.layers.0.mlp.up_proj"
FORMATS = ("mxfp4", "mxfp8", NVFP4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("mlx") / "m")


def in_mlx(model: Path, output: Path, options: Options) -> Path:
    """A model in the layout, its settings under both keys, as mlx_lm.convert writes them, and without a record."""
    quantized(model, output, options)
    config = json.loads((output / "config.json").read_text())
    config["quantization"] = config["quantization_config"]
    (output / "config.json").write_text(json.dumps(config))
    (output / "mxcli.json").unlink()
    return output


def plain(folder: Path) -> dict[str, Any]:
    dequantize_checkpoint(open_checkpoint(folder), folder.with_name(f"{folder.name}-plain"), backend=Cpu())
    return read_raw(folder.with_name(f"{folder.name}-plain") / SHARD)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_are_those_of_our_own_layout(model: Path, tmp_path: Path, format: str) -> None:
    ours = quantized(model, tmp_path / "ours", Options(format, layout="mxcli"))
    folder = in_mlx(model, tmp_path / "mlx", Options(format, layout="mlx"))
    raw, own = read_raw(folder / SHARD), read_raw(ours / SHARD)
    packed = f"{UP}.weight" if format == "mxfp8" else f"{UP}.weight_packed"
    rows, columns = read_raw(model / SHARD)[f"{UP}.weight"][1]
    numbers = columns // (4 if format == "mxfp8" else 8)
    assert raw[f"{UP}.weight"] == ("U32", [rows, numbers], own[packed][2])
    assert raw[f"{UP}.scales"] == ("U8", own[f"{UP}.weight_scale"][1], own[f"{UP}.weight_scale"][2])
    assert plain(folder) == plain(ours)
    result = verified(folder, model)
    assert result.is_sound
    assert not {"silent_misreading", "possible_misreading", "setting", "misfit"} & found(result).keys()
    assert all(each.provenance is not None and each.provenance.exact for each in result.weights)


def test_bytes_of_mlx_on_a_cpu_are_traced_to_it(model: Path, tmp_path: Path) -> None:
    for format in ("mxfp4", NVFP4):
        rules = Rules(dialect="mlx-cpu")
        result = verified(in_mlx(model, tmp_path / format[:4], Options(format, rules, layout="mlx")), model)
        assert {each.provenance and each.provenance.scheme.dialect.name for each in result.weights} == {"mlx-cpu"}


def test_modes_by_layer_are_read_back(model: Path, tmp_path: Path) -> None:
    overrides = (Override("*.down_proj", "mxfp8"), Override("*.o_proj", NVFP4))
    folder = in_mlx(model, tmp_path / "q", Options("mxfp4", overrides=overrides, layout="mlx"))
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    assert settings["mode"] == "mxfp4"
    assert settings["model.layers.0.mlp.down_proj"] == {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    assert settings["model.layers.0.self_attn.o_proj"] == {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    result = verified(folder, model)
    assert result.is_sound
    assert {each.format for each in result.weights} == {"mxfp4_e2m1", "mxfp8_e4m3", NVFP4}


def damaged(folder: Path, output: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a checkpoint with its scales changed, as uint8 matrices."""
    tensors: Tensors = {}
    for name, (dtype, shape, data) in read_raw(folder / SHARD).items():
        stored = np.uint32 if dtype == "U32" else np.uint8
        tensors[name] = (dtype, np.frombuffer(data, stored if dtype[0] == "U" else np.uint16).reshape(shape))
    change(tensors)
    return write_model(output, tensors, json.loads((folder / "config.json").read_text()))


def with_biases(tensors: Tensors) -> None:
    tensors[f"{UP}.biases"] = ("BF16", np.zeros(tensors[f"{UP}.scales"][1].shape, np.uint16))


def without_scales(tensors: Tensors) -> None:
    del tensors[f"{UP}.scales"]


def of_wider_groups(tensors: Tensors) -> None:
    tensors[f"{UP}.scales"] = ("U8", tensors[f"{UP}.scales"][1][:, ::2].copy())


def of_narrower_groups(tensors: Tensors) -> None:
    tensors[f"{UP}.scales"] = ("U8", tensors[f"{UP}.scales"][1].repeat(4, 1))


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        (with_biases, "not_read", "biases"),
        (without_scales, "codes_without_scale", "U32 [128, 8] without a scale"),
        (of_wider_groups, "misfit", "the configuration states mode mxfp4"),
        (of_narrower_groups, "misfit", "fits no mode of MLX"),
    ],
)
def test_damage_is_found_and_not_read(
    model: Path, tmp_path: Path, change: Callable[[Tensors], None], check: str, said: str
) -> None:
    folder = damaged(in_mlx(model, tmp_path / "q", Options("mxfp4", layout="mlx")), tmp_path / "d", change)
    result = verified(folder)
    assert not result.is_sound
    assert any(said in text for text in (*found(result)[check], *values(result, check)))
    with pytest.raises((InputError, RefusedError)):
        plain(folder)
