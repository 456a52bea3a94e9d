"""A CuPy that is installed and cannot be imported is reported, not taken for usable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mxcli.backends.gpus import Gpu, GpuState
from mxcli.flows import doctor

USABLE = GpuState((13, 0), (Gpu(0, "NVIDIA H100", (9, 0), 80 << 30),), "cupy-cuda13x 14.2.0", (13, 0), ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "raise AttributeError('module numpy has no attribute int')",
            "AttributeError: module numpy has no attribute int",
        ),
        ("", "module 'cupy' has no attribute 'cuda'"),
    ],
)
def test_a_broken_cupy(text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor.gpus, "examine", lambda: USABLE)
    state = doctor.examine().gpu
    assert problem in state.problems[0]
    assert state.usable == ()


def test_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class cuda:\n    class memory:\n        OutOfMemoryError = MemoryError"
    (tmp_path / "cupy.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor.gpus, "examine", lambda: USABLE)
    assert doctor.examine().gpu == USABLE
    assert "cupy" not in sys.modules
