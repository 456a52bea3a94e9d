"""A machine with fake GPUs: a compiled driver library and pretended packages."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from mxcli.errors import EnvironmentFailure

SOURCE = Path(__file__).with_name("fake_driver.cpp")
NO_NVRTC = EnvironmentFailure("NVRTC, the CUDA compiler, is not installed: pip install it", ["libnvrtc: no such file"])


def build_driver(folder: Path, *options: str) -> Path:
    """Build libcuda.so.1 in the folder; FAKE_INIT, FAKE_DRIVER, FAKE_GPUS and FAKE_GET control its results."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler to build a driver library")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *options, str(SOURCE), "-o", str(library)], check=True)
    return library


def install(
    monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, str], nvrtc: tuple[int, int] | EnvironmentFailure
) -> None:
    """Pretend that only these packages are installed."""

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    def nvrtc_version() -> tuple[int, int]:
        if isinstance(nvrtc, EnvironmentFailure):
            raise nvrtc
        return nvrtc

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("mxcli.backends.nvrtc.version", nvrtc_version)
