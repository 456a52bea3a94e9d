"""Inputs under static scales, the outputs of attention, and keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import tiny, tokens
from torch import nn
from transformers import DynamicCache

import mxcli
from mxcli.errors import MxcliError, RefusedError, UsageError


def values(x: torch.Tensor, format: str) -> torch.Tensor:
    found: Any = mxcli.quantize(x.detach(), format).dequantize()
    return torch.as_tensor(found)


@pytest.mark.parametrize(("format", "largest"), [("fp8_e4m3", 448.0), ("nvfp4", 448.0 * 6)])
def test_static_scales(format: str, largest: float) -> None:
    """A static scale for the amax of other inputs gives what they have together; larger values saturate."""
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(64))
    x = torch.randn(4, 64).clamp(-2, 2)
    other = torch.full((1, 64), 5.0)
    scale = torch.tensor(5.0) / largest
    with mxcli.emulate(layer, format=format, input_scales={"weight": float(scale)}):
        found = layer(x)
        assert layer(torch.full((1, 64), 80.0)).max() == 5.0
    assert torch.allclose(found, values(torch.cat([x, other]), format)[:4], rtol=1e-6)
    with mxcli.emulate(layer, format=format):
        assert layer(torch.full((1, 64), 80.0)).max() == 80.0


def test_captured_inputs_give_scales(tmp_path: Path) -> None:
    model = tiny("llama")
    with mxcli.capture(model, tmp_path / "captures", roles="activation") as recorder:
        plain = model(tokens()).logits
        recorder.step()
    with mxcli.emulate(model, format="nvfp4"):
        dynamic = model(tokens()).logits
    with mxcli.emulate(model, format="nvfp4", input_scales=tmp_path / "captures"):
        static = model(tokens()).logits
        doubled = model.model.layers[0].self_attn.q_proj(torch.full((1, 64), 1e4)).abs().max()
    assert not torch.equal(static, dynamic)
    assert (static - plain).norm() < 1.2 * (dynamic - plain).norm()
    assert doubled < 100  # the captured inputs are those of a norm, a few units at most


def test_outputs_of_attention_have_their_own_format() -> None:
    model = tiny("gpt2")
    with mxcli.emulate(model, format="mxfp4", activations="none", outputs="fp8_e4m3_channel") as emulation:
        x = torch.randn(3, 64)
        found = model.transformer.h[0].attn.c_proj(x)
    assert emulation.layers["transformer.h.0.attn.c_proj"] == "weights mxfp4_e2m1, inputs fp8_e4m3_channel"
    assert emulation.layers["transformer.h.0.attn.c_attn"] == "weights mxfp4_e2m1, inputs as they are"
    assert emulation.layers["transformer.h.0.mlp.c_proj"] == "weights mxfp4_e2m1, inputs as they are"
    layer = model.transformer.h[0].attn.c_proj
    expected = values(x, "fp8_e4m3_channel") @ values(layer.weight.T, "mxfp4").T + layer.bias
    assert torch.allclose(found, expected, atol=1e-6)
    with mxcli.emulate(tiny("bert"), format="mxfp4", outputs="mxfp8") as emulation:
        assert (
            emulation.layers["bert.encoder.layer.0.attention.output.dense"] == "weights mxfp4_e2m1, inputs mxfp8_e4m3"
        )
        assert emulation.layers["bert.encoder.layer.0.output.dense"] == "weights mxfp4_e2m1, inputs mxfp4_e2m1"


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_oss"])
def test_keys_and_values(name: str) -> None:
    """The cache holds quantized keys and values, and attention reads these: one token at a time, all at once, and
    without a cache alike."""
    model, ids = tiny(name), tokens(2, 5)
    plain_cache, cache = DynamicCache(), DynamicCache()
    with torch.no_grad():
        plain = model(ids, past_key_values=plain_cache).logits
        with mxcli.emulate(model, format="mxfp8", activations="none", kv_cache="mxfp4") as emulation:
            whole = model(ids, past_key_values=cache).logits
            without = model(ids, use_cache=False).logits
            steps = DynamicCache()
            one_by_one = [model(ids[:, at : at + 1], past_key_values=steps).logits for at in range(ids.shape[1])]
    keys = cache.layers[0].keys
    assert torch.equal(keys, values(keys, "mxfp4"))
    assert torch.equal(cache.layers[1].values, values(cache.layers[1].values, "mxfp4"))
    assert not torch.equal(plain_cache.layers[0].keys, values(plain_cache.layers[0].keys, "mxfp4"))
    assert torch.equal(whole, without)
    assert torch.allclose(torch.cat(one_by_one, 1), whole, atol=1e-4)
    assert not torch.allclose(whole, plain, atol=1e-3)
    assert "update" not in vars(cache)
    assert sum(what == "keys and values mxfp4_e2m1" for what in emulation.layers.values()) == 2
    with torch.no_grad():
        assert torch.equal(model(ids, past_key_values=DynamicCache()).logits, plain)


def test_keys_and_values_have_gradients() -> None:
    model = tiny("llama")
    with mxcli.emulate(model, format="mxfp8", kv_cache="mxfp8"):
        model(tokens(), labels=tokens()).loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_generation() -> None:
    model = tiny("llama")
    with mxcli.emulate(model, format="mxfp8", kv_cache="fp8_e4m3"):
        found = model.generate(tokens(1, 4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert found.shape == (1, 8)


@pytest.mark.parametrize(
    ("model", "options", "kind", "sentence"),
    [
        (
            lambda: tiny("llama"),
            {"format": "mxfp8", "input_scales": {"model.layers.0.self_attn.q_proj": 0.1}},
            RefusedError,
            "model.layers.0.self_attn.q_proj.weight has inputs in mxfp8_e4m3, whose scales are those of blocks",
        ),
        (
            lambda: tiny("llama"),
            {"format": "nvfp4", "input_scales": {"model.layers.0.self_attn.w_proj": 0.1}},
            UsageError,
            "input_scales: model.layers.0.self_attn.w_proj is not a layer whose inputs are quantized.",
        ),
        (
            lambda: tiny("llama"),
            {"format": "nvfp4", "input_scales": {"model.layers.0.self_attn.q_proj": -1}},
            RefusedError,
            "model.layers.0.self_attn.q_proj.weight has -1, which is not a scale under nvfp4",
        ),
        (lambda: tiny("llama"), {"format": "nvfp4", "input_scales": 3}, UsageError, "input_scales 3: give a mapping"),
        (lambda: tiny("llama"), {"format": "mxfp8", "outputs": "fp3"}, UsageError, "unknown format 'fp3'"),
        (
            lambda: tiny("llama"),
            {"format": "mxfp8", "kv_cache": 4},
            UsageError,
            "kv_cache 4: give the name of a format.",
        ),
        (
            lambda: nn.Linear(64, 64),
            {"format": "mxfp8", "outputs": "mxfp8"},
            UsageError,
            "outputs='mxfp8': no layer that attention ends with, such as o_proj, is quantized: leave outputs out.",
        ),
        (
            lambda: nn.Linear(64, 64),
            {"format": "mxfp8", "kv_cache": "mxfp8"},
            RefusedError,
            "kv_cache: Linear has no attention of transformers that takes a cache: leave kv_cache out.",
        ),
        (
            lambda: nn.Linear(64, 64),
            {"training": "mxfp8", "input_scales": {}},
            UsageError,
            "training='mxfp8' says how every operand is quantized: leave input_scales out.",
        ),
    ],
)
def test_refusals(model: Callable[[], Any], options: dict[str, Any], kind: type[MxcliError], sentence: str) -> None:
    with pytest.raises(kind) as raised:
        mxcli.emulate(model(), **options)
    assert sentence in str(raised.value)
