"""The state of this installation and machine; nothing heavy is imported to find it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli import __version__
from mxcli.backends import gpus
from mxcli.errors import MxcliError, printable

PACKAGES = (
    "numpy",
    "rich",
    "safetensors",
    "torch",
    "typer",
    "matplotlib",
    "transformers",
    "compressed-tensors",
)
EXTRAS = {
    "torch": ("torch",),
    "plots": ("matplotlib",),
    "capture": ("torch", "transformers"),
    "gguf": ("gguf",),
    "cuda12": ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"),
    "cuda13": ("cupy-cuda13x", "nvidia-cuda-nvrtc"),
}
"""The extras of mxcli that bring features, each with its packages."""
_FLAGS = {"avx2": ("avx2", "fma", "bmi2"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl")}
_COMPILER = re.compile(rb"GCC: \([ -~]{0,80}\) [0-9.]+|clang version [0-9][ -~]{0,80}")


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled CPU kernel: its folder, compiler and instruction set, or why it does not run."""

    path: str | None
    compiler: str | None
    instruction_set: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The versions (None: not installed), processor, threads, memory, kernel and GPUs of this machine.

    `extras` maps each extra to whether its packages are installed. `driver_release` is the NVIDIA driver's own number,
    if the system reports it.
    """

    version: str
    python: str
    system: str
    packages: Mapping[str, str | None]
    extras: Mapping[str, bool]
    processor: str
    instruction_sets: tuple[str, ...]
    threads: int
    memory_bytes: int | None
    compiler_found: str | None
    kernel: Kernel
    driver_release: str | None
    gpu: gpus.GpuState


def own_version() -> str:
    """Return the version of mxcli."""
    return __version__


def package_version(name: str) -> str | None:
    """Return the version of an installed package from its metadata, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> Diagnosis:
    """Examine this installation and machine; nothing that is missing raises."""
    flags = _processor("flags").split()
    return Diagnosis(
        version=own_version(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages={name: package_version(name) for name in PACKAGES},
        extras={name: all(map(package_version, packages)) for name, packages in EXTRAS.items()},
        processor=_processor("model name") or platform.processor() or platform.machine(),
        instruction_sets=(
            "baseline",
            *(name for name, needed in _FLAGS.items() if set(needed) <= set(flags)),
        ),
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        compiler_found=next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None),
        kernel=_kernel(),
        driver_release=_driver_release(),
        gpu=_gpu_state(),
    )


def _gpu_state() -> gpus.GpuState:
    """Return the GPUs; if one seems usable, also import CuPy, in a process of its own because it may crash."""
    state = gpus.examine()
    if not state.usable:
        return state
    command = [sys.executable, "-c", "import cupy; cupy.cuda.memory.OutOfMemoryError"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return replace(state, problems=(*state.problems, f"CuPy was not tried: {error}"))
    if done.returncode == 0:
        return state
    words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    problem = f"CuPy is installed but cannot be imported ({printable(words)}): reinstall it"
    return replace(state, problems=(*state.problems, problem))


def _kernel() -> Kernel:
    if package_version("numpy") is None:
        return Kernel(None, None, None, "numpy is not installed")
    from mxcli.backends import abi as library
    from mxcli.backends import cpu

    try:
        folder = library.kernel_folder()
        instruction_set = cpu.instruction_set()
    except (MxcliError, OSError) as error:
        return Kernel(None, None, None, str(error))
    path = Path(library.load()._name)
    compiler = _COMPILER.search(path.read_bytes())
    return Kernel(str(folder), compiler[0].decode() if compiler else None, instruction_set, None)


def _driver_release() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def _processor(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, or an empty string."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^{field}\s*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def memory_bytes() -> int | None:
    """Return the memory of the machine, or None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def free_bytes(folder: Path) -> int:
    """Return the free space at a directory, which need not exist yet."""
    there = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    return shutil.disk_usage(there).free
