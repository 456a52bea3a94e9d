"""What one layer was handed, and what came back to it, within one step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import RefusedError, printable
from mxcli.files.roles import ACTIVATION, GRADIENT
from mxcli.flows.capture.layers import DTYPES, Layer

if TYPE_CHECKING:
    import torch


_ODD = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """At most `most` tokens of a step (None: all): those that come first in an order that `seed` and `step` decide."""

    most: int | None
    seed: int
    step: int

    def order(self, tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The place of each token in that order, no two at one place: SplitMix64 of their counts."""
        start = np.array([self.seed & _WORD, self.step & _WORD], np.uint64)
        key = _mixed(_mixed(start[:1]) ^ start[1:])
        return _mixed(key + tokens.astype(np.uint64) * np.uint64(_ODD))

    def best(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in `tokens` those are that are kept, ascending."""
        if self.most is None or len(tokens) <= self.most:
            return np.arange(len(tokens))
        return np.sort(np.argpartition(self.order(tokens), self.most - 1)[: self.most])


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIXERS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of tokens [tokens, features], in memory: a copy, which nobody else changes."""

    tokens: NDArray[np.int64]
    rows: torch.Tensor


def copied(choice: RowSampling, first: int, rows: torch.Tensor) -> TokenRows:
    """What a choice keeps of rows [tokens, features] of the tokens counted from `first`."""
    import torch

    tokens = np.arange(first, first + len(rows))
    best = choice.best(tokens)
    if len(best) == len(tokens):
        return TokenRows(tokens, rows.to("cpu", copy=True))
    return TokenRows(tokens[best], rows[torch.from_numpy(best).to(rows.device)].to("cpu"))


class Rows:
    """Rows of tokens, in memory, of which no more are held than the choice keeps; tokens may come in any order."""

    def __init__(self, choice: RowSampling) -> None:
        self._choice = choice
        self.tokens: NDArray[np.int64] = np.empty(0, np.int64)
        self._parts: list[torch.Tensor] = []

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the rows that came; None before any did."""
        return self._parts[0].dtype if self._parts else None

    def put(self, came: TokenRows) -> None:
        """Add what `copied` by the same choice made of rows."""
        import torch

        held = len(self.tokens)
        both = np.concatenate([self.tokens, came.tokens])
        best = self._choice.best(both)
        if len(best) == len(both):
            self._parts.append(came.rows)
        elif len(new := best[best >= held]):
            kept = torch.cat(self._parts)[torch.from_numpy(best[best < held])]
            self._parts = [torch.cat([kept, came.rows[torch.from_numpy(new - held)]])]
        else:
            return
        self.tokens = both[best]

    def replace(self, came: TokenRows) -> None:
        """Take other rows of tokens that came before; those of tokens that are not held any more are passed over."""
        import torch

        _, there, at = np.intersect1d(self.tokens, came.tokens, assume_unique=True, return_indices=True)
        held = torch.cat(self._parts)
        held[torch.from_numpy(there)] = came.rows[torch.from_numpy(at)]
        self._parts = [held]

    def of(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """The rows of these tokens, all of which are held, in their order."""
        import torch

        whole = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        if np.array_equal(tokens, self.tokens):
            return whole
        order = np.argsort(self.tokens)
        return whole[torch.from_numpy(order[np.searchsorted(self.tokens, tokens, sorter=order)])]


OnRows = Callable[[int, int], None]
"""Told how many tokens a layer has seen, and how many rows of them wait beyond those that are kept, before their rows
are taken."""


@dataclass(slots=True, weakref_slot=True)
class _Call:
    """A call that a gradient may come to: the numbers of its tokens, its rows until one does, and whether it counts
    already, as a repetition does only then. It lives as long as what it returned can be run backward."""

    first: int
    tokens: int
    rows: TokenRows | None
    counts: bool
    has_gradient: bool = False


class LayerStep:
    """Rows of a layer's calls in a step, one call after another; of what is not among the roles, no features.

    Calls under no_grad, such as a validation in between, count only in a step without any other. A call that a
    checkpointed segment repeats while gradients are computed is not counted again: where the first was made without
    gradients, the repetition counts in its place once a gradient comes to it, with rows as they were when it was made,
    or at once where none can; else it is left out. Calls come from any thread, `lock` being held; gradients come by
    themselves.
    """

    def __init__(
        self, layer: Layer, choice: RowSampling, roles: Collection[str], on_rows: OnRows, lock: threading.RLock
    ) -> None:
        self.layer = layer
        self._choice, self._roles, self._on_rows, self._lock = choice, roles, on_rows, lock
        self._inputs, self._gradients = Rows(choice), Rows(choice)  # of tokens with gradients, the same in both
        self._others = Rows(choice)  # inputs of tokens that no gradient will come to
        self._waiting: dict[int, tuple[TokenRows, weakref.finalize[..., Any]]] = {}  # inputs that one may come to
        self._lost: list[int] = []  # of those, what cannot be run backward any more
        self._seen = self._passed = 0  # tokens of calls with gradients, and without as long as there are no others
        self._next = self._end = 0  # the number of the next token, and of that after all that are counted
        self._without = 0  # calls without gradients, less those whose repetition counts
        self._graded = 0  # tokens that a gradient came to
        self._has_own = False  # calls with gradients that repeat no other
        self.several_passes = False
        self._is_closed = False

    def called(self, x: torch.Tensor, output: torch.Tensor, *, with_grad: bool, repeated: bool) -> None:
        """Takes the input of a call, and the gradient when it comes; `with_grad`: the call was made outside of no_grad,
        `repeated`: while gradients are computed."""
        self._check_plain(x, output)
        rows = self._rows(x, ACTIVATION, self.layer.inputs)
        self._sort_out()
        if not repeated:
            self._next = self._end  # repetitions that no gradient came to were of calls that are counted already
        if not with_grad:
            if not repeated:
                self._pass(rows)
            return
        # No gradient tells of a repetition in frozen layers: it is of a call without gradients where there is no other.
        in_place = repeated and not output.requires_grad and self._without > 0 and not self._has_own
        if repeated and not output.requires_grad and not in_place:
            return
        self._has_own |= not repeated
        self._without -= in_place
        call = _Call(self._next, len(rows), None, counts=not repeated or in_place)
        self._next += call.tokens
        awaits = output.requires_grad and GRADIENT in self._roles and call.tokens > 0
        if call.counts:
            self._count(call, waits=awaits)
        # A copy: by the time a gradient comes, the input may have been changed in place.
        came = copied(self._choice, call.first, rows)
        if not call.counts or awaits:
            call.rows = came
        else:
            self._put(self._others, came)
        if call.counts and awaits:
            self._wait(call, came)
        if call.rows is not None:
            _tapped(output).register_hook(lambda gradient: self._came(call, gradient))

    def close(self) -> None:
        """Nothing that comes later is taken."""
        self._is_closed = True

    def kept(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Inputs and gradients of the same tokens, in their order; None where none came.

        Without any gradient the inputs are of all tokens, else of those that one came to.
        """
        if self.got_gradients:
            tokens = np.sort(self._gradients.tokens)
            return self._inputs.of(tokens), self._gradients.of(tokens)
        for first in list(self._waiting):
            self._put(self._others, self._take(first))
        tokens = np.sort(self._others.tokens)
        return (self._others.of(tokens) if len(tokens) else None), None

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
        """Tokens whose gradient never came, where it did for others."""
        return self._seen - self._graded if self.got_gradients else 0

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
            self._on_rows(self._passed, 0)
            self._put(self._others, copied(self._choice, first, rows))

    def _count(self, call: _Call, *, waits: bool) -> None:
        """A call with gradients: those without do not count in this step."""
        if self._passed:
            self._others, self._passed = Rows(self._choice), 0
        self._seen += call.tokens
        self._end = max(self._end, call.first + call.tokens)
        most = self._choice.most
        came = call.tokens if most is None else min(call.tokens, most)
        held = len(self._inputs.tokens) + len(self._others.tokens)
        held += sum(len(rows.tokens) for rows, _ in self._waiting.values()) + (came if waits else 0)
        self._on_rows(self._seen, max(0, held - (self._seen if most is None else min(self._seen, most))))

    def _wait(self, call: _Call, came: TokenRows) -> None:
        """Hold the rows of a call until its gradient comes, or can come no more: then they are like any others."""
        lost = self._lost
        watch = weakref.finalize(call, lost.append, call.first)  # at any time, in any thread: it does no more
        watch.atexit = False
        self._waiting[call.first] = came, watch

    def _take(self, first: int) -> TokenRows:
        came, watch = self._waiting.pop(first)
        watch.detach()
        return came

    def _sort_out(self) -> None:
        while self._lost:
            first = self._lost.pop()
            if first in self._waiting:
                self._put(self._others, self._take(first))

    def _came(self, call: _Call, gradient: torch.Tensor) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._check_plain(gradient)
            first_time, call.has_gradient = not call.has_gradient, True
            if first_time:
                self._take_inputs(call)
            if GRADIENT not in self._roles:
                return
            rows = copied(self._choice, call.first, self._rows(gradient, GRADIENT, self.layer.outputs))
            if first_time:
                self._put(self._gradients, rows)
                self._graded += call.tokens
            else:
                # Each pass is quantized by itself in training: their sum is nothing that a product is handed.
                self.several_passes = True
                self._alike(rows.rows, self._gradients)
                self._gradients.replace(rows)

    def _take_inputs(self, call: _Call) -> None:
        """The rows of a call that a gradient came to."""
        rows, call.rows = call.rows, None
        if not call.counts:
            self._count(call, waits=True)
            self._without = max(self._without - 1, 0)
        elif call.first in self._waiting:
            self._take(call.first)
        if rows is not None:
            self._put(self._inputs if GRADIENT in self._roles else self._others, rows)

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

    def _check_plain(self, *tensors: Any) -> None:
        """Raises RefusedError for tensors of a transformation such as vmap, which have no values of their own."""
        import torch

        known = torch._C._functorch
        tests = (known.is_functorch_wrapped_tensor, known.is_legacy_batchedtensor)
        if any(isinstance(x, torch.Tensor) and any(test(x) for test in tests) for x in tensors):
            raise RefusedError(
                f"{printable(self.layer.name)}: runs under torch.func, vmap or batched gradients, whose tensors cannot "
                "be recorded; leave the layer out (--layers), or call what transforms it outside of the recording."
            )

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
