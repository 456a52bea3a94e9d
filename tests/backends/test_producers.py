"""`--as NAME` reproduces the bytes of package NAME: all quantized weights of files written by the packages.

tests/data/layouts/README.md lists the package version of each file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mxcli.backends import cpu
from mxcli.numerics.scheme import Rules, resolve

FILES = Path(__file__).parents[1] / "data" / "layouts"


@dataclass(frozen=True)
class Case:
    file: str
    format: str
    dialect: str
    codes: str
    scale_rounding: str | None = None
    source: str = "toy"
    tensor_scale: str | None = None
    encodes: bool = False
    tensors: int = 2


CT, PLAIN, TORCHAO = ".weight_packed", ".weight", "._weight_qdata"
CASES = [
    Case("ct-nvfp4a16", "nvfp4", "ct-bf16", CT, tensor_scale=".weight_global_scale", encodes=True),
    Case("ct-mxfp4", "mxfp4", "ct-bf16", CT),
    Case("ct-mxfp4", "mxfp4", "ct", CT),
    Case("ct-mxfp6a16", "mxfp6", "ct-bf16", CT),
    Case("ct-mxfp8", "mxfp8", "ct-bf16", PLAIN),
    Case("ct-fp8-tensor", "fp8_e4m3", "ct-bf16", PLAIN),
    Case("ct-fp8-dynamic", "fp8_e4m3_channel", "ct-bf16", PLAIN),
    Case("ct-fp8-block", "fp8_e4m3_128x128", "ct-bf16", PLAIN, source="ct-block", tensors=1),
    Case("modelopt-nvfp4", "nvfp4", "modelopt", PLAIN, tensor_scale=".weight_scale_2"),
    Case("modelopt-mxfp8", "mxfp8", "modelopt", PLAIN),
    Case("modelopt-mxfp4", "mxfp4", "modelopt", PLAIN),
    Case("modelopt-fp8", "fp8_e4m3", "modelopt-bf16", PLAIN),
    Case("torchao-mxfp4-plain-floor", "mxfp4", "torchao-casts", TORCHAO),
    Case("torchao-mxfp4-plain-even", "mxfp4", "torchao", TORCHAO, "even"),
    Case("torchao-mxfp4-plain-rceil", "mxfp4", "torchao", TORCHAO),
    Case("torchao-mxfp6-e2m3-plain-floor", "mxfp6_e2m3", "torchao-casts", TORCHAO),
    Case("torchao-mxfp6-e3m2-plain-floor", "mxfp6_e3m2", "torchao-casts", TORCHAO),
    Case("torchao-mxfp8-plain-floor", "mxfp8", "torchao-casts", TORCHAO),
    Case("torchao-mxfp8-plain-rceil", "mxfp8", "torchao", TORCHAO),
    Case("torchao-nvfp4-plain", "nvfp4", "torchao", TORCHAO, tensor_scale="._weight_per_tensor_scale"),
    Case("torchao-nvfp4-plain-onelevel", "e2m1:e4m3:1x16", "torchao", TORCHAO),
    Case("llama64-quark-mxfp4wo", "mxfp4", "quark", PLAIN, source="llama64-original/model", tensors=14),
    Case("llama64-quark-mxfp6e2m3", "mxfp6_e2m3", "quark", PLAIN, source="llama64-original/model", tensors=14),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.file}-{c.dialect}")
def test_bytes_equal_the_producers(case: Case) -> None:
    theirs = load_file(FILES / case.file / "model.safetensors")
    weights = load_file(FILES / f"{case.source}.safetensors")
    scheme = resolve(case.format, Rules(dialect=case.dialect, scale_rounding=case.scale_rounding))
    compared = 0
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        scale_name = module + case.codes.replace("qdata", "scale").replace("weight_packed", "weight_scale")
        scale_name = scale_name if case.codes != PLAIN else f"{module}.weight_scale"
        if module + case.codes not in theirs or scale_name not in theirs:
            continue
        ours = cpu.quantize(weight.view(torch.uint16).numpy(), "BF16", scheme)
        codes = _bytes(theirs[module + case.codes])
        unpacked = codes.size == weight.numel() and scheme.format.element.bits < 8
        assert np.array_equal(codes, (cpu.unpack(ours) if unpacked else ours.packed).reshape(-1)), name
        scales = theirs[scale_name]
        scales = scales.float() if scales.dtype == torch.bfloat16 else scales
        assert np.array_equal(_bytes(scales), ours.scales.reshape(-1).view(np.uint8)), name
        if case.tensor_scale:
            scalar = theirs[module + case.tensor_scale].item()
            assert scalar == (ours.tensor_encode if case.encodes else ours.tensor_scale), name
        compared += 1
    assert compared == case.tensors


def test_gguf_bytes() -> None:
    """GGUF's MXFP4 layout: per 32 values a scale byte, then 16 bytes with elements j and j + 16 as nibbles."""
    theirs, weights = load_file(FILES / "gguf-mxfp4" / "model.safetensors"), load_file(FILES / "toy.safetensors")
    scheme = resolve("mxfp4", Rules(dialect="gguf"))
    for name in ("fc1.weight", "fc2.weight"):
        rows = theirs[name].numpy().reshape(-1, 17)
        ours = cpu.quantize(weights[name].view(torch.uint16).numpy(), "BF16", scheme)
        codes = cpu.unpack(ours).reshape(-1, 32)
        assert np.array_equal(rows[:, 0], ours.scales.reshape(-1))
        assert np.array_equal(rows[:, 1:], codes[:, :16] | codes[:, 16:] << 4)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
