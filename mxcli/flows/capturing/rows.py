"""Which rows of a step are kept: chosen by seed and step and a row's place, the same in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_ODD = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Choice:
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


def copied(choice: Choice, first: int, rows: torch.Tensor) -> TokenRows:
    """What a choice keeps of rows [tokens, features] of the tokens counted from `first`."""
    import torch

    tokens = np.arange(first, first + len(rows))
    best = choice.best(tokens)
    if len(best) == len(tokens):
        return TokenRows(tokens, rows.to("cpu", copy=True))
    return TokenRows(tokens[best], rows[torch.from_numpy(best).to(rows.device)].to("cpu"))


class Rows:
    """Rows of tokens, in memory, of which no more are held than the choice keeps; tokens may come in any order."""

    def __init__(self, choice: Choice) -> None:
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
