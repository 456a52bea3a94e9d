"""Quantizing and dequantizing in one pass: the function for tensors and arrays, and the operator of torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxcli
from mxcli.errors import RefusedError, UsageError

torch = pytest.importorskip("torch")

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture(scope="module")
def operator() -> Any:
    import mxcli.torch_operator

    assert mxcli.torch_operator.quantize_dequantize is not None
    return torch.ops.mxcli.quantize_dequantize


def same(given: Any, wanted: Any) -> bool:
    """Compare types, shapes and bits."""
    return given.dtype == wanted.dtype and given.shape == wanted.shape and bits(given) == bits(wanted)


def bits(x: Any) -> bytes:
    return bytes(x.detach().contiguous().view(torch.uint8).numpy().tobytes())


RULES: list[tuple[str, dict[str, Any]]] = [
    ("mxfp8", {}),
    ("mxfp4", {"scale_rounding": "floor", "rounding": "half-away"}),
    ("nvfp4", {"rounding": "stochastic", "seed": 7, "hadamard": 16}),
    ("fp8_e4m3_128x128", {"nonfinite": "nan-block"}),
    ("fp8_e5m2_channel", {"threads": 1}),
]


@pytest.mark.parametrize(("name", "rules"), RULES)
@pytest.mark.parametrize("axis", ["row", "column"])
def test_values_equal_those_of_two_steps(name: str, rules: dict[str, Any], axis: str) -> None:
    """In the kind and type of the input, in place, and in another type."""
    for dtype in TYPES:
        x = normal(2, 48, 80, dtype=dtype)
        two = mxcli.quantize(x, name, axis=axis, **rules).dequantize()
        wanted = two.to(dtype).contiguous()
        assert same(mxcli.quantize_dequantize(x, name, axis=axis, **rules), wanted)
        wider = torch.empty(x.shape)
        assert mxcli.quantize_dequantize(x, name, axis=axis, out=wider, **rules) is wider
        assert same(wider, two.contiguous())
        assert mxcli.quantize_dequantize(x, name, axis=axis, out=x, **rules) is x
        assert same(x, wanted)


def test_numpy_arrays_give_numpy_arrays() -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64, ">f4"):
        x = np.random.default_rng(0).standard_normal((3, 70)).astype(dtype)
        given = mxcli.quantize_dequantize(x, "nvfp4")
        wanted = np.asarray(mxcli.quantize(x, "nvfp4").dequantize()).astype(x.dtype.newbyteorder("="))
        assert (type(given), given.dtype) == (np.ndarray, wanted.dtype)
        assert given.tobytes() == wanted.tobytes()
    x = np.ones((4, 64), ml_dtypes.bfloat16)
    assert mxcli.quantize_dequantize(x, "mxfp8", out=x) is x
    assert x.tolist() == [[1.0] * 64] * 4


def test_strided_tensors_and_versions() -> None:
    x = normal(64, 32)
    wanted = mxcli.quantize(x.T, "mxfp8").dequantize()
    assert same(mxcli.quantize_dequantize(x.T, "mxfp8"), wanted)
    version = x._version
    mxcli.quantize_dequantize(x.T, "mxfp8", out=x.T)
    assert same(x.T.contiguous(), wanted)
    assert x._version > version


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        (torch.empty(2, 33), "out has shape [2, 33], the values [2, 32]"),
        (np.empty((2, 32), np.float32), "out is a ndarray for values of a Tensor: pass one of the same kind"),
        (torch.empty(2, 32, dtype=torch.int32), "out is a tensor of int32 on cpu: pass one of float32, bfloat16, "),
        (torch.empty(2, 32, requires_grad=True), "and needs no gradient, such as out.detach()"),
        (torch._neg_view(torch.empty(2, 32)), "that is not a negated view"),
        (torch.empty(2, 32, device="meta"), "a tensor on meta"),
        ([[1.0] * 32] * 2, "out is a list for values of a Tensor: pass one of the same kind"),
    ],
)
def test_places_that_take_no_values_are_refused(out: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        mxcli.quantize_dequantize(normal(2, 32), "mxfp8", out=out)
    assert sentence in str(refused.value)


def test_arrays_that_take_no_values_are_refused() -> None:
    x = np.ones((2, 32), np.float32)
    fixed = x.copy()
    fixed.flags.writeable = False
    for out in (fixed, np.empty((2, 32), ">f4"), np.empty((2, 32), np.int8)):
        with pytest.raises(UsageError, match="pass a writable one of float32, bfloat16, float16, float64"):
            mxcli.quantize_dequantize(x, "mxfp8", out=out)


def test_policies_are_those_of_quantize() -> None:
    x = normal(2, 40)
    with pytest.raises(UsageError, match=r"axis 'both' makes two tensors: call mxcli\.quantize_dequantize for each"):
        mxcli.quantize_dequantize(x, "mxfp8", axis="both")
    with pytest.raises(RefusedError, match=r"shape \[2, 40\] does not divide into blocks of 1x32"):
        mxcli.quantize_dequantize(x, "mxfp8", on_indivisible="error")
    x[1, 3] = torch.nan
    with pytest.raises(RefusedError, match=r"1 of 80 values are NaN or infinite, the first at \[1, 3\]"):
        mxcli.quantize_dequantize(x, "mxfp8", nonfinite="error")
    assert mxcli.quantize_dequantize(x, "mxfp8").isnan().sum() == 32


# --- The operator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rules"), [rule for rule in RULES if "threads" not in rule[1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_the_function(operator: Any, name: str, rules: dict[str, Any], dtype: Any) -> None:
    x = normal(48, 80, dtype=dtype)
    assert same(operator(x, name, **rules), mxcli.quantize_dequantize(x, name, **rules))
    column = operator(x, name, "column", **rules)
    assert same(column, mxcli.quantize_dequantize(x, name, axis="column", **rules))


def test_torch_finds_nothing_wrong(operator: Any) -> None:
    found = torch.library.opcheck(operator, (normal(4, 48).requires_grad_(), "nvfp4"), {"straight_through": True})
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"straight_through": True}, {"axis": "column", "rounding": "stochastic"}])
def test_torch_finds_nothing_wrong_with_types_strides_and_options(operator: Any, options: dict[str, Any]) -> None:
    for x in (normal(4, 64, dtype=torch.bfloat16), normal(4, 48, dtype=torch.float64), normal(2, 32, 64).mT):
        for given in (x, x.clone().requires_grad_()):
            found = torch.library.opcheck(operator, (given, "nvfp4"), options)
            assert set(found.values()) == {"SUCCESS"}


def test_gradients_pass_straight_through_where_wanted(operator: Any) -> None:
    """Otherwise they are zero, as those of torch.round are."""
    weights = torch.arange(64.0).reshape(2, 32)
    for straight, wanted in ((True, weights), (False, torch.zeros(2, 32))):
        x = normal(2, 32).requires_grad_()
        (operator(x, "mxfp4", straight_through=straight) * weights).sum().backward()
        assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_are_whole(operator: Any, backend: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def layer(x: Any, w: Any) -> Any:
        inputs = operator(x * 2, "nvfp4", straight_through=True)
        return torch.nn.functional.linear(inputs, operator(w, "mxfp4", straight_through=True)) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    x, w = normal(8, 64), normal(16, 64).requires_grad_()
    given = compiled(x, w)
    assert torch.equal(given, layer(x, w))
    (found,) = torch.autograd.grad(given.sum(), w)
    (wanted,) = torch.autograd.grad(layer(x, w).sum(), w)
    assert torch.equal(found, wanted)
    assert (counter.frame_count, [str(node.target) for node in counter.graphs[0].graph.nodes].count(NODE)) == (1, 2)


NODE = "mxcli.quantize_dequantize"


@pytest.mark.slow
def test_the_operator_is_there_once_its_module_is() -> None:
    code = (
        "import mxcli, torch; mxcli.quantize; before = hasattr(torch.ops.mxcli, 'quantize_dequantize'); "
        "import mxcli.torch_operator; print(before, hasattr(torch.ops.mxcli, 'quantize_dequantize'))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
