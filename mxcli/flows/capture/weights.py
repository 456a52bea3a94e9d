"""Weights as the forward of their layer used them, read without running code of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAME = "weight"


@contextmanager
def unobserved() -> Iterator[None]:
    """Run operations of torch that the program does not see: without gradients, outside its modes, and without the code
    of tensor subclasses."""
    import torch
    from torch.utils import _python_dispatch

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_python_dispatch._disable_current_modes())
        yield


def is_plain(tensor: Any) -> bool:
    """Return whether the tensor is one of torch's own, no subclass with code or values of its own."""
    import torch

    kind = type(tensor)
    return kind in (torch.Tensor, torch.nn.Parameter) or (
        isinstance(tensor, torch.nn.Parameter)
        and kind.__torch_function__ is torch.nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ is torch.nn.Parameter.__torch_dispatch__
    )


def held_weight(module: Any) -> Any:
    """Return the weight that a module holds; None if it computes one whenever it is read."""
    if hasattr(type(module), _NAME):
        return None
    state = vars(module)
    return next(
        (held[_NAME] for held in (state, state["_parameters"], state["_buffers"]) if held.get(_NAME) is not None), None
    )


def parametrization_of(module: Any) -> Any:
    """Return the module of torch.nn.utils.parametrize that computes the weight of another; None without one."""
    from torch.nn.utils.parametrize import ParametrizationList

    found = vars(module)["_modules"].get("parametrizations")
    lists = {} if found is None else vars(found)["_modules"]
    return lists[_NAME] if isinstance(lists.get(_NAME), ParametrizationList) else None


def cached_weight(module: Any) -> Any:
    """Return the weight that `torch.nn.utils.parametrize.cached` keeps for a module; None if there is none."""
    from torch.nn.utils import parametrize

    return parametrize._cache.get((id(module), _NAME))


def weight_dtype(module: Any) -> str:
    """Return torch's name for the dtype of a module's weight, or of what its parametrization computes it from."""
    weight, parametrization = held_weight(module), parametrization_of(module)
    if weight is None and parametrization is not None:
        weight = next(iter(vars(parametrization)["_parameters"].values()), None)
    with unobserved():
        return str(getattr(weight, "dtype", None))


def whole_weight(weight: Any, inputs: int, outputs: int, *, transposed: bool) -> torch.Tensor | None:
    """Return a copy of a weight as [out, in], contiguous and on the CPU. None for one that is not a plain matrix of
    that size, such as a quantized, sharded or offloaded one.

    A copy always: as a numpy array, torch could no longer resize the storage, as sharding does.
    """
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    if weight is None or not is_plain(weight) or tuple(weight.shape) != shape or weight.is_meta:
        return None
    if not weight.is_floating_point() or weight.layout is not _strided():
        return None
    plain = weight.detach().t() if transposed else weight.detach()
    found = plain.cpu().contiguous()
    return found.clone() if found.data_ptr() == weight.data_ptr() else found


def _strided() -> Any:
    import torch

    return torch.strided
