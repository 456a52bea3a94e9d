"""A `Device` that runs kernels with `cuda_on_cpu.py`: unchanged launch code and kernels on a CPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
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
"""Bytes before and after each buffer that kernels must not touch."""


FLAGS = {"MX_CODES": 508, "MX_HISTOGRAM": 509, "MX_SWIZZLED": 510}
SIGNS, ROUNDED = 480, 507
"""Definitions that are run-time values here, with their offsets in the library's constant, so that one build serves all
their values; the scheme is another, at offset 0."""


@cache
def program(file: str, definitions: frozenset[tuple[str, str]]) -> cuda_on_cpu.Program:
    """Build a kernel file with these definitions and those that are run-time values."""
    words = [f"reinterpret_cast<const unsigned*>(cuda_on_cpu_constant)[{SIGNS // 4 + i}]" for i in range(4)]
    rounded = f"(cuda_on_cpu_constant[{ROUNDED}])"
    choices = {**dict(sorted(definitions)), "MX_SIGNS": ", ".join(words), "MX_ROTATED_BF16": rounded}
    if file != "reduce.cu":
        choices["MX_SCHEME"] = "(*reinterpret_cast<const MxScheme*>(cuda_on_cpu_constant))"
        choices |= {name: f"(cuda_on_cpu_constant[{at}])" for name, at in FLAGS.items()}
    return cuda_on_cpu.build(KERNELS / file, choices, KERNELS)


def program_of(kernel: Kernel) -> cuda_on_cpu.Program:
    """Return a kernel's program with its scheme and run-time definitions set."""
    given = dict(kernel.definitions)
    signs = [int(word.removesuffix("u")) for word in given.pop("MX_SIGNS", "0u").split(",")]
    flags = {at: int(given.pop(name, "0")) for name, at in FLAGS.items()}
    flags[ROUNDED] = int(given.pop("MX_ROTATED_BF16", "0"))
    built = program(kernel.file, frozenset(given.items()))
    assert len(kernel.scheme) <= SIGNS
    built.set_constant(kernel.scheme)
    built.set_constant(np.array(signs, np.uint32).tobytes(), SIGNS)
    for at, flag in flags.items():
        built.set_constant(bytes([flag]), at)
    return built


class Memory:
    """A buffer of garbage between guards, `shift` bytes off a multiple of 256."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        self._all = np.full(GUARD + shift + nbytes + GUARD + 256, 0xCD, np.uint8)
        start = -self._all.ctypes.data % 256 + GUARD + shift
        self.bytes = self._all[start : start + nbytes]
        self._guards = self._all[:start], self._all[start + nbytes :]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def check(self) -> None:
        assert all((guard == 0xCD).all() for guard in self._guards), "a kernel wrote outside its buffer"


@dataclass
class ProcessorQueue:
    """A queue that runs launches immediately but completes downloads only in finish(), as a GPU may."""

    device: ProcessorDevice
    buffers: list[Memory] = field(default_factory=list)
    downloads: list[tuple[Memory, Any, int]] = field(default_factory=list)

    def empty(self, nbytes: int, shift: int = 0) -> Memory:
        memory = self.device.take(nbytes, shift)
        self.buffers.append(memory)
        return memory

    def upload(self, array: Any) -> Memory:
        buffer = self.empty(array.nbytes, self.device.shift * array.itemsize)
        buffer.bytes[:] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return buffer

    def fill(self, buffer: Memory, byte: int, begin: int, end: int) -> None:
        buffer.bytes[begin:end] = byte

    def launch(self, launch: Launch) -> None:
        kernel: Kernel = launch.kernel
        self.device.launches.append(launch)
        built = program_of(kernel)
        built.launch(kernel.name, launch.grid, launch.threads, launch.arguments, self.device.order)

    def download(self, buffer: Memory, array: Any, begin: int = 0) -> None:
        assert array.flags.c_contiguous
        assert begin + array.nbytes <= buffer.bytes.nbytes
        self.downloads.append((buffer, array, begin))

    def finish(self) -> None:
        for buffer, array, begin in self.downloads:
            array.view(np.uint8).reshape(-1)[:] = buffer.bytes[begin : begin + array.nbytes]
        for buffer in self.buffers:
            buffer.check()
        self.downloads, self.buffers = [], []


class ProcessorDevice:
    """An emulated GPU with one multiprocessor, so that thread blocks loop on small tensors too. `memory`: its bytes;
    `order`: of threads, as in `cuda_on_cpu.py`; `shift`: elements by which uploads are off a multiple of 256 bytes."""

    name, processors, conversions = "cuda:0", 1, 0

    def __init__(self, memory: int = 1 << 30, order: str = "ascending", shift: int = 0) -> None:
        self.memory, self.order, self.shift = memory, order, shift
        self.used = self.most_used = 0
        self.launches: list[Launch] = []
        self._queues = [ProcessorQueue(self) for _ in range(2)]

    def take(self, nbytes: int, shift: int) -> Memory:
        """Allocate memory, which is freed with its last reference."""
        if self.used + nbytes > self.memory:
            raise EnvironmentFailure(f"out of memory: {nbytes:,} bytes requested")
        memory = Memory(nbytes, shift)
        self._use(nbytes)
        weakref.finalize(memory, self._use, -nbytes)
        return memory

    def _use(self, nbytes: int) -> None:
        self.used += nbytes
        self.most_used = max(self.most_used, self.used)

    def free_bytes(self) -> int:
        return self.memory - self.used

    def queues(self, count: int) -> Sequence[ProcessorQueue]:
        return self._queues[:count]


class TimedProcessorQueue(ProcessorQueue):
    """A queue with timing, to test the timing code."""

    def copy(self, source: Memory, target: Memory, nbytes: int, offset: int = 0) -> None:
        target.bytes[offset : offset + nbytes] = source.bytes[:nbytes]

    def seconds(self, work: Callable[[], None], before: Callable[[], None]) -> float:
        before()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


class TimedProcessorDevice(ProcessorDevice):
    """An emulated GPU with the interface that benchmarks need."""

    capability = (9, 0)

    def __init__(self) -> None:
        super().__init__()
        self._queues = [TimedProcessorQueue(self) for _ in range(2)]

    def describe(self) -> str:
        return "this processor, in place of a GPU"

    def clocks(self) -> str:
        return "not known"


class StreamDevice(ProcessorDevice):
    """An emulated GPU with a queue per stream."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[int] = []

    def queue_of(self, stream: int) -> ProcessorQueue:
        self.streams.append(stream)
        return ProcessorQueue(self)
