"""The GPUs of this machine and why they cannot be used, from the driver itself: CuPy is not imported."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from mxcli.errors import EnvironmentFailure, printable

Version: TypeAlias = tuple[int, int]
Load: TypeAlias = Callable[[str], Any]

LOWEST_CAPABILITY: Version = (8, 0)
"""The lowest compute capability that the kernels are compiled for."""
LOWEST_CUPY = 14
CUPY_PACKAGES = {"cupy-cuda11x": 11, "cupy-cuda12x": 12, "cupy-cuda13x": 13, "cupy": None}
"""CuPy by the names it is installed under, with the major version of CUDA that each needs (None: unknown)."""
PACKAGES = {
    13: "'cupy-cuda13x>=14' nvidia-cuda-nvrtc",
    12: "'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'",
}
"""Our extras by the major version of CUDA that they bring, newest first; it is the least the driver must serve."""
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
_NO_DEVICE, _STUB = 100, 34
_ERRORS = {
    2: "out of memory: end other programs that use the GPU",
    _STUB: "the stub of a CUDA toolkit was loaded for the driver: take its folder 'stubs' off LD_LIBRARY_PATH",
    46: "the device is unavailable: end the program that holds it, or use a GPU that is not exclusively held",
    802: "the system is not ready: start the fabric manager (nvidia-fabricmanager) and see that it runs",
    803: "the driver in the kernel and its library are of different versions: reboot, or reload the kernel module, "
    "as after an update of the driver",
    804: "a forward-compatible library was loaded that this GPU does not support: take the cuda-compat folder off "
    "LD_LIBRARY_PATH, or update the driver",
    999: "unknown error: see that /dev/nvidia* can be opened from here, or reload the kernel module nvidia_uvm",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver numbers it, which is after CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    capability: Version
    memory_bytes: int

    @property
    def device(self) -> str:
        """As `--device` takes it."""
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class GpuState:
    """The requirements of GPUs on this machine, and the problems.

    `driver` is the newest CUDA version that the driver serves, `cupy` every CuPy package with its version. `problems`
    are sentences without their full stop, each with the way out. `init_error` is the CUDA error of starting the
    driver, 0 for none.
    """

    driver: Version | None
    gpus: tuple[Gpu, ...]
    cupy: str | None
    nvrtc: Version | None
    problems: tuple[str, ...]
    init_error: int = 0

    def problems_of(self, gpu: Gpu) -> tuple[str, ...]:
        """Return the problems of one GPU: all but those of other GPUs alone."""
        of_others = {_incapable(other) for other in self.gpus if other != gpu}
        return tuple(problem for problem in self.problems if problem not in of_others)

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The GPUs without problems."""
        return tuple(gpu for gpu in self.gpus if not self.problems_of(gpu))

    @property
    def is_fixable(self) -> bool:
        """True if there is a GPU that is unusable for a reason that can be removed."""
        if self.init_error:
            return self.init_error not in (_NO_DEVICE, _STUB)
        return not self.usable and any(_incapable(gpu) is None for gpu in self.gpus)


def has_driver(load: Load = ctypes.CDLL) -> bool:
    """Return whether the library of the NVIDIA driver is present; without it nothing else is searched for."""
    return _library(load) is not None


def examine(load: Load = ctypes.CDLL) -> GpuState:
    """Look for all that a GPU needs; never fails for something that is missing."""
    driver, init_error, gpus, problems = _devices(load)
    cupy = _cupy()
    nvrtc = _nvrtc()
    return GpuState(
        driver,
        gpus,
        ", ".join(f"{name} {version}" for name, version in cupy.items()) or None,
        nvrtc if isinstance(nvrtc, tuple) else None,
        (
            *problems,
            *filter(None, map(_incapable, gpus)),
            *_package_problems(driver, cupy, nvrtc),
        ),
        init_error,
    )


def _library(load: Load) -> Any | None:
    try:
        return load(_LIBRARY)
    except OSError:
        return None


