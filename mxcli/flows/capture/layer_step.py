"""The rows recorded of one layer within one step: its inputs and the gradients of its outputs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import RefusedError, printable
from mxcli.files.roles import ACTIVATION, GRADIENT
from mxcli.flows.capture.layers import DTYPES, Layer
from mxcli.flows.capture.weights import is_plain

if TYPE_CHECKING:
    import torch


_ODD = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A sample of at most `max_rows` tokens of a step (None: all), chosen by `seed` and `step`."""

    max_rows: int | None
    seed: int
    step: int

    def order(self, tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a distinct sort key per token: SplitMix64 of its number."""
        start = np.array([self.seed & _WORD, self.step & _WORD], np.uint64)
        key = _mixed(_mixed(start[:1]) ^ start[1:])
        return _mixed(key + tokens.astype(np.uint64) * np.uint64(_ODD))

    def chosen(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the sampled tokens, ascending."""
        if self.max_rows is None or len(tokens) <= self.max_rows:
            return np.arange(len(tokens))
        return np.sort(np.argpartition(self.order(tokens), self.max_rows - 1)[: self.max_rows])


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIXERS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of tokens [tokens, features], in memory: a copy, which nothing else changes."""

    tokens: NDArray[np.int64]
    rows: torch.Tensor


def sampled_rows(sampling: RowSampling, first: int, rows: torch.Tensor) -> TokenRows:
    """Copy the sampled rows of [tokens, features], for tokens numbered from `first`."""
    import torch

    tokens = np.arange(first, first + len(rows))
    chosen = sampling.chosen(tokens)
    if len(chosen) == len(tokens):
        return TokenRows(tokens, rows.to("cpu", copy=True))
    return TokenRows(tokens[chosen], rows[torch.from_numpy(chosen).to(rows.device)].to("cpu"))


class Rows:
    """Rows of tokens, in memory, no more of them than the sample keeps; tokens may come in any order."""

    def __init__(self, sampling: RowSampling) -> None:
        self._sampling = sampling
        self.tokens: NDArray[np.int64] = np.empty(0, np.int64)
        self._parts: list[torch.Tensor] = []

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the rows; None before there are any."""
        return self._parts[0].dtype if self._parts else None

    def add(self, new: TokenRows) -> None:
        """Add rows that `sampled_rows` copied with the same sampling."""
        import torch

        count = len(self.tokens)
        tokens = np.concatenate([self.tokens, new.tokens])
        chosen = self._sampling.chosen(tokens)
        if len(chosen) == len(tokens):
            self._parts.append(new.rows)
        elif len(added := chosen[chosen >= count]):
            kept = torch.cat(self._parts)[torch.from_numpy(chosen[chosen < count])]
            self._parts = [torch.cat([kept, new.rows[torch.from_numpy(added - count)]])]
        else:
            return
        self.tokens = tokens[chosen]

    def replace(self, new: TokenRows) -> None:
        """Replace the rows of tokens added before; tokens that are not kept any more are skipped."""
        import torch

        _, old_at, new_at = np.intersect1d(self.tokens, new.tokens, assume_unique=True, return_indices=True)
        rows = torch.cat(self._parts)
        rows[torch.from_numpy(old_at)] = new.rows[torch.from_numpy(new_at)]
        self._parts = [rows]

    def of(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Return the rows of these tokens in their order; all of them must be kept."""
        import torch

        whole = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        if np.array_equal(tokens, self.tokens):
            return whole
        order = np.argsort(self.tokens)
        return whole[torch.from_numpy(order[np.searchsorted(self.tokens, tokens, sorter=order)])]


OnRows = Callable[[int, int], None]
"""Called before a layer's rows are taken, with the tokens it has seen, and the rows that wait in addition to those
kept."""


@dataclass(slots=True, weakref_slot=True)
class _PendingCall:
    """A call that a gradient may reach: the numbers of its tokens, its rows until one does, and whether it counts
    already; a repeated call counts only then. It lives as long as its output can be run backward."""

    first: int
    tokens: int
    rows: TokenRows | None
    counts: bool
    has_gradient: bool = False


class LayerStep:
    """Rows of a layer's calls in a step, one call after another; roles that are not recorded have no features.

    Calls under no_grad, such as a validation in between, count only in a step without any others. A call that a
    checkpointed segment repeats in the backward pass does not count twice: if the first was made without gradients, the
    repetition counts in its place once a gradient reaches it, with rows as they were when it was made, or at once if
    none can; else it is left out. Calls may come from any thread while `lock` is held; gradients take the lock
    themselves, within `guard`, which decides what follows an error.
    """

    def __init__(
        self,
        layer: Layer,
        sampling: RowSampling,
        roles: Collection[str],
        on_rows: OnRows,
        lock: threading.RLock,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.layer = layer
        self._sampling, self._roles, self._on_rows, self._lock, self._guard = sampling, roles, on_rows, lock, guard
        self._inputs, self._gradients = Rows(sampling), Rows(sampling)  # of the same tokens, those with gradients
        self._others = Rows(sampling)  # inputs of tokens that no gradient will reach
        self._waiting: dict[int, tuple[TokenRows, weakref.finalize[..., Any]]] = {}  # inputs that one may reach
        self._lost: list[int] = []  # those that cannot be run backward any more
        self._seen = self._passed = 0  # tokens of calls with gradients; of calls without, while there are no others
        self._next = self._end = 0  # the number of the next token, and the one after all counted tokens
        self._without = 0  # calls without gradients whose repetition does not count
        self._graded = 0  # tokens that a gradient reached
        self._has_own = False  # has calls with gradients that are not repetitions
        self.several_passes = False
        self._is_closed = False

    def called(self, x: torch.Tensor, output: torch.Tensor, *, with_grad: bool, repeated: bool) -> None:
        """Take the input of a call, and its gradient when it arrives; `with_grad`: the call was made outside of
        no_grad, `repeated`: in a backward pass."""
        self._check_plain(x, output)
        rows = self._rows(x, ACTIVATION, self.layer.inputs)
        self._release_lost()
        if not repeated:
            self._next = self._end  # repetitions that no gradient reached were of calls counted already
        if not with_grad:
            if not repeated:
                self._count_without_grad(rows)
            return
        # A repetition in frozen layers gets no gradient: it counts for a call without gradients if there is no other.
        in_place = repeated and not output.requires_grad and self._without > 0 and not self._has_own
        if repeated and not output.requires_grad and not in_place:
            return
        self._has_own |= not repeated
        self._without -= in_place
        call = _PendingCall(self._next, len(rows), None, counts=not repeated or in_place)
        self._next += call.tokens
        awaits = output.requires_grad and GRADIENT in self._roles and call.tokens > 0
        if call.counts:
            self._count(call, waits=awaits)
        # A copy: by the time a gradient arrives, the input may have been changed in place.
        copied = sampled_rows(self._sampling, call.first, rows)
        if not call.counts or awaits:
            call.rows = copied
        else:
            self._put(self._others, copied)
        if call.counts and awaits:
            self._wait(call, copied)
        if call.rows is not None:
            _hook_target(output).register_hook(lambda gradient: self._take_gradient(call, gradient))

    def close(self) -> None:
        """Stop taking inputs and gradients."""
        self._is_closed = True

    def rows(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return inputs and gradients of the same tokens, in their order; None if there are none.

        Without any gradient the inputs are of all tokens, else of those that one reached.
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
        """Return the number of tokens that count, kept or not."""
        return self._seen or self._passed

    @property
    def got_gradients(self) -> bool:
        """Return whether any recorded gradient arrived."""
        return len(self._gradients.tokens) > 0

    @property
    def tokens_without_gradient(self) -> int:
        """Return the number of tokens whose gradient never arrived, if it did for others."""
        return self._seen - self._graded if self.got_gradients else 0

    @property
    def calls_without_gradient(self) -> int:
        """Return the number of calls that no gradient could reach and that do not count."""
        return 0 if self._passed else self._without

    def _count_without_grad(self, rows: torch.Tensor) -> None:
        """Count a call without gradients."""
        self._without += 1
        if not self._seen:
            first = self._passed
            self._passed += len(rows)
            self._on_rows(self._passed, 0)
            self._put(self._others, sampled_rows(self._sampling, first, rows))

    def _count(self, call: _PendingCall, *, waits: bool) -> None:
        """Count a call with gradients: calls without do not count in this step."""
        if self._passed:
            self._others, self._passed = Rows(self._sampling), 0
        self._seen += call.tokens
        self._end = max(self._end, call.first + call.tokens)
        in_memory = len(self._inputs.tokens) + len(self._others.tokens)
        in_memory += sum(len(rows.tokens) for rows, _ in self._waiting.values())
        in_memory += self._at_most(call.tokens) if waits else 0
        self._on_rows(self._seen, max(0, in_memory - self._at_most(self._seen)))

    def _at_most(self, tokens: int) -> int:
        """Return the rows that the sample keeps of that many tokens."""
        return tokens if self._sampling.max_rows is None else min(tokens, self._sampling.max_rows)

    def _wait(self, call: _PendingCall, rows: TokenRows) -> None:
        """Hold the rows of a call until its gradient arrives, or cannot any more: then they join the others."""
        lost = self._lost
        watch = weakref.finalize(call, lost.append, call.first)  # may run at any time, in any thread
        watch.atexit = False
        self._waiting[call.first] = rows, watch

    def _take(self, first: int) -> TokenRows:
        rows, watch = self._waiting.pop(first)
        watch.detach()
        return rows

    def _release_lost(self) -> None:
        while self._lost:
            first = self._lost.pop()
            if first in self._waiting:
                self._put(self._others, self._take(first))

    def _take_gradient(self, call: _PendingCall, gradient: torch.Tensor) -> None:
        with self._guard(), self._lock:
            if self._is_closed:
                return
            self._check_plain(gradient)
            first_time, call.has_gradient = not call.has_gradient, True
            if first_time:
                self._take_inputs(call)
            if GRADIENT not in self._roles:
                return
            rows = sampled_rows(self._sampling, call.first, self._rows(gradient, GRADIENT, self.layer.outputs))
            if first_time:
                self._put(self._gradients, rows)
                self._graded += call.tokens
            else:
                # Training quantizes each pass by itself: their sum is not an operand of any product.
                self.several_passes = True
                self._check_dtype(rows.rows, self._gradients)
                self._gradients.replace(rows)

    def _take_inputs(self, call: _PendingCall) -> None:
        """Take the rows of a call that a gradient reached."""
        rows, call.rows = call.rows, None
        if not call.counts:
            self._count(call, waits=True)
            self._without = max(self._without - 1, 0)
        elif call.first in self._waiting:
            self._take(call.first)
        if rows is not None:
            self._put(self._inputs if GRADIENT in self._roles else self._others, rows)

    def _put(self, held: Rows, new: TokenRows) -> None:
        self._check_dtype(new.rows, held)
        held.add(new)

    def _rows(self, x: Any, role: str, features: int) -> torch.Tensor:
        """Return the rows of a tensor of any dimensions, without features if the role is not recorded. Raises
        RefusedError for tensors that cannot be recorded."""
        if not is_plain(x) or str(x.dtype) not in DTYPES or x.shape[-1:] != (features,):
            shape = list(getattr(x, "shape", ()))
            raise RefusedError(
                f"{printable(self.layer.name)}: a {type(x).__name__} of {getattr(x, 'dtype', 'no type')} and shape "
                f"{shape} cannot be recorded, only whole tensors of floats with {features:,} features; leave the layer "
                "out (--layers)."
            )
        rows = x.detach().reshape(-1, features)
        return rows if role in self._roles else rows[:, :0]

    def _check_plain(self, *tensors: Any) -> None:
        """Raise RefusedError for tensors of a transformation such as vmap, which have no values of their own, and while
        operations become part of a graph."""
        import torch

        on_gpu = any(getattr(x, "is_cuda", False) for x in tensors)
        if torch._C._get_tracing_state() is not None or (on_gpu and torch.cuda.is_current_stream_capturing()):
            raise RefusedError(
                f"{printable(self.layer.name)}: runs under torch.jit.trace, or while a CUDA graph is captured, which "
                "would include the recording; leave the layer out (--layers), or trace it outside of the recording."
            )
        known = torch._C._functorch
        tests = (known.is_functorch_wrapped_tensor, known.is_legacy_batchedtensor)
        if any(isinstance(x, torch.Tensor) and any(test(x) for test in tests) for x in tensors):
            raise RefusedError(
                f"{printable(self.layer.name)}: runs under torch.func, vmap or batched gradients, whose tensors cannot "
                "be recorded; leave the layer out (--layers), or transform it outside of the recording."
            )

    def _check_dtype(self, rows: torch.Tensor, held: Rows) -> None:
        """Raise RefusedError if other rows of the step have another dtype."""
        if held.dtype not in (None, rows.dtype):
            raise RefusedError(
                f"{printable(self.layer.name)}: {held.dtype} and {rows.dtype} in one step; call step() between them, "
                "or leave the layer out (--layers)."
            )


def _hook_target(output: torch.Tensor) -> torch.Tensor:
    """Return the tensor to take the gradient of. A layer often returns the product in another shape; if that is then
    changed in place, as by an activation function, autograd reaches the product alone."""
    base = output._base
    return base if base is not None and base.grad_fn is not None and base.numel() == output.numel() else output
