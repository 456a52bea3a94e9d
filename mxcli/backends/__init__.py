"""Runs the kernels on a device and says why it chose it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mxcli.errors import EnvironmentFailure, UsageError, printable

if TYPE_CHECKING:
    from mxcli.backends.backend import Backend
    from mxcli.backends.device import TimedDevice
    from mxcli.backends.gpus import GpuState
    from mxcli.numerics.blocks import Quantized

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
_OR_CPU = " Or use --device cpu."
_DEVICE = re.compile(r"auto|cpu|cuda(?::([0-9]{1,4}))?")


def check_device(device: str) -> None:
    """Raise UsageError unless `device` is auto, cpu, cuda or cuda:N; whether the device exists is not checked."""
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"unknown device '{printable(device)}': --device takes auto, cpu, cuda or cuda:N.")


def choose_backend(
    device: str | None,
    *,
    threads: int | None = None,
    max_memory: int | None = None,
    on_note: Callable[[str], object] = lambda note: None,
) -> Backend:
    """Return the backend that a device word stands for on this machine; None is auto.

    `threads` is for the CPU, `max_memory` (bytes) for the memory of a GPU. `on_note` receives the reason
    why auto skips a GPU that the user could make usable. Raises like `find_device`.
    """
    found = find_device(device, on_note)
    if found != CPU:
        try:
            return _opened(found, max_memory)
        except EnvironmentFailure as failure:
            if device not in (None, AUTO):
                raise
            on_note(_unused(failure.message.removeprefix(f"--device {found}: ").removesuffix(_OR_CPU)))
    from mxcli.backends import cpu

    return cpu.Cpu(threads)


def find_device(device: str | None, on_note: Callable[[str], object] = lambda note: None) -> str:
    """Return `cpu` or `cuda:N`: auto is the first usable GPU, else the CPU; cuda is the first usable GPU.

    Nothing is opened. Raises UsageError for other words, and EnvironmentFailure with all problems of a
    requested GPU.
    """
    word = AUTO if device is None else device
    check_device(word)
    if word == CPU:
        return CPU
    from mxcli.backends import gpus

    # Further checks cost a tenth of a second or more; skip them on a machine without a driver.
    if word == AUTO and not gpus.has_driver():
        return CPU
    state = gpus.examine()
    if word == AUTO:
        if state.usable:
            return state.usable[0].device
        if state.is_fixable:
            on_note(_unused("; ".join(state.problems)))
        return CPU
    return _requested(word, state)


def _requested(word: str, state: GpuState) -> str:
    """Return the GPU that `cuda` or `cuda:N` means."""
    index = word.partition(":")[2]
    if index and state.gpus and int(index) >= len(state.gpus):
        there = ", ".join(f"{gpu.device} ({printable(gpu.name)})" for gpu in state.gpus)
        raise EnvironmentFailure(f"--device {word}: there is no such GPU; there is {there}.", state.problems)
    possible = [gpu for gpu in state.usable if not index or gpu.index == int(index)]
    if possible:
        return possible[0].device
    problems = state.problems_of(state.gpus[int(index)]) if index and state.gpus else state.problems
    if len(problems) == 1:
        raise EnvironmentFailure(f"--device {word}: {problems[0]}. Or use --device cpu.")
    raise EnvironmentFailure(
        f"--device {word}: {len(problems)} things are missing. Fix them all, or use --device cpu.", problems
    )


def open_timed_device(device: str) -> TimedDevice:
    """Return GPU `cuda:N` for a benchmark. Raises EnvironmentFailure if it cannot be used."""
    with _cupy_or_failure(device):
        from mxcli.backends.cupy_device import CupyDevice

        return CupyDevice(_index(device))


def open_resident(device: str) -> Backend:
    """Return GPU `cuda:N` for torch tensors on it. Raises EnvironmentFailure if it cannot be used."""
    found = find_device(device)
    with _cupy_or_failure(found):
        from mxcli.backends.cupy_device import CupyDevice
        from mxcli.backends.device_tensors import DeviceTensors

        return DeviceTensors(CupyDevice(_index(found)))


def unpacked(q: Quantized) -> Any:
    """Return one code per byte, in the tensor's shape, on the device of the codes."""
    import numpy as np

    if isinstance(q.packed, np.ndarray):
        from mxcli.backends import cpu

        return cpu.unpack(q)
    from mxcli.backends import device_tensors as resident

    return resident.unpack(q)


def _opened(device: str, max_memory: int | None) -> Backend:
    with _cupy_or_failure(device):
        from mxcli.backends import cuda

        return cuda.open_device(_index(device), max_memory)


def _index(device: str) -> int:
    return int(device.partition(":")[2])


@contextmanager
def _cupy_or_failure(device: str) -> Iterator[None]:
    """Return a CuPy that is not whole as EnvironmentFailure."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentFailure(
            f"--device {device}: {printable(error)}; `mxcli doctor` says what to install.{_OR_CPU}"
        ) from error


def _unused(why: str) -> str:
    end = "" if "mxcli doctor" in why else "; see mxcli doctor"
    return f"GPU present but not used: {why.rstrip('.')}{end}"
