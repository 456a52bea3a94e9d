"""Problems that keep a GPU from being used, reported by a fake driver library."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest
from fake_gpus import NO_NVRTC, build_driver, install

from mxcli.backends.gpus import Gpu, GpuState, examine, has_driver
from mxcli.errors import EnvironmentFailure

GOOD = {"cupy-cuda12x": "14.0.1"}
GIB = 1 << 30

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the driver library has another name there")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up one usable GPU with everything it needs."""
    monkeypatch.setenv("FAKE_GPUS", "9.0")
    for name in ("FAKE_INIT", "FAKE_DRIVER", "FAKE_GET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    install(monkeypatch, GOOD, (12, 9))


def examined(library: Path) -> GpuState:
    def load(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        return ctypes.CDLL(str(library))

    assert has_driver(load)
    return examine(load)


def test_usable_gpu(library: Path) -> None:
    gpu = Gpu(0, "Fake 0", (9, 0), 80 * GIB)
    state = examined(library)
    assert state == GpuState((12, 8), (gpu,), "cupy-cuda12x 14.0.1", (12, 9), ())
    assert state.usable == (gpu,)
    assert gpu.device == "cuda:0"
    assert not state.is_fixable


def test_old_gpus_do_not_block_others(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "7.5,8.0,7.0,12.1")
    state = examined(library)
    assert [(gpu.index, gpu.capability, gpu.memory_bytes) for gpu in state.gpus] == [
        (0, (7, 5), 80 * GIB), (1, (8, 0), 80 * GIB + 1), (2, (7, 0), 80 * GIB + 2), (3, (12, 1), 80 * GIB + 3)
    ]  # fmt: skip
    assert state.problems == (
        "cuda:0 (Fake 0) has compute capability 7.5, and 8.0 is needed: use another GPU",
        "cuda:2 (Fake 2) has compute capability 7.0, and 8.0 is needed: use another GPU",
    )
    assert [gpu.index for gpu in state.usable] == [1, 3]
    assert state.problems_of(state.gpus[2]) == state.problems[1:]
    install(monkeypatch, {}, (12, 9))
    without_cupy = examined(library)
    assert without_cupy.usable == ()
    assert without_cupy.is_fixable
    assert without_cupy.problems_of(state.gpus[1]) == (
        "CuPy is not installed: pip install 'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'",
    )
    monkeypatch.setenv("FAKE_GPUS", "7.5,7.0")
    assert not examined(library).is_fixable


def test_without_a_driver_everything_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    assert not has_driver(load)
    install(monkeypatch, {}, NO_NVRTC)
    state = examine(load)
    assert state == GpuState(
        None,
        (),
        None,
        None,
        (
            "there is no NVIDIA driver on this machine (libcuda.so.1 is not found): install it",
            "CuPy is not installed: pip install 'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'",
            "NVRTC, the CUDA compiler, is not installed (libnvrtc: no such file): pip install 'cupy-cuda12x>=14' "
            "'nvidia-cuda-nvrtc-cu12>=12.8'",
        ),
    )
    assert not state.is_fixable


@pytest.mark.parametrize(
    ("code", "words", "fixable"),
    [
        (100, "the NVIDIA driver shows no GPU: see what nvidia-smi lists", False),
        (34, "CUDA error 34: the stub of a CUDA toolkit was loaded", False),
        (46, "CUDA error 46: the device is unavailable", True),
        (802, "CUDA error 802: the system is not ready: start the fabric manager", True),
        (803, "cuInit fails with CUDA error 803: the driver in the kernel and its library are of different", True),
        (804, "CUDA error 804: a forward-compatible library", True),
        (999, "CUDA error 999: unknown error: see that /dev/nvidia", True),
        (719, "CUDA error 719: see what nvidia-smi says", True),
    ],
)
def test_driver_that_does_not_start(
    library: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str, fixable: bool
) -> None:
    monkeypatch.setenv("FAKE_INIT", str(code))
    state = examined(library)
    assert (state.driver, state.gpus, state.init_error, state.is_fixable) == ((12, 8), (), code, fixable)
    (problem,) = state.problems
    assert words in problem


@pytest.mark.parametrize(("init", "gpus"), [("100", "9.0"), ("0", "")])
def test_hidden_gpus(library: Path, monkeypatch: pytest.MonkeyPatch, init: str, gpus: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("FAKE_INIT", init)
    monkeypatch.setenv("FAKE_GPUS", gpus)
    state = examined(library)
    assert state.problems == ("no GPU is visible with CUDA_VISIBLE_DEVICES='-1': unset it, or name one that exists",)
    assert not state.is_fixable


def test_gpu_that_cannot_be_queried(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GET", "999")
    assert "cuDeviceGet fails with CUDA error 999" in examined(library).problems[0]


def test_driver_library_without_a_needed_function(tmp_path: Path) -> None:
    state = examined(build_driver(tmp_path, "-DOLD"))
    (problem,) = state.problems
    assert re.match(r"the NVIDIA driver is too old \(.*cuDeviceTotalMem_v2\): update it", problem)
    assert state.usable == ()


CUDA13 = {"cupy-cuda13x": "14.0.1"}


@pytest.mark.parametrize(
    ("driver", "packages", "nvrtc", "problems"),
    [
        (12000, GOOD, (12, 9), []),
        (13000, GOOD, (12, 9), []),
        (13000, CUDA13, (13, 0), []),
        (12080, {"cupy": "14.0.1"}, (12, 0), []),
        (
            12080,
            CUDA13,
            (13, 0),
            [
                "the NVIDIA driver serves CUDA 12.8, and cupy-cuda13x and NVRTC need 13.0: update the driver, or pip "
                "install 'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'"
            ],
        ),
        (
            12080,
            GOOD,
            (13, 0),
            ["the NVIDIA driver serves CUDA 12.8, and NVRTC needs 13.0: update the driver, or pip install "
             "'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'"],
        ),
        (
            11080,
            GOOD,
            (12, 0),
            [
                "the NVIDIA driver serves CUDA 11.8, and cupy-cuda12x and NVRTC need 12.0: update the driver to one "
                "for CUDA 12.0, then pip install 'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'"
            ],
        ),
        (13010, {}, (13, 0), ["CuPy is not installed: pip install 'cupy-cuda13x>=14' nvidia-cuda-nvrtc"]),
        (
            13000,
            GOOD | CUDA13,
            (13, 0),
            [
                "cupy-cuda12x and cupy-cuda13x are installed and break each other: pip uninstall cupy-cuda12x "
                "cupy-cuda13x, then pip install 'cupy-cuda13x>=14' nvidia-cuda-nvrtc"
            ],
        ),
        (
            13000,
            CUDA13,
            NO_NVRTC,
            [
                "NVRTC, the CUDA compiler, is not installed (libnvrtc: no such file): pip install 'cupy-cuda13x>=14' "
                "nvidia-cuda-nvrtc"
            ],
        ),
    ],
)  # fmt: skip
def test_packages_fit_the_driver(
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: int,
    packages: dict[str, str],
    nvrtc: tuple[int, int] | EnvironmentFailure,
    problems: list[str],
) -> None:
    monkeypatch.setenv("FAKE_DRIVER", str(driver))
    install(monkeypatch, packages, nvrtc)
    state = examined(library)
    assert list(state.problems) == problems
    assert bool(state.usable) == (not problems)
    assert state.is_fixable == bool(problems)
