"""The GPU backend: a tensor goes through in pieces, so that transfers and computing overlap and a tensor may be larger
than the GPU's memory; bytes and statistics equal those of the CPU for any size of pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from mxcli.backends import cpu
from mxcli.backends.device import Buffer, Device, Queue
from mxcli.backends.launches import Addresses, KernelJob
from mxcli.backends.pipeline import FOUND, Outputs, Pipeline, amax_from, look_at, uploaded
from mxcli.errors import EnvironmentFailure, UsageError
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Amax

Array = np.ndarray
PIECE_BYTES = 16 << 20
"""Input of a piece: long enough for full transfer speed, short enough that most weights are several."""
QUEUES = 2
_SHARE_OF_FREE = 0.9


def open_device(index: int, max_memory: int | None) -> Cuda:
    """Return GPU `index` as a backend that uses no more than `max_memory` bytes of its memory.

    Raises EnvironmentFailure if it cannot be used; ImportError if CuPy is not whole.
    """
    from mxcli.backends.cupy_device import CupyDevice

    return Cuda(CupyDevice(index), max_memory)


class Cuda:
    """A GPU as a `Backend`; `piece_bytes` of input go through at a time."""

    def __init__(self, device: Device, max_memory: int | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._max_memory, self._piece_bytes = device, max_memory, piece_bytes

    @property
    def name(self) -> str:
        """As `--device` takes it."""
        return self._device.name

    def amax(self, x: Array, dtype: str, hadamard: Hadamard | None = None) -> Amax:
        """Implement `Backend.amax`."""
        cpu.check_transform(x.shape, hadamard)
        flat = cpu.bits_of(x, dtype).reshape(-1)
        if flat.size == 0:
            return Amax(0.0, 0, -1)
        group = 1 if hadamard is None else hadamard.size
        step = max(group, self._piece(self._limit(flat.nbytes, 1), 1) // flat.itemsize // group * group)
        parts = (flat[first : first + step] for first in range(0, flat.size, step))
        with self._queues() as queues:
            sources = ((partial(_uploaded_part, part), part.size) for part in parts)
            return amax_from(look_at(self._device, queues, dtype, sources, hadamard))

    def quantize(
        self,
        x: Array,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        codes: bool = True,
        stats: bool = True,
        per_block: bool = False,
        reuse: Quantized | None = None,
    ) -> Quantized:
        """Implement `Backend.quantize`."""
        if x.size == 0:
            return cpu.quantize(
                x, dtype, scheme, tensor_amax=tensor_amax, stream=stream, codes=codes, stats=stats, per_block=per_block
            )
        cpu.check_transform(x.shape, scheme.hadamard)
        array, job = cpu.bits_of(x, dtype), KernelJob(x.shape, dtype, scheme, stream)
        packed, scales = cpu.outputs(scheme, x.shape, codes=codes, reuse=reuse)
        blocks = cpu.per_block_arrays(scheme, x.shape) if per_block else None
        has_scale = scheme.format.tensor_scale is not None
        looks = job.whole or (has_scale and tensor_amax is None)
        limit = self._limit(array.nbytes, job.growth)
        room = limit // 2 if looks else 0
        piece_bytes = self._piece(limit - room, job.growth)
        wanted = Outputs(packed, scales, stats, blocks)
        with self._queues() as queues:
            pipeline = Pipeline(self._device, queues, job, uploaded(array, job), wanted)
            found = pipeline.find_amax(job.pieces(piece_bytes), room) if looks else np.zeros(1, FOUND)[0]
            if tensor_amax is not None:
                found["finite"] = np.float32(tensor_amax).view(np.uint32)
            encode, decode = cpu.tensor_scales(scheme, float(found["finite"].view(np.float32)))
            pipeline.set_amax(found)
            measured = pipeline.run(job.pieces(piece_bytes))
        scale = decode if has_scale else None
        return Quantized(scheme, tuple(x.shape), packed, scales, scale, encode, measured, blocks)

    def quantize_both(self, x: Array, dtype: str, scheme: Scheme, *, stream: int = 0) -> tuple[Quantized, Quantized]:
        """Implement `Backend.quantize_both`."""
        return cpu.both_ways(partial(self.quantize, stream=stream, stats=False), x, dtype, scheme)

    def dequantize(self, q: Quantized, dtype: str = "F32") -> Array:
        """Implement `Backend.dequantize`."""
        if dtype not in cpu.TYPES:
            raise UsageError(f"dequantized type {dtype} is not one of {', '.join(cpu.TYPES)}")
        out = np.empty(q.shape, cpu.TYPES[dtype][1])
        if out.size == 0:
            return out
        job = KernelJob(q.shape, dtype, q.scheme)
        packed = np.ascontiguousarray(q.packed).reshape(job.all_rows, -1)
        scales = np.ascontiguousarray(q.scales).reshape(-1)
        values = out.reshape(job.all_rows, -1)
        piece_bytes = self._piece(self._limit(out.nbytes, job.growth), job.growth)
        with self._queues() as queues:
            for number, piece in enumerate(job.pieces(piece_bytes)):
                queue, rows = queues[number % QUEUES], slice(*piece.rows)
                queue.finish()
                codes, scale = queue.upload(packed[rows]), queue.upload(scales[slice(*piece.blocks)])
                made = queue.empty(values[rows].nbytes)
                at = Addresses(
                    x=made.address - piece.rows[0] * job.columns * job.item_bytes,
                    codes=codes.address - piece.rows[0] * job.row_bytes,
                    scales=scale.address - piece.blocks[0] * job.scale_bytes,
                )
                decode = 1.0 if q.tensor_scale is None else q.tensor_scale
                queue.launch(job.dequantize(piece, at, q.tensor_encode, decode))
                queue.download(made, values[rows])
            for queue in queues:
                queue.finish()
        return out

    def quantize_dequantize(
        self,
        x: Array,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        out: Array | None = None,
    ) -> Array:
        """Implement `Backend.quantize_dequantize`."""
        cpu.check_transform(x.shape, scheme.hadamard)
        array, job = cpu.bits_of(x, dtype), KernelJob(x.shape, dtype, scheme, stream)
        made, target, kind = cpu.values_for(array.reshape(x.shape), dtype, out)
        if x.size and job.has_values:
            self._pass(array, job, tensor_amax, target, kind)
        elif x.size:
            q = self.quantize(array, dtype, scheme, tensor_amax=tensor_amax, stream=stream, stats=False)
            target = self.dequantize(q, kind)
        if target is not made:
            made[...] = target
        return made

    def _pass(self, array: Array, job: KernelJob, tensor_amax: float | None, values: Array, dtype: str) -> None:
        """Fill `values` with those of a tensor under the scheme of its job."""
        growth = 1 - -values.itemsize // array.itemsize
        limit = self._limit(array.nbytes, growth)
        looks = job.whole or (job.scheme.format.tensor_scale is not None and tensor_amax is None)
        room = limit // 2 if looks else 0
        piece_bytes = self._piece(limit - room, growth)
        nothing = np.empty(0, np.uint8)
        wanted = Outputs(nothing, nothing, False, None, values, dtype)
        with self._queues() as queues:
            pipeline = Pipeline(self._device, queues, job, uploaded(array, job), wanted)
            found = pipeline.find_amax(job.pieces(piece_bytes), room) if looks else np.zeros(1, FOUND)[0]
            if tensor_amax is not None:
                found["finite"] = np.float32(tensor_amax).view(np.uint32)
            pipeline.set_amax(found)
            pipeline.run(job.pieces(piece_bytes))

    @contextmanager
    def _queues(self) -> Iterator[Sequence[Queue]]:
        """Return the device's queues. After a failure nothing is left waiting in them: what they hold is given back,
        and no download reaches arrays that the caller has taken up again."""
        queues = self._device.queues(QUEUES)
        try:
            yield queues
        except BaseException:
            for queue in queues:
                with suppress(EnvironmentFailure):
                    queue.finish()
            raise

    def _limit(self, nbytes: int, growth: int) -> int:
        """Return the bytes of the device's memory to use for a tensor of `nbytes`, each of which needs `growth`."""
        free = int(self._device.free_bytes() * _SHARE_OF_FREE)
        limit = free if self._max_memory is None else min(free, self._max_memory)
        least = min(nbytes, 1 << 20) * growth * QUEUES
        if limit < least:
            raise EnvironmentFailure(
                f"{self.name}: {limit:,} bytes of its memory may be used and {least:,} are needed; end what else uses "
                "it, raise --max-memory, or use --device cpu."
            )
        return limit

    def _piece(self, limit: int, growth: int) -> int:
        """Return the bytes of input that go through at a time, each of which needs `growth`."""
        return max(1, min(self._piece_bytes, limit // (QUEUES * growth)))


def _uploaded_part(part: Array, queue: Queue) -> Buffer:
    return queue.upload(part)
