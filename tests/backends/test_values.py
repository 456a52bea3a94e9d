"""Quantizing and dequantizing in one pass: bit for bit the values of two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_oracle import DTYPES, SPELLED, format_rules, scheme_of
from kernel_samples import SAMPLES, log_uniform, nonfinite, normal
from same_results import GPU, needs_cxx, same_bytes
from slow_cases import slow_except

from mxcli.backends import cpu
from mxcli.backends.cpu import Cpu
from mxcli.backends.cuda import Cuda
from mxcli.errors import RefusedError, UsageError
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.scheme import Scheme

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ONE_THREAD = Cpu(threads=1)
PLACES = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "F64": np.float64}


def stored(x: Array, dtype: str) -> Array:
    """Return values as backends take them in a type."""
    with np.errstate(over="ignore"):
        kept = x.astype(DTYPES[dtype])
    return kept.view(np.uint16) if dtype == "BF16" else kept


def two_passes(x: Array, dtype: str, scheme: Scheme, to: str, **options: Any) -> Array:
    q = cpu.quantize(x, dtype, scheme, stats=False, threads=1, **options)
    return cpu.dequantize(q, to, 1)


def assert_equals_two_passes(x: Array, dtype: str, scheme: Scheme, to: str | None = None, **options: Any) -> None:
    kind = to or ("F32" if dtype == "F64" else dtype)
    wanted = two_passes(x, dtype, scheme, kind, **options)
    out = None if to is None else np.empty(x.shape, PLACES[to])
    given = ONE_THREAD.quantize_dequantize(x, dtype, scheme, out=out, **options)
    case = f"{scheme.format.name} {scheme.scale_rule.name} {scheme.rounding.name} {scheme.nonfinite} {dtype} {kind}"
    assert same_bytes(given, wanted), case
    assert out is None or given is out


def schemes(name: str, rule: str) -> Iterator[Scheme]:
    for rounding in ELEMENT_ROUNDINGS:
        for policy in ("saturate", "nan-block"):
            yield scheme_of(name, rule, rounding=rounding, nonfinite=policy)


DEFAULT = [(name, scheme_of(name).scale_rule.name) for name in (*FORMATS, *SPELLED)]


@pytest.mark.parametrize(("name", "rule"), slow_except(DEFAULT, format_rules()))
def test_every_format_rule_rounding_and_type(name: str, rule: str) -> None:
    """On ragged rows of normal, tiny, huge, subnormal, zero and non-finite values; in place too."""
    for scheme in schemes(name, rule):
        for x in SAMPLES.values():
            assert_equals_two_passes(x, "F32", scheme, stream=1)
            bits = stored(x, "BF16")
            wanted = two_passes(bits, "BF16", scheme, "BF16", stream=1)
            assert ONE_THREAD.quantize_dequantize(bits, "BF16", scheme, stream=1, out=bits) is bits
            assert same_bytes(bits, wanted)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxint8", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128"])
def test_every_pair_of_types(name: str) -> None:
    for dtype in DTYPES:
        for to in DTYPES:
            for x in (SAMPLES["wide range"], SAMPLES["nonfinite"], SAMPLES["subnormal"]):
                assert_equals_two_passes(stored(x, dtype), dtype, scheme_of(name), to)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "name", ["mxfp8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_channel", "e5m2:e8m0:1x7", "int8:fp32:1x600"]
)
def test_a_transform_is_undone(name: str, size: int) -> None:
    """Also where blocks cut its groups, and rows several spans."""
    for rounding in ("nearest-even", "stochastic"):
        scheme = scheme_of(name, hadamard=find_hadamard(size), rounding=rounding)
        for x in (normal(3, 1408), log_uniform(-38, 38, 18, 128), nonfinite(7, 128)):
            for dtype in ("F32", "BF16"):
                bits = stored(x, dtype)
                assert_equals_two_passes(bits, dtype, scheme, stream=3)
                wanted = two_passes(bits, dtype, scheme, dtype, stream=3)
                assert same_bytes(ONE_THREAD.quantize_dequantize(bits, dtype, scheme, stream=3, out=bits), wanted)


def test_values_of_an_example() -> None:
    """MXFP4 under floor has a scale of 1, so 7 saturates at 6; NVFP4 with an amax of 6 * 448 one of 1.125."""
    x = np.array([[1.0] * 8 + [7.0] * 8 + [-0.2] * 8 + [0.3] * 8], np.float32)
    mxfp4 = ONE_THREAD.quantize_dequantize(x, "F32", scheme_of("mxfp4", "floor"))
    assert mxfp4.tolist() == [[1.0] * 8 + [6.0] * 8 + [-0.0] * 8 + [0.5] * 8]
    assert np.signbit(mxfp4[0, 16:24]).all()
    nvfp4 = ONE_THREAD.quantize_dequantize(x[:, :16], "F32", scheme_of("nvfp4"), tensor_amax=2688.0)
    assert nvfp4.tolist() == [[1.125] * 8 + [6.75] * 8]
    x[0, 3] = np.nan
    assert np.isnan(ONE_THREAD.quantize_dequantize(x, "F32", scheme_of("mxfp4"))).all()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"])
def test_given_amaxes(name: str) -> None:
    for amax in (3.0, 1e-3, 1e30, None):
        assert_equals_two_passes(normal(33, 200), "F32", scheme_of(name), tensor_amax=amax)
        assert_equals_two_passes(nonfinite(7, 70), "F32", scheme_of(name), tensor_amax=amax)


@pytest.mark.parametrize(
    "name", ["mxfp8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128", "e2m1:e8m0:1x1024"]
)
def test_threads_do_not_change_values(name: str) -> None:
    x = stored(normal(3, 150, 1040), "BF16")
    for options in ({}, {"rounding": "stochastic"}, {"hadamard": find_hadamard(16)}):
        scheme = scheme_of(name, **options)
        wanted = ONE_THREAD.quantize_dequantize(x, "BF16", scheme, stream=1)
        assert same_bytes(wanted, two_passes(x, "BF16", scheme, "BF16", stream=1))
        for threads in (2, 5):
            own = x.copy()
            assert same_bytes(Cpu(threads).quantize_dequantize(own, "BF16", scheme, stream=1, out=own), wanted)


def test_where_values_go() -> None:
    """To `out`, or a copy of it where a kernel may not write: strided, or a view of the same memory further on."""
    scheme, x = scheme_of("mxfp4"), normal(4, 64)
    wanted = two_passes(x, "F32", scheme, "F32")
    memory = np.zeros((5, 64), np.float32)
    memory[:4] = x
    assert same_bytes(ONE_THREAD.quantize_dequantize(memory[:4], "F32", scheme, out=memory[1:]), wanted)
    turned = np.empty((64, 4), np.float32)
    assert np.array_equal(ONE_THREAD.quantize_dequantize(x, "F32", scheme, out=turned.T), wanted)
    assert np.array_equal(turned.T, wanted)
    same = x.copy()
    halves = same.view(np.float16)[:, :64]
    assert np.array_equal(ONE_THREAD.quantize_dequantize(same, "F32", scheme, out=halves), wanted.astype(np.float16))
    strided = np.ascontiguousarray(x.T).T
    assert ONE_THREAD.quantize_dequantize(strided, "F32", scheme, out=strided) is strided
    assert np.array_equal(strided, wanted)


def test_values_that_have_no_place_are_refused() -> None:
    x = normal(2, 32)
    for out in (np.empty((2, 32), np.int32), np.empty((2, 31), np.float32), np.empty((2, 32), ">f4")):
        with pytest.raises(UsageError, match=r"values of shape \[2, 32\] do not go into an array of "):
            ONE_THREAD.quantize_dequantize(x, "F32", scheme_of("mxfp8"), out=out)
    fixed = x.copy()
    fixed.flags.writeable = False
    with pytest.raises(UsageError, match="pass a writable one of float32, uint16, float16, float64"):
        ONE_THREAD.quantize_dequantize(x, "F32", scheme_of("mxfp8"), out=fixed)
    with pytest.raises(UsageError, match="type I8 is not one the kernel reads"):
        ONE_THREAD.quantize_dequantize(x, "I8", scheme_of("mxfp8"))
    with pytest.raises(RefusedError, match="a length of 40 does not divide into groups of 16"):
        ONE_THREAD.quantize_dequantize(normal(2, 40), "F32", scheme_of("mxfp8", hadamard=find_hadamard(16)))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,), (), (1,), (2, 0, 16)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128"])
def test_empty_and_tiny_tensors(name: str, shape: tuple[int, ...]) -> None:
    x = np.full(shape, 2.5, np.float32)
    assert_equals_two_passes(x, "F32", scheme_of(name))


# --- GPUs --------------------------------------------------------------------------------------------------

ON_GPU = ["mxfp8", "mxfp4", "mxint8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_128x128", "e2m1:fp32:1x32"]


@needs_cxx
@pytest.mark.parametrize("name", slow_except(["mxfp8", "nvfp4", "fp8_e4m3_128x128"], ON_GPU))
def test_gpus_have_the_same_values(name: str) -> None:
    """Codes are not made where a kernel holds what it needs; in place, and in other types."""
    for options in ({}, {"rounding": "stochastic", "seed": 3}, {"nonfinite": "nan-block"}):
        scheme = scheme_of(name, **options)
        for x in (normal(5, 70), SAMPLES["wide range"], SAMPLES["nonfinite"], normal(2, 40, 96)):
            bits = stored(x, "BF16")
            wanted = ONE_THREAD.quantize_dequantize(bits, "BF16", scheme, stream=2)
            assert same_bytes(GPU.quantize_dequantize(bits, "BF16", scheme, stream=2), wanted)
            assert same_bytes(GPU.quantize_dequantize(bits, "BF16", scheme, stream=2, out=bits), wanted)


@needs_cxx
@pytest.mark.parametrize(
    ("name", "size"),
    slow_except([("mxfp4", 16)], [(n, s) for n in ("mxfp4", "mxfp8", "nvfp4", "fp8_e4m3") for s in (16, 32, 64, 128)]),
)
def test_gpus_undo_transforms(name: str, size: int) -> None:
    scheme = scheme_of(name, hadamard=find_hadamard(size))
    for x in (normal(5, 128), normal(3, 384)):
        wanted = ONE_THREAD.quantize_dequantize(x, "F32", scheme)
        assert same_bytes(GPU.quantize_dequantize(x, "F32", scheme), wanted)


@needs_cxx
@pytest.mark.parametrize("name", slow_except(["nvfp4"], ["nvfp4", "fp8_e4m3", "nvfp4_2d"]))
def test_pieces_on_a_gpu(name: str) -> None:
    """A tensor that goes through in pieces, in place, with the amax given and found; into another type."""
    from processor_device import ProcessorDevice

    gpu, x = Cuda(ProcessorDevice(), piece_bytes=1 << 12), stored(normal(300, 64), "BF16")
    for amax in (None, 2.0):
        wanted = ONE_THREAD.quantize_dequantize(x, "BF16", scheme_of(name), tensor_amax=amax)
        own = x.copy()
        assert same_bytes(gpu.quantize_dequantize(own, "BF16", scheme_of(name), tensor_amax=amax, out=own), wanted)
    wider = np.empty(x.shape, np.float32)
    gpu.quantize_dequantize(x, "BF16", scheme_of(name), out=wider)
    assert same_bytes(wider, two_passes(x, "BF16", scheme_of(name), "F32"))


@needs_cxx
def test_one_launch_for_values() -> None:
    from processor_device import ProcessorDevice

    device, x = ProcessorDevice(), stored(normal(5, 70), "BF16")
    Cuda(device).quantize_dequantize(x, "BF16", scheme_of("mxfp8"))
    (launch,) = device.launches
    assert launch.kernel.name == "mx_quantize_rows"
    assert dict(launch.kernel.definitions)["MX_TARGET"] == "1"
    Cuda(two := ProcessorDevice()).quantize_dequantize(
        stored(normal(32, 64), "BF16"), "BF16", scheme_of("nvfp4_2d", hadamard=find_hadamard(16))
    )
    assert [each.kernel.name for each in two.launches][-1] == "mx_dequantize"


@needs_cxx
@pytest.mark.parametrize("name", slow_except(["mxfp8", "nvfp4"], ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128"]))
def test_tensors_on_a_gpu(name: str) -> None:
    torch = pytest.importorskip("torch")
    from processor_device import StreamDevice

    from mxcli.backends.device_tensors import DeviceTensors

    there, scheme = DeviceTensors(StreamDevice()), scheme_of(name)
    x = torch.from_numpy(stored(normal(5, 70), "BF16"))
    for amax in (None, 3.0):
        wanted = ONE_THREAD.quantize_dequantize(x.numpy(), "BF16", scheme, tensor_amax=amax)
        given = there.quantize_dequantize(x, "BF16", scheme, tensor_amax=amax)
        assert (given.dtype, same_bytes(given.numpy(), wanted)) == (torch.uint16, True)
        own = x.clone()
        assert there.quantize_dequantize(own, "BF16", scheme, tensor_amax=amax, out=own) is own
        assert same_bytes(own.numpy(), wanted)
    turned = torch.empty((70, 5), dtype=torch.float32).T
    there.quantize_dequantize(x, "BF16", scheme, out=turned)
    assert np.array_equal(turned.numpy(), two_passes(x.numpy(), "BF16", scheme, "F32"))
    with pytest.raises(UsageError, match=r"values of shape \[5, 70\] do not go into a tensor of torch.int32"):
        there.quantize_dequantize(x, "BF16", scheme, out=torch.empty((5, 70), dtype=torch.int32))
    assert there.quantize_dequantize(x[:0], "BF16", scheme).shape == (0, 70)
