"""What is next to codes and not read is an error that names it; stale settings and markers of codes do not stay."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import SHARD, Tensors, changed, found, quantized, untouched, verified
from tiny_models import LLAMA, bf16, llama, noise, read_header, read_raw, safetensors_bytes, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.sides import side_of
from mxcli.flows.write.accounting import accounting_of
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import open_floats, plain_view, quantized_settings
from mxcli.output.written import accounting_words

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    outputs: dict[tuple[str, str], Path] = {}

    def make(format: str, layout: str) -> Path:
        if (format, layout) not in outputs:
            folder = tmp_path_factory.mktemp("made")
            outputs[format, layout] = quantized(
                write_model(folder / "m", llama(), LLAMA), folder / "q", Options(format, layout=layout)
            )
        return outputs[format, layout]

    return make


def refusals(folder: Path, output: Path) -> list[str]:
    """What dequantize, --requantize and diff say; nothing is written."""
    checkpoint = open_checkpoint(folder)
    attempts: list[Callable[[], object]] = [
        lambda: dequantize_checkpoint(checkpoint, output, backend=Cpu()),
        lambda: open_floats(folder, requantize=True),
        lambda: side_of("a", checkpoint),
    ]
    said = []
    for attempt in attempts:
        with pytest.raises((InputError, RefusedError)) as refused:
            attempt()
        said.append(refused.value.message)
    assert not output.exists()
    return said


@pytest.mark.parametrize(
    ("part", "tensor", "format", "layout", "check"),
    [
        ("svdquant_lora_a", noise(4, 128), "nvfp4", "compressed-tensors", "not_read"),
        ("svdquant_lora_b", noise(64, 4), "nvfp4", "compressed-tensors", "not_read"),
        ("weight_zero_point", ("I8", np.zeros((64, 8), np.int8)), "nvfp4", "compressed-tensors", "scale_without_codes"),
        ("weight_shape", ("I64", np.array([64, 128])), "nvfp4", "modelopt", "not_read"),
        ("smooth_scale", noise(128), "mxfp8", "compressed-tensors", "not_read"),
        ("foo_scale", noise(64), "nvfp4", "modelopt", "not_read"),
        ("weight_codebook", noise(16), "mxfp4", "compressed-tensors", "not_read"),
        ("proj_up", noise(4, 128), "nvfp4", "compressed-tensors", "not_read"),
        ("weight_bitmask", ("U8", np.ones((64, 16), np.uint8)), "fp8_e4m3_channel", "compressed-tensors", "not_read"),
        ("wscales", noise(8, 64), "mxfp8", "modelopt", "not_read"),
    ],
)
def test_a_tensor_next_to_codes_that_is_not_read_is_named(
    tmp_path: Path, made: Callable[..., Path], part: str, tensor: Any, format: str, layout: str, check: str
) -> None:
    def with_part(tensors: Tensors) -> None:
        tensors[f"{DOWN}.{part}"] = tensor

    folder = changed(made(format, layout), tmp_path / "q", with_part)
    for said in refusals(folder, tmp_path / "d"):
        assert f"{DOWN}.{part} ({tensor[0]} {list(tensor[1].shape)})" in said
    assert f"{DOWN}.{part}" in found(verified(folder))[check]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{DOWN}.bias", (64,)),
        ("model.layers.0.self_attn.k_proj.k_scale", ()),
        ("model.layers.0.self_attn.v_proj.output_scale", ()),
        (f"{DOWN}.lora_A.default.weight", (4, 128)),
        ("model.layers.0.mlp.alpha", (1,)),
    ],
)
def test_what_is_no_part_of_a_weight_stays(
    tmp_path: Path, made: Callable[..., Path], name: str, shape: tuple[int, ...]
) -> None:
    def with_tensor(tensors: Tensors) -> None:
        tensors[name] = noise(*shape)

    folder = changed(made("nvfp4", "modelopt"), tmp_path / "q", with_tensor)
    dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())
    assert name in read_header(tmp_path / "d" / "model.safetensors")
    assert "not_read" not in found(verified(folder))


@pytest.mark.parametrize("algorithm", ["NVFP4_SVDQUANT", "W4A8_NVFP4_FP8", "NVFP5_NEW"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_an_algorithm_that_is_not_read_is_named_though_its_codes_fit(
    tmp_path: Path, made: Callable[..., Path], algorithm: str, by_layer: bool
) -> None:
    stated: dict[str, Any] = {"quant_algo": algorithm}
    if by_layer:
        stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {DOWN: {"quant_algo": algorithm}}}
    folder = changed(made("nvfp4", "modelopt"), tmp_path / "q", untouched, **stated)
    of = f" of {DOWN}" if by_layer else ""
    for said in refusals(folder, tmp_path / "d"):
        assert f"the quant_algo{of} is {algorithm}, which mxcli does not read. Use the checkpoint that" in said
    assert "not_read" in found(verified(folder))


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "nvfp4"])
def test_algorithms_that_are_read_are_no_fault(tmp_path: Path, made: Callable[..., Path], algorithm: str) -> None:
    folder = changed(made("nvfp4", "modelopt"), tmp_path / "q", untouched, quant_algo=algorithm)
    assert plain_view(open_checkpoint(folder)).weights
    assert "not_read" not in found(verified(folder))


def marker(content: object) -> tuple[str, np.ndarray]:
    return "U8", np.frombuffer(json.dumps(content).encode(), np.uint8)


def comfy(folder: Path, content: object, *, four_bits: bool = False) -> Path:
    """One layer as ComfyUI stores it, in one file with its metadata."""
    codes = np.arange(128 * 64, dtype=np.int64).reshape(128, 64) % 100
    layer = "blocks.0.attn.qkv"
    tensors: dict[str, Any] = {
        f"{layer}.weight": ("U8" if four_bits else "F8_E4M3", codes.astype(np.uint8)),
        f"{layer}.comfy_quant": marker(content),
        f"{layer}.bias": noise(128),
        "img_in.weight": noise(64, 64),
    }
    if four_bits:
        tensors[f"{layer}.weight_scale"] = ("F8_E4M3", np.full((128, 8), 0x38, np.uint8))
        tensors[f"{layer}.weight_scale_2"] = ("F32", np.array(1, np.float32))
    else:
        tensors[f"{layer}.weight_scale"] = ("F32", np.array(0.5, np.float32))
        tensors[f"{layer}.input_scale"] = ("F32", np.array(0.25, np.float32))
    folder.mkdir()
    metadata = {"format": "pt", "_quantization_metadata": json.dumps({"layers": {layer: content}})}
    (folder / "flux.safetensors").write_bytes(safetensors_bytes(tensors, metadata))
    return folder


@pytest.mark.parametrize("format", ["int8_tensorwise", "convrot_w4a4", "awq_w4a16"])
def test_comfyui_s_other_codes_are_not_taken_for_those_of_modelopt(tmp_path: Path, format: str) -> None:
    folder = comfy(tmp_path / "m", {"format": format}, four_bits=True)
    assert open_checkpoint(folder).dialect == "comfyui"
    for said in refusals(folder, tmp_path / "d"):
        assert f"flux.safetensors: blocks.0.attn.qkv.comfy_quant states '{format}', whose order of" in said
    coverage = verified(folder).coverage
    assert coverage.is_empty
    assert coverage.unread is not None
    assert f"blocks.0.attn.qkv.weight: its marker states {format}, which mxcli does not read" in coverage.unread


@pytest.mark.parametrize("content", [{"format": "float8_e5m2"}, {"x": 1}, [], "text"])
def test_a_marker_of_other_codes_beats_a_signature_that_fits(tmp_path: Path, content: object) -> None:
    folder = comfy(tmp_path / "m", content)
    for said in refusals(folder, tmp_path / "d"):
        assert "blocks.0.attn.qkv.comfy_quant states '" in said
        assert "whose order of codes and scales mxcli does not read" in said
    assert found(verified(folder))["not_read"] == ["blocks.0.attn.qkv.comfy_quant"]


def test_markers_of_fp8_are_read_and_dropped(tmp_path: Path) -> None:
    folder = comfy(tmp_path / "m", {"format": "float8_e4m3fn", "full_precision_matrix_mult": True})
    restored = dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())
    assert restored.notes == (
        "1 layers ('blocks.0.attn.qkv', …) state full_precision_matrix_mult: ComfyUI multiplies their dequantized "
        "weights by inputs that are not quantized.",
        "1 activation scale ('blocks.0.attn.qkv.input_scale') is omitted.",
        "1 marker of the source's codes ('blocks.0.attn.qkv.comfy_quant') is omitted.",
        "Settings of the source's codes, which an output does not keep: _quantization_metadata of __metadata__.",
    )
    assert accounting_words(restored.accounting).endswith(
        ", carried none, left out none; of the files read, left out 67 B: markers of the source's codes "
        "(blocks.0.attn.qkv.comfy_quant, 63 B), activation scales (blocks.0.attn.qkv.input_scale, 4 B)"
    )
    header = read_header(tmp_path / "d" / "model.safetensors")
    assert header.keys() == {"__metadata__", "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias", "img_in.weight"}
    assert header["__metadata__"] == {"format": "pt"}
    stored = np.frombuffer(read_raw(tmp_path / "d" / "model.safetensors")["blocks.0.attn.qkv.weight"][2], np.uint16)
    codes = np.arange(128 * 64) % 100
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9) / 2
    assert np.array_equal(stored, bf16(values)[1])
    again = open_floats(folder, requantize=True)
    assert accounting_of(again) == restored.accounting
    quantize_checkpoint(again, make_plan(again, Options("mxfp8")), tmp_path / "r", backend=Cpu())
    header = read_header(tmp_path / "r" / "model.safetensors")
    assert not [name for name in header if name.endswith(("comfy_quant", "input_scale", "weight_scale_2"))]
    assert header["__metadata__"] == {"format": "pt"}
    assert restored.notes[3] in again.notes


def nested(folder: Path, keys: tuple[str, ...]) -> None:
    """Move the settings of a configuration to other keys."""
    config = json.loads((folder / "config.json").read_text())
    part: dict[str, Any] = config
    settings = config.pop("quantization_config")
    for key in keys[:-1]:
        part = part.setdefault(key, {})
    part[keys[-1]] = settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "keys",
    [
        ("text_config", "quantization_config"),
        ("llm_config", "quantization_config"),
        ("compression_config",),
        ("text_config", "compression_config"),
    ],
)
@pytest.mark.parametrize(
    ("format", "layout"), [("nvfp4", "compressed-tensors"), ("mxfp8", "modelopt"), ("mxfp4", "quark")]
)
def test_settings_in_a_part_of_the_configuration_are_read_and_do_not_stay(
    tmp_path: Path, made: Callable[..., Path], keys: tuple[str, ...], format: str, layout: str
) -> None:
    folder = changed(made(format, layout), tmp_path / "q", untouched)
    for file in ("mxcli.json", "hf_quant_config.json"):
        (folder / file).unlink(missing_ok=True)
    nested(folder, keys)
    checkpoint = open_checkpoint(folder)
    assert len(plain_view(checkpoint).weights) == 7
    assert not {"misfit", "not_read", "codes_without_scale"} & found(verified(folder)).keys()
    restored = dequantize_checkpoint(checkpoint, tmp_path / "d", backend=Cpu())
    note = f"Settings of the source's codes, which an output does not keep: {'.'.join(keys)} of config.json."
    assert note in restored.notes
    again = open_floats(folder, requantize=True)
    quantize_checkpoint(again, make_plan(again, Options("mxfp8")), tmp_path / "r", backend=Cpu())
    for output, settings in (("d", []), ("r", ["quantization_config"])):
        config = json.loads((tmp_path / output / "config.json").read_text())
        assert list(quantized_settings(config)) == settings


@pytest.mark.parametrize(
    ("config", "stale"),
    [
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "text_config.quantization_config"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
        ({"vision_config": {"a": {"quantization_config": {}}}}, "vision_config.a.quantization_config"),
    ],
)
def test_settings_of_codes_in_a_plain_source_do_not_stay(
    tmp_path: Path, config: Mapping[str, object], stale: str
) -> None:
    source = open_floats(write_model(tmp_path / "m", llama(), {**LLAMA, **config}, {"recipe.yaml": "x"}))
    assert f"Settings of the source's codes, which an output does not keep: {stale} of config.json." in source.notes
    quantize_checkpoint(source, make_plan(source, Options("mxfp8")), tmp_path / "q", backend=Cpu())
    written = json.loads((tmp_path / "q" / "config.json").read_text())
    assert list(quantized_settings(written)) == ["quantization_config"]
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
    assert not (tmp_path / "q" / "recipe.yaml").exists()


def test_other_keys_named_quantization_stay(tmp_path: Path) -> None:
    config = {**LLAMA, "quantization": {"codebook_size": 1024}, "speech": {"quantization": "rvq"}}
    source = open_floats(write_model(tmp_path / "m", llama(), config))
    quantize_checkpoint(source, make_plan(source, Options("mxfp8")), tmp_path / "q", backend=Cpu())
    written = json.loads((tmp_path / "q" / "config.json").read_text())
    assert (written["quantization"], written["speech"]) == (config["quantization"], config["speech"])
    assert SHARD == "model.safetensors"
