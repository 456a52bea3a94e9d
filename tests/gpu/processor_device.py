"""A `Device` whose kernels are run by `cuda_on_cpu.py`: the launching code and the kernels as they are, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import cuda_on_cpu
import numpy as np

from mxcli.backends.device import Kernel, Launch
from mxcli.errors import EnvironmentFailure

KERNELS = Path(__file__).parents[2] / "kernels"
GUARD = 256
"""Bytes before and after every buffer that no kernel may touch."""


@cache
def program(file: str, definitions: tuple[tuple[str, str], ...]) -> cuda_on_cpu.Program:
    """A kernel file, built; its recipe is read from the library's constant, so that one build serves all recipes."""
    choices = dict(definitions)
    if file != "reduce.cu":
        choices["MX_RECIPE"] = "(*reinterpret_cast<const MxRecipe*>(cuda_on_cpu_constant))"
    return cuda_on_cpu.build(KERNELS / file, choices, KERNELS)


class Memory:
    """Bytes between guards, filled with what nothing may rely on."""

    def __init__(self, nbytes: int) -> None:
        self._all = np.full(GUARD + nbytes + GUARD + 256, 0xCD, np.uint8)
        start = -self._all.ctypes.data % 256 + GUARD
        self.bytes = self._all[start : start + nbytes]
        self._guards = self._all[:start], self._all[start + nbytes :]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def check(self) -> None:
        assert all((guard == 0xCD).all() for guard in self._guards), "a kernel wrote outside its buffer"


@dataclass
class ProcessorQueue:
    """Runs everything at once, but fills what is downloaded only when finished, as a GPU may."""

    device: ProcessorDevice
    buffers: list[Memory] = field(default_factory=list)
    downloads: list[tuple[Memory, Any]] = field(default_factory=list)

    def empty(self, nbytes: int) -> Memory:
        self.device.used += nbytes
        if self.device.used > self.device.memory:
            raise EnvironmentFailure(f"out of memory: {nbytes:,} bytes asked for")
        self.buffers.append(Memory(nbytes))
        return self.buffers[-1]

    def upload(self, array: Any) -> Memory:
        buffer = self.empty(array.nbytes)
        buffer.bytes[:] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return buffer

    def fill(self, buffer: Memory, byte: int, begin: int, end: int) -> None:
        buffer.bytes[begin:end] = byte

    def launch(self, launch: Launch) -> None:
        kernel: Kernel = launch.kernel
        self.device.launches.append(launch)
        built = program(kernel.file, kernel.definitions)
        if kernel.recipe:
            built.set_constant(kernel.recipe)
        built.launch(kernel.name, launch.grid, launch.threads, launch.arguments, self.device.order)

    def download(self, buffer: Memory, array: Any) -> None:
        assert array.flags.c_contiguous
        assert array.nbytes <= buffer.bytes.nbytes
        self.downloads.append((buffer, array))

    def finish(self) -> None:
        for buffer, array in self.downloads:
            array.view(np.uint8).reshape(-1)[:] = buffer.bytes[: array.nbytes]
        for buffer in self.buffers:
            buffer.check()
        self.device.used -= sum(buffer.bytes.nbytes for buffer in self.buffers)
        self.downloads, self.buffers = [], []


class ProcessorDevice:
    """Few multiprocessors, so that blocks of threads take turns on small tensors too."""

    name, processors, conversions = "cuda:0", 1, 0

    def __init__(self, memory: int = 1 << 30, order: str = "ascending") -> None:
        self.memory, self.order, self.used = memory, order, 0
        self.launches: list[Launch] = []
        self._queues = [ProcessorQueue(self) for _ in range(2)]

    def free_bytes(self) -> int:
        return self.memory - self.used

    def queues(self, count: int) -> Sequence[ProcessorQueue]:
        return self._queues[:count]
