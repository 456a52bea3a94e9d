"""check.py without a GPU: on the emulated device, with few formats and small tensors."""

from __future__ import annotations

from pathlib import Path

import check
import check_gemm
import check_training
import numpy as np
import pytest
from kernel_samples import nonfinite, normal
from processor_device import StreamDevice, TimedProcessorDevice
from same_results import needs_cxx
from slow_cases import slow_except

from mxcli.backends import nvrtc
from mxcli.backends.device_tensors import DeviceTensors
from mxcli.errors import EnvironmentFailure
from mxcli.flows.bench import gpu as bench_gpu
from mxcli.flows.bench.gemm_operands import open_engine
from mxcli.flows.products.shapes import Shape
from mxcli.numerics.scheme import Rules, resolve

pytestmark = needs_cxx


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> check.Check:
    monkeypatch.setenv("MXCLI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(check, "FORMATS", {"mxfp8_e4m3": None, "fp8_e4m3_channel": None})
    monkeypatch.setattr(
        check, "SCHEMES", [resolve("mxfp8", Rules(scale_rounding="floor")), resolve("fp8_e4m3_channel")]
    )
    monkeypatch.setattr(check, "SPELLED", ())
    monkeypatch.setattr(check, "BENCH_SIZE", 256)
    monkeypatch.setattr(check, "PEERS", ())
    bf16 = (normal(5, 70).view(np.uint32) >> 16).astype(np.uint16)
    tensors = {"normal BF16": (bf16, "BF16"), "odd": (nonfinite(7, 70), "F32")}
    monkeypatch.setattr(check, "samples", lambda: tensors)
    monkeypatch.setattr(bench_gpu, "TILE", 1 << 15)
    monkeypatch.setattr(bench_gpu, "FLUSH_BYTES", 1 << 10)
    return check.Check(TimedProcessorDevice(), quick=True)


@pytest.fixture
def needs_nvrtc() -> None:
    try:
        nvrtc.library()
    except EnvironmentFailure as missing:
        pytest.skip(missing.message)


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(("name", "capability"), [("mxfp8_e4m3", (9, 0)), ("mxfp4_e2m1", (10, 0))])
def test_conversions_compile(name: str, capability: tuple[int, int]) -> None:
    source = check.conversions_source(name, capability)
    assert nvrtc.build("conversions.cu", *source).log == ""


@pytest.mark.slow
@pytest.mark.usefixtures("needs_nvrtc")
def test_compiling_goes_through_the_cache(small: check.Check) -> None:
    what, result, _ = small.compile()
    assert what == "compiling (goal 1.5 s, 50 ms)"
    assert " kernels in " in result
    assert " from the cache " in result


def test_bytes_and_statistics(small: check.Check) -> None:
    assert small.every_rule() == ("CPU = GPU", "6 times, 2 schemes: equal", True)


def test_differences_are_reported(small: check.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check.cpu.quantize
    other = resolve("mxfp8", Rules(scale_rounding="ceil"))

    def mistaken(x: object, dtype: str, scheme: object, **options: object) -> object:
        return real(x, dtype, other if scheme.format.name == "mxfp8_e4m3" else scheme, **options)  # type: ignore

    monkeypatch.setattr(check.cpu, "quantize", mistaken)
    _, result, good = small.every_rule()
    assert not good
    assert "differ, first: mxfp8_e4m3 rceil normal BF16: " in result


@pytest.mark.parametrize(
    ("names", "sizes"),
    slow_except([(("mxfp8",), (None,))], [(("mxfp8",), (None,)), (("mxfp8", "fp8_e4m3_1x128"), (None, 16))]),
)
def test_training_is_compared(small: check.Check, names: tuple[str, ...], sizes: tuple[int | None, ...]) -> None:
    resident = DeviceTensors(StreamDevice())
    found = check_training.compare(small.gpu, resident, lambda x: x, names, sizes)
    assert found == (len(names) * len(sizes), [])


@pytest.mark.slow
def test_speed_lines(small: check.Check) -> None:
    names = [what for what, _, good in small.speed() if good]
    assert names == [
        "copy copy",
        "read read",
        "mxcli mxfp8_e4m3 floor codes",
        "mxcli fp8_e4m3_channel amax codes",
        "mxcli mxfp8_e4m3 rceil errors",
        "mxcli mxfp8_e4m3 rceil statistics",
        "mxcli fp8_e4m3_channel amax errors",
        "mxcli fp8_e4m3_channel amax statistics",
        "clocks",
    ]


@pytest.mark.slow
def test_checkpoints_are_the_same_files(small: check.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "DEVICE", "cpu")
    assert small.checkpoints() == ("mxcli quantize", "3 formats, every file: equal", True)


@pytest.mark.slow
def test_products_are_verified_and_timed() -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # next to other tests, more threads would compete
    try:
        lines = list(check_gemm.products(open_engine("cpu"), "no GPU", shapes=(Shape(32, 32, 64),), rounds=1))
    finally:
        torch.set_num_threads(threads)
    by_name = {what: (result, good) for what, result, good in lines}
    assert all(good for _, good in by_name.values())
    assert by_name["re-encoding to FP8"][0] == "12 times: equal"
    assert by_name["mxfp8 proven"][0] == "needs a GPU of compute capability 10.0 or later; this is the CPU"
    assert by_name["fp8-row proven"][0].startswith("10 products, at most 0.")
    assert "x bf16" in by_name["mxfp4-as-fp8-row 32x32x64"][0]
    assert "bf16 32x32x64 against torch.mm" in by_name
