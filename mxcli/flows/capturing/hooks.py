"""What hangs on a model while it is recorded, and not on copies of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from mxcli.flows.capturing.layers import Layer

OnCall = Callable[[Layer, Any, Any, Any], None]
"""Told of a layer's call: its positional and named arguments, and its output."""


class LayerHook:
    """A forward hook that tells of a layer's calls and returns nothing, so that the output stays what it is.

    A copy of the model is another model, and a file of it must not need mxcli: copied or pickled, the hook becomes
    something of the standard library that takes four arguments and does nothing.
    """

    def __init__(self, layer: Layer, on_call: OnCall) -> None:
        self._layer, self._on_call = layer, on_call

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Tells of a call of the layer's."""
        self._on_call(self._layer, args, kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
