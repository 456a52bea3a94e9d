"""Codes that are not read are counted and named, and nothing that follows from them is a fault of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import found, quantized, source, verified
from tiny_models import LLAMA, llama, noise, write_model

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options
from mxcli.flows.write.restore import plain_view

EXPERTS = "model.layers.0.mlp.experts"
FP4 = {"down_proj": ("U8", (4, 64, 64)), "down_proj_weight_scale": ("F8_E4M3", (4, 8, 64))}
STACKS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "NVFP4": {**FP4, "down_proj_weight_scale_2": ("F32", ())},
    "FP8": {"down_proj": ("F8_E4M3", (4, 128, 64)), "down_proj_weight_scale": ("F32", ())},
    "MXFP8": {"down_proj": ("F8_E4M3", (4, 128, 64)), "down_proj_weight_scale": ("U8", (4, 128, 2))},
    "FP8_PER_CHANNEL_PER_TOKEN": {"down_proj": ("F8_E4M3", (4, 128, 64)), "down_proj_weight_scale": ("F32", (4,))},
}
STORED = {"F32": np.float32}


@pytest.mark.parametrize("algorithm", STACKS)
def test_stacks_of_experts_of_modelopt_are_named(tmp_path: Path, algorithm: str) -> None:
    parts = {
        f"{EXPERTS}.{name}": (dtype, np.full(shape, 1, STORED.get(dtype, np.uint8)))
        for name, (dtype, shape) in STACKS[algorithm].items()
    }
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.layers*proj"]}
    config = {"model_type": "gpt_oss", "quantization_config": settings}
    folder = write_model(tmp_path / "q", {**parts, "model.norm.weight": noise(64)}, config)
    result = verified(folder)
    assert not found(result).keys() & {"codes_without_scale", "scale_without_codes", "misfit"}
    assert result.coverage.unchecked == 1
    with pytest.raises(InputError) as raised:
        plain_view(open_checkpoint(folder))
    assert f"{EXPERTS}.down_proj: it is a stack of 4 experts in one tensor, {algorithm}" in raised.value.message


def affine(name: str, rows: int, columns: int) -> dict[str, Any]:
    """A layer in MLX's mode affine, 4 bits in groups of 64."""
    return {
        f"{name}.weight": ("U32", np.ones((rows, columns // 8), np.uint32)),
        f"{name}.scales": noise(rows, columns // 64),
        f"{name}.biases": noise(rows, columns // 64),
    }


@pytest.mark.parametrize("without", ["", "lm_head"])
def test_a_model_in_mlx_s_integer_mode_has_its_ends(tmp_path: Path, without: str) -> None:
    tensors: dict[str, Any] = {}
    for name, (dtype, values) in llama().items():
        module = name.removesuffix(".weight")
        if module != without:
            tensors |= affine(module, *values.shape) if values.ndim == 2 else {name: (dtype, values)}
    mode = {"group_size": 64, "bits": 4, "mode": "affine"}
    stated = {"tie_word_embeddings": False, "num_hidden_layers": 1}
    config = {**LLAMA, **stated, "quantization": mode, "quantization_config": mode}
    result = verified(write_model(tmp_path / "q", tensors, config))
    assert found(result).get("model_ends", []) == ([f"{without}.weight"] if without else [])
    assert result.coverage.by_values == 0
    assert result.coverage.unread is not None
    assert "its mode is affine" in result.coverage.unread


def test_mlx_quantizes_embeddings_and_routers(tmp_path: Path) -> None:
    options = Options("mxfp8", layout="mlx", overrides=(Override("model.embed_tokens", "mxfp8"),))
    assert "kind" not in found(verified(quantized(source(tmp_path / "m"), tmp_path / "q", options)))
