"""Backend for torch tensors on a GPU: quantized in place, on torch's current stream, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mxcli.backends import cpu
from mxcli.backends.device import Buffer, Device, Queue
from mxcli.backends.launches import Addresses, KernelJob
from mxcli.backends.pipeline import FOUND, Outputs, Pipeline, Source, amax_from, look_at
from mxcli.errors import UsageError
from mxcli.numerics.blocks import Quantized, grid_shape, packed_columns
from mxcli.numerics.floats import FP32
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Amax

if TYPE_CHECKING:
    import torch


class StreamDevice(Device, Protocol):
    """A device that can work on streams of somebody else's."""

    def queue_of(self, stream: int) -> Queue:
        """Return a queue that is a CUDA stream, by its handle."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory that torch holds, as a `Buffer`."""

    address: int


class DeviceTensors:
    """A GPU as a `Backend` for torch tensors on it, BF16 as the uint16 of its bits; results are torch tensors on it.

    Kernels follow what torch has put into its current stream, and what torch does next follows them.
    """

    def __init__(self, device: StreamDevice) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """As `--device` takes it."""
        return self._device.name

    def amax(self, x: torch.Tensor, dtype: str, hadamard: Hadamard | None = None) -> Amax:
        """Implement `Backend.amax`."""
        cpu.check_transform(tuple(x.shape), hadamard)
        if x.numel() == 0:
            return Amax(0.0, 0, -1)
        place = _Place(x.data_ptr())
        parts = [(lambda queue: place, x.numel())]
        return amax_from(look_at(self._device, [self._queue(x)], dtype, parts, hadamard))

    def quantize(
        self,
        x: torch.Tensor,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        codes: bool = True,
        stats: bool = True,
        per_block: bool = False,
        reuse: Quantized | None = None,
        swizzled: bool = False,
    ) -> Quantized:
        """Implement `Backend.quantize`: codes or statistics, not both, and no arrays per block. `swizzled`: scales of
        a tensor of two dimensions, one byte each, in the 128x4 order of block-scaled matrix products, flat."""
        import torch

        if stats == codes or per_block or reuse is not None:
            raise UsageError("a tensor on a GPU is either quantized or measured, without arrays per block")
        cpu.check_transform(tuple(x.shape), scheme.hadamard)
        job, queue = KernelJob(tuple(x.shape), dtype, scheme, stream), self._queue(x)
        wanted = Outputs(np.empty(0, np.uint8), np.empty(0, np.uint8), stats, None)
        pipeline, piece = self._passage(job, x, queue, wanted), job.piece(0, job.cut.units)
        found, has_scale = self._find(job, pipeline, tensor_amax), scheme.format.tensor_scale is not None
        encode, decode = cpu.tensor_scales(scheme, float(found["finite"].view(np.float32)))
        measured, packed, scales = None, torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        if stats:
            pipeline.set_amax(found)
            measured = pipeline.run([piece])
        else:
            packed, scales = _outputs(x, scheme, swizzled=swizzled)
            uploaded = queue.upload(np.array([found], FOUND)) if has_scale or job.whole else None
            at = Addresses(
                x.data_ptr(),
                0 if uploaded is None else uploaded.address,
                codes=packed.data_ptr(),
                scales=scales.data_ptr(),
            )
            if x.numel():
                queue.launch(job.quantize(piece, at, self._device.conversions, swizzled))
            if uploaded is not None:
                queue.finish()  # the array must live until its upload is done
        scale = decode if has_scale else None
        return Quantized(scheme, tuple(x.shape), packed, scales, scale, encode, measured, None)

    def quantize_both(
        self, x: torch.Tensor, dtype: str, scheme: Scheme, *, stream: int = 0
    ) -> tuple[Quantized, Quantized]:
        """Implement `Backend.quantize_both`: one read for both, after the one for a tensor scale, where blocks are
        rows of 16 or 32 that hold whole groups of a transform."""
        import torch

        shape = tuple(x.shape)
        job = KernelJob(shape, dtype, scheme, stream)
        if not (job.has_both and len(shape) > 1 and x.numel()):
            transposed = x.transpose(-1, -2).contiguous()
            row, column = (
                self.quantize(oriented, dtype, scheme, stream=stream, stats=False) for oriented in (x, transposed)
            )
            return row, column
        for oriented in (shape, (*shape[:-2], shape[-1], shape[-2])):
            cpu.check_transform(oriented, scheme.hadamard)
        queue, has_scale = self._queue(x), scheme.format.tensor_scale is not None
        amaxes = self._both_amaxes(x, dtype, scheme) if has_scale else (0.0, 0.0)
        made, addresses, uploaded = [], [], []
        transposed = torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=x.dtype, device="meta")
        for oriented, amax in zip((x, transposed), amaxes, strict=True):
            packed, scales = _outputs(oriented, scheme, swizzled=False, device=x.device)
            encode, decode = cpu.tensor_scales(scheme, amax)
            found = queue.upload(np.array([amax], np.float32)) if has_scale else None
            uploaded.append(found)
            address = 0 if found is None else found.address
            addresses.append(Addresses(x.data_ptr(), address, codes=packed.data_ptr(), scales=scales.data_ptr()))
            scale = decode if has_scale else None
            made.append(Quantized(scheme, tuple(oriented.shape), packed, scales, scale, encode, None, None))
        queue.launch(job.quantize_both(addresses[0], addresses[1], self._device.processors, self._device.conversions))
        if has_scale:
            queue.finish()  # as in quantize
        return made[0], made[1]

    def _both_amaxes(self, x: torch.Tensor, dtype: str, scheme: Scheme) -> tuple[float, float]:
        """Return largest magnitudes along rows and along columns, which only a transform makes different."""
        row = self.amax(x, dtype, scheme.hadamard).value
        if scheme.hadamard is None:
            return row, row
        return row, self.amax(x.transpose(-1, -2).contiguous(), dtype, scheme.hadamard).value

    def dequantize(self, q: Quantized, dtype: str = "F32") -> torch.Tensor:
        """Implement `Backend.dequantize`."""
        import torch

        if dtype not in cpu.TYPES:
            raise UsageError(f"dequantized type {dtype} is not one of {', '.join(cpu.TYPES)}")
        kind = getattr(torch, np.dtype(cpu.TYPES[dtype][1]).name)
        out = torch.empty(q.shape, dtype=kind, device=q.packed.device)
        job = KernelJob(q.shape, dtype, q.scheme)
        at = Addresses(out.data_ptr(), codes=q.packed.data_ptr(), scales=q.scales.data_ptr())
        decode = 1.0 if q.tensor_scale is None else q.tensor_scale
        if out.numel():
            piece = job.piece(0, job.cut.units)
            self._queue(out).launch(job.dequantize(piece, at, q.tensor_encode, decode))
        return out

    def quantize_dequantize(
        self,
        x: torch.Tensor,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `Backend.quantize_dequantize`."""
        job, queue = KernelJob(tuple(x.shape), dtype, scheme, stream), self._queue(x)
        made, target, kind = _values_for(x, dtype, out)
        if x.numel() and job.has_values:
            cpu.check_transform(tuple(x.shape), scheme.hadamard)
            nothing = Outputs(np.empty(0, np.uint8), np.empty(0, np.uint8), False, None)
            found = self._find(job, self._passage(job, x, queue, nothing), tensor_amax)
            uploaded = queue.upload(np.array([found], FOUND))
            at = Addresses(x.data_ptr(), uploaded.address, codes=target.data_ptr())
            queue.launch(job.quantize_dequantize(job.piece(0, job.cut.units), at, kind))
            queue.finish()  # as in quantize
        elif x.numel():
            q = self.quantize(x, dtype, scheme, tensor_amax=tensor_amax, stream=stream, stats=False)
            target = self.dequantize(q, kind)
        return made if target is made else made.copy_(target)

    def _find(self, job: KernelJob, pipeline: Pipeline, tensor_amax: float | None) -> Any:
        """Return the amaxes that a job's kernels read, an element of type FOUND; `tensor_amax` replaces that of a
        tensor scale."""
        found = np.zeros(1, FOUND)[0]
        has_scale = job.scheme.format.tensor_scale is not None
        if job.all_rows * job.columns and (job.whole or (has_scale and tensor_amax is None)):
            found = pipeline.find_amax([job.piece(0, job.cut.units)], room=0)
        if tensor_amax is not None:
            found["finite"] = np.float32(tensor_amax).view(np.uint32)
        return found

    def _passage(self, job: KernelJob, x: torch.Tensor, queue: Queue, wanted: Outputs) -> Pipeline:
        return Pipeline(self._device, [queue], job, _lying(x), wanted)

    def _queue(self, x: torch.Tensor) -> Queue:
        import torch

        return self._device.queue_of(torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)


def unpack(q: Quantized) -> torch.Tensor:
    """Return one code per byte, in the tensor's shape."""
    import torch

    packed: torch.Tensor = q.packed
    bits = q.format.element.stored_bits
    if bits == 8:
        return packed
    if bits == 4:
        codes = torch.stack((packed & 0xF, packed >> 4), -1)
    else:
        one, two, three = packed.unflatten(-1, (-1, 3)).unbind(-1)
        parts = (one & 0x3F, one >> 6 | (two & 0xF) << 2, two >> 4 | (three & 0x3) << 4, three >> 2)
        codes = torch.stack(parts, -1)
    return codes.flatten(-2)[..., : q.shape[-1]].contiguous()


def _values_for(x: torch.Tensor, dtype: str, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return what `cpu.values_for` does, for tensors of a device."""
    import torch

    kinds = {name: getattr(torch, np.dtype(kind).name) for name, (_, kind) in cpu.TYPES.items()}
    if out is None:
        out = torch.empty(x.shape, dtype=kinds["F32" if dtype == "F64" else dtype], device=x.device)
    known = next((name for name, kind in kinds.items() if out.dtype is kind), None)
    if known is None or out.shape != x.shape:
        raise UsageError(f"values of shape {list(x.shape)} do not go into a tensor of {out.dtype}, {list(out.shape)}")
    in_place = out.data_ptr() == x.data_ptr() and known == dtype
    is_apart = in_place or out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    target = out if is_apart and out.is_contiguous() else torch.empty(x.shape, dtype=out.dtype, device=x.device)
    return out, target, known


def _lying(x: torch.Tensor) -> Source:
    place: Buffer = _Place(x.data_ptr())
    return lambda queue, piece: place


def _outputs(
    x: torch.Tensor, scheme: Scheme, *, swizzled: bool, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors for codes and scales on the device of x, or on a given device."""
    import torch

    where = x.device if device is None else device

    row, shape = scheme.format, tuple(x.shape)
    packed = torch.empty((*shape[:-1], packed_columns(row, shape[-1])), dtype=torch.uint8, device=where)
    grid = grid_shape(row, shape)
    if not swizzled:
        kind = torch.float32 if row.scale is FP32 else torch.uint8
        return packed, torch.empty(grid, dtype=kind, device=where)
    if len(grid) != 2 or row.scale.bits != 8:
        raise UsageError(
            f"scales of shape {list(grid)} ({row.scale.name}): only those of two dimensions and one byte "
            "each have the order of block-scaled matrix products"
        )
    padded = -(-grid[0] // 128) * 128 * -(-grid[1] // 4) * 4
    return packed, torch.zeros(padded, dtype=torch.uint8, device=where)
