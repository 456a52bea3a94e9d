"""The forward pass of a window, and the scores of its tokens against the original's predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mxcli.flows.capture.model import cpu_hint, memory_errors
from mxcli.flows.evaluate.scores import WindowScores

if TYPE_CHECKING:
    import torch

ROWS = 128
"""Tokens whose predictions are compared at a time: a row has a value for every word of the vocabulary."""
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Question:
    """A window as a model gets it: the tokens it reads, the positions whose predictions are scored, and the
    tokens that are right there; int64."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]


def logits_of(model: Any, question: Question) -> torch.Tensor:
    """Return the logits at the scored positions, [positions, vocabulary] on the model's device."""
    import torch

    device = next(model.parameters()).device
    ids = torch.from_numpy(question.ids)[None].to(device)
    sentence = f"{device}: out of memory for a window of {len(question.ids):,} tokens; use a smaller --context"
    with torch.no_grad(), memory_errors(f"{sentence}{cpu_hint(str(device))}."):
        more = {"use_cache": False} if getattr(model.config, "is_decoder", False) or _takes_cache(model) else {}
        logits = model(input_ids=ids, **more).logits[0]
        return logits[torch.from_numpy(question.positions).to(device)]


def _takes_cache(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "use_cache", False))


def scores_of(
    logits: torch.Tensor,
    question: Question,
    original: Callable[[int, int], F32] | None,
    keep: Callable[[int, F32], object] = lambda first, rows: None,
) -> WindowScores:
    """Return the scores of a window.

    `original` yields the original's log-probabilities of a number of positions from one on; None: this is the original.
    `keep` gets the log-probabilities of every part, in order.
    """
    parts = [_part(logits, question, first, original, keep) for first in range(0, len(question.targets), ROWS)]
    return WindowScores(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _part(
    logits: torch.Tensor,
    question: Question,
    first: int,
    original: Callable[[int, int], F32] | None,
    keep: Callable[[int, F32], object],
) -> tuple[F32, F32, NDArray[np.bool_], F32]:
    import torch

    with torch.no_grad():
        rows = torch.log_softmax(logits[first : first + ROWS].float(), -1)
        targets = torch.from_numpy(question.targets[first : first + ROWS, None]).to(rows.device)
        own = rows.gather(1, targets)[:, 0]
        if original is None:
            keep(first, rows.cpu().numpy())
            nothing = np.zeros(len(own), np.float32)
            return (-own).cpu().numpy(), nothing, np.ones(len(own), np.bool_), nothing
        known = torch.from_numpy(original(first, len(rows))).to(rows.device)
        its = known.gather(1, targets)[:, 0]
        agrees = rows.argmax(1) == known.argmax(1)
        # A token that the original rules out adds nothing.
        kl = (known.exp() * (known - rows)).nan_to_num_(nan=0.0, posinf=torch.inf).sum(1).clamp_min_(0)
        kl[rows.isnan().any(1)] = torch.nan
        return tuple(each.cpu().numpy() for each in (-own, kl, agrees, own.exp() - its.exp()))
