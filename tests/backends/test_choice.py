"""The backend selected by --device."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
from command_line import environment

import mxcli.backends
from mxcli.backends import check_device, choose_backend, cpu, find_device, gpus
from mxcli.backends.backend import Backend
from mxcli.backends.cpu import Cpu
from mxcli.backends.gpus import Gpu, GpuState
from mxcli.errors import EnvironmentFailure, UsageError
from mxcli.numerics.scheme import resolve

OLD, NEW, NEWER = (Gpu(index, f"GPU {index}", (major, 0), 1 << 30) for index, major in enumerate((7, 9, 10)))
TOO_OLD = "cuda:0 (GPU 0) has compute capability 7.0, and 8.0 is needed: use another GPU"
NO_CUPY = "CuPy is not installed: pip install 'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'"
NO_DRIVER = "there is no NVIDIA driver on this machine (libcuda.so.1 is not found): install it"


class OnGpu:
    """Stub of an opened device."""

    def __init__(self, index: int, max_memory: int | None) -> None:
        if max_memory == 1:
            raise EnvironmentFailure(f"cuda:{index}: 1 byte is too little.")
        if max_memory == 2:
            raise ImportError("libcublas.so.12: cannot open shared object file")
        self.name, self.max_memory = f"cuda:{index}", max_memory


def state(*there: Gpu, problems: tuple[str, ...] = ()) -> GpuState:
    return GpuState((12, 8), there, None, None, problems)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces this machine's GPUs by those of a state."""
    module: Any = types.ModuleType("mxcli.backends.cuda")
    module.open_device = OnGpu
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(mxcli.backends, "cuda", module, raising=False)

    def have(found: GpuState) -> None:
        monkeypatch.setattr(gpus, "has_driver", lambda: bool(found.driver))
        monkeypatch.setattr(gpus, "examine", lambda: found)

    return have


@pytest.mark.parametrize("word", ["", "gpu", "tpu", "cpu:1", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:0:1", "a\nb"])
def test_invalid_devices(word: str) -> None:
    with pytest.raises(UsageError, match="--device takes auto, cpu, cuda or cuda:N"):
        check_device(word)


@pytest.mark.parametrize("word", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_valid_devices(word: str) -> None:
    check_device(word)


def test_checking_and_finding_import_nothing_heavy() -> None:
    program = (
        "import sys; from mxcli.backends import check_device, find_device; check_device('cuda'); find_device(None); "
        "print({'numpy', 'torch', 'cupy'} & set(sys.modules))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_cpu_with_threads(machine: Any) -> None:
    machine(state(NEW))
    assert choose_backend("cpu", threads=3) == Cpu(3)
    assert choose_backend("cpu").name == "cpu"


@pytest.mark.parametrize("word", [None, "auto"])
def test_auto_is_the_first_usable_gpu(machine: Any, word: str | None) -> None:
    notes: list[str] = []
    machine(state(NEW, NEWER))
    assert choose_backend(word, on_note=notes.append).name == "cuda:1"
    machine(state(OLD, NEW, NEWER, problems=(TOO_OLD,)))
    chosen: Any = choose_backend(word, max_memory=1 << 20, on_note=notes.append)
    assert (chosen.name, chosen.max_memory) == ("cuda:1", 1 << 20)
    assert notes == []


def test_auto_without_a_driver_is_the_cpu_without_examination(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(GpuState(None, (), None, None, (NO_DRIVER, NO_CUPY)))
    monkeypatch.delattr(gpus, "examine")
    notes: list[str] = []
    assert choose_backend("auto", threads=2, on_note=notes.append) == Cpu(2)
    assert notes == []


@pytest.mark.parametrize(
    ("found", "notes"),
    [
        (state(OLD, problems=(TOO_OLD,)), []),
        (state(problems=("the NVIDIA driver shows no GPU",)), []),
        (state(NEW, problems=(NO_CUPY,)), [f"GPU present but not used: {NO_CUPY}; see mxcli doctor"]),
        (
            GpuState((12, 8), (), None, None, ("the driver is broken: reboot", NO_CUPY), init_error=803),
            [f"GPU present but not used: the driver is broken: reboot; {NO_CUPY}; see mxcli doctor"],
        ),
    ],
)
def test_auto_reports_an_unusable_gpu(machine: Any, found: GpuState, notes: list[str]) -> None:
    machine(found)
    reported: list[str] = []
    assert choose_backend("auto", on_note=reported.append) == Cpu()
    assert reported == notes


def test_gpu_that_cannot_be_opened(machine: Any) -> None:
    machine(state(NEW))
    notes: list[str] = []
    assert choose_backend("auto", max_memory=1, on_note=notes.append) == Cpu()
    assert notes == ["GPU present but not used: cuda:1: 1 byte is too little; see mxcli doctor"]
    with pytest.raises(EnvironmentFailure, match="1 byte is too little"):
        choose_backend("cuda", max_memory=1)
    with pytest.raises(EnvironmentFailure, match=r"--device cuda:1: libcublas\.so\.12: cannot open"):
        choose_backend("cuda", max_memory=2)


def test_gpu_by_index(machine: Any) -> None:
    there = [Gpu(0, "A", (7, 0), 1), Gpu(1, "B", (8, 0), 1), Gpu(2, "C", (9, 0), 1)]
    problem = "cuda:0 (A) has compute capability 7.0, and 8.0 is needed: use another GPU"
    machine(state(*there, problems=(problem,)))
    assert [find_device(word) for word in ("cuda", "cuda:1", "cuda:2", "cpu")] == ["cuda:1", "cuda:1", "cuda:2", "cpu"]
    with pytest.raises(EnvironmentFailure) as old:
        find_device("cuda:0")
    assert str(old.value) == f"--device cuda:0: {problem}. Or use --device cpu."
    with pytest.raises(EnvironmentFailure) as absent:
        find_device("cuda:7")
    assert "there is no such GPU; there is cuda:0 (A), cuda:1 (B), cuda:2 (C)." in str(absent.value)


@pytest.mark.parametrize("word", ["cuda", "cuda:0", "cuda:7"])
def test_requested_gpu_reports_everything_missing(machine: Any, word: str) -> None:
    machine(GpuState(None, (), None, None, (NO_DRIVER, NO_CUPY)))
    with pytest.raises(EnvironmentFailure) as refused:
        choose_backend(word)
    assert refused.value.exit_code == 6
    assert refused.value.message == f"--device {word}: 2 things are missing. Fix them all, or use --device cpu."
    assert refused.value.details == (NO_DRIVER, NO_CUPY)


def test_cpu_backend_equals_its_functions() -> None:
    x, scheme = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32), resolve("nvfp4")
    backend: Backend = Cpu(2)
    q = backend.quantize(x, "F32", scheme, per_block=True)
    wanted = cpu.quantize(x, "F32", scheme, per_block=True)
    assert (q.packed.tobytes(), q.scales.tobytes(), q.stats) == (
        wanted.packed.tobytes(), wanted.scales.tobytes(), wanted.stats
    )  # fmt: skip
    assert q.per_block is not None
    assert backend.amax(x, "F32") == cpu.amax(x, "F32")
    assert backend.dequantize(q, "F64").tobytes() == cpu.dequantize(wanted, "F64").tobytes()
    assert backend.quantize(x, "F32", scheme, codes=False, stats=False).packed.size == 0
    assert backend.quantize(x, "F32", scheme, reuse=q).packed is q.packed
    assert backend.quantize(x, "F32", scheme, tensor_amax=100.0).tensor_scale == pytest.approx(100 / 2688)
