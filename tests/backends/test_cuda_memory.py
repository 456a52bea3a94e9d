"""Small, full or limited GPU memory: the same bytes, or an error with the requested bytes."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_oracle import DTYPES, scheme_of
from kernel_samples import normal
from processor_device import Memory, ProcessorDevice
from same_results import CPU, Array, assert_same, bits, needs_cxx, quantize, same_bytes
from slow_cases import slow_except

from mxcli.backends.cuda import Cuda
from mxcli.errors import EnvironmentFailure, UsageError

pytestmark = needs_cxx

X = normal(300, 551)
"""661,200 bytes; three chunks of most formats."""


class FullOnce(ProcessorDevice):
    """Memory that runs out once, after `left` more buffers, as if another process had taken it."""

    left, taken = -1, 0

    def take(self, nbytes: int, shift: int) -> Memory:
        self.left, self.taken = self.left - 1, self.taken + 1
        if self.left == -1:
            raise EnvironmentFailure(f"out of memory: {nbytes:,} bytes requested")
        return super().take(nbytes, shift)


# --- Memory that runs out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except(["nvfp4"], ["mxfp8", "nvfp4", "fp8_e4m3"]))
def test_next_call_works_wherever_memory_ran_out(name: str) -> None:
    """A failed call frees its memory and leaves reused arrays intact."""
    device, scheme = FullOnce(), scheme_of(name)
    gpu = Cuda(device, piece_bytes=1)
    held, wanted = quantize(gpu, -2 * X, scheme), quantize(CPU, X, scheme)
    buffers, device.taken = device.taken, 0
    assert buffers > 10
    for number in range(buffers):
        device.left = number
        with pytest.raises(EnvironmentFailure, match=r"^out of memory: [0-9,]+ bytes requested$"):
            quantize(gpu, X, scheme, reuse=held)
        assert device.used == 0
        after = quantize(Cuda(device), X, scheme, stats=False, reuse=held)
        assert after.packed is held.packed
        assert same_bytes(after.packed, wanted.packed)
        assert same_bytes(after.scales, wanted.scales)


def test_error_reports_requested_bytes() -> None:
    device, scheme = FullOnce(), scheme_of("mxfp8")
    gpu = Cuda(device)
    for buffers, nbytes in ((0, "24"), (2, "661,200"), (3, "165,300"), (4, "5,400")):
        device.left = buffers
        with pytest.raises(EnvironmentFailure, match=rf"^out of memory: {nbytes} bytes requested$"):
            quantize(gpu, X, scheme, stats=False)
    for buffers, nbytes in ((0, "24"), (2, "661,200")):
        device.left = buffers
        with pytest.raises(EnvironmentFailure, match=rf"^out of memory: {nbytes} bytes requested$"):
            gpu.amax(X, "F32")
    q = assert_same(X, scheme, gpu, stats=False)
    for buffers, nbytes in ((0, "165,300"), (1, "5,400"), (2, "330,600")):
        device.left = buffers
        with pytest.raises(EnvironmentFailure, match=rf"^out of memory: {nbytes} bytes requested$"):
            gpu.dequantize(q, "BF16")
    assert same_bytes(gpu.dequantize(q, "BF16"), CPU.dequantize(q, "BF16"))
    assert gpu.amax(X, "F32") == CPU.amax(X, "F32")


# --- Limits ------------------------------------------------------------------------------------------------


def test_limit_too_low() -> None:
    """MXFP8 codes and per-block numbers need less than binary32: twice 661,200 bytes for each of two queues."""
    words = (
        r"^cuda:0: {} bytes of its memory may be used and {} are needed; end what else uses it, raise --max-memory, "
    )
    gpu, scheme = Cuda(ProcessorDevice(), max_memory=1_000), scheme_of("mxfp8")
    with pytest.raises(EnvironmentFailure, match=words.format("1,000", "2,644,800")):
        quantize(gpu, X, scheme)
    with pytest.raises(EnvironmentFailure, match=words.format("1,000", "1,322,400")):
        gpu.amax(X, "F32")
    with pytest.raises(EnvironmentFailure, match=words.format("1,000", "2,644,800")):
        gpu.dequantize(quantize(CPU, X, scheme))
    with pytest.raises(EnvironmentFailure, match=words.format("900", "2,644,800")):
        quantize(Cuda(ProcessorDevice(memory=1_000)), X, scheme)
    assert_same(normal(1, 32), scheme, gpu, stats=False)


def test_limit_just_high_enough() -> None:
    device, scheme = ProcessorDevice(), scheme_of("mxfp8")
    with pytest.raises(EnvironmentFailure, match="2,644,799 bytes of its memory may be used and 2,644,800 are needed"):
        quantize(Cuda(device, max_memory=2_644_799), X, scheme)
    gpu = Cuda(device, max_memory=2_644_800)
    assert_same(X, scheme, gpu, per_block=True)
    q = assert_same(X, scheme, gpu, stats=False)
    assert same_bytes(gpu.dequantize(q), CPU.dequantize(q))
    assert gpu.amax(X, "F32") == CPU.amax(X, "F32")
    assert device.most_used <= 2_644_800


@pytest.mark.parametrize(
    ("name", "growth"),
    slow_except(
        [("nvfp4", 3), ("fp8_e4m3_128x128", 2), ("e4m3:fp32:1x4", 5)],
        [
            *(("mxfp4", 3), ("nvfp4", 3), ("fp8_e4m3", 2), ("fp8_e4m3_128x128", 2)),
            *(("e4m3:fp32:1x4", 5), ("e4m3:fp32:1x1", 16)),
        ],
    ),
)
def test_tensor_larger_than_the_limit(name: str, growth: int) -> None:
    """A limit of two 1 MiB pieces and their results."""
    x = normal(1_100 if growth < 4 else 600, 2_048).astype(DTYPES["BF16"])
    device, limit = ProcessorDevice(), growth * 2 << 20
    gpu = Cuda(device, max_memory=limit)
    many = growth > 4  # many blocks: skip statistics, which take seconds
    assert_same(x, scheme_of(name), gpu, stats=not many, per_block=not many)
    launches = [
        launch for launch in device.launches if "_rows" in launch.kernel.file or "_blocks" in launch.kernel.file
    ]
    assert len(launches) > 1
    assert device.most_used <= limit


def test_tensor_larger_than_the_memory() -> None:
    x = normal(2_500, 1_000)
    for name in ("mxfp8", "nvfp4", "fp8_e5m2"):
        device = ProcessorDevice(memory=9_400_000)
        assert x.nbytes > device.memory
        assert_same(x, scheme_of(name), Cuda(device), stats=name == "mxfp8")
        q = quantize(CPU, x, scheme_of(name), stats=False)
        assert same_bytes(Cuda(device).dequantize(q), CPU.dequantize(q))
        assert Cuda(device).amax(x, "F32") == CPU.amax(x, "F32")


def test_whole_tensor_does_not_fit() -> None:
    """Rule `best` with a per-tensor scale needs the whole tensor."""
    device = ProcessorDevice(memory=9_400_000)
    x = normal(2_500, 1_000)
    with pytest.raises(EnvironmentFailure, match=r"^out of memory: 10,000,000 bytes requested$"):
        quantize(Cuda(device), x, scheme_of("e4m3:e8m0:tensor", "best"))
    assert device.used == 0
    assert_same(X[:20], scheme_of("e4m3:e8m0:tensor", "best"), Cuda(device))


# --- Types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [np.zeros(4, np.uint8), np.zeros(0, np.uint8)])
def test_unsupported_types(x: Array) -> None:
    gpu, scheme = Cuda(ProcessorDevice()), scheme_of("mxfp8")
    for backend in (gpu, CPU):
        with pytest.raises(UsageError, match=r"^type F8_E4M3 is not one the kernel reads: F32, BF16, F16, F64$"):
            backend.quantize(x, "F8_E4M3", scheme)
        with pytest.raises(UsageError, match=r"^type F8_E4M3 is not one the kernel reads: F32, BF16, F16, F64$"):
            backend.amax(x, "F8_E4M3")
        q = backend.quantize(*bits(x.astype(np.float32)), scheme)
        with pytest.raises(UsageError, match=r"^dequantized type I8 is not one of F32, BF16, F16, F64$"):
            backend.dequantize(q, "I8")
