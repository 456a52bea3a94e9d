"""Where matrix products are computed: tensors on a device, quantized there by our kernels, as libraries take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mxcli.backends import CPU, Backend, open_resident
from mxcli.backends.cpu import Cpu
from mxcli.backends.reencoding import reencode
from mxcli.errors import EnvironmentFailure
from mxcli.files.packing import swizzle
from mxcli.flows.doctor import memory_bytes
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix [rows, k] of codes with block scales along k, on the device; `inexact` elements were rounded again when
    it was re-encoded."""

    quantized: Quantized
    inexact: int = 0

    @property
    def recipe(self) -> Recipe:
        """How it was quantized."""
        return self.quantized.recipe


@dataclass(frozen=True, slots=True)
class Engine:
    """A device, the backend that quantizes on it, and its compute capability (None: the CPU)."""

    device: str
    backend: Backend
    capability: tuple[int, int] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.capability is not None

    def quantize(self, x: Tensor, recipe: Recipe, *, swizzled: bool = False) -> Operand:
        """A BF16 matrix quantized; `swizzled` scales are flat, in the 128x4 order of block-scaled products."""
        import torch

        bits = x.contiguous().view(torch.uint16)
        if self.on_gpu:
            more = {"swizzled": True} if swizzled else {}
            return Operand(cast("Any", self.backend).quantize(bits, "BF16", recipe, stats=False, **more))
        return Operand(self.backend.quantize(bits.numpy(), "BF16", recipe, stats=False))

    def reencode(self, operand: Operand, recipe: Recipe) -> Operand:
        """The same values under another recipe, as far as it can hold them."""
        found = reencode(operand.quantized, recipe, self.backend)
        return Operand(found.quantized, found.inexact)

    def values(self, operand: Operand) -> Tensor:
        """What the codes stand for, in binary32."""
        return self.tensor(self.backend.dequantize(operand.quantized))

    def codes(self, operand: Operand) -> Tensor:
        """The codes as the torch type that they are: float8, or pairs of 4-bit codes."""
        import torch

        types = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
        return self.tensor(operand.quantized.packed).view(types[operand.recipe.format.element.name])

    def scales(self, operand: Operand, *, swizzled: bool = False) -> Tensor:
        """The scales as the torch type that they are; in the 128x4 order where they were quantized so, or are asked
        for so on a CPU."""
        import torch

        scales = operand.quantized.scales
        if swizzled and not self.on_gpu:
            scales = swizzle(scales)
        types = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
        name = operand.recipe.format.scale.name
        found = self.tensor(scales)
        return found.view(types[name]) if name in types else found

    def tensor(self, array: Any) -> Tensor:
        """A torch tensor of an array of the backend, without a copy."""
        import torch

        return torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def free_bytes(self) -> int:
        """Memory that could be had: what is free on a GPU, what the machine has on a CPU."""
        if self.on_gpu:
            import torch

            return int(torch.cuda.mem_get_info(self.device)[0])
        return memory_bytes() or 1 << 62

    def release(self) -> None:
        """Gives memory back that nothing refers to any more."""
        if self.on_gpu:
            import torch

            torch.cuda.empty_cache()


def open_engine(device: str) -> Engine:
    """The engine of `cpu` or `cuda:N`; raises EnvironmentFailure where torch or the kernels cannot use the GPU."""
    if device == CPU:
        return Engine(CPU, Cpu())
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentFailure(
            f"--device {device}: torch {torch.__version__} cannot use it (built without CUDA, or no driver); install "
            "torch for CUDA."
        )
    return Engine(device, open_resident(device), torch.cuda.get_device_capability(device))
