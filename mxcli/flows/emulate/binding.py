"""Modules by the parameters that they compute with, and the ones that cannot be emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxcli.flows.emulate.experts import are_known_experts
from mxcli.flows.emulate.modules import conv1d_forward, embedding_forward, linear_forward

_FALCON = "FalconLinear"
"""A class of transformers whose forward is that of torch.nn.Linear in other words."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of modules with one matrix: its name, a test for it, and the forward that replaces its own; one without
    products looks rows up."""

    name: str
    fits: Callable[[Any], bool]
    forward: Callable[[Any], Callable[..., Any]]
    has_products: bool = True


def _is_linear(module: Any) -> bool:
    import torch

    if not isinstance(module, torch.nn.Linear):
        return False
    own = type(module).forward
    return own is torch.nn.Linear.forward or str(own.__qualname__) == f"{_FALCON}.forward"


def _is_conv1d(module: Any) -> bool:
    own = type(module).forward
    return bool(own.__qualname__ == "Conv1D.forward" and own.__module__ == "transformers.pytorch_utils")


def _is_embedding(module: Any) -> bool:
    import torch

    return type(module).forward is torch.nn.Embedding.forward and module.max_norm is None


KINDS = (
    Kind("torch.nn.Linear", _is_linear, linear_forward),
    Kind("transformers' Conv1D", _is_conv1d, conv1d_forward),
    Kind("torch.nn.Embedding", _is_embedding, embedding_forward, has_products=False),
)


@dataclass(frozen=True, slots=True)
class Holder:
    """A module with a parameter of its own, by the module's name and the parameter's attribute; `kind` None: experts,
    or (`why`) nothing that can be emulated."""

    name: str
    module: Any
    attribute: str
    kind: Kind | None
    why: str = ""


def holders(model: Any) -> dict[int, list[Holder]]:
    """Return the modules that hold each parameter, by its identity."""
    found: dict[int, list[Holder]] = {}
    parents = _called_in_parts(model)
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(_holder(name, module, attribute, parents))
    return found


def computed_weights(model: Any) -> list[str]:
    """Return the names of layers whose weight is computed whenever it is read, and not a parameter of theirs."""
    return [
        name
        for name, module in model.named_modules()
        if any(kind.fits(module) for kind in KINDS) and "weight" not in dict(module.named_parameters(recurse=False))
    ]


def _holder(name: str, module: Any, attribute: str, parents: Mapping[int, str]) -> Holder:
    if "forward" in vars(module):
        return Holder(name, module, attribute, None, "its forward was replaced by another program")
    if id(module) in parents:
        return Holder(name, module, attribute, None, f"torch's {parents[id(module)]} does not call it as a module")
    kind = next((kind for kind in KINDS if attribute == "weight" and kind.fits(module)), None)
    why = "" if kind or are_known_experts(module) else f"how a {type(module).__name__} computes with it is not known"
    return Holder(name, module, attribute, kind, why)


def _called_in_parts(model: Any) -> dict[int, str]:
    """Return the modules that torch computes without calling them, by identity, and what does that."""
    return dict(_parts_of_attention(model))


def _parts_of_attention(model: Any) -> Iterator[tuple[int, str]]:
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.MultiheadAttention | torch.nn.TransformerEncoderLayer):
            yield from ((id(part), type(module).__name__) for part in module.modules())