class _DriverError(Exception):
    """A call of the driver that failed, with its CUDA error."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} fails with CUDA error {code}")
        self.code = code


def _devices(load: Load) -> tuple[Version | None, int, tuple[Gpu, ...], tuple[str, ...]]:
    """Return the CUDA version of the driver, the error of starting it, its GPUs, and what is wrong with all that."""
    library = _library(load)
    if library is None:
        return None, 0, (), (f"there is no NVIDIA driver on this machine ({_LIBRARY} is not found): install it",)
    driver: Version | None = None
    try:
        driver = _driver(library)
        _call(library, "cuInit", 0)
        count = ctypes.c_int(0)
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        gpus = tuple(_gpu(library, index) for index in range(count.value))
    except _DriverError as error:
        return driver, error.code, (), (_no_gpu() if error.code == _NO_DEVICE else _failure(error),)
    except AttributeError as error:
        return driver, 0, (), (f"the NVIDIA driver is too old ({printable(error)}): update it",)
    return driver, 0, gpus, () if gpus else (_no_gpu(),)


def _driver(library: Any) -> Version:
    number = ctypes.c_int(0)
    _call(library, "cuDriverGetVersion", ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _gpu(library: Any, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor = (_attribute(library, which, device) for which in (_MAJOR, _MINOR))
    return Gpu(index, name.value.decode("utf-8", "replace"), (major, minor), memory.value)


def _attribute(library: Any, which: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int(0)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(value), which, device)
    return value.value


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        raise _DriverError(name, code)


def _failure(error: _DriverError) -> str:
    words = _ERRORS.get(error.code, "see what nvidia-smi says")
    return f"the NVIDIA driver cannot be used, {error}: {words}"


def _no_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return "the NVIDIA driver shows no GPU: see what nvidia-smi lists, and run where there is one"
    return f"no GPU is visible with CUDA_VISIBLE_DEVICES='{printable(visible)}': unset it, or name one that exists"


def _incapable(gpu: Gpu) -> str | None:
    if gpu.capability >= LOWEST_CAPABILITY:
        return None
    return (
        f"{gpu.device} ({printable(gpu.name)}) has compute capability {_dotted(gpu.capability)}, and "
        f"{_dotted(LOWEST_CAPABILITY)} is needed: use another GPU"
    )


def _cupy() -> dict[str, str]:
    """Return the CuPy packages that are installed, with their versions."""
    import importlib.metadata

    found = {}
    for name in CUPY_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _nvrtc() -> Version | str:
    """Return the version of NVRTC, or why there is none."""
    from mxcli.backends import nvrtc

    try:
        return nvrtc.version()
    except EnvironmentFailure as failure:
        # Its way out names every extra; the driver says which of them fits.
        what, details = failure.message.partition(": ")[0], "; ".join(failure.details)
        return f"{what} ({printable(details)})" if details else what


def _package_problems(driver: Version | None, cupy: Mapping[str, str], nvrtc: Version | str) -> Iterator[str]:
    """Yield what is wrong with the packages; a missing driver is not their fault."""
    install = _install(driver)
    if not cupy:
        yield f"CuPy is not installed: {install}"
    if len(cupy) > 1:
        yield (
            f"{' and '.join(cupy)} are installed and break each other: pip uninstall {' '.join(cupy)}, then {install}"
        )
    for name, version in cupy.items():
        if int(version.partition(".")[0]) < LOWEST_CUPY:
            yield f"{name} {version} is too old, {LOWEST_CUPY} is needed: pip uninstall {name}, then {install}"
    if isinstance(nvrtc, str):
        yield f"{nvrtc}: {install}"
    needed = {name: major for name in cupy if (major := CUPY_PACKAGES[name]) is not None}
    if not isinstance(nvrtc, str):
        needed["NVRTC"] = nvrtc[0]
    newer = {name: major for name, major in needed.items() if driver is not None and driver < (major, 0)}
    if newer and driver is not None:
        update = "update the driver, or " if driver >= (min(PACKAGES), 0) else ""
        yield (
            f"the NVIDIA driver serves CUDA {_dotted(driver)}, and {' and '.join(newer)} "
            f"need{'s' * (len(newer) == 1)} {max(newer.values())}.0: {update}{install}"
        )


def _install(driver: Version | None) -> str:
    """Return how to get the packages that fit a driver; without one, those that fit most drivers."""
    oldest = min(PACKAGES)
    fitting = next((major for major in PACKAGES if driver is not None and driver >= (major, 0)), oldest)
    update = "" if driver is None or driver >= (oldest, 0) else f"update the driver to one for CUDA {oldest}.0, then "
    return f"{update}pip install {PACKAGES[fitting]}"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
