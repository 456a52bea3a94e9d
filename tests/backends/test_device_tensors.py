"""torch tensors on a device; the emulated device uses the CPU's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_samples import nonfinite, normal
from processor_device import StreamDevice
from same_results import needs_cxx, stats_that_differ
from slow_cases import slow_except

from mxcli.backends import cpu
from mxcli.backends.device_tensors import DeviceTensors, unpack
from mxcli.errors import UsageError
from mxcli.files import packing
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules, resolve

torch = pytest.importorskip("torch")
pytestmark = needs_cxx


CPU = cpu.Cpu()
FORMATS = ("mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e5m2_128x128")


def bf16(x: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(x).bfloat16().view(torch.uint16)


@pytest.mark.parametrize("name", slow_except(["mxfp8", "nvfp4"], FORMATS))
def test_results_equal_the_cpus(name: str) -> None:
    scheme, x = resolve(name), bf16(normal(33, 76))
    there, here = DeviceTensors(StreamDevice()), cpu.quantize(x.numpy(), "BF16", scheme)
    q = there.quantize(x, "BF16", scheme, stats=False)
    assert q.packed.numpy().tobytes() == here.packed.tobytes()
    assert q.scales.numpy().tobytes() == here.scales.tobytes()
    assert (q.tensor_scale, q.tensor_encode, q.shape) == (here.tensor_scale, here.tensor_encode, (33, 76))
    assert unpack(q).numpy().tobytes() == cpu.unpack(here).tobytes()
    for dtype in ("F32", "BF16", "F16", "F64"):
        assert there.dequantize(q, dtype).numpy().tobytes() == cpu.dequantize(here, dtype).tobytes()
    measured = there.quantize(x, "BF16", scheme, codes=False)
    assert measured.stats is not None
    assert here.stats is not None
    assert stats_that_differ(measured.stats, here.stats) == []


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (130, 160), (128, 128), (257, 4096)])
@pytest.mark.parametrize("name", slow_except(["mxfp8", "nvfp4"], ["mxfp8", "mxfp4", "nvfp4"]))
def test_swizzled_scales(name: str, rows: int, columns: int) -> None:
    """Scales in the 128x4 layout of block-scaled matrix products, padded with zeros."""
    scheme, x = resolve(name), bf16(normal(rows, columns))
    q = DeviceTensors(StreamDevice()).quantize(x, "BF16", scheme, stats=False, swizzled=True)
    here = cpu.quantize(x.numpy(), "BF16", scheme)
    assert q.scales.numpy().tobytes() == packing.swizzle(here.scales).tobytes()
    assert q.packed.numpy().tobytes() == here.packed.tobytes()


def test_scales_that_cannot_be_swizzled() -> None:
    there = DeviceTensors(StreamDevice())
    with pytest.raises(UsageError, match=r"scales of shape \[4, 1\] \(fp32\)"):
        there.quantize(bf16(normal(4, 128)), "BF16", resolve("fp8_e4m3_1x128"), stats=False, swizzled=True)
    with pytest.raises(UsageError, match=r"scales of shape \[2, 4, 1\]"):
        there.quantize(bf16(normal(2, 4, 32)), "BF16", resolve("mxfp8"), stats=False, swizzled=True)


def test_amax_counts_nonfinite_elements() -> None:
    x = nonfinite(7, 70)
    found = DeviceTensors(StreamDevice()).amax(torch.from_numpy(x), "F32")
    assert found == cpu.amax(x, "F32")
    assert found.first_nonfinite == 73


def test_shared_tensor_scale() -> None:
    scheme, x = resolve("nvfp4"), bf16(normal(4, 64))
    q = DeviceTensors(StreamDevice()).quantize(x, "BF16", scheme, stats=False, tensor_amax=100.0)
    here = cpu.quantize(x.numpy(), "BF16", scheme, tensor_amax=100.0)
    assert (q.packed.numpy().tobytes(), q.tensor_scale) == (here.packed.tobytes(), here.tensor_scale)


def test_empty_tensor() -> None:
    there = DeviceTensors(StreamDevice())
    x = torch.empty((0, 64), dtype=torch.float32)
    q = there.quantize(x, "F32", resolve("mxfp8"), stats=False)
    assert (tuple(q.packed.shape), tuple(q.scales.shape)) == ((0, 64), (0, 2))
    assert tuple(there.dequantize(q).shape) == (0, 64)
    assert there.amax(x, "F32").value == 0.0


def test_unsupported_requests() -> None:
    there, x = DeviceTensors(StreamDevice()), bf16(normal(2, 32))
    with pytest.raises(UsageError, match="either quantized or measured"):
        there.quantize(x, "BF16", resolve("mxfp8"))
    with pytest.raises(UsageError, match="dequantized type I8 is not one of F32, BF16, F16, F64"):
        there.dequantize(there.quantize(x, "BF16", resolve("mxfp8"), stats=False), "I8")


BOTH = ("mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_1x128", "e4m3:e8m0:1x64")


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_except([("mxfp8", "F32"), ("nvfp4_2d", "F32")], [(name, dtype) for name in BOTH for dtype in ("F32", "BF16")]),
)
def test_both_axes_equal_tensor_and_transpose(name: str, dtype: str) -> None:
    """For ragged edges, batches and all roundings."""
    there = DeviceTensors(StreamDevice())
    for options in ({}, {"rounding": "stochastic", "seed": 3}, {"hadamard": find_hadamard(16)}):
        scheme = resolve(name, Rules(**options))
        for shape in ((64, 128), (2, 48, 80), (130, 208)):
            if "hadamard" in options and (shape[-2] % 16 or shape[-1] % 16):
                continue
            x = normal(*shape) if dtype == "F32" else bf16(normal(*shape)).numpy()
            given = there.quantize_both(torch.from_numpy(x), dtype, scheme, stream=2)
            for ours, theirs in zip(given, CPU.quantize_both(x, dtype, scheme, stream=2), strict=True):
                assert ours.packed.numpy().tobytes() == theirs.packed.tobytes()
                assert ours.scales.numpy().tobytes() == theirs.scales.tobytes()
                assert (ours.tensor_scale, ours.tensor_encode) == (theirs.tensor_scale, theirs.tensor_encode)
                assert ours.shape == theirs.shape


def test_both_axes_of_nonfinite_values() -> None:
    there, x = DeviceTensors(StreamDevice()), nonfinite(70, 72)
    for name in ("mxfp8", "nvfp4"):
        scheme = resolve(name, Rules(scale_rounding="best" if name == "mxfp8" else None))
        given = there.quantize_both(torch.from_numpy(x), "F32", scheme)
        for ours, theirs in zip(given, CPU.quantize_both(x, "F32", scheme), strict=True):
            assert ours.packed.numpy().tobytes() == theirs.packed.tobytes()
            assert ours.scales.numpy().tobytes() == theirs.scales.tobytes()


def test_one_launch_for_both_axes() -> None:
    device = StreamDevice()
    DeviceTensors(device).quantize_both(bf16(normal(64, 128)), "BF16", resolve("mxfp8"))
    assert [launch.kernel.name for launch in device.launches] == ["mx_quantize_both"]
    DeviceTensors(other := StreamDevice()).quantize_both(bf16(normal(64, 128)), "BF16", resolve("nvfp4_2d"))
    assert [launch.kernel.name for launch in other.launches].count("mx_quantize_blocks") == 2
