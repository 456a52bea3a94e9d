"""Keys and values of attention as a quantized cache holds them, and which layers take the outputs of attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from mxcli.errors import RefusedError, UsageError, printable
from mxcli.files.roles import WEIGHT, tags_of
from mxcli.flows.emulate.operand import Devices
from mxcli.flows.emulate.products import Inputs, Quantizer
from mxcli.numerics.formats import find_format
from mxcli.numerics.scheme import Scheme, find_scale_rule, resolve, rules_from, scale_rules

if TYPE_CHECKING:
    import torch

ARGUMENTS = ("cache", "past_key_values")
"""What releases of transformers call the cache that attention receives."""
_PROJECTIONS = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "o", "out_lin", "to_out", "o_net", "proj"})


def takes_outputs_of_attention(name: str) -> bool:
    """Return whether the weight of that name is of the layer that attention ends with: the inputs of that layer are the
    outputs of attention."""
    module = name.removesuffix(f".{WEIGHT}")
    return module.rpartition(".")[2] in _PROJECTIONS and "attn" in tags_of(name, WEIGHT)


def cache_scheme(format: str, rules: Mapping[str, Any]) -> Scheme:
    """Return the scheme of keys and values: rules that do not serve the format are left to the dialect."""
    if not isinstance(format, str):
        raise UsageError(f"kv_cache {printable(repr(format))}: give the name of a format.")
    fmt = find_format(format)
    named = rules_from({"nonfinite": "saturate", **{key: value for key, value in rules.items() if value is not None}})
    if named.scale_rounding is not None and find_scale_rule(named.scale_rounding) not in scale_rules(fmt):
        named = replace(named, scale_rounding=None)
    return resolve(fmt, replace(named, hadamard=None))


def cache_forwards(model: Any, scheme: Scheme, devices: Devices) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield each module of attention with its name and a forward in which keys and values are those of a cache in a
    format. Raises RefusedError for a model without such modules, and for one whose decoder reads an encoder."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise RefusedError(
            f"kv_cache: {type(model).__name__} has an encoder and a decoder, whose caches are not emulated: leave "
            "kv_cache out."
        )
    found = [(name, module, argument) for name, module in model.named_modules() if (argument := _argument(module))]
    if not found:
        raise RefusedError(
            f"kv_cache: {type(model).__name__} has no attention of transformers that takes a cache: leave kv_cache out."
        )
    for name, module, argument in found:
        yield module, name, _forward(name, type(module), argument, scheme, devices)


def _argument(module: Any) -> str | None:
    """Return the argument that attention receives its cache in; None for other modules."""
    if not type(module).__module__.startswith("transformers.") or not isinstance(
        getattr(module, "layer_idx", None), int
    ):
        return None
    known = inspect.signature(type(module).forward).parameters
    return next((name for name in ARGUMENTS if name in known), None)


def _forward(name: str, base: Any, argument: str, scheme: Scheme, devices: Devices) -> Callable[..., Any]:
    signature = inspect.signature(base.forward)

    inputs, quantizer = Inputs(name, scheme), Quantizer(devices)

    def values(x: torch.Tensor) -> torch.Tensor:
        return quantizer.of(x, inputs, x.dtype)

    def forward(module: Any, *arguments: Any, **named: Any) -> Any:
        known = {argument if name in ARGUMENTS else name: value for name, value in named.items()}
        bound = signature.bind(module, *arguments, **known)
        given = bound.arguments.get(argument)
        if given is None:
            bound.arguments[argument] = _passing()(values)
            return base.forward(*bound.args, **bound.kwargs)
        update = given.update
        given.update = lambda keys, *rest, **more: update(values(keys), values(rest[0]), *rest[1:], **more)
        try:
            return base.forward(*bound.args, **bound.kwargs)
        finally:
            del given.update

    return forward


@cache
def _passing() -> Any:
    """Return the class of caches that hold nothing: what is put into one comes back quantized."""
    from transformers import DynamicCache

    class Passing(DynamicCache):  # type: ignore[misc]
        """A cache that holds nothing."""

        def __init__(self, values: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self._values = values

        def update(self, key_states: Any, value_states: Any, *rest: Any, **more: Any) -> tuple[Any, Any]:
            """Return keys and values, quantized."""
            return self._values(key_states), self._values(value_states)

    return Passing
