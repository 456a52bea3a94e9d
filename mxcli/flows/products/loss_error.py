"""Estimates of the loss that quantized weights cost, from captured inputs and gradients of their layers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mxcli.backends.backend import Backend
from mxcli.errors import InputError
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers
from mxcli.files.captures import rows_of
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN
from mxcli.files.reading import as_floats
from mxcli.files.roles import ACTIVATION
from mxcli.files.tensors import TensorInfo
from mxcli.flows.plan.plan import TensorPlan
from mxcli.flows.products.output_error import nonfinite_operand, pieces_of
from mxcli.numerics.blocks import Quantized

MOST_ROWS = 4096
"""The most captured tokens used of a layer."""
_SEED = 0
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Captured tokens of a layer: X, dY, both float32, and for each token the number of tokens of its step."""

    x: F32
    dy: F32
    tokens: NDArray[np.float64]


class CapturedGradients:
    """The captured inputs and gradients of a source by layer, of all its steps and ranks.

    A gradient is that of a mean loss over the tokens of a step, as autograd has it.
    """

    def __init__(self, captures: Checkpoint) -> None:
        self._captures = captures
        found = by_layer(captured_layers(captures.tensors, captures.captures), ACTIVATION)
        whole = {layer: [each for each in held if _is_whole(each)] for layer, held in found.items()}
        self._layers = {layer: held for layer, held in whole.items() if held}

    def has(self, planned: TensorPlan) -> bool:
        """Return whether inputs and gradients of a layer were captured, of the widths that it has."""
        if len(planned.shape) != 2:
            return False
        held = self._layers.get(planned.tensor.name.removesuffix(".weight"), [])
        widths = {(_width(each.activation), _width(each.gradient)) for each in held}
        return widths == {(planned.shape[-1], planned.shape[-2])}

    def changes(
        self, checkpoint: Checkpoint, planned: TensorPlan, made: Iterable[Quantized], backend: Backend
    ) -> list[float]:
        """Return the estimated change of the loss in nats for each quantized form of a weight.

        It is the second-order term with the empirical Fisher matrix in place of the Hessian: 1/2 sum (dY . dX W^T)^2
        over tokens, with the gradients of the summed loss (Optimal Brain Surgeon: Hassibi and Stork 1992; the diagonal
        in Kunstner et al. 2019, section 2).
        """
        import torch

        rows = self._rows(planned)
        x, dy = torch.from_numpy(rows.x), torch.from_numpy(rows.dy)
        weight = read(checkpoint, planned.tensor)
        turned = np.swapaxes(weight, -1, -2) if planned.axis == COLUMN else weight
        pieces = list(pieces_of(planned.shape))
        found = []
        for quantized in made:
            scaled_back = backend.dequantize(quantized, "F32")
            sums = torch.zeros(len(x), dtype=torch.float64)
            for piece in pieces:
                plain = np.asarray(as_floats(np.ascontiguousarray(turned[piece]), planned.tensor.dtype), np.float32)
                error = torch.from_numpy(scaled_back[piece] - plain)
                sums += ((x @ error.T) * dy[:, piece]).sum(1, dtype=torch.float64)
            squares = np.square(sums.numpy()) * np.square(rows.tokens)
            found.append(0.5 * float(squares.mean()))
        return found

    def _rows(self, planned: TensorPlan) -> _Rows:
        """Return the captured tokens of a layer, or a sample of them. Raises InputError for values that are not
        finite."""
        held = self._layers[planned.tensor.name.removesuffix(".weight")]
        x = np.concatenate([self._of(each.activation) for each in held])
        dy = np.concatenate([self._of(each.gradient) for each in held])
        tokens = np.concatenate([np.full(each.tokens, each.tokens, np.float64) for each in held])
        if len(x) > MOST_ROWS:
            kept = sorted(random.Random(_SEED).sample(range(len(x)), MOST_ROWS))
            x, dy, tokens = x[kept], dy[kept], tokens[kept]
        return _Rows(x, dy, tokens)

    def _of(self, info: TensorInfo | None) -> F32:
        assert info is not None
        x: F32 = np.asarray(as_floats(read(self._captures, info), info.dtype), np.float32)
        if not np.isfinite(x).all():
            raise InputError(nonfinite_operand(self._captures.where, info))
        return x.reshape(-1, x.shape[-1])


def _is_whole(each: CapturedLayer) -> bool:
    """Return whether a step has the gradient of every token of the input, and some."""
    if each.activation is None or each.gradient is None:
        return False
    return rows_of(each.activation) == rows_of(each.gradient) > 0


def _width(info: TensorInfo | None) -> int:
    return info.shape[-1] if info is not None and info.shape else 0


def served(gradients: CapturedGradients, planned: Iterable[TensorPlan]) -> bool:
    """Return whether inputs and gradients of all layers were captured."""
    return all(map(gradients.has, planned))
