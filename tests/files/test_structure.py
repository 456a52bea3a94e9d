"""The dimension a stored weight reduces over."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxcli.files.structure import reduction_axis, stores_conv1d
from mxcli.files.tensors import TensorInfo


def _info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "BF16", shape, "weight", Path("m.safetensors"), 0, 0)


UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("name", "shape", "config", "axis"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 32), {"model_type": "llama"}, -1),
        ("h.0.attn.c_attn.weight", (768, 2304), {"model_type": "gpt2"}, -2),
        ("transformer.h.0.mlp.c_proj.weight", (3072, 768), {"model_type": "gpt2"}, -2),
        ("transformer.h.0.attn.c_attn.weight", (6144, 2048), {"model_type": "qwen"}, -1),
        ("transformer.h.0.mlp.c_fc.weight", (8192, 2048), {"model_type": "gpt_bigcode"}, -1),
        (UP, (32, 2880, 5760), {"model_type": "gpt_oss", "hidden_size": 2880}, -2),
        (DOWN, (32, 2880, 2880), {"model_type": "gpt_oss", "hidden_size": 2880}, -2),
        (UP, (16, 5120, 16384), {"text_config": {"model_type": "llama4_text", "hidden_size": 5120}}, -2),
        (DOWN, (16, 8192, 5120), {"text_config": {"model_type": "llama4_text", "hidden_size": 5120}}, -2),
        (UP, (128, 1536, 2048), {"model_type": "qwen3_moe", "hidden_size": 2048}, -1),
        (DOWN, (128, 2048, 768), {"model_type": "qwen3_moe", "hidden_size": 2048}, -1),
        (UP, (128, 2048, 1536), {"model_type": "new", "hidden_size": 2048}, -2),
        (DOWN, (8, 64, 64), {"model_type": "qwen3_moe", "hidden_size": 64}, -1),
        (UP, (8, 64, 128), None, -1),
        ("params.Dense_0.kernel", (64, 128), None, -2),
        ("x", (64,), None, -1),
        ("x", (), None, -1),
    ],
)
def test_reduction_axis(name: str, shape: tuple[int, ...], config: dict[str, object] | None, axis: int) -> None:
    assert reduction_axis(_info(name, *shape), config) == axis


def test_gpt2_is_recognised_by_its_fused_attention() -> None:
    stored = {info.name: info for info in (_info("h.0.attn.c_attn.weight", 8, 24), _info("h.0.mlp.c_fc.weight", 8, 32))}
    linear = {info.name: info for info in (_info("h.0.attn.c_attn.weight", 24, 8), _info("h.0.mlp.c_fc.weight", 32, 8))}
    assert stores_conv1d(stored)
    assert not stores_conv1d(linear)
    assert not stores_conv1d({})
    axes = [reduction_axis(info, None, conv1d=stores_conv1d(stored)) for info in stored.values()]
    assert axes == [-2, -2]
