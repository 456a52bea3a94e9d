"""Scores of tokens: the loss of each, its distance from the original's, and what follows for the text.

Losses are in nats. The standard error of a mean over tokens is that of means over runs of RUN consecutive tokens, since
neighbours are alike (batch means: Flegal and Jones, Annals of Statistics 38, 2010).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

RUN = 256
"""Consecutive tokens of a window whose mean counts as one draw."""

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WindowScores:
    """The scores of the tokens of a window, float32: the negative log-probability of each token in nats, the KL
    divergence from the original's prediction, whether the most likely token is the same, and the change of the token's
    probability."""

    nll: F32
    kl: F32
    agrees: NDArray[np.bool_]
    change: F32


@dataclass(frozen=True)
class Scores:
    """The scores of all windows of a text, in order."""

    windows: tuple[WindowScores, ...]

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return sum(len(window.nll) for window in self.windows)

    @cached_property
    def loss(self) -> float:
        """The mean negative log-probability of a token in nats."""
        return mean([window.nll for window in self.windows])

    @cached_property
    def loss_error(self) -> float | None:
        """The standard error of the loss."""
        return standard_error([window.nll for window in self.windows])

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond binary64."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @cached_property
    def kl(self) -> NDArray[np.float64]:
        """The KL divergence of every token, ascending."""
        return np.sort(np.concatenate([window.kl for window in self.windows]).astype(np.float64))

    @cached_property
    def kl_mean(self) -> float:
        """The mean KL divergence from the original's predictions: sum p log(p / q) in nats."""
        return mean([window.kl for window in self.windows])

    @cached_property
    def kl_error(self) -> float | None:
        """The standard error of the mean KL divergence."""
        return standard_error([window.kl for window in self.windows])

    def kl_quantile(self, share: float) -> float:
        """Return the KL divergence that a share of the tokens does not exceed (nearest rank)."""
        return float(self.kl[max(math.ceil(share * len(self.kl)), 1) - 1])

    @cached_property
    def same_top(self) -> float:
        """The percent of tokens for which the most likely one is the original's."""
        return 100 * mean([window.agrees for window in self.windows])

    @cached_property
    def rms_change(self) -> float:
        """The root mean square change of the text's tokens' probability, in percent."""
        return 100 * math.sqrt(mean([np.square(window.change, dtype=np.float64) for window in self.windows]))

    def difference(self, original: Scores) -> tuple[float, float | None]:
        """Return the change of the loss against the original on the same tokens, and its standard error."""
        pairs = zip(self.windows, original.windows, strict=True)
        changes = [one.nll.astype(np.float64) - other.nll for one, other in pairs]
        return mean(changes), standard_error(changes)


def mean(windows: Sequence[NDArray[np.generic]]) -> float:
    """Return the mean over all values of some windows."""
    return math.fsum(float(np.sum(each, dtype=np.float64)) for each in windows) / sum(len(each) for each in windows)


def standard_error(windows: Sequence[NDArray[np.generic]]) -> float | None:
    """Return the standard error of `mean`, from runs of RUN values; None for fewer than two runs."""
    runs = [run for each in windows for run in _runs(each)]
    if len(runs) < 2:
        return None
    sizes = np.asarray([len(run) for run in runs], np.float64)
    means = np.asarray([run.mean(dtype=np.float64) for run in runs])
    whole = float(np.average(means, weights=sizes))
    spread = float(np.sum((sizes / sizes.sum()) ** 2 * (means - whole) ** 2))
    return math.sqrt(spread * len(runs) / (len(runs) - 1))


def _runs(values: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    """Return a window in equal parts of at most RUN values."""
    return np.array_split(values, max(-(-len(values) // RUN), 1)) if len(values) else []
