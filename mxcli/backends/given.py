"""Torch tensors and numpy arrays of a program as the elements that backends take."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from mxcli.errors import UsageError

if TYPE_CHECKING:
    import torch

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_FIRST_BEYOND = 2.0**128 - 2.0**103
"""The smallest float64 that rounds to an infinity of binary32."""


def torch_tensor(x: Any) -> torch.Tensor | None:
    """Return the value if it is a torch tensor, else None; torch is not imported for that."""
    return x if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor) else None


def plain_array(x: Any) -> np.ndarray[Any, Any]:
    """Return an array as numpy's own class. Raises UsageError for anything else, and for a masked one."""
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError("a masked array: masks are not known here; pass x.filled(0) or x.compressed()")
    if not isinstance(x, np.ndarray):
        raise UsageError(f"{type(x).__name__} is neither a torch tensor nor a numpy array")
    return x.view(np.ndarray)


def check_plain(tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor whose elements are not all there as they are."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        way = "pass its parts one by one" if tensor.is_nested else "pass x.to_dense()"
        raise UsageError(f"a tensor of layout {'nested' if tensor.is_nested else tensor.layout}: {way}")
    if tensor.is_meta:
        raise UsageError("a tensor on meta: only tensors in memory and on CUDA devices are read")
    known = torch._C._functorch
    if known.is_functorch_wrapped_tensor(tensor) or known.is_legacy_batchedtensor(tensor):
        raise UsageError("a tensor under torch.func or vmap has no elements of its own: call mxcli outside of it")
    kind = type(tensor)
    if kind.__torch_dispatch__ not in (
        torch.Tensor.__torch_dispatch__,
        torch.nn.Parameter.__torch_dispatch__,
    ):
        raise UsageError(f"a {kind.__name__} is not a plain tensor: pass its dequantized or whole values")


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's type, without its prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def elements_of(x: Any) -> tuple[Any, str]:
    """Return the elements without a copy where they are contiguous, BF16 as the uint16 of its bits, and their type: a
    numpy array, or of a tensor on a GPU a tensor."""
    tensor = torch_tensor(x)
    if tensor is not None:
        import torch

        name = dtype_name(tensor)
        if name not in _DTYPES:
            raise UsageError(f"a tensor of type {name} is not one of {', '.join(_DTYPES)}")
        data = tensor.detach().resolve_neg().contiguous()
        bits = data.view(torch.uint16) if name == "bfloat16" else data
        return bits if tensor.is_cuda else bits.numpy(), _DTYPES[name]
    x = plain_array(x)
    if x.dtype.name not in _DTYPES:
        raise UsageError(f"an array of type {x.dtype.name} is not one of {', '.join(_DTYPES)}")
    native = x.astype(x.dtype.newbyteorder("="), copy=False)
    return (native.view(np.uint16) if x.dtype.name == "bfloat16" else native), _DTYPES[x.dtype.name]


def result_for(x: Any, out: Any) -> tuple[Any, Any]:
    """Return a tensor for values in the shape of x (`out` if it is not None) and its elements, as `elements_of` shows
    them but never copied. Raises UsageError for an `out` that cannot take them."""
    if out is None:
        out = _like(x)
    tensor, given = torch_tensor(out), torch_tensor(x)
    if (tensor is None) != (given is None):
        raise UsageError(f"out is a {type(out).__name__} for values of a {type(x).__name__}: pass one of the same kind")
    if tuple(out.shape) != tuple(x.shape):
        raise UsageError(f"out has shape {list(out.shape)}, the values {list(x.shape)}")
    if tensor is None:
        array = plain_array(out)
        if array.dtype.name not in _DTYPES or not array.dtype.isnative or not array.flags.writeable:
            raise UsageError(f"out is an array of {array.dtype}: pass a writable one of {', '.join(_DTYPES)}")
        return out, array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    import torch

    check_plain(tensor)
    if dtype_name(tensor) not in _DTYPES or tensor.is_neg() or tensor.requires_grad or tensor.device != x.device:
        raise UsageError(
            f"out is a tensor of {dtype_name(tensor)} on {tensor.device}: pass one of {', '.join(_DTYPES)} on "
            f"{x.device} that is not a negated view and needs no gradient, such as out.detach()"
        )
    torch.autograd.graph.increment_version(tensor)
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return out, bits if tensor.is_cuda else bits.numpy()


def _like(x: Any) -> Any:
    """Return new memory in the shape and type of x."""
    if torch_tensor(x) is None:
        array = plain_array(x)
        return np.empty(array.shape, array.dtype.newbyteorder("="))
    import torch

    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def beyond_binary32(x: Any) -> int:
    """Return the number of finite float64 values that binary32 rounds to infinity."""
    magnitude = abs(x)
    return int(((magnitude >= _FIRST_BEYOND) & (magnitude < math.inf)).sum())
