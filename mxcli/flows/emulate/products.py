"""Products of quantized operands, and gradients that pass straight through the rounding."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mxcli.errors import RefusedError, printable
from mxcli.flows.emulate.operand import Devices, amax_of, quantized
from mxcli.numerics.scheme import Scheme

if TYPE_CHECKING:
    import torch


@cache
def _straight() -> Any:
    """Return the function of autograd that replaces values and passes gradients on."""
    import torch

    class Straight(torch.autograd.Function):  # type: ignore[misc]
        """Other values for a tensor, with the gradient of the identity."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            ctx.dtype = x.dtype
            return values.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradients[0].to(ctx.dtype), None

    return Straight


def straight(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the values, with the gradient of x where it needs one."""
    import torch

    if not (torch.is_grad_enabled() and x.requires_grad):
        return values
    found: torch.Tensor = _straight().apply(x, values)
    return found


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a layer: its name, their scheme (None: not quantized), and the amax that a static scale is made
    for, if any."""

    name: str = ""
    scheme: Scheme | None = None
    amax: float | None = None


class Quantizer:
    """A quantizer of inputs. Several layers may read one tensor, such as q, k and v: its values are kept until another
    one comes, or it is gone."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self._last: tuple[weakref.ref[torch.Tensor], object, torch.Tensor] | None = None

    def of(self, x: torch.Tensor, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
        """Return the inputs of a product, [..., features], as their codes stand for them: tokens of all leading
        dimensions are quantized as one matrix. Raises RefusedError for values that the scheme refuses."""
        if inputs.scheme is None:
            return x.to(dtype)
        # Tensors of inference mode do not count their changes.
        key = None if x.is_inference() else (x._version, x.data_ptr(), inputs.scheme, inputs.amax, dtype)
        last = self._last
        if key is not None and last is not None and last[0]() is x and last[1] == key:
            return straight(x, last[2])
        made = self._made(x.detach(), inputs, dtype)
        if key is not None:
            self._last = weakref.ref(x, self._forget), key, made
        return straight(x, made)

    def _made(self, x: torch.Tensor, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
        assert inputs.scheme is not None
        rows = x.reshape(-1, x.shape[-1])
        if inputs.scheme.nonfinite == "error" and (count := amax_of(rows, self.devices).nonfinite):
            raise RefusedError(
                f"{printable(inputs.name)}: its inputs hold {count:,} NaN or infinite values: exclude the layer, or "
                "state nonfinite='saturate' or 'nan-block'."
            )
        return quantized(rows, inputs.scheme, self.devices, dtype, tensor_amax=inputs.amax).reshape(x.shape)

    def _forget(self, gone: weakref.ref[torch.Tensor]) -> None:
        last = self._last
        if last is not None and last[0] is gone:
            self._last = None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, turned: bool = False
) -> torch.Tensor:
    """Return x W^T + b of operands in the dtype of the product; `turned`: W is [in, out]."""
    import torch

    plain = None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        if not turned:
            return torch.nn.functional.linear(x, weight, plain)
        rows = x.reshape(-1, x.shape[-1])
        found = rows @ weight if plain is None else torch.addmm(plain, rows, weight)
        return found.reshape(*x.shape[:-1], weight.shape[-1])


def autocast(x: torch.Tensor) -> torch.Tensor:
    """Return the input of a layer in the dtype that autocast gives it."""
    import torch

    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
