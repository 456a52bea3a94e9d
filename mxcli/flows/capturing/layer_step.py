"""What one layer was handed, and what came back to it, within one step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import RefusedError, printable
from mxcli.files.roles import ACTIVATION, GRADIENT
from mxcli.flows.capturing.layers import DTYPES, Layer
from mxcli.flows.capturing.rows import Choice, Rows, TokenRows, copied

if TYPE_CHECKING:
    import torch

OnRows = Callable[[int], None]
"""Told how many tokens a layer has seen, before their rows are taken."""


@dataclass(slots=True)
class _Call:
    """A call that a gradient may come to: the numbers of its tokens, and the rows to be taken when one does, where they
    were not taken at once."""

    first: int
    tokens: int
    waiting: TokenRows | None = None
    has_gradient: bool = False


class LayerStep:
    """Rows of a layer's calls in a step, one call after another; of what is not among the roles, no features.

    Calls that no gradient can come back to (under no_grad, such as a validation in between) count only in a step
    without any other. A call that a checkpointed segment repeats while gradients are computed is not counted again:
    where the first was made without gradients, the repetition counts in its place once a gradient comes to it, with
    rows as they were when it was made; else it is left out.
    """

    def __init__(self, layer: Layer, choice: Choice, roles: Collection[str], on_rows: OnRows) -> None:
        self.layer = layer
        self._choice, self._roles, self._on_rows = choice, roles, on_rows
        self._inputs, self._gradients = Rows(choice), Rows(choice)
        self._seen = self._passed = 0  # tokens of calls with gradients, and without as long as there are no others
        self._next = self._end = 0  # the number of the next token, and of that after all that are counted
        self._without = 0  # calls without gradients, less those whose repetition counts
        self._is_closed = False

    def called(self, x: torch.Tensor, output: torch.Tensor, *, repeated: bool) -> None:
        """Takes the input of a call, and the gradient when it comes; `repeated`: while gradients are computed."""
        rows = self._rows(x, ACTIVATION, self.layer.inputs)
        if not repeated:
            self._next = self._end  # repetitions that no gradient came to were of calls that are counted already
        if not output.requires_grad:
            if not repeated:
                self._pass(rows)
            return
        call = _Call(self._next, len(rows))
        self._next += call.tokens
        if repeated:
            # A copy: by the time a gradient comes, the input may have been changed in place.
            call.waiting = copied(self._choice, call.first, rows)
        else:
            self._count(call)
            self._put(self._inputs, copied(self._choice, call.first, rows))
        if repeated or GRADIENT in self._roles:
            _tapped(output).register_hook(lambda gradient: self._came(call, gradient))

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
    def seen(self) -> int:
        """Tokens that count, kept or not."""
        return self._seen or self._passed

    @property
    def got_gradients(self) -> bool:
        """Whether any gradient came, and was to be recorded."""
        return len(self._gradients.tokens) > 0

    @property
    def lacking(self) -> int:
        """Tokens held whose gradient never came, where it did for others."""
        return len(self._inputs.tokens) - len(self._gradients.tokens) if self.got_gradients else 0

    @property
    def calls_without_gradient(self) -> int:
        """Calls that no gradient could come to and that do not count."""
        return 0 if self._passed else self._without

    def _pass(self, rows: torch.Tensor) -> None:
        """A call without gradients."""
        self._without += 1
        if not self._seen:
            first = self._passed
            self._passed += len(rows)
            self._on_rows(self._passed)
            self._put(self._inputs, copied(self._choice, first, rows))

    def _count(self, call: _Call) -> None:
        """A call with gradients: those without do not count in this step."""
        if self._passed:
            self._inputs, self._passed = Rows(self._choice), 0
        self._seen += call.tokens
        self._end = max(self._end, call.first + call.tokens)
        self._on_rows(self._seen)

    def _came(self, call: _Call, gradient: torch.Tensor) -> None:
        if self._is_closed:
            return
        if call.waiting is not None:
            self._count(call)
            self._put(self._inputs, call.waiting)
            call.waiting = None
            self._without = max(self._without - 1, 0)
        if GRADIENT not in self._roles:
            return
        rows = self._rows(gradient, GRADIENT, self.layer.outputs)
        if call.has_gradient:  # through the same call once more: what autograd would add up
            self._gradients.increase(call.first, self._alike(rows, self._gradients))
        else:
            self._put(self._gradients, copied(self._choice, call.first, rows))
            call.has_gradient = True

    def _put(self, held: Rows, came: TokenRows) -> None:
        self._alike(came.rows, held)
        held.put(came)

    def _rows(self, x: Any, role: str, features: int) -> torch.Tensor:
        """The rows of a tensor of any number of dimensions, without features where the role is not recorded; raises
        RefusedError for what cannot be.
        """
        if hasattr(x, "to_local") or str(getattr(x, "dtype", None)) not in DTYPES or x.shape[-1:] != (features,):
            shape = list(getattr(x, "shape", ()))
            raise RefusedError(
                f"{printable(self.layer.name)}: a {type(x).__name__} of {getattr(x, 'dtype', 'no type')} and shape "
                f"{shape} cannot be recorded, only whole tensors of floats with {features:,} features; leave the layer "
                "out (--layers)."
            )
        rows = x.detach().reshape(-1, features)
        return rows if role in self._roles else rows[:, :0]

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
