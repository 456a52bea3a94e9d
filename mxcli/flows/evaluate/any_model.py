"""`mxcli.evaluate`: the loss of any model of torch under formats and recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import RefusedError, UsageError, import_extra, printable
from mxcli.flows.emulate.emulate import emulate
from mxcli.flows.evaluate.candidates import NONE, Candidate, of_formats, of_recipe
from mxcli.numerics.scheme import RuleOptions

if TYPE_CHECKING:
    import torch

ORIGINAL = "original"


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Any],
    *,
    formats: Sequence[str] = (),
    activations: Sequence[str] = (NONE,),
    recipes: Sequence[str | Path] = (),
    **rules: Unpack[RuleOptions],
) -> dict[str, dict[str, float | None]]:
    """Return the loss of a model as it is ("original") and under every format and recipe, on the same batches.

    `loss_fn(model, batch)` returns the loss of a batch: a number, or a tensor with a loss for each sample. It is called
    without gradients and once for every batch and candidate; the model's mode and dropout are the caller's. `batches`
    are gone through once for each. `formats` are formats of weights, each with every one of `activations` ("none",
    "same" or a format) as the format of inputs; `recipes` are recipe files; `rules` are those of `mxcli.quantize`. The
    model is given back as it was.

    Each entry has `loss`, `loss_error`, `loss_change` and `loss_change_error` (of the mean; the change is paired by
    sample; None with fewer than two samples).

    Raises UsageError for nothing to evaluate, RefusedError for losses that are not finite or for batches that give
    another number of losses than before, and what `mxcli.emulate` raises.
    """
    import_extra("torch", "evaluating a model", "capture")
    kept = list(batches)
    inputs = (activations,) if isinstance(activations, str) else tuple(activations)
    names = (formats,) if isinstance(formats, str) else tuple(formats)
    given: dict[str, Any] = {name: value for name, value in rules.items() if value is not None}
    candidates = [*of_formats(names, inputs, given)]
    candidates += [of_recipe(str(path), each, given) for path in recipes for each in inputs]
    if not kept or not candidates:
        raise UsageError("nothing to evaluate: give batches, and formats or recipes.")
    original = _losses(model, kept, loss_fn, ORIGINAL)
    found = {ORIGINAL: _entry(original, original)}
    for candidate in candidates:
        found[candidate.name] = _entry(_under(model, candidate, kept, loss_fn), original)
    return found


def _under(model: Any, candidate: Candidate, batches: Sequence[Any], loss_fn: Callable[[Any, Any], Any]) -> Any:
    with emulate(model, **candidate.emulation):
        return _losses(model, batches, loss_fn, candidate.name)


def _losses(model: Any, batches: Sequence[Any], loss_fn: Callable[[Any, Any], Any], name: str) -> NDArray[np.float64]:
    """Return the losses of all samples. Raises RefusedError if one is not finite."""
    import torch

    found = []
    with torch.no_grad():
        for batch in batches:
            loss = loss_fn(model, batch)
            values = loss.detach().double().reshape(-1).cpu().numpy() if isinstance(loss, torch.Tensor) else [loss]
            found.append(np.asarray(values, np.float64).reshape(-1))
    losses = np.concatenate(found)
    if bad := int(np.count_nonzero(~np.isfinite(losses))):
        raise RefusedError(
            f"{printable(name)}: {bad:,} of {len(losses):,} losses are not finite, so nothing can be compared."
        )
    return losses


def _entry(losses: NDArray[np.float64], original: NDArray[np.float64]) -> dict[str, float | None]:
    if losses.shape != original.shape:
        raise RefusedError(
            f"loss_fn returned {len(losses):,} losses, and {len(original):,} for the original: they cannot be paired."
        )
    changes = losses - original
    return {
        "loss": float(losses.mean()),
        "loss_error": _error(losses),
        "loss_change": float(changes.mean()),
        "loss_change_error": _error(changes),
    }


def _error(values: NDArray[np.float64]) -> float | None:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
