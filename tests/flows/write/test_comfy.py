"""ComfyUI's files: read exactly, layer by layer, and written as one file with markers that verify finds sound."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import found, quantized, verified
from tiny_models import noise, read_header, read_raw, safetensors_bytes, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.arrange import arrange
from mxcli.flows.write.dequantize import Restored, dequantize_checkpoint
from mxcli.flows.write.restore import plain_view

ONE, TWO = 0x38, 0x40
"""1 and 2 in E4M3."""


def scales(ones: int, other: int) -> np.ndarray:
    """One block of each of 16 rows, in a 128x4 tile: all `ones` but for row 3, 16 bytes for each row before it."""
    tile = np.zeros((128, 4), np.uint8)
    tile.reshape(-1)[: 16 * 16 : 16] = ones
    tile.reshape(-1)[48] = other
    return tile


def text(format: str) -> tuple[str, np.ndarray]:
    return "U8", np.frombuffer(json.dumps({"format": format}).encode(), np.uint8)


NVFP4: dict[str, Any] = {
    "n.weight": ("U8", np.full((16, 8), 0x1A, np.uint8)),
    "n.weight_scale": ("F8_E4M3", scales(ONE, TWO)),
    "n.weight_scale_2": ("F32", np.array(0.25, np.float32)),
}
N_VALUES = np.tile(np.array([0.125, -0.25], np.float32), (16, 8)) * np.where(np.arange(16) == 3, 2, 1)[:, None]
MXFP8: dict[str, Any] = {
    "m.weight": ("F8_E4M3", np.tile(np.array([ONE, TWO], np.uint8), (32, 16))),
    "m.weight_scale": ("F8_E8M0", np.full((128, 4), 126, np.uint8)),
}
M_VALUES = np.tile(np.array([0.5, 1], np.float32), (32, 16))
SCALED: dict[str, Any] = {
    "f.weight": ("F8_E4M3", np.array([[ONE], [TWO], [ONE | 0x80]], np.uint8).repeat(4, 1)),
    "f.weight_scale": ("F32", np.array(0.75, np.float32)),
    "f.input_scale": ("F32", np.array(0.5, np.float32)),
}
F_VALUES = np.array([[0.75], [1.5], [-0.75]], np.float32).repeat(4, 1)
PLAIN = {"img_in.weight": noise(4, 8), "n.bias": noise(16)}
MARKERS = {"n.comfy_quant": text("nvfp4"), "m.comfy_quant": text("mxfp8"), "f.comfy_quant": text("float8_e4m3fn")}
LAYERS = {"n": {"format": "nvfp4"}, "m": {"format": "mxfp8"}, "f": {"format": "float8_e4m3fn"}}


def file(folder: Path, tensors: Mapping[str, Any], layers: object = None) -> Path:
    folder.mkdir()
    metadata = {} if layers is None else {"_quantization_metadata": json.dumps({"layers": layers})}
    (folder / "flux.safetensors").write_bytes(safetensors_bytes({**tensors, **PLAIN}, metadata))
    return folder


def restored(folder: Path, output: Path) -> tuple[Restored, dict[str, np.ndarray]]:
    result = dequantize_checkpoint(open_checkpoint(folder), output, backend=Cpu(), dtype="F32")
    raw = read_raw(output / "model.safetensors")
    assert raw.pop("img_in.weight")[2] == PLAIN["img_in.weight"][1].tobytes()
    assert raw.pop("n.bias")[2] == PLAIN["n.bias"][1].tobytes()
    assert {dtype for dtype, _, _ in raw.values()} <= {"F32"}
    return result, {name: np.frombuffer(data, np.float32).reshape(shape) for name, (_, shape, data) in raw.items()}


@pytest.mark.parametrize(
    ("more", "layers"),
    [(MARKERS, None), (MARKERS, LAYERS), ({}, LAYERS), ({"n.comfy_quant": MARKERS["n.comfy_quant"]}, LAYERS)],
)
def test_layers_of_three_formats_are_read_exactly(tmp_path: Path, more: Mapping[str, Any], layers: object) -> None:
    folder = file(tmp_path / "m", {**NVFP4, **MXFP8, **SCALED, **more}, layers)
    assert open_checkpoint(folder).dialect == "comfyui"
    result, values = restored(folder, tmp_path / "d")
    assert result.layout == "comfy"
    assert values.keys() == {"n.weight", "m.weight", "f.weight"}
    assert np.array_equal(values["n.weight"], N_VALUES)
    assert np.array_equal(values["m.weight"], M_VALUES)
    assert np.array_equal(values["f.weight"], F_VALUES)
    assert "_quantization_metadata" not in read_header(tmp_path / "d" / "model.safetensors")["__metadata__"]
    assert verified(folder).is_sound
    assert found(verified(folder)).keys() <= {"alignment"}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("elements", [0, 2])
def test_the_older_form_is_read_exactly(tmp_path: Path, prefix: str, elements: int) -> None:
    tensors = {
        f"{prefix}f.weight": SCALED["f.weight"],
        f"{prefix}f.scale_weight": SCALED["f.weight_scale"],
        f"{prefix}f.scale_input": ("F32", np.array(1, np.float32)),
        f"{prefix}scaled_fp8": ("F8_E4M3", np.zeros(elements, np.uint8)),
    }
    folder = file(tmp_path / "m", tensors)
    assert open_checkpoint(folder).dialect == "comfy-fp8"
    result, values = restored(folder, tmp_path / "d")
    assert values.keys() == {f"{prefix}f.weight"}
    assert np.array_equal(values[f"{prefix}f.weight"], F_VALUES)
    noted = [f"1 activation scale ('{prefix}f.scale_input') is omitted."]
    noted += [f"1 marker of the source's codes ('{prefix}scaled_fp8') is omitted."]
    assert list(result.notes[-2:]) == noted
    assert len(result.notes) == (3 if elements else 2)
    assert verified(folder).is_sound
    assert found(verified(folder)).keys() <= {"alignment"}


def test_a_configuration_of_modelopt_does_not_decide_the_order_of_marked_codes(tmp_path: Path) -> None:
    folder = file(tmp_path / "m", {**NVFP4, "n.comfy_quant": MARKERS["n.comfy_quant"]})
    (folder / "flux.safetensors").rename(folder / "model.safetensors")
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(
        RefusedError, match=r"n\.comfy_quant states 'nvfp4', whose order of codes and scales mxcli does"
    ):
        plain_view(open_checkpoint(folder))


def test_channels_scaled_for_inputs_are_refused(tmp_path: Path) -> None:
    tensors = {**NVFP4, "n.comfy_quant": MARKERS["n.comfy_quant"], "n.pre_quant_scale": noise(16)}
    with pytest.raises(RefusedError, match=r"n\.pre_quant_scale .* is next to the codes of n\.weight and is not read"):
        plain_view(open_checkpoint(file(tmp_path / "m", tensors)))


def model() -> dict[str, Any]:
    return {
        "blocks.0.attn.to_q.weight": noise(64, 64),
        "blocks.0.attn.to_k.weight": noise(64, 64, seed=1, scale=4),
        "blocks.0.attn.to_v.weight": noise(64, 64, seed=2),
        "blocks.0.mlp.0.weight": noise(160, 64, seed=3),
        "blocks.0.mlp.2.weight": noise(100, 64, seed=4),
        "blocks.0.mlp.2.bias": noise(100, seed=5),
    }


@pytest.mark.parametrize(
    ("format", "stated", "kept"),
    [
        ("nvfp4", "nvfp4", ["blocks.0.mlp.2.weight"]),
        ("mxfp8", "mxfp8", ["blocks.0.mlp.2.weight"]),
        ("fp8_e4m3", "float8_e4m3fn", []),
        ("fp8_e5m2", "float8_e5m2", []),
    ],
)
def test_what_is_written_is_sound_and_equal_to_its_source_quantized_again(
    tmp_path: Path, format: str, stated: str, kept: list[str]
) -> None:
    source = write_model(tmp_path / "m", model())
    folder = quantized(source, tmp_path / "q", Options(format, layout="comfy"))
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "mxcli.json"]
    raw, header = read_raw(folder / "model.safetensors"), read_header(folder / "model.safetensors")
    layers = [name.removesuffix(".weight") for name in model() if name.endswith(".weight") and name not in kept]
    described = json.loads(header["__metadata__"]["_quantization_metadata"])
    assert described == {"format_version": "1.0", "layers": {name: {"format": stated} for name in layers}}
    for name in layers:
        assert bytes(raw[f"{name}.comfy_quant"][2]) == json.dumps({"format": stated}).encode()
    assert all(raw[name][0] == "BF16" for name in kept)
    assert found(verified(folder)) == {}
    against = verified(folder, against=source)
    assert found(against) == {}
    assert against.is_sound


def test_layers_of_several_formats_are_written_in_one_file_from_several(tmp_path: Path) -> None:
    tensors = model()
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[2:]},
    }
    source = write_model(tmp_path / "m", shards)
    overrides = (Override("*.attn.*", "mxfp8"), Override("*.mlp.2.*", "fp8_e4m3"))
    options = Options("nvfp4", overrides=overrides, layout="comfy")
    folder = quantized(source, tmp_path / "q", options)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "mxcli.json"]
    weights = plain_view(open_checkpoint(folder)).weights
    assert {name: stored.weight.format.name for name, stored in weights.items()} == {
        "blocks.0.attn.to_q.weight": "mxfp8_e4m3",
        "blocks.0.attn.to_k.weight": "mxfp8_e4m3",
        "blocks.0.attn.to_v.weight": "mxfp8_e4m3",
        "blocks.0.mlp.0.weight": "nvfp4",
        "blocks.0.mlp.2.weight": "fp8_e4m3",
    }
    assert found(verified(folder, against=source)) == {}
    with pytest.raises(RefusedError, match=r"loaders of the layout comfy take one file, here with .*Omit it"):
        arrange(open_checkpoint(source), make_plan(open_checkpoint(source), options), max_shard_bytes=4096)
