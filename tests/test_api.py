"""`import mxcli` for notebooks: torch tensors and numpy arrays in, the same kind out, the golden bytes either way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

import mxcli
from mxcli import api
from mxcli.backends import gpus
from mxcli.errors import EnvironmentFailure, MxcliError, RefusedError, UsageError

GOLDEN = sorted(
    path
    for path in (Path(__file__).parent / "data" / "golden").glob("*__*.safetensors")
    if "_adaptive" not in path.stem
)
FORMATS = {"nvfp4_noglobal": "e2m1:e4m3:1x16", "nvfp4_2d16": "nvfp4_2d", "nvfp4": "nvfp4"}


def format_and_options(stem: str) -> tuple[str, dict[str, Any]]:
    """The options that a golden file's name states."""
    name, rule = stem.split("__")
    if name.startswith("fp8_"):
        return name if rule == "tensor" else f"{name}_{rule}", {}
    return FORMATS.get(name, name.removeprefix("mx_").removesuffix("_adaptive")), {"scale_rounding": rule}


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.stem)
def test_golden_vectors(file: Path) -> None:
    """Codes, scales and values of every case; codes of blocks whose scale is NaN are don't-care."""
    format, options = format_and_options(file.stem)
    with safe_open(file, "pt") as tensors:
        cases = json.loads(tensors.metadata()["json"])["cases"]
        assert cases
        for case in cases:
            q = mxcli.quantize(tensors.get_tensor(f"{case}.x"), format, **options)
            scales = tensors.get_tensor(f"{case}.scales")
            assert torch.equal(q.scales.view(torch.uint8), scales.view(torch.uint8)), case
            values, wanted = q.dequantize(), tensors.get_tensor(f"{case}.deq")
            assert torch.equal(values.nan_to_num(7.0), wanted.nan_to_num(7.0)), case
            finite = ~wanted.isnan()
            assert torch.equal(q.codes[finite], tensors.get_tensor(f"{case}.codes")[finite]), case


X = torch.linspace(-3, 3, 6 * 64).reshape(6, 64)


