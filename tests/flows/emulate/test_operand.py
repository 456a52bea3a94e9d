"""Operands are those of `mxcli.quantize` and `dequantize`, bit for bit, in any format, rule and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mxcli
from mxcli.backends.cpu import Cpu
from mxcli.flows.emulate.operand import Devices, is_exact_in_bfloat16, product_dtype, quantized
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Rules, resolve, rules_from, scale_rules
from mxcli.numerics.streams import stream_of

DEVICES = Devices(threads=1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(rows: int = 40, columns: int = 96) -> torch.Tensor:
    """Values of many binades, with zeros, subnormals of bfloat16 and its largest values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-9, 9, (rows, 1), generator=generator)
    x[0], x[1], x[2] = 0.0, x[1] * 2.0**-125, x[2].sign() * torch.finfo(torch.bfloat16).max
    x[3], x[4] = x[3] * 2.0**-133, x[4] * 2.0**118
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same values, the sign of zeros and NaN included."""
    return torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_rule(format: str, dtype: torch.dtype) -> None:
    x = drawn().to(dtype)
    for rule in scale_rules(FORMATS[format]):
        for rounding in (
            ("nearest-even", "stochastic") if rule == scale_rules(FORMATS[format])[0] else ("nearest-even",)
        ):
            rules: Any = {"scale_rounding": rule, "rounding": rounding}
            expected: Any = mxcli.quantize(x, format, **rules).dequantize()
            found = quantized(x, resolve(format, Rules(**rules)), DEVICES, torch.float32)
            assert same(found, torch.as_tensor(expected)), rule


@pytest.mark.parametrize("options", [{"hadamard": 16}, {"dialect": "modelopt"}, {"nonfinite": "nan-block"}], ids=str)
def test_other_rules(options: dict[str, Any]) -> None:
    x = drawn()[5:]
    x[7, 7] = float("inf") if "nonfinite" in options else 1.0
    for format in ("nvfp4", "mxfp8"):
        expected: Any = mxcli.quantize(x, format, **options).dequantize()
        scheme = resolve(format, rules_from(options))
        assert same(quantized(x, scheme, DEVICES, torch.float32), torch.as_tensor(expected))


EXACT = [name for name in FORMATS if name.startswith("mx")] + [
    *("e3m2:e8m0:1x16", "e2m5:e8m0:1x32", "e4m3:e8m0:32x32", "e1m2:e8m0:1x8")
]


@pytest.mark.parametrize("format", EXACT)
def test_products_in_bfloat16_have_exact_operands(format: str) -> None:
    """Wherever products of bfloat16 are computed in it, no value of an operand is rounded."""
    x = drawn().to(torch.bfloat16)
    for rule in scale_rules(resolve(format).format):
        scheme = resolve(format, Rules(scale_rounding=rule))
        narrow, wide = (quantized(x, scheme, DEVICES, dtype) for dtype in (torch.bfloat16, torch.float32))
        assert narrow.dtype == torch.bfloat16
        assert is_exact_in_bfloat16(scheme)
        assert same(narrow, wide), rule


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in EXACT])
def test_other_operands_are_not_exact_in_bfloat16(format: str) -> None:
    scheme, x = resolve(format), torch.randn(128, 128).to(torch.bfloat16)
    narrow, wide = (quantized(x, scheme, DEVICES, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert not is_exact_in_bfloat16(scheme)
    assert not same(narrow, wide)
    assert same(narrow, wide.to(torch.bfloat16))


def test_dtypes_of_products() -> None:
    mx, nv = resolve("mxfp4"), resolve("nvfp4")
    bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    assert product_dtype(bf16, (mx, mx)) == bf16
    assert product_dtype(bf16, (None, mx)) == bf16
    assert product_dtype(bf16, (mx, nv)) == f32
    assert product_dtype(bf16, (None, resolve("mxfp8", rules_from({"hadamard": 32})))) == f32
    assert product_dtype(f16, (mx, mx)) == f32
    assert product_dtype(f32, (mx, mx)) == f32
    assert product_dtype(f64, (nv, nv)) == f64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_has_the_stream_of_its_name(dtype: torch.dtype) -> None:
    """Weights that are rounded stochastically are those that a quantized checkpoint has."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(dtype)
    with mxcli.emulate(model, format="mxfp4", activations="none", rounding="stochastic", seed=7):
        found = model(torch.eye(64, dtype=dtype)).T
    weight = model[0].weight.detach()
    bits = weight.view(torch.uint16) if dtype == torch.bfloat16 else weight
    scheme = resolve("mxfp4", Rules(rounding="stochastic", seed=7))
    q = Cpu(1).quantize(
        bits.numpy(), {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype], scheme, stream=stream_of("0.weight")
    )
    assert torch.equal(found.float(), torch.from_numpy(Cpu(1).dequantize(q)))
