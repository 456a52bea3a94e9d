"""Already quantized checkpoints are recognised, by their configuration or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from raw_checkpoint import zeros

from mxcli.files.checkpoint import open_checkpoint

Writer = Callable[..., Path]
Entry = tuple[str, list[int], bytes]

FP8 = zeros("F8_E4M3", 128, 64)
NIBBLES = zeros("U8", 128, 32)
BYTE_SCALES = zeros("U8", 128, 2)

LAYOUTS: dict[str, tuple[str, dict[str, Entry]]] = {
    "ct nvfp4": (
        "compressed-tensors",
        {
            "fc.weight_packed": NIBBLES,
            "fc.weight_scale": zeros("F8_E4M3", 128, 4),
            "fc.weight_global_scale": zeros("F32", 1),
        },
    ),
    "ct mxfp4": ("compressed-tensors", {"fc.weight_packed": NIBBLES, "fc.weight_scale": BYTE_SCALES}),
    "ct mxfp8": ("compressed-tensors", {"fc.weight": FP8, "fc.weight_scale": BYTE_SCALES}),
    "ct fp8 channel": ("compressed-tensors", {"fc.weight": FP8, "fc.weight_scale": zeros("BF16", 128, 1)}),
    "modelopt nvfp4": (
        "modelopt",
        {
            "fc.weight": NIBBLES,
            "fc.weight_scale": zeros("F8_E4M3", 128, 4),
            "fc.weight_scale_2": zeros("F32"),
            "fc.input_scale": zeros("F32"),
        },
    ),
    "mistral fp8": ("mistral", {"fc.weight": FP8, "fc.qscale_weight": zeros("F32"), "fc.qscale_act": zeros("F32")}),
    "modelopt fp8": ("modelopt", {"fc.weight": FP8, "fc.weight_scale": zeros("F32")}),
    "quark mxfp4": ("quark", {"fc.weight": NIBBLES, "fc.weight_scale": BYTE_SCALES}),
    "fp8 block": ("fp8-block", {"fc.weight": FP8, "fc.weight_scale_inv": zeros("F32", 1, 1)}),
    "fp8 block ue8m0": ("fp8-block", {"fc.weight": FP8, "fc.scale": zeros("F8_E8M0", 1, 1)}),
    "gpt-oss": (
        "gpt-oss",
        {
            "model.layers.0.mlp.experts.gate_up_proj_blocks": zeros("U8", 4, 128, 2, 16),
            "model.layers.0.mlp.experts.gate_up_proj_scales": zeros("U8", 4, 128, 2),
            "model.embed_tokens.weight": zeros("BF16", 128, 64),
        },
    ),
    "torchao": (
        "torchao",
        {"fc._weight_qdata": NIBBLES, "fc._weight_scale": zeros("F8_E8M0", 128, 2)},
    ),
    "gptq": ("gptq", {"fc.qweight": ("I32", [8, 64], bytes(2048)), "fc.g_idx": ("I32", [4], bytes(16))}),
    "awq": ("awq", {"fc.qweight": ("I32", [8, 64], bytes(2048)), "fc.qzeros": ("I32", [1, 8], bytes(32))}),
    "bitsandbytes": ("bitsandbytes", {"fc.weight": zeros("U8", 64, 1), "fc.weight.absmax": zeros("F32", 2)}),
    "casts": ("fp8-unscaled", {"fc.weight": FP8}),
    "riddle": ("unknown", {"fc.weight": zeros("U8", 64, 51)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dialects_are_seen_without_a_configuration(model: Writer, layout: str) -> None:
    dialect, tensors = LAYOUTS[layout]
    checkpoint = open_checkpoint(model({"model.safetensors": tensors}))
    assert checkpoint.dialect == dialect
    assert len(checkpoint.notes) == 1
    assert not any(info.role == "weight" for info in checkpoint.tensors.values())


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt"),
        ({"quant_algo": "MXFP8"}, "modelopt"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "mxfp8"}, "mxfp8"),
        ({"quant_method": "mxfp4"}, "gpt-oss"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "auto-round"}, "auto-round"),
        ({"quant_method": "mxcli"}, "mxcli"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_configuration_decides(model: Writer, config: Mapping[str, Any], dialect: str, nested: bool) -> None:
    whole: dict[str, Any] = {"quantization_config": config}
    root = model(
        {
            "model.safetensors": LAYOUTS["ct mxfp8"][1],
            "config.json": {"text_config": whole} if nested else whole,
        }
    )
    checkpoint = open_checkpoint(root)
    assert (checkpoint.dialect, checkpoint.notes) == (dialect, ())


def test_our_own_codes_are_of_any_name_and_type(model: Writer) -> None:
    config = {"quantization_config": {"quant_method": "mxcli"}}
    tensors = {"x": zeros("I8", 4, 64), "x_scale": zeros("U8", 4, 2)}
    assert open_checkpoint(model({"model.safetensors": tensors, "config.json": config})).dialect == "mxcli"


def test_our_configuration_without_scales_is_contradicted(model: Writer) -> None:
    config = {"quantization_config": {"quant_method": "mxcli"}}
    tensors = {"x": zeros("I8", 4, 64), "y.weight": zeros("BF16", 4, 64)}
    checkpoint = open_checkpoint(model({"model.safetensors": tensors, "config.json": config}))
    assert (checkpoint.dialect, checkpoint.notes) == (
        None,
        ("The configuration says mxcli, but no tensor holds codes.",),
    )


def test_producer_configuration_is_enough(model: Writer) -> None:
    root = model(
        {
            "model.safetensors": LAYOUTS["ct mxfp8"][1],
            "config.json": {"model_type": "llama"},
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "MXFP8"},
            },
        }
    )
    assert open_checkpoint(root).dialect == "modelopt"


def test_unknown_methods_are_named(model: Writer) -> None:
    config = {"quantization_config": {"quant_method": "HQQ"}}
    checkpoint = open_checkpoint(model({"model.safetensors": LAYOUTS["riddle"][1], "config.json": config}))
    assert checkpoint.dialect == "hqq"
    assert checkpoint.notes == ("Quantized by hqq, which this program does not read.",)


@pytest.mark.parametrize(
    "config", [None, {}, {"quantization_config": None}, {"quantization_config": {"quant_method": 3}}]
)
def test_plain_checkpoints_have_no_dialect(model: Writer, config: object) -> None:
    root = model({"model.safetensors": {"fc.weight": zeros("BF16", 8, 8)}, "config.json": config or {}})
    assert open_checkpoint(root).dialect is None


def test_a_configuration_without_codes_is_contradicted(model: Writer) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    tensors = {"fc.weight": zeros("BF16", 8, 8), "fc.k_scale": zeros("F32")}
    checkpoint = open_checkpoint(model({"model.safetensors": tensors, "config.json": config}))
    assert checkpoint.dialect is None
    assert checkpoint.notes == ("The configuration says fp8, but no tensor holds codes.",)


def test_codes_that_nothing_explains_are_named(model: Writer) -> None:
    root = model({"model.safetensors": {"fc.weight": zeros("U8", 64, 51), "up.weight": zeros("I8", 64, 64)}})
    checkpoint = open_checkpoint(root)

    assert checkpoint.notes == ("2 tensors ('fc.weight', …) of codes by name and dtype, and no known layout fits.",)


@pytest.mark.parametrize(("dtype", "nbytes"), [("BOOL", 1), ("C64", 8), ("I64", 8), ("U64", 8)])
def test_numbers_that_are_never_codes_are_plain(model: Writer, dtype: str, nbytes: int) -> None:
    tensors = {"fc.weight": (dtype, [64, 64], bytes(64 * 64 * nbytes))}
    assert open_checkpoint(model({"model.safetensors": tensors})).dialect is None