def test_what_a_quantized_tensor_says() -> None:
    q = mxcli.quantize(X, "nvfp4")
    assert (q.format.name, q.shape) == ("nvfp4", (6, 64))
    assert (q.codes.dtype, tuple(q.codes.shape)) == (torch.uint8, (6, 64))
    assert (q.packed.dtype, tuple(q.packed.shape)) == (torch.uint8, (6, 32))
    assert (q.scales.dtype, tuple(q.scales.shape)) == (torch.uint8, (6, 4))
    assert q.tensor_scale == pytest.approx(3 / 2688, rel=1e-6)
    assert torch.equal(q.packed, q.codes[:, 0::2] | q.codes[:, 1::2] << 4)
    assert (q.dequantize().dtype, q.dequantize().shape) == (torch.float32, X.shape)
    assert repr(q) == "QuantizedTensor(nvfp4, scale_rounding=te, shape=[6, 64])"
    assert mxcli.quantize(X, "mxfp8").tensor_scale is None
    assert mxcli.quantize(X, "fp8_e4m3_channel").scales.dtype == torch.float32


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x.numpy(),
        lambda x: x.numpy().astype(">f4"),
        lambda x: x.double(),
        lambda x: x.clone().requires_grad_(),
        lambda x: x.t().contiguous().t(),
        lambda x: x.numpy()[::-1][::-1],
    ],
    ids=["numpy", "big-endian", "float64", "requires-grad", "transposed", "negative-strides"],
)
def test_the_same_values_have_the_same_codes(given: Callable[[torch.Tensor], Any]) -> None:
    x = given(X)
    q = mxcli.quantize(x, "mxfp4")
    assert isinstance(q.codes, np.ndarray if isinstance(x, np.ndarray) else torch.Tensor)
    assert np.array_equal(np.asarray(q.codes), mxcli.quantize(X, "mxfp4").codes.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_widened_exactly(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    assert torch.equal(mxcli.quantize(x, "nvfp4").codes, mxcli.quantize(x.float(), "nvfp4").codes)


def test_bfloat16_arrays_of_numpy() -> None:
    x = X.to(torch.bfloat16)
    array = x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    assert np.array_equal(mxcli.quantize(array, "mxfp8").codes, mxcli.quantize(x, "mxfp8").codes.numpy())


def test_vectors_and_stacks() -> None:
    stack = torch.stack([X, 2 * X])
    q = mxcli.quantize(stack, "mxfp8")
    assert (tuple(q.codes.shape), tuple(q.scales.shape)) == ((2, 6, 64), (2, 6, 2))
    assert torch.equal(q.codes[0], q.codes[1])
    assert torch.equal(q.scales[1], q.scales[0] + 1)
    assert tuple(mxcli.quantize(X[0], "mxfp8").scales.shape) == (1, 2)
    assert tuple(mxcli.quantize(torch.empty(0, 32), "mxfp8").codes.shape) == (0, 32)


def test_the_ragged_end_is_padded_or_refused() -> None:
    q = mxcli.quantize(X[:, :50], "mxfp8")
    assert (tuple(q.codes.shape), tuple(q.scales.shape)) == ((6, 50), (6, 2))
    with pytest.raises(RefusedError, match=r"shape \[6, 50\] does not divide into blocks of 1x32 \(mxfp8_e4m3\)"):
        mxcli.quantize(X[:, :50], "mxfp8", on_indivisible="error")
    with pytest.raises(UsageError, match="on_indivisible 'keep' is neither pad nor error"):
        mxcli.quantize(X, "mxfp8", on_indivisible="keep")


def test_policies_for_what_is_not_finite() -> None:
    x = X.clone()
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    assert mxcli.quantize(x, "mxfp8").scales[1:3].tolist() == [[255, x_scale(1, 1)], [x_scale(2, 0), 254]]
    assert mxcli.quantize(x, "mxfp8", nonfinite="nan-block").scales[2].tolist() == [x_scale(2, 0), 255]
    with pytest.raises(RefusedError, match=r"2 of 384 values are NaN or infinite, the first at \[1, 3\]"):
        mxcli.quantize(x, "mxfp8", nonfinite="error")
    assert mxcli.measure(x, "mxfp8")["nonfinite"] == 2


def x_scale(row: int, block: int) -> int:
    """The scale of an untouched block."""
    return int(mxcli.quantize(X, "mxfp8").scales[row, block])


def test_measure_has_every_metric() -> None:
    from mxcli.numerics.metrics import METRICS

    values = mxcli.measure(X, "mxfp8", scale_rounding="floor")
    assert list(values) == list(METRICS)
    error = (mxcli.quantize(X, "mxfp8", scale_rounding="floor").dequantize() - X).double()
    assert values["mse"] == pytest.approx(float(error.square().mean()), rel=1e-5)
    assert values["max_abs_error"] == float(error.abs().max())
    assert (values["saturated"] or 0) > 0
    assert mxcli.measure(X, "mxfp8")["saturated"] == 0


def test_a_dialect_and_one_thread_do_what_they_say() -> None:
    assert mxcli.quantize(X, "mxfp8", dialect="ocp").scales.tolist() == (
        mxcli.quantize(X, "mxfp8", scale_rounding="floor", threads=1).scales.tolist()
    )


def test_swizzle_is_the_order_of_128x4_tiles() -> None:
    file = Path(__file__).parent / "data" / "golden" / "layout.safetensors"
    with safe_open(file, "pt") as tensors:
        cases = [name.removesuffix(".in") for name in tensors.keys() if name.startswith("swizzle")]  # noqa: SIM118
        cases = [case for case in cases if not case.endswith(".out")]
        assert cases
        for case in cases:
            given, wanted = tensors.get_tensor(f"{case}.in"), tensors.get_tensor(f"{case}.out")
            assert torch.equal(mxcli.swizzle(given), wanted.reshape(-1)), case
            assert np.array_equal(mxcli.swizzle(given.numpy()), wanted.numpy().reshape(-1)), case
    with pytest.raises(UsageError, match=r"scales of shape \[2\] .* needs two dimensions of bytes"):
        mxcli.swizzle(np.zeros(2, np.uint8))


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: mxcli.quantize([1.0], "mxfp8"), UsageError, "list is neither a torch tensor nor a numpy array"),
        (lambda: mxcli.quantize(X.int(), "mxfp8"), UsageError, "a tensor of type int32 is not one of float32"),
        (lambda: mxcli.quantize(X.numpy().astype("i8"), "mxfp8"), UsageError, "an array of type int64"),
        (lambda: mxcli.quantize(torch.tensor(1.0), "mxfp8"), UsageError, "without dimensions has no blocks"),
        (lambda: mxcli.quantize(X, "mxfp9"), UsageError, "Did you mean mxfp8"),
        (lambda: mxcli.quantize(X, "nvfp4", scale_rounding="rceil"), UsageError, "rceil does not serve nvfp4"),
        (lambda: mxcli.quantize(X, "mxfp8", nonfinite="ignore"), UsageError, "unknown policy 'ignore'"),
        (lambda: mxcli.quantize(X, "mxfp8", threads=0), UsageError, "--threads 0 is not a positive number"),
        (lambda: mxcli.quantize(X, "mxfp8", device="gpu"), UsageError, "unknown device 'gpu'"),
        (lambda: mxcli.quantize(X.to("meta"), "mxfp8"), UsageError, "a tensor on meta: only tensors in memory and on"),
        (lambda: mxcli.quantize(X.to_sparse(), "mxfp8"), UsageError, "pass x.to_dense()"),
        (lambda: mxcli.quantize(X, "mxfp8", device=0), UsageError, "device 0 is neither a word such as 'cuda:0'"),
        (lambda: mxcli.quantize(X, "mxfp8", device=""), UsageError, "unknown device ''"),
        (
            lambda: mxcli.quantize(X, "mxfp8", threads=1.5),
            UsageError,
            "threads 1.5: give a whole number from 1 to 1024",
        ),
        (lambda: mxcli.swizzle([1]), UsageError, "list is neither a torch tensor nor a numpy array"),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[MxcliError], sentence: str) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert sentence in str(refused.value)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = gpus.GpuState(None, (), None, None, ("there is no NVIDIA driver",))
    monkeypatch.setattr(gpus, "examine", lambda: nothing)
    api._backend.cache_clear()
    for call in (mxcli.quantize, mxcli.measure):
        with pytest.raises(EnvironmentFailure, match=r"--device cuda: there is no NVIDIA driver\. Or use --device cpu"):
            call(X, "mxfp8", device="cuda")


