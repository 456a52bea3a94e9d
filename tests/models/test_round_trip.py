"""A trained Llama quantized into a checkpoint and back: the weights are the oracle's, all else is untouched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from dear import slow_but
from safetensors.torch import load_file

import mxcli
from models import wanted
from models.measuring import fused, fused_amax, run, weight
from models.store import Models
from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import Checkpoint, open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint

pytestmark = pytest.mark.network

LINEARS, KEPT = 21, 8
SAMPLED = ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight")
CASES = [
    ("mxfp8_e4m3", "rceil", "compressed-tensors"),
    ("mxfp6_e3m2", "rceil", "mxcli"),
    ("mxfp4_e2m1", "rceil", "compressed-tensors"),
    ("mxint8", "rceil", "mxcli"),
    ("nvfp4", "te", "compressed-tensors"),
    ("fp8_e4m3_128x128", "amax-bf16-scale", "compressed-tensors"),
]
"""Formats with the rule and layout that weights in bfloat16 get by default."""
DIVIDES = ("nvfp4", "compressed-tensors")
"""Its readers divide by the tensor scale where `te` multiplies by its reciprocal: the last bit may differ."""


@pytest.fixture(scope="module")
def source(models: Models) -> Path:
    return models.smollm2("short")


@pytest.mark.parametrize(
    ("format", "rule", "layout"), slow_but([CASES[0], CASES[3], CASES[4]], [*CASES, ("nvfp4", "te", "mxcli")])
)
def test_there_and_back(tmp_path: Path, source: Path, format: str, rule: str, layout: str) -> None:
    checkpoint = open_checkpoint(source)
    named = None if (format, rule, layout) in CASES else layout
    written = quantize_checkpoint(
        checkpoint, make_plan(checkpoint, Options(format, layout=named)), tmp_path / "q", backend=Cpu()
    )
    assert written.arrangement.layout.name == layout
    assert {step.scheme.scale_rule.name for step, _ in written.layers if step.scheme} == {rule}
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "plain", backend=Cpu(), dtype="F32")
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "bf16", backend=Cpu())
    original, plain = load_file(source / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    rounded = load_file(tmp_path / "bf16" / "model.safetensors")
    assert plain.keys() == rounded.keys() == original.keys()
    linears = [name for name in original if "proj" in name]
    assert len(linears) == LINEARS
    for name, tensor in original.items():
        assert torch.equal(rounded[name], plain[name].to(torch.bfloat16)), name
        assert torch.equal(rounded[name], tensor) == (name not in linears), name
    for name in linears:
        values = _by_api(original, name, format, rule)
        if (format, layout) == DIVIDES:
            torch.testing.assert_close(plain[name], values, rtol=2e-7, atol=0)
            assert torch.equal(rounded[name], values.to(torch.bfloat16)), name
        else:
            assert torch.equal(plain[name], values), name
    for name in SAMPLED:
        np.testing.assert_array_equal(plain[name].numpy(), _by_oracle(checkpoint, name, format, layout), name)


def _by_api(original: dict[str, torch.Tensor], name: str, format: str, rule: str) -> torch.Tensor:
    """One weight as `mxcli.quantize` has it, given those that it shares a tensor scale with."""
    names = fused(name) if format == "nvfp4" else [name]
    whole = torch.cat([original[member] for member in names])
    values = mxcli.quantize(whole, format, scale_rounding=rule).dequantize()
    parts = torch.as_tensor(values).split([len(original[member]) for member in names])
    return dict(zip(names, parts, strict=True))[name]


def _by_oracle(checkpoint: Checkpoint, name: str, format: str, layout: str) -> wanted.F32:
    x = weight(checkpoint, name)
    if format == "fp8_e4m3_128x128":
        return _scaled_in_bfloat16(x)
    result = wanted.expected(x, format, tensor_amax=fused_amax(checkpoint, name))
    if (format, layout) != DIVIDES:
        return result.dequantized
    scales = oracle.decode(result.scales, oracle.E4M3).astype(np.float32) / np.float32(result.tensor_encode)
    return oracle.decode(result.codes, result.element).astype(np.float32) * scales.repeat(16, axis=1)


def _scaled_in_bfloat16(x: wanted.F32) -> wanted.F32:
    """E4M3 by blocks of 128x128 with scales rounded to bfloat16, which the oracle has no rule for."""
    element, y = oracle.element_format("e4m3"), np.empty_like(x)
    for row in range(0, x.shape[0], 128):
        for column in range(0, x.shape[1], 128):
            block = np.s_[row : row + 128, column : column + 128]
            scale = torch.tensor(np.abs(x[block]).max() / np.float32(448)).to(torch.bfloat16).float().numpy()
            y[block] = oracle.decode(oracle.encode(x[block] / scale, element), element) * scale
    return y


def test_the_checkpoint_is_a_model_of_its_own(tmp_path: Path, source: Path) -> None:
    run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "q", "-q")
    original, stored = load_file(source / "model.safetensors"), load_file(tmp_path / "q" / "model.safetensors")
    assert len(stored) == KEPT + 3 * LINEARS
    assert "lm_head.weight" not in stored
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["format"] == "nvfp4-pack-quantized"
    assert settings["ignore"] == ["lm_head"]
    scales = {name: stored[name.replace(".weight", ".weight_global_scale")] for name in original if "proj" in name}
    for name, scale in scales.items():
        assert all(torch.equal(scale, scales[member]) for member in fused(name)), name
    last = run("dequantize", tmp_path / "q", "-o", tmp_path / "back", "-q")
    assert last.startswith(f"written to {tmp_path / 'back'}: 21 weights dequantized; ")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == original.keys()
