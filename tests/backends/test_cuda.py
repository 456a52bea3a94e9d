"""GPU kernels and launches produce the CPU's codes, scales and statistics, bit for bit.

No GPU is needed: `tests/gpu/cuda_on_cpu.py` emulates the kernels on the CPU, thread by thread.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_oracle import CHANNELS, DTYPES, SPELLED, default_rules, format_rules, scheme_of
from kernel_samples import SAMPLES, log_uniform, nonfinite, normal
from processor_device import ProcessorDevice
from same_results import CPU, GPU, Array, assert_same, first_difference, measure_and_quantize, needs_cxx, same_bytes
from slow_cases import slow_except

from mxcli.backends.cuda import Cuda
from mxcli.errors import UsageError
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.stats import Amax

pytestmark = needs_cxx

KINDS = (
    *("mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4_2d"),
    *("fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_1x128", "fp8_e4m3_128x128"),
)
"""Formats that cover every mapping of a tensor to threads."""
PARTED = ("mxfp8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e5m2_channel", "fp8_e4m3_128x128")

# --- Formats, rules, roundings, dialects -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule"), slow_except([*default_rules(), ("mxfp4_e2m1", "best")], format_rules(tuple(FORMATS)))
)
def test_every_named_format_rule_and_rounding(name: str, rule: str) -> None:
    for x in SAMPLES.values():
        measure_and_quantize(x, scheme_of(name, rule))
    for rounding in list(ELEMENT_ROUNDINGS)[1:]:
        scheme = scheme_of(name, rule, rounding=rounding)
        for x in SAMPLES.values():
            assert_same(x, scheme, stats=False)
        assert_same(SAMPLES["ties"], scheme)
    assert_same(SAMPLES["nonfinite"], scheme_of(name, rule, nonfinite="nan-block"), per_block=True)


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["int8:e8m0:tensor", "e5m2:e8m0:1x7", "e2m3:e8m0:channel"],
        [*SPELLED, *CHANNELS],
    ),
)
def test_every_spelled_format(name: str) -> None:
    for sample in ("normal", "wide range", "nonfinite", "mostly zero"):
        measure_and_quantize(SAMPLES[sample], scheme_of(name))


@pytest.mark.parametrize(
    ("name", "rule"),
    slow_except(
        [("e4m3:e8m0:1x64", "best"), ("e4m3:e8m0:tensor", "best"), ("e2m1:e8m0:8x4", "best")],
        [
            ("e4m3:e8m0:1x1", None),
            ("e4m3:e8m0:1x3", None),
            ("e4m3:e8m0:1x24", None),
            ("e4m3:e8m0:1x24", "best"),
            ("e4m3:e8m0:1x64", "best"),
            ("e4m3:e8m0:1x512", "floor"),
            ("e4m3:e8m0:1x1024", "best"),
            ("e4m3:e8m0:128x128", "best"),
            ("e4m3:e8m0:tensor", "best"),
            ("e4m3:e8m0:channel", "best"),
            ("e2m1:e8m0:8x4", "best"),
            ("e2m1:e4m3:16x16:fp32", "vllm"),
            ("e3m2:e4m3:1x128:fp32", "te"),
            ("e2m1:e8m0:channel", "even"),
            ("e3m2:e8m0:channel", "best"),
        ],
    ),
)
def test_block_shapes(name: str, rule: str | None) -> None:
    many = name.split(":")[2] in ("8x4", "1x1", "1x3")  # more blocks than threads
    for x in (normal(9, 40 if many else 1100, seed=4), nonfinite(7, 70), SAMPLES["ties"]):
        measure_and_quantize(x, scheme_of(name, rule))


@pytest.mark.parametrize("dialect", slow_except(["torchao", "modelopt", "microxcaling"], tuple(DIALECTS)))
def test_every_dialect(dialect: str) -> None:
    count = 0
    for name in FORMATS:
        try:
            scheme = scheme_of(name, dialect=dialect)
        except UsageError:  # test_kernel.py checks which and why
            continue
        for sample in ("normal", "subnormal", "nonfinite", "ties", "mostly zero"):
            assert_same(SAMPLES[sample], scheme, stats=False)
        measure_and_quantize(SAMPLES["rows of every size"], scheme)
        measure_and_quantize(SAMPLES["zero"], scheme)
        count += 1
    assert count > 0


# --- Types and shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_except(
        [("mxfp8", "BF16")],
        [
            (name, dtype)
            for name in ("mxfp8", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128")
            for dtype in ("BF16", "F16", "F64")
        ],
    ),
)
def test_every_source_type(name: str, dtype: str) -> None:
    for sample in ("normal", "wide range", "rows of every size", "nonfinite"):
        with np.errstate(over="ignore"):
            measure_and_quantize(SAMPLES[sample].astype(DTYPES[dtype]), scheme_of(name))
    measure_and_quantize(normal(3, 71).astype(DTYPES[dtype]), scheme_of(name))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_all_values_of_16_bit_types(dtype: str) -> None:
    measure_and_quantize(np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype]).reshape(-1, 32), scheme_of("mxfp8"))


SHAPES = [(), (1,), (45,), (1, 1), (3, 31), (3, 33), (2, 17, 40), (2, 1, 3, 40), (2, 130, 1), (17, 130), (300, 8)]


@pytest.mark.parametrize("name", slow_except(["mxfp6", "nvfp4", "nvfp4_2d", "fp8_e4m3"], KINDS))
def test_every_shape(name: str) -> None:
    scheme = scheme_of(name)
    for shape in SHAPES:
        measure_and_quantize(np.asarray(normal(*shape), np.float32).reshape(shape), scheme)
    for shape in ((3, 1100), (3, 5000)):
        x = normal(*shape)
        x[1, shape[1] - 5], x[0, 2] = 300, -70
        measure_and_quantize(x, scheme)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"])
def test_row_longer_than_a_chunk(name: str) -> None:
    x = normal(1, 70_000)
    x[0, 69_999] = 900
    measure_and_quantize(x, scheme_of(name))


@pytest.mark.parametrize("name", KINDS)
def test_empty_tensors(name: str) -> None:
    for shape in ((0,), (0, 32), (5, 0), (2, 0, 32)):
        q = assert_same(np.zeros(shape, np.float32), scheme_of(name), per_block=True)
        assert same_bytes(GPU.dequantize(q), np.zeros(shape, np.float32))


def test_strided_arrays() -> None:
    x = normal(64, 96)
    for view in (x.T, x[::2], x[:, ::3], x[::-1], x.reshape(-1)[1:-31].reshape(-1, 32)):
        measure_and_quantize(view, scheme_of("mxfp4"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_except(
        [("mxfp8", "F32"), ("nvfp4", "F32"), ("fp8_e4m3", "F32"), ("mxfp8", "BF16")],
        [
            (name, dtype)
            for name in ("mxfp8", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128")
            for dtype in ("F32", "BF16", "F64")
        ],
    ),
)
def test_unaligned_memory(name: str, dtype: str) -> None:
    """Tensors that start one element after an aligned address."""
    gpu = Cuda(ProcessorDevice(shift=1))
    for x in (normal(3, 64), SAMPLES["nonfinite"]):
        x = x.astype(DTYPES[dtype])
        measure_and_quantize(x, scheme_of(name), gpu)
        q = assert_same(x, scheme_of(name), gpu, stats=False)
        assert same_bytes(gpu.dequantize(q, dtype), CPU.dequantize(q, dtype))


# --- Pieces and orders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    slow_except(
        [("mxfp8", (300, 551)), ("nvfp4", (3, 130, 200)), ("fp8_e4m3", (300, 551))],
        [(name, shape) for name in PARTED for shape in ((300, 551), (3, 130, 200))],
    ),
    ids=str,
)
def test_pieces(name: str, shape: tuple[int, ...]) -> None:
    """Pieces of one chunk, of several, and the whole tensor."""
    x = normal(*shape)
    x.reshape(-1)[[-7, 70_000]] = 900, np.nan
    counts = set()
    for piece_bytes in (1, 300_000, 64 << 20):
        device = ProcessorDevice()
        measure_and_quantize(x, scheme_of(name), Cuda(device, piece_bytes=piece_bytes))
        counts.add(sum(launch.kernel.name.startswith("mx_quantize") for launch in device.launches))
    assert len(counts) > 1
    assert min(counts) == 1


@pytest.mark.parametrize("rule", ["floor", "best"])
@pytest.mark.parametrize("name", slow_except(["e4m3:e8m0:tensor"], ["e4m3:e8m0:tensor", "e2m1:e8m0:tensor"]))
def test_per_tensor_scale_in_pieces(name: str, rule: str) -> None:
    """Rule `best` needs the whole tensor at once."""
    measure_and_quantize(normal(300, 551), scheme_of(name, rule), Cuda(ProcessorDevice(), piece_bytes=1 << 16))


def test_noisiest_blocks_of_many_pieces() -> None:
    """More blocks than one thread block reduces, with ties."""
    x = np.tile(normal(1_000, 7), (5, 1))
    q = assert_same(x, scheme_of("e4m3:e8m0:1x7"), Cuda(ProcessorDevice(), piece_bytes=1 << 14), per_block=True)
    assert q.stats is not None
    noise, blocks = zip(*q.stats.worst, strict=True)
    assert len(set(noise)) == 2
    assert [block % 1_000 for block in blocks] == [blocks[0]] * 5 + [blocks[5]] * 3


@pytest.mark.parametrize(
    ("name", "order"),
    slow_except(
        [
            *((name, "shuffle:1") for name in ("mxfp8", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_1x128")),
            *((name, "descending") for name in ("nvfp4", "fp8_e4m3_128x128")),
        ],
        [(name, order) for name in KINDS for order in ("descending", "shuffle:1")],
    ),
)
def test_thread_order(name: str, order: str) -> None:
    gpu = Cuda(ProcessorDevice(order=order))
    for x in (SAMPLES["normal"], SAMPLES["nonfinite"], SAMPLES["mostly zero"], normal(300, 8)):
        measure_and_quantize(x, scheme_of(name), gpu)
    assert gpu.amax(SAMPLES["nonfinite"], "F32") == CPU.amax(SAMPLES["nonfinite"], "F32")
    if name == "mxfp8":
        measure_and_quantize(SAMPLES["ties"], scheme_of(name, "best"), gpu)
        measure_and_quantize(SAMPLES["ties"], scheme_of("e4m3:e8m0:tensor", "best"), gpu)


# --- Options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_statistics_without_codes(name: str) -> None:
    for x in (SAMPLES["normal"], SAMPLES["nonfinite"], normal(2, 17, 40)):
        q = assert_same(x, scheme_of(name), codes=False, per_block=True)
        assert (q.packed.size, q.scales.size) == (0, 0)
        assert_same(x, scheme_of(name), codes=False)


def test_neither_codes_nor_statistics() -> None:
    for name in ("mxfp8", "nvfp4", "fp8_e4m3"):
        q = assert_same(SAMPLES["normal"], scheme_of(name), codes=False, stats=False)
        assert q.stats is None


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d"])
def test_shared_tensor_scale(name: str) -> None:
    for amax in (0.0, 0.25, 4.0, 1000.0):
        assert_same(SAMPLES["normal"], scheme_of(name), tensor_amax=amax, stats=False)
        assert_same(SAMPLES["nonfinite"], scheme_of(name), tensor_amax=amax)
    assert_same(SAMPLES["normal"], scheme_of("fp8_e4m3"), tensor_amax=1000.0)


def test_reused_arrays() -> None:
    scheme, (first, second) = scheme_of("mxfp8"), (normal(3, 64), normal(3, 64, seed=5))
    old = assert_same(first, scheme, stats=False)
    new = GPU.quantize(second, "F32", scheme, reuse=old)
    assert new.packed is old.packed
    assert new.scales is old.scales
    assert same_bytes(new.packed, CPU.quantize(second, "F32", scheme).packed)
    other = assert_same(normal(2, 64), scheme)
    assert GPU.quantize(first, "F32", scheme, reuse=other).packed is not other.packed


# --- Values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_except(
        [
            *((name, dtype) for name in (*FORMATS, *SPELLED) for dtype in ("F32", "BF16")),
            *((name, dtype) for name in ("mxfp4_e2m1", "nvfp4", "nvfp4_2d") for dtype in ("F16", "F64")),
        ],
        [(name, dtype) for name in (*FORMATS, *SPELLED) for dtype in DTYPES],
    ),
)
def test_dequantized(name: str, dtype: str) -> None:
    x = np.concatenate([SAMPLES["normal"], SAMPLES["wide range"], SAMPLES["nonfinite"][:3], normal(6, 70) * 3e4])
    for each in (x, normal(2, 17, 41)):
        q = CPU.quantize(each, "F32", scheme_of(name, nonfinite="nan-block"))
        given, wanted = (backend.dequantize(q, dtype) for backend in (GPU, CPU))
        assert same_bytes(given, wanted), first_difference(given, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_dequantized_in_pieces(name: str) -> None:
    for shape in ((300, 551), (3, 130, 200)):
        q = CPU.quantize(normal(*shape), "F32", scheme_of(name))
        device = ProcessorDevice()
        assert same_bytes(Cuda(device, piece_bytes=70_000).dequantize(q), CPU.dequantize(q))
        assert len(device.launches) > 1


def test_values_outside_binary16() -> None:
    q = CPU.quantize(log_uniform(-9, 9, 8, 64), "F32", scheme_of("mxfp8"))
    y = GPU.dequantize(q, "F16")
    assert same_bytes(y, CPU.dequantize(q, "F16"))
    assert np.isinf(y).any()
    assert (np.abs(y) < 2.0**-14).any()


# --- Amax --------------------------------------------------------------------------------------------------


def amax(x: Array, piece_bytes: int = 64 << 20) -> Amax:
    dtype = next(name for name, kind in DTYPES.items() if kind == x.dtype)
    array = x.view(np.uint16) if dtype == "BF16" else x
    found = Cuda(ProcessorDevice(), piece_bytes=piece_bytes).amax(array, dtype)
    with np.errstate(over="ignore"):
        assert found == CPU.amax(array, dtype)
    return found


def test_first_nonfinite() -> None:
    x = normal(1, 40_000)
    x[0, 39_000] = -12.5
    assert amax(x) == Amax(12.5, 0, -1)
    for places in ((0,), (39_999,), (5_000, 4_999, 30_000), (16_383, 16_384), (20_001, 39_999)):
        y = x.copy()
        y[0, places] = [np.nan, -np.inf, np.inf][: len(places)]
        for piece_bytes in (4 * 999, 1 << 16, 64 << 20):
            assert amax(y, piece_bytes) == Amax(12.5, len(places), min(places))


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_of_every_type(dtype: str) -> None:
    for sample in SAMPLES.values():
        with np.errstate(over="ignore"):
            amax(sample.astype(DTYPES[dtype]))
    assert amax(np.array([2, -3, np.nan, np.inf, 1]).astype(DTYPES[dtype])) == Amax(3.0, 2, 2)
    assert amax(np.full(5, -np.inf).astype(DTYPES[dtype])) == Amax(0.0, 5, 0)
    assert amax(np.zeros((0, 3)).astype(DTYPES[dtype])) == Amax(0.0, 0, -1)


def test_binary64_above_binary32_is_infinite() -> None:
    assert amax(np.array([1.0, 1e300, -2.0])) == Amax(2.0, 1, 1)


# --- Stochastic rounding, transforms, given amax -----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    slow_except([*KINDS, "int8:e8m0:1x32"], [*KINDS, "e4m3:e8m0:1x24", "e2m1:fp32:tensor", "int8:e8m0:1x32"]),
)
def test_stochastic_rounding(name: str) -> None:
    """Whole vectors, parts of four, and rows that start between two Philox calls."""
    scheme = scheme_of(name, rounding="stochastic", seed=7)
    for x in (normal(9, 70), nonfinite(7, 70), SAMPLES["mostly zero"], SAMPLES["wide range"], normal(2, 3, 512)):
        assert_same(x, scheme, stats=False, stream=3)
        assert_same(x, scheme, per_block=True, stream=3)


@pytest.mark.parametrize(
    ("name", "size"),
    slow_except(
        [("mxfp8", 16), ("nvfp4_2d", 16)],
        [
            *((name, 16) for name in KINDS),
            *(("nvfp4", size) for size in (32, 64, 128)),
            *(("mxfp8", 128), ("fp8_e4m3_1x128", 64), ("e4m3:e8m0:1x24", 32), ("nvfp4_2d", 128)),
        ],
    ),
)
def test_hadamard_transforms(name: str, size: int) -> None:
    """Groups larger and smaller than blocks and than a thread's elements."""
    for rounding in ("nearest-even", "stochastic"):
        scheme = scheme_of(name, rounding=rounding, hadamard=find_hadamard(size, 5))
        x = normal(2, 3, 640) if rounding == "nearest-even" else nonfinite(7, 256)
        for each in (x, x.astype(DTYPES["BF16"])) if (name, size) == ("nvfp4", 16) else (x,):
            q = assert_same(each, scheme, stats=False)
            assert_same(each, scheme, per_block=True)
            for dtype in ("F32",) if size != 16 else ("F32", "BF16"):
                given, wanted = GPU.dequantize(q, dtype), CPU.dequantize(q, dtype)
                assert same_bytes(given, wanted), first_difference(given, wanted)


@pytest.mark.parametrize("size", slow_except([16], [16, 128]))
def test_amax_of_transformed_values(size: int) -> None:
    for x in (normal(5, 256), nonfinite(7, 128)):
        assert GPU.amax(x, "F32", find_hadamard(size)) == CPU.amax(x, "F32", find_hadamard(size))


@pytest.mark.parametrize("amax", [0.0, 0.5, 448.0, 1e30])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "e4m3:e8m0:tensor"])
def test_given_amax(name: str, amax: float) -> None:
    for x in (normal(40, 70), nonfinite(7, 128), np.zeros((3, 5), np.float32)):
        assert_same(x, scheme_of(name), tensor_amax=amax, stats=False)
        assert_same(x, scheme_of(name), tensor_amax=amax, per_block=True)