def test_the_names_are_the_documented_ones() -> None:
    assert dir(mxcli) == [
        "QuantizedTensor",
        "__version__",
        "capture",
        "emulate",
        "evaluate",
        "formats",
        "measure",
        "quantize",
        "quantize_both",
        "quantize_dequantize",
        "swizzle",
    ]
    assert [name for name in mxcli.formats if name.startswith("nv")] == ["nvfp4", "nvfp4_2d"]
    with pytest.raises(AttributeError, match="module 'mxcli' has no attribute 'quantise'"):
        _ = mxcli.quantise  # type: ignore[attr-defined]


# --- Axes, transforms, chance ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(mxcli.formats))
def test_columns_are_the_rows_of_the_transpose(name: str) -> None:
    """Bit for bit, for every format and rounding; values and codes come back in the input's shape."""
    x = torch.randn(3, 64, 160, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"rounding": "stochastic", "seed": 3}, {"hadamard": 32}):
        column = mxcli.quantize(x, name, axis="column", **options)
        turned = mxcli.quantize(x.mT.contiguous(), name, **options)
        assert torch.equal(column.packed, turned.packed)
        assert torch.equal(column.scales, turned.scales)
        assert (column.axis, column.shape, turned.shape) == ("column", (3, 64, 160), (3, 160, 64))
        assert torch.equal(column.codes, turned.codes.mT)
        assert torch.equal(column.dequantize(), turned.dequantize().mT)
        assert mxcli.measure(x, name, axis="column", **options) == mxcli.measure(x.mT, name, **options)


