"""Stacked experts of transformers: one product for each expert and stack, of the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxcli.flows.emulate.operand import product_dtype
from mxcli.flows.emulate.products import Inputs, Quantizer, autocast, linear, straight
from mxcli.flows.emulate.training import TrainedLayer
from mxcli.flows.emulate.weights import WeightOperand

if TYPE_CHECKING:
    import torch

SETTINGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts")
"""What transformers sets on experts that it can compute in several ways; they all compute the same."""
DOWN = "down_proj"


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of all experts in one parameter: its operand (None: it stays as it is), the inputs of each expert,
    and, in training, a layer for each."""

    name: str
    operand: WeightOperand | None = None
    inputs: Mapping[int, Inputs] | None = None
    trained: Mapping[int, TrainedLayer] | None = None


@dataclass(frozen=True, slots=True)
class ExpertsState:
    """The stacks of a module, by attribute."""

    stacks: Mapping[str, Stack]
    quantizer: Quantizer


def are_known_experts(module: Any) -> bool:
    """Return whether a module is experts of transformers that can be computed in several ways, or those of Llama 4."""
    known = _take_all_tokens(module) or all(hasattr(module, name) for name in SETTINGS)
    return known and hasattr(module, first_of(module))


def first_of(module: Any) -> str:
    """Return the attribute of the first stack."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def experts_forward(module: Any, state: ExpertsState) -> Callable[..., torch.Tensor]:
    """Return the forward of experts."""
    return _of_all_tokens(state) if _take_all_tokens(module) else _of_routed_tokens(state)


def _take_all_tokens(module: Any) -> bool:
    """Return whether every expert takes all tokens, multiplied by their weights beforehand, as in Llama 4."""
    forward: Callable[..., Any] = type(module).forward
    return str(forward.__qualname__) == "Llama4TextExperts.forward" and forward.__module__.startswith("transformers.")


def _of_all_tokens(state: ExpertsState) -> Callable[..., torch.Tensor]:
    """Return the forward of experts with tokens of their own: hidden states [experts x tokens, features]."""

    def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        import torch

        first, found = first_of(module), []
        matrices = {name: _matrices(state, module, name) for name in (first, DOWN)}
        for expert, x in enumerate(hidden_states.view(module.num_experts, -1, hidden_states.shape[-1])):
            gate, up = _product(state, module, first, matrices, expert, x).chunk(2, dim=-1)
            found.append(_product(state, module, DOWN, matrices, expert, up * module.act_fn(gate)))
        return torch.cat(found)

    return forward


def _of_routed_tokens(state: ExpertsState) -> Callable[..., torch.Tensor]:
    """Return the forward of experts: hidden states [tokens, features], and the experts of each token with their
    weights."""

    def forward(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        import torch

        matrices = {name: _matrices(state, module, name) for name in (first_of(module), DOWN)}
        found = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= module.num_experts:  # of another rank
                continue
            tokens, places = torch.where(top_k_index == expert)
            x = hidden_states[tokens]
            x = _product(state, module, first_of(module), matrices, expert, x)
            x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
            x = _product(state, module, DOWN, matrices, expert, x)
            x = module.post_expert_norm(x) if module.has_post_expert_norm else x
            x = x * top_k_weights[tokens, places, None]
            found = found.index_add(0, tokens, x.to(found.dtype))
        return found

    return forward


def _matrices(state: ExpertsState, module: Any, name: str) -> tuple[torch.Tensor, ...]:
    """Return the matrix of each expert as the module holds it; gradients of all are stacked once."""
    parameter: torch.Tensor = getattr(module, name)
    return tuple(parameter.unbind(0))


def _product(
    state: ExpertsState,
    module: Any,
    name: str,
    matrices: Mapping[str, tuple[torch.Tensor, ...]],
    expert: int,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return the output of one expert's matrix in the dtype of its input."""
    x, stack, turned = autocast(x), state.stacks[name], bool(getattr(module, "is_transposed", True))
    weight = matrices[name][expert]
    bias = getattr(module, f"{name}_bias")[expert] if getattr(module, "has_bias", False) else None
    if stack.trained is not None:
        return stack.trained[expert].product(x, weight.t() if turned else weight, bias)
    inputs = (stack.inputs or {}).get(expert, Inputs())
    schemes = () if stack.operand is None else stack.operand.schemes
    dtype = product_dtype(x.dtype, (inputs.scheme, *schemes)) if stack.operand else x.dtype
    made = state.quantizer.of(x, inputs, dtype)
    values = weight.to(dtype) if stack.operand is None else straight(weight, stack.operand.values(dtype)[expert])
    found = linear(made, values, None, dtype, turned=turned)
    return (found if bias is None else found + bias.to(dtype)).to(x.dtype)
