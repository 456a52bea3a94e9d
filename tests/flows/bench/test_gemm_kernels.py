"""Products: what each computes is the product of its operands, and libraries take the arguments that it gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from mxcli.errors import EnvironmentFailure, UsageError
from mxcli.flows.bench.gemm import _deviation, refuse_unmet
from mxcli.flows.bench.gemm_kernels import BLACKWELL, GEMM_KERNELS, GemmKernel, named_kernels
from mxcli.flows.bench.gemm_operands import Engine, open_engine

torch = pytest.importorskip("torch")
HERE = [row for row in GEMM_KERNELS.values() if row.capability is None]
SCALED = [row for row in GEMM_KERNELS.values() if row.arithmetic != "bf16"]


@pytest.fixture
def engine() -> Engine:
    return open_engine("cpu")


def operands(m: int, n: int, k: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, k, generator=generator).to(torch.bfloat16) for rows in (m, n))


@pytest.mark.parametrize("shape", [(64, 128, 256), (17, 48, 96), (1, 16, 32), (5, 7, 11)], ids=str)
@pytest.mark.parametrize("kernel", HERE, ids=lambda row: row.name)
def test_a_product_is_that_of_its_operands(engine: Engine, kernel: GemmKernel, shape: tuple[int, int, int]) -> None:
    if kernel.misfit(shape):
        assert "is not a multiple of" in str(kernel.misfit(shape))
        return
    a, b = operands(*shape)
    product = kernel.prepare(kernel, engine, a, b)
    d = product.call()
    assert (d.dtype, tuple(d.shape)) == (torch.bfloat16, shape[:2])
    values_a, values_b = (x.double() for x in product.values())
    assert _deviation(d, values_a, values_b) < 1
    assert _deviation(d * 1.02, values_a, values_b) > 1  # 2 % is no accumulation error


def test_what_is_folded_into_fp8_is_the_same_product(engine: Engine) -> None:
    a, b = operands(32, 64, 512)
    for format in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"):
        folded, emulated = GEMM_KERNELS[f"{format}-as-fp8-row"], GEMM_KERNELS[f"{format}-emulated"]
        product = folded.prepare(folded, engine, a, b)
        assert product.inexact == 0
        theirs = emulated.prepare(emulated, engine, a, b).values()
        assert all(torch.equal(x, y) for x, y in zip(product.values(), theirs, strict=True))


def test_what_folding_rounds_is_counted(engine: Engine) -> None:
    a, b = operands(4, 16, 64)
    b[:, 32:] *= 2.0**-20  # block exponents further apart than E4M3 reaches
    kernel = GEMM_KERNELS["mxfp4-as-fp8-row"]
    product = kernel.prepare(kernel, engine, a, b)
    assert product.inexact is not None
    assert product.inexact > 300
    values_a, values_b = (x.double() for x in product.values())
    assert _deviation(product.call(), values_a, values_b) < 1  # it is still the product of what it says it is


@pytest.mark.parametrize("shape", [(128, 256, 512), (256, 128, 128), (640, 384, 1280)], ids=str)
@pytest.mark.parametrize("kernel", SCALED, ids=lambda row: row.name)
def test_torch_takes_the_arguments_for_a_gpu(engine: Engine, kernel: GemmKernel, shape: tuple[int, int, int]) -> None:
    """The library's own checks of types, shapes, strides and swizzles, on tensors that claim to be on a GPU."""
    if kernel.name == "mxfp4":
        pytest.skip("torch's check counts packed bytes for MXFP4; only a GPU's library says what it takes")
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, b = operands(*shape)
    call = kernel.prepare(kernel, engine, a, b).call
    assert isinstance(call, partial)
    with FakeTensorMode(allow_non_fake_inputs=True):

        def there(value: Any) -> Any:
            if isinstance(value, list):
                return [there(each) for each in value]
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

        d = call.func(*map(there, call.args), **call.keywords)
    assert tuple(d.shape) == shape[:2]


def test_needs_that_are_not_met_are_reported(engine: Engine) -> None:
    assert GEMM_KERNELS["bf16"].unmet(engine) is None
    assert GEMM_KERNELS["mxfp8"].unmet(engine) == ("needs a GPU of compute capability 10.0 or later; this is the CPU")
    hopper, blackwell = (Engine("cuda:0", engine.backend, capability) for capability in ((9, 0), BLACKWELL))
    assert GEMM_KERNELS["nvfp4"].unmet(hopper) == ("needs a GPU of compute capability 10.0 or later; cuda:0 has 9.0")
    assert GEMM_KERNELS["fp8-1x128-1x128"].unmet(hopper) is None
    assert GEMM_KERNELS["nvfp4"].unmet(blackwell) is None
    with pytest.raises(EnvironmentFailure, match=r"mxfp8: needs a GPU.*; nvfp4: needs a GPU"):
        refuse_unmet(engine, [GEMM_KERNELS["mxfp8"], GEMM_KERNELS["bf16"], GEMM_KERNELS["nvfp4"]])


def test_rows_by_name() -> None:
    assert [row.name for row in named_kernels(["nvfp4-emulated"])] == ["bf16", "nvfp4-emulated"]
    assert len(named_kernels([])) == len(GEMM_KERNELS)
    with pytest.raises(UsageError, match=r"unknown product a, b: known are bf16"):
        named_kernels(["a", "b"])