def test_both_axes() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    row, column = mxcli.quantize_both(x, "nvfp4", rounding="stochastic", seed=9)
    assert torch.equal(row.packed, mxcli.quantize(x, "nvfp4", rounding="stochastic", seed=9).packed)
    assert torch.equal(column.packed, mxcli.quantize(x.T, "nvfp4", rounding="stochastic", seed=9).packed)
    assert mxcli.measure(x, "mxfp8", axis="both") == {
        "row": mxcli.measure(x, "mxfp8"),
        "column": mxcli.measure(x.T, "mxfp8"),
    }
    with pytest.raises(UsageError, match=r"axis 'both' makes two tensors: call mxcli\.quantize_both"):
        mxcli.quantize(x, "nvfp4", axis="both")
    with pytest.raises(UsageError, match="axis 'rows' is none of row, column, both"):
        mxcli.quantize(x, "nvfp4", axis="rows")
    with pytest.raises(UsageError, match="a tensor of 1 dimensions has no columns"):
        mxcli.quantize(x[0], "nvfp4", axis="column")


def test_two_dimensional_blocks_have_one_set_of_codes_for_both_products() -> None:
    """NVFP4 in 16x16 tiles: along columns the same codes and scales, exchanged; scales repeat for products of rows."""
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    row, column = mxcli.quantize_both(w, "nvfp4_2d")
    assert torch.equal(row.codes, column.codes)
    assert torch.equal(row.scales, column.scales.T)
    assert torch.equal(row.dequantize(), column.dequantize())
    assert tuple(row.scales.shape) == (4, 6)
    assert tuple(row.row_scales.shape) == (64, 6)
    for at in range(64):
        assert torch.equal(row.row_scales[at], row.scales[at // 16])
    ragged = mxcli.quantize(w[:40], "nvfp4_2d")
    assert tuple(ragged.row_scales.shape) == (40, 6)
    plain = mxcli.quantize(w, "nvfp4")
    assert torch.equal(plain.row_scales, plain.scales)
    with pytest.raises(UsageError, match="fp8_e4m3 has no scales of single rows"):
        _ = mxcli.quantize(w, "fp8_e4m3").row_scales


def test_a_transform_is_undone_by_dequantizing() -> None:
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(4))
    for size in (16, 32, 64, 128):
        q = mxcli.quantize(x, "mxfp8", hadamard=size)
        assert (q.dequantize() - x).norm() < 0.04 * x.norm()
        assert not torch.equal(q.codes, mxcli.quantize(x, "mxfp8").codes)
    with pytest.raises(RefusedError, match="a length of 40 does not divide into groups of 16"):
        mxcli.quantize(x[:, :40], "mxfp8", hadamard=16)
    with pytest.raises(UsageError, match="a Hadamard transform of 8: --hadamard takes 16, 32, 64, 128"):
        mxcli.quantize(x, "mxfp8", hadamard=8)


def test_invalid_seeds_and_what_cannot_be_reencoded() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    for seed in (1.5, -1, "3", 2**32):
        with pytest.raises(UsageError, match="a seed is an integer from 0 to 4294967295"):
            mxcli.quantize(x, "mxfp4", rounding="stochastic", seed=seed)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a seed is an integer from 0"):
        mxcli.quantize(x, "mxfp4", hadamard=16, hadamard_seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="codes under a hadamard-16 transform: reencode a tensor without one"):
        mxcli.quantize(x, "mxfp4", hadamard=16).reencode("row")


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected keyword 'scale_rouding': rules are scale_rounding, rounding, "):
        mxcli.quantize(X, "mxfp8", scale_rouding="floor")  # type: ignore[call-arg]


# --- Values of other types ---------------------------------------------------------------------------------

SCALES = np.zeros((2, 2), np.uint8)
STRUCTURED = np.zeros((2, 32), [("a", "<f4"), ("b", "<f4")])


@pytest.mark.parametrize(
    "x",
    [
        None,
        [[1.0]],
        3.0,
        "mxfp8",
        X.bool(),
        X.long(),
        X.to(torch.complex64),
        X.to(torch.complex64).conj(),
        X.to("meta"),
        X.to_sparse(),
        X.to_sparse_csr(),
        torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([X[0], X[1, :32]]),
        X.to(torch.float8_e4m3fn),
        torch.tensor(1.0),
        np.float32(1),
        np.array(1.0),
        X.numpy().astype("O"),
        X.numpy().astype("c8"),
        X.numpy().astype("g"),
        X.numpy() > 0,
        X.numpy().astype("U4"),
        STRUCTURED,
        STRUCTURED.view(np.recarray),
        np.ma.masked_array(X.numpy(), X.numpy() > 0),
        np.ma.masked_array(X.numpy()),
        np.zeros((2, 2), "M8[s]"),
    ],
    ids=lambda x: f"{type(x).__name__}",
)
@pytest.mark.parametrize("axis", ["row", "column"])
def test_what_is_not_a_tensor_of_floats_is_refused(x: Any, axis: str) -> None:
    for call in (mxcli.quantize, mxcli.measure):
        with pytest.raises(UsageError):
            call(x, "mxfp8", axis=axis)
    with pytest.raises(UsageError):
        mxcli.quantize_both(x, "mxfp8")


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("format", None, "format None is neither a name such as 'mxfp8' nor a row of mxcli.formats"),
        ("format", 8, "format 8 is neither a name"),
        ("format", ["mxfp8"], "format ['mxfp8'] is neither a name"),
        ("format", "", "unknown format ''"),
        ("scale_rounding", 1, "scale_rounding 1 is not a name"),
        ("scale_rounding", ["floor"], "scale_rounding ['floor'] is not a name"),
        ("scale_rounding", "", "scale_rounding '' is not a name"),
        ("rounding", {}, "rounding {} is not a name"),
        ("rounding", b"nearest", "rounding b'nearest' is not a name"),
        ("dialect", 2.0, "dialect 2.0 is not a name"),
        ("nonfinite", None, "nonfinite None is not one of error, saturate, nan-block"),
        ("nonfinite", [], "nonfinite [] is not one of"),
        ("seed", True, "seed True: a seed is an integer from 0 to 4294967295"),
        ("seed", float("nan"), "seed nan: a seed is an integer"),
        ("seed", 10**40, "a seed is an integer from 0 to 4294967295"),
        ("seed", "1", "seed '1': a seed is an integer"),
        ("hadamard", "16", "hadamard '16': a Hadamard transform has 16, 32, 64 or 128 elements"),
        ("hadamard", 16.0, "hadamard 16.0: a Hadamard transform has"),
        ("hadamard", True, "hadamard True: a Hadamard transform has"),
        ("hadamard", [16], "hadamard [16]: a Hadamard transform has"),
        ("hadamard_seed", float("nan"), "hadamard_seed nan: a seed is an integer from 0"),
        ("axis", None, "axis None is none of row, column, both"),
        ("axis", 1, "axis 1 is none of row, column, both"),
        ("axis", ["row"], "axis ['row'] is none of row, column, both"),
        ("on_indivisible", None, "on_indivisible None is neither pad nor error"),
        (
            "on_indivisible",
            np.array(["pad", "error"]),
            "on_indivisible array(['pad', 'error'], dtype='<U5') is neither",
        ),
        ("threads", True, "threads True: give a whole number from 1 to 1024"),
        ("threads", "2", "threads '2': give a whole number from 1 to 1024"),
        ("threads", float("nan"), "threads nan: give a whole number from 1 to 1024"),
        ("threads", 10**30, "threads 1000000000000000000000000000000: give a whole number from 1 to 1024"),
        ("device", ["cpu"], "device ['cpu'] is neither a word such as 'cuda:0' nor a torch device"),
    ],
)
def test_options_of_another_type_are_named(option: str, value: object, sentence: str) -> None:
    for call in (mxcli.quantize, mxcli.measure, mxcli.quantize_both):
        if option == "axis" and call is mxcli.quantize_both:
            continue
        options: dict[str, Any] = {"format": "mxfp8", option: value}
        with pytest.raises(UsageError) as refused:
            call(X, **options)
        assert sentence in str(refused.value)


