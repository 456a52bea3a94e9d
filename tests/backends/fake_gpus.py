"""A machine with GPUs that are not there: a compiled driver library, and packages by word of mouth."""

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
    """libcuda.so.1 in the folder; what it says is told by FAKE_INIT, FAKE_DRIVER, FAKE_GPUS and FAKE_GET."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler to make a driver library with")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *options, str(SOURCE), "-o", str(library)], check=True)
    return library


def install(
    monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, str], nvrtc: tuple[int, int] | EnvironmentFailure
) -> None:
    """Lets these packages alone seem to be installed."""

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
