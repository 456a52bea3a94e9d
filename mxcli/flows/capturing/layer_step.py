"""What one layer was handed, and what came back to it, within one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import RefusedError, printable
from mxcli.flows.capturing.layers import DTYPES, Layer
from mxcli.flows.capturing.rows import Choice, Rows

if TYPE_CHECKING:
    import torch

OnRows = Callable[[int], None]
"""Told how many tokens a layer has seen, before their rows are taken."""


class LayerStep:
    """Rows of a layer's calls in a step, one call after another.

    Calls that no gradient can come back to (under no_grad, such as a validation in between) count only in a step
    without any other. A call that a checkpointed segment repeats while gradients are computed is not counted again:
    where the first was made without gradients, its rows are taken when their gradient comes, else it is left out.
    """

    def __init__(self, layer: Layer, choice: Choice, on_rows: OnRows, *, gradients: bool) -> None:
        self.layer = layer
        self.seen = 0
        self.calls_without_gradient = 0
        self._wants_gradients, self._on_rows = gradients, on_rows
        self._inputs, self._gradients = Rows(choice), Rows(choice)
        self._choice = choice
        self._passed = 0
        self._is_closed = False

    def called(self, x: torch.Tensor, output: torch.Tensor, *, repeated: bool) -> None:
        """Takes the input of a call, and the gradient when it comes; `repeated`: while gradients are computed."""
        rows = self._rows(x, self.layer.inputs)
        if repeated:
            if self._wants_gradients and output.requires_grad:
                _tapped(output).register_hook(lambda gradient: self._both(rows, gradient))
        elif output.requires_grad:
            self._forget_passed()
            first = self._take(rows)
            came: list[bool] = []
            if self._wants_gradients:
                _tapped(output).register_hook(lambda gradient: self._gradient(first, gradient, came))
        elif not self.got_gradients and self._passed == self.seen:
            self._take(rows)
            self._passed = self.seen
        else:
            self.calls_without_gradient += 1

    def close(self) -> None:
        """Nothing that comes later is taken."""
        self._is_closed = True

    def kept(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Inputs and gradients of the same tokens, in their order; None where none came."""
        inputs, gradients = np.sort(self._inputs.tokens), np.sort(self._gradients.tokens)
        if not len(inputs):
            return None, None
        if not len(gradients):
            return self._inputs.of(inputs), None
        tokens: NDArray[np.int64] = np.intersect1d(inputs, gradients, assume_unique=True)
        return self._inputs.of(tokens), self._gradients.of(tokens)

    @property
    def got_gradients(self) -> bool:
        """Whether any gradient came."""
        return len(self._gradients.tokens) > 0

    @property
    def lacking(self) -> int:
        """Tokens held whose gradient never came, where it did for others."""
        return len(self._inputs.tokens) - len(self._gradients.tokens) if self.got_gradients else 0

    def _take(self, rows: torch.Tensor) -> int:
        first = self.seen
        self.seen += len(rows)
        self._on_rows(self.seen)
        self._inputs.put(first, self._alike(rows, self._inputs))
        return first

    def _gradient(self, first: int, gradient: torch.Tensor, came: list[bool]) -> None:
        if self._is_closed:
            return
        rows = self._alike(self._rows(gradient, self.layer.outputs), self._gradients)
        if came:  # through the same call once more: what autograd would add up
            self._gradients.increase(first, rows)
        else:
            self._gradients.put(first, rows)
            came.append(True)

    def _both(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._is_closed:
            return
        self._forget_passed()
        self._gradient(self._take(rows), gradient, [])

    def _forget_passed(self) -> None:
        """A call with gradients: those without do not count in this step."""
        if self._passed:
            self._inputs, self._passed, self.seen = Rows(self._choice), 0, 0

    def _rows(self, x: Any, features: int) -> torch.Tensor:
        """The rows of a tensor of any number of dimensions; raises RefusedError for what cannot be recorded."""
        if hasattr(x, "to_local") or str(getattr(x, "dtype", None)) not in DTYPES or x.shape[-1:] != (features,):
            shape = list(getattr(x, "shape", ()))
            raise RefusedError(
                f"{printable(self.layer.name)}: a {type(x).__name__} of {getattr(x, 'dtype', 'no type')} and shape "
                f"{shape} cannot be recorded, only whole tensors of floats with {features:,} features; leave the layer "
                "out (--layers)."
            )
        return x.detach().reshape(-1, features)

    def _alike(self, rows: torch.Tensor, held: Rows) -> torch.Tensor:
        """The rows; raises RefusedError where others of the step are of another type."""
        if held.dtype not in (None, rows.dtype):
            raise RefusedError(
                f"{printable(self.layer.name)}: {held.dtype} and {rows.dtype} in one step; call step() between them, "
                "or leave the layer out (--layers)."
            )
        return rows


def _tapped(output: torch.Tensor) -> torch.Tensor:
    """The tensor to take the gradient of: what a layer returns is often the product in another shape, and where that is
    then changed in place, as by an activation function, autograd comes back to the product alone."""
    base = output._base
    return base if base is not None and base.grad_fn is not None and base.numel() == output.numel() else output
