"""Operands of products: tensors of torch as their codes stand for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mxcli.backends import CPU, CUDA, choose_backend, open_resident
from mxcli.backends.backend import Backend
from mxcli.backends.given import check_plain, elements_of
from mxcli.errors import UsageError
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Amax

if TYPE_CHECKING:
    import torch

BFLOAT16_DIGITS = 8
"""Binary digits of a bfloat16, the leading one included."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The backends of tensors: in memory that of the `device` (None: the CPU) with `threads`, on a GPU its own."""

    device: str | None = None
    threads: int | None = None

    def of(self, tensor: torch.Tensor) -> Backend:
        """Return the backend of a tensor. Raises UsageError for one elsewhere, and for a named device that the tensor
        is not on."""
        where = tensor.device
        if where.type == CPU:
            return _in_memory(self.device or CPU, self.threads)
        if where.type != CUDA:
            raise UsageError(f"a tensor on {where}: only tensors in memory and on CUDA devices are read.")
        name = f"{CUDA}:{where.index or 0}"
        if self.device not in (None, "auto", CUDA, name):
            raise UsageError(f"device '{self.device}' for a tensor on {name}: leave device out.")
        return _resident(name)


@lru_cache(maxsize=16)
def _in_memory(device: str, threads: int | None) -> Backend:
    return choose_backend(device, threads=threads)


@lru_cache(maxsize=16)
def _resident(device: str) -> Backend:
    return open_resident(device)


def quantized(
    x: torch.Tensor,
    scheme: Scheme,
    devices: Devices,
    dtype: torch.dtype,
    *,
    tensor_amax: float | None = None,
    stream: int = 0,
) -> torch.Tensor:
    """Return the values of a tensor under a scheme in a dtype, blocks along its last dimension: bit for bit those of
    `dequantize` after `quantize`, rounded to nearest even where the dtype does not hold them."""
    import torch

    check_plain(x)
    if not x.numel():
        return x.detach().to(dtype)
    # Values that are kept may be used in training later, which takes no tensors of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        elements, name = elements_of(x)
        found = torch.empty(x.shape, dtype=torch.float32 if dtype == torch.float64 else dtype, device=x.device)
        devices.of(x).quantize_dequantize(
            elements, name, scheme, tensor_amax=tensor_amax, stream=stream, out=_bits(found)
        )
        return found.to(dtype)


def amax_of(x: torch.Tensor, devices: Devices, hadamard: Hadamard | None = None) -> Amax:
    """Return the largest finite magnitude of a tensor, of its transform if one is given, and what is not finite."""
    check_plain(x)
    elements, name = elements_of(x)
    return devices.of(x).amax(elements, name, hadamard)


def product_dtype(x: torch.dtype, schemes: tuple[Scheme | None, ...]) -> torch.dtype:
    """Return the dtype in which a product of operands is computed, for inputs of dtype `x`: bfloat16 where that is the
    dtype of the inputs and every value of both operands is exact in it, else float32; float64 stays.

    An operand that is not quantized (None) is exact in its own dtype.
    """
    import torch

    if x == torch.bfloat16 and all(scheme is None or is_exact_in_bfloat16(scheme) for scheme in schemes):
        return x
    return torch.promote_types(x, torch.float32)


def is_exact_in_bfloat16(scheme: Scheme) -> bool:
    """Return whether all values of bfloat16 input under a scheme are bfloat16 again: few digits times a power of two.

    Where a scale is so small that elements are finer than the smallest bfloat16, the input has no such digits either.
    """
    fmt = scheme.format
    is_power = fmt.has_power_of_two_scales and fmt.tensor_scale is None and scheme.hadamard is None
    return is_power and fmt.element.mantissa_bits + 1 <= BFLOAT16_DIGITS


def _bits(found: torch.Tensor) -> Any:
    """Return the tensor as backends write it: BF16 as the uint16 of its bits, in memory a numpy array."""
    import torch

    plain = found.view(torch.uint16) if found.dtype == torch.bfloat16 else found
    return plain if found.is_cuda else plain.numpy()
