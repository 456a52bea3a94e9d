"""A GPU through CuPy, which finds the driver, holds memory and launches; kernels are compiled by `nvrtc.py`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from mxcli.backends import nvrtc
from mxcli.backends.device import Buffer, Launch
from mxcli.backends.nvrtc import Compiler
from mxcli.errors import EnvironmentFailure

try:
    import cupy

    _OutOfMemory = cupy.cuda.memory.OutOfMemoryError
except ImportError:
    raise
except Exception as error:  # one built for another numpy or another CUDA breaks in any way
    raise ImportError(f"CuPy is broken ({type(error).__name__}: {error})") from error

P = ParamSpec("P")
R = TypeVar("R")
_OUT_OF_MEMORY = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY")
_WAY_OUT = "End what else uses it, lower --max-memory, or use --device cpu."


def _in_words(method: Callable[P, R]) -> Callable[P, R]:
    """Raise errors of CuPy and CUDA as EnvironmentFailure."""

    @wraps(method)
    def careful(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except _OutOfMemory as error:
            raise EnvironmentFailure(f"the GPU's memory is full: {error} {_WAY_OUT}") from error
        except RuntimeError as error:
            if type(error).__name__ not in ("CUDARuntimeError", "CUDADriverError"):
                raise
            if str(error).startswith(_OUT_OF_MEMORY):
                raise EnvironmentFailure(f"memory for transfers to the GPU is full: {error}. {_WAY_OUT}") from error
            raise EnvironmentFailure(f"the GPU failed: {error}. Use --device cpu to go on without it.") from error

    return careful


class Memory:
    """A `Buffer`."""

    __slots__ = ("address", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.pointer, self.address = pointer, int(pointer.ptr)


class CupyQueue:
    """A CUDA stream as a `Queue`. What goes to and from the host goes through page-locked memory, since only that is
    transferred during computing."""

    def __init__(self, device: CupyDevice, stream: Any) -> None:
        self._device, self.stream = device, stream
        self._kept: list[object] = []
        self._downloads: list[tuple[Any, np.ndarray[Any, Any]]] = []

    @_in_words
    def empty(self, nbytes: int) -> Memory:
        """Implement `Queue.empty`."""
        with self._device.chosen, self.stream:  # memory of a stream is used again in that stream's order
            memory = Memory(cupy.cuda.alloc(max(1, nbytes)))
        self._kept.append(memory)
        return memory

    @_in_words
    def upload(self, array: Any) -> Memory:
        """Implement `Queue.upload`."""
        memory = self.empty(array.nbytes)
        with self._device.chosen:
            pinned = cupy.cuda.alloc_pinned_memory(array.nbytes)
            np.frombuffer(pinned, array.dtype, array.size)[:] = array.reshape(-1)
            memory.pointer.copy_from_host_async(pinned.ptr, array.nbytes, self.stream)
        self._kept.append(pinned)
        return memory

    @_in_words
    def fill(self, buffer: Buffer, byte: int, begin: int, end: int) -> None:
        """Implement `Queue.fill`."""
        assert isinstance(buffer, Memory)
        with self._device.chosen:
            (buffer.pointer + begin).memset_async(byte, end - begin, self.stream)

    @_in_words
    def launch(self, launch: Launch) -> None:
        """Implement `Queue.launch`."""
        with self._device.chosen:
            function = self._device.function(launch)
            function((launch.grid,), (launch.threads,), launch.arguments, stream=self.stream)

    @_in_words
    def copy(self, source: Buffer, target: Buffer, nbytes: int, offset: int = 0) -> None:
        """Implement `TimedQueue.copy`."""
        assert isinstance(source, Memory)
        assert isinstance(target, Memory)
        with self._device.chosen:
            (target.pointer + offset).copy_from_device_async(source.pointer, nbytes, self.stream)

    @_in_words
    def seconds(self, work: Callable[[], None], before: Callable[[], None]) -> float:
        """Implement `TimedQueue.seconds`."""
        with self._device.chosen:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            before()
            start.record(self.stream)
            work()
            end.record(self.stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3

    @_in_words
    def download(self, buffer: Buffer, array: Any, begin: int = 0) -> None:
        """Implement `Queue.download`."""
        assert isinstance(buffer, Memory)
        with self._device.chosen:
            pinned = cupy.cuda.alloc_pinned_memory(array.nbytes)
            (buffer.pointer + begin).copy_to_host_async(pinned.ptr, array.nbytes, self.stream)
        self._downloads.append((pinned, array))

    @_in_words
    def finish(self) -> None:
        """Implement `Queue.finish`."""
        with self._device.chosen:
            self.stream.synchronize()
        for pinned, array in self._downloads:
            array[...] = np.frombuffer(pinned, array.dtype, array.size).reshape(array.shape)
        self._downloads.clear()
        self._kept.clear()


class CupyDevice:
    """GPU `index` as a `Device`."""

    @_in_words
    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.chosen = cupy.cuda.Device(index)
        self.processors = int(self.chosen.attributes["MultiProcessorCount"])
        self.capability = divmod(int(self.chosen.compute_capability), 10)
        self._compiler = Compiler(self.capability)
        self.conversions = self._compiler.conversions
        self._functions: dict[object, Any] = {}
        self._queues: list[CupyQueue] = []

    @_in_words
    def free_bytes(self) -> int:
        """Implement `Device.free_bytes`."""
        with self.chosen:
            free, _ = cupy.cuda.runtime.memGetInfo()
            return int(free + cupy.get_default_memory_pool().free_bytes())

    @_in_words
    def queues(self, count: int) -> Sequence[CupyQueue]:
        """Implement `Device.queues`."""
        with self.chosen:
            while len(self._queues) < count:
                self._queues.append(CupyQueue(self, cupy.cuda.Stream(non_blocking=True)))
        return self._queues[:count]

    def queue_of(self, stream: int) -> CupyQueue:
        """Return a queue that is a stream of somebody else's, by its handle."""
        return CupyQueue(self, cupy.cuda.ExternalStream(stream))

    @_in_words
    def describe(self) -> str:
        """Implement `TimedDevice.describe`."""
        properties = cupy.cuda.runtime.getDeviceProperties(self.chosen.id)
        driver = cupy.cuda.runtime.driverGetVersion()
        major, minor = nvrtc.version()
        return (
            f"{properties['name'].decode()}, {properties['totalGlobalMem'] / 2**30:.0f} GiB, CUDA driver "
            f"{driver // 1000}.{driver % 1000 // 10}, NVRTC {major}.{minor}"
        )

    def clocks(self) -> str:
        """Implement `TimedDevice.clocks`."""
        wanted = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader", f"--id={self.chosen.pci_bus_id}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"not known ({error})"
        return "SM, memory, power, temperature: " + done.stdout.strip()

    def function(self, launch: Launch) -> Any:
        """Return the kernel of a launch, loaded."""
        if launch.kernel not in self._functions:
            module = cupy.cuda.function.Module()
            module.load(self._compiler.cubin(launch.kernel))
            self._functions[launch.kernel] = module.get_function(launch.kernel.name)
        return self._functions[launch.kernel]
