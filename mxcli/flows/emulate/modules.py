"""Modules that compute as emulated: the class of each is exchanged for one with another forward, and given back."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxcli.flows.emulate.operand import product_dtype
from mxcli.flows.emulate.products import Inputs, Quantizer, autocast, linear, straight
from mxcli.flows.emulate.training import TrainedLayer
from mxcli.flows.emulate.weights import WeightOperand

if TYPE_CHECKING:
    import torch

MARK = "_mxcli_emulated"
"""The attribute that an exchanged class has, with the class before."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """The operands of a layer with one matrix; `trained` replaces those for inference."""

    operand: WeightOperand | None
    inputs: Inputs
    quantizer: Quantizer
    trained: TrainedLayer | None = None


def exchange(module: Any, forward: Callable[..., Any]) -> None:
    """Give a module a forward of another kind, called with the module and its arguments. Copies and pickles of the
    module are of its own class."""
    base: Any = type(module)

    def reduce(self: Any, protocol: Any) -> Any:
        build, arguments, *state = base.__reduce_ex__(self, protocol)
        if build is getattr(copyreg, "__newobj__", None):  # pickle takes it for the object's own class only
            return (getattr(copyreg, "_reconstructor"), (base, object, None), *state)  # noqa: B009
        return (build, tuple(base if each is type(self) else each for each in arguments), *state)

    content = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        MARK: base,
    }
    module.__class__ = type(base.__name__, (base,), content)


def give_back(module: Any) -> None:
    """Give a module the class that it had."""
    module.__class__ = getattr(type(module), MARK)


def is_emulated(module: Any) -> bool:
    """Return whether the class of a module is exchanged."""
    return hasattr(type(module), MARK)


def linear_forward(state: LayerState) -> Callable[..., torch.Tensor]:
    """Return the forward of torch.nn.Linear."""
    return lambda module, input: _product(state, module, input, turned=False)


def conv1d_forward(state: LayerState) -> Callable[..., torch.Tensor]:
    """Return the forward of transformers' Conv1D, whose weight is [in, out]."""
    return lambda module, x: _product(state, module, x, turned=True)


def embedding_forward(state: LayerState) -> Callable[..., torch.Tensor]:
    """Return the forward of torch.nn.Embedding: rows of the quantized table, in the table's dtype."""

    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        import torch

        assert state.operand is not None
        table = straight(module.weight, state.operand.values(module.weight.dtype))
        return torch.nn.functional.embedding(
            input,
            table,
            module.padding_idx,
            scale_grad_by_freq=module.scale_grad_by_freq,
        )

    return forward


def _product(state: LayerState, module: Any, input: torch.Tensor, *, turned: bool) -> torch.Tensor:
    """Return the output of a layer in the dtype of its input, which autocast may change."""
    x, weight, bias = autocast(input), module.weight, module.bias
    if state.trained is not None:
        return state.trained.product(x, weight.t() if turned else weight, bias)
    assert state.operand is not None
    dtype = product_dtype(x.dtype, (state.inputs.scheme, *state.operand.schemes))
    quantized = state.quantizer.of(x, state.inputs, dtype)
    values = straight(weight, state.operand.values(dtype))
    return linear(quantized, values, bias, dtype, turned=turned).to(x.dtype)
