"""The interface of a GPU to the kernels: memory, queues of work, and a compiler. CuPy implements it (`cupy_device.py`);
tests implement it on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to compile: its file, its name in it, the definitions the file is read with, sorted, and the scheme that
    becomes constants in it (the bytes of an `MxScheme`; empty: none)."""

    file: str
    name: str
    definitions: tuple[tuple[str, str], ...]
    scheme: bytes = b""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel over `grid` blocks of `threads` threads, with arguments by value (an address: np.uint64)."""

    kernel: Kernel
    grid: int
    threads: int
    arguments: tuple[np.generic, ...]


class Buffer(Protocol):
    """Memory of a device, given back when nothing refers to it any more."""

    @property
    def address(self) -> int:
        """Its first byte, a multiple of 256."""


class Queue(Protocol):
    """Work that a device does in order, concurrently with its other queues."""

    def empty(self, nbytes: int) -> Buffer:
        """Return memory for this queue's work, kept at least until `finish`."""

    def upload(self, array: Any) -> Buffer:
        """Return device memory for a copy of a contiguous array, which may be changed once this returns."""

    def fill(self, buffer: Buffer, byte: int, begin: int, end: int) -> None:
        """Set bytes begin to end."""

    def launch(self, launch: Launch) -> None:
        """Run a kernel. Raises EnvironmentFailure if it cannot be compiled or loaded here."""

    def download(self, buffer: Buffer, array: Any, begin: int = 0) -> None:
        """Copy bytes from `begin` on into a contiguous array, which is filled when `finish` returns."""

    def finish(self) -> None:
        """Wait for all of it; what was kept for it may be given back. Raises EnvironmentFailure for what failed."""


class Device(Protocol):
    """A GPU. All of it raises EnvironmentFailure where memory runs out, with the bytes requested."""

    @property
    def name(self) -> str:
        """As `--device` takes it: `cuda:0`."""

    @property
    def processors(self) -> int:
        """The number of multiprocessors."""

    @property
    def conversions(self) -> int:
        """MX_HARDWARE of `kernels/device.h`: the formats it converts to by itself."""

    def free_bytes(self) -> int:
        """Return the bytes of memory free now."""

    def queues(self, count: int) -> Sequence[Queue]:
        """Return that many queues, the same ones on every call."""


class TimedQueue(Queue, Protocol):
    """A queue whose work can be timed on the device itself."""

    def copy(self, source: Buffer, target: Buffer, nbytes: int, offset: int = 0) -> None:
        """Copy the first bytes of a buffer to another, `offset` bytes from its beginning."""

    def seconds(self, work: Callable[[], None], before: Callable[[], None]) -> float:
        """Return the device time of the work that `work` queues, after the work that `before` queues is done."""


class TimedDevice(Device, Protocol):
    """A GPU for benchmarks."""

    @property
    def capability(self) -> tuple[int, int]:
        """Its compute capability."""

    def describe(self) -> str:
        """Return its name, memory, driver and compiler."""

    def clocks(self) -> str:
        """Return its current clocks and power as its driver reports them, or that they are unknown."""

    def queues(self, count: int) -> Sequence[TimedQueue]:
        """Return queues as `Device.queues` does."""