def test_integers_of_numpy_are_integers() -> None:
    seeded = mxcli.quantize(X, "mxfp4", rounding="stochastic", seed=np.int64(3), threads=np.int32(1))  # type: ignore[arg-type]
    assert torch.equal(seeded.codes, mxcli.quantize(X, "mxfp4", rounding="stochastic", seed=3).codes)


def test_other_views_of_the_same_values_have_the_same_codes() -> None:
    codes = mxcli.quantize(X, "mxfp8").codes
    negated = torch._neg_view(-X)
    assert negated.is_neg()
    given = [negated, nn_parameter(X), X.numpy().view(np.matrix), X.to(torch.float64), X.expand(1, 6, 64)[0]]
    assert all(np.array_equal(np.asarray(mxcli.quantize(x, "mxfp8").codes), codes.numpy()) for x in given)


def nn_parameter(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(x.clone())


@pytest.mark.parametrize(
    ("scales", "sentence"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), "a tensor of type int64 is not one of uint8, float8_e8m0fnu, "),
        (torch.zeros(2, 2), "a tensor of type float32 is not one of uint8"),
        (torch.zeros(2, 2, dtype=torch.bool), "a tensor of type bool is not one of uint8"),
        (torch.zeros(2, 2, dtype=torch.int8), "a tensor of type int8 is not one of uint8"),
        (torch.zeros(2, 2, dtype=torch.complex64), "a tensor of type complex64 is not one of uint8"),
        (torch.zeros(2, 2, dtype=torch.uint8).to("meta"), "a tensor on meta"),
        (torch.zeros(2, 2, dtype=torch.uint8).to_sparse(), "a tensor of layout torch.sparse_coo: pass x.to_dense()"),
        (torch.zeros(4, dtype=torch.uint8), "scales of shape [4] and type uint8: needs two dimensions of bytes"),
        (np.zeros((2, 2), "S1"), "an array of type bytes8 is not one of uint8"),
        (np.zeros((2, 2), "?"), "an array of type bool is not one of uint8"),
        (np.zeros((2, 2), "<i8"), "an array of type int64 is not one of uint8"),
        (np.zeros((2, 2), "O"), "an array of type object is not one of uint8"),
        (np.zeros((), "u1"), "scales of shape [] and type uint8: needs two dimensions of bytes"),
        (np.ma.masked_array(SCALES, SCALES == 0), "a masked array: masks are not known here"),
        (None, "NoneType is neither a torch tensor nor a numpy array"),
        ([[1]], "list is neither a torch tensor nor a numpy array"),
    ],
)
def test_scales_that_are_not_bytes_are_refused(scales: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        mxcli.swizzle(scales)
    assert sentence in str(refused.value)


def test_scales_of_any_strides_and_type_of_one_byte_are_swizzled() -> None:
    scales = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    wanted = mxcli.swizzle(scales)
    for name in ("float8_e8m0fnu", "float8_e4m3fn"):
        assert torch.equal(mxcli.swizzle(scales.view(getattr(torch, name))), wanted)
        assert np.array_equal(mxcli.swizzle(scales.numpy().view(getattr(ml_dtypes, name))), wanted.numpy())
    assert torch.equal(mxcli.swizzle(scales.T.contiguous().T), wanted)
    assert np.array_equal(mxcli.swizzle(scales.numpy()[::-1][::-1]), wanted.numpy())
    assert mxcli.swizzle(scales[:0]).numel() == 0


def test_float64_beyond_binary32_is_named_as_such() -> None:
    x = X.double()
    x[1, 3], x[4, 4] = 1e300, -3.5e38
    for given in (x, x.numpy()):
        with pytest.raises(
            RefusedError, match=r"^2 of 384 values are beyond binary32's range \(3.4e38\), the first at \[1, 3\]: pass"
        ):
            mxcli.quantize(given, "mxfp8", nonfinite="error")
        with pytest.warns(UserWarning, match="2 of 384 values are beyond binary32's range .* they count as infinite"):
            mxcli.quantize(given, "mxfp8")
    x[0, 0] = torch.nan
    with pytest.raises(RefusedError, match=r"3 of 384 values are NaN or infinite, .*; 2 of them are beyond binary32's"):
        mxcli.measure(x, "mxfp8", nonfinite="error")
    largest = torch.full((1, 32), 3.4028235677973366e38, dtype=torch.float64)
    with pytest.warns(UserWarning, match="32 of 32 values are beyond"):
        mxcli.quantize(largest, "mxfp8")
    assert mxcli.quantize(torch.nextafter(largest, -largest), "mxfp8", nonfinite="error").scales.tolist() == [[247]]


def test_what_a_reencoding_is_called() -> None:
    for target in (None, 1, ["row"]):
        with pytest.raises(UsageError, match="is not a name such as 'row'"):
            mxcli.quantize(X, "mxfp8").reencode(target)  # type: ignore[arg-type]
