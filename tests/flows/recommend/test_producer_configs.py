"""Configurations for other producers, literally, and as their own classes read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LLAMA, llama, noise, write_model

from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.recommend.producer_configs import producer_files

yaml = pytest.importorskip("yaml")

MIXED = Options(
    "nvfp4",
    overrides=(Override("*.self_attn.*", "mxfp8"), Override("*.down_proj", keep=True), Override("*.q_proj", "mxfp8")),
)


def files(folder: Path, options: Options, **more: Any) -> tuple[dict[str, str], list[str]]:
    checkpoint = open_checkpoint(write_model(folder, llama() | more, LLAMA))
    return producer_files(checkpoint, make_plan(checkpoint, options))


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, str]:
    found, notes = files(tmp_path / "m", MIXED, **{"model.layers.0.mlp.gate.weight": noise(8, 64)})
    assert notes == []
    assert list(found) == ["compressed-tensors.json", "llm-compressor.yaml", "modelopt.yaml", "auto-round.json"]
    return found


ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in ("k", "o", "q", "v")]
MLP = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
ATTENTION_TARGETS = [r"re:(.*\.)?layers\.0\.self_attn\.(k_proj|o_proj|q_proj|qkv_proj|v_proj)$"]
MLP_TARGETS = [r"re:(.*\.)?layers\.0\.mlp\.(gate_proj|gate_up_proj|up_proj)$"]
IGNORED = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate"]


def test_compressed_tensors(mixed: dict[str, str]) -> None:
    settings = json.loads(mixed["compressed-tensors.json"])["quantization_config"]
    assert settings["format"] == "mixed-precision"
    assert settings["ignore"] == IGNORED
    assert {group["format"]: group["targets"] for group in settings["config_groups"].values()} == {
        "mxfp8-quantized": ATTENTION_TARGETS,
        "nvfp4-pack-quantized": MLP_TARGETS,
    }
    config = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig.model_validate(settings)
    assert {scheme.format for scheme in config.config_groups.values()} == {"mxfp8-quantized", "nvfp4-pack-quantized"}


def test_llm_compressor(mixed: dict[str, str]) -> None:
    recipe = yaml.safe_load(mixed["llm-compressor.yaml"])
    modifier = recipe["quant_stage"]["quant_modifiers"]["QuantizationModifier"]
    assert modifier["ignore"] == IGNORED
    nvfp4 = next(group for group in modifier["config_groups"].values() if group["targets"] == MLP_TARGETS)
    assert nvfp4["weights"] == {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    assert nvfp4["input_activations"] is None
    scheme = pytest.importorskip("compressed_tensors.quantization").QuantizationScheme
    for group in modifier["config_groups"].values():
        scheme.model_validate(group)


def test_modelopt(mixed: dict[str, str]) -> None:
    recipe = yaml.safe_load(mixed["modelopt.yaml"])
    assert recipe["metadata"]["recipe_type"] == "ptq"
    assert recipe["quantize"]["algorithm"] == "max"
    first, *entries = recipe["quantize"]["quant_cfg"]
    assert first == {"quantizer_name": "*", "enable": False}
    found = {entry["quantizer_name"]: entry["cfg"] for entry in entries}
    assert set(found) == {f"{module}.weight_quantizer" for module in ATTENTION + MLP}
    assert found["model.layers.0.mlp.up_proj.weight_quantizer"] == {
        "num_bits": "e2m1",
        "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"},
    }
    assert found["model.layers.0.self_attn.o_proj.weight_quantizer"] == {
        "num_bits": "e4m3",
        "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e8m0"},
    }


def test_auto_round(mixed: dict[str, str]) -> None:
    config = json.loads(mixed["auto-round.json"])
    assert set(config) == {*ATTENTION, *MLP, *IGNORED} - {"lm_head"}
    assert config["model.layers.0.mlp.up_proj"] == {
        "bits": 4, "data_type": "nv_fp", "group_size": 16, "sym": True, "act_bits": 16, "act_data_type": "float",
    }  # fmt: skip
    assert config["model.layers.0.self_attn.q_proj"]["data_type"] == "mx_fp"
    assert config["model.layers.0.mlp.down_proj"] == {
        "bits": 16, "act_bits": 16, "data_type": "float", "act_data_type": "float",
    }  # fmt: skip


def test_a_producer_without_a_format_gets_no_file(tmp_path: Path) -> None:
    found, notes = files(tmp_path / "a", Options("mxfp6_e3m2"))
    assert list(found) == ["modelopt.yaml"]
    assert notes[0].startswith("No configuration for compressed-tensors and llm-compressor: mxfp6_e3m2: the layout")
    assert notes[1] == "No configuration for auto-round: it has no mxfp6_e3m2."
    found, notes = files(tmp_path / "b", Options("e3m2:e8m0:1x16"))
    assert (len(found), len(notes)) == (0, 3)


def test_fp8(tmp_path: Path) -> None:
    found, notes = files(tmp_path / "a", Options("fp8_e4m3_channel"))
    assert notes == []
    entries = yaml.safe_load(found["modelopt.yaml"])["quantize"]["quant_cfg"]
    assert entries[1]["cfg"] == {"num_bits": "e4m3", "axis": 0}
    assert json.loads(found["auto-round.json"])["model.layers.0.mlp.up_proj"]["group_size"] == -1


@pytest.mark.parametrize(
    "value", [{"a": [1, {"b": None, "c": []}], "d": {}}, [[1, 2], ["x: y", "-", "é\n"]], {"a": {"b": [{}]}}]
)
def test_yaml_is_read_back(value: object) -> None:
    from mxcli.flows.recommend.producer_configs import yaml_text

    assert yaml.safe_load(yaml_text(value)) == value
