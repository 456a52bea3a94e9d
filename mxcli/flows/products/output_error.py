"""Errors of layers' outputs with quantized weights, for inputs captured from a running model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import InputError, printable, together
from mxcli.files.captured_layers import by_layer, captured_layers, steps_and_ranks
from mxcli.files.captures import incomplete_notes, rows_of
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN
from mxcli.files.reading import as_floats
from mxcli.files.roles import ACTIVATION
from mxcli.files.tensors import DTYPES, Array, TensorInfo
from mxcli.flows.plan.plan import TensorPlan
from mxcli.numerics.blocks import Quantized

MOST_ROWS = 1024
"""The most captured rows used of a layer."""
_SEED = 0
_PIECE = 1 << 22
"""Elements of a weight held in binary64 at a time."""


class CapturedInputs:
    """The captured activations of a source by the layer whose input they are; those of all its steps and ranks."""

    def __init__(self, captures: Checkpoint) -> None:
        self._captures = captures
        self.notes = tuple(incomplete_notes(captures.root))
        """Notes on recordings that stopped early."""
        found = by_layer(captured_layers(captures.tensors, captures.captures), ACTIVATION)
        inputs = {layer: [each.activation for each in held if each.activation] for layer, held in found.items()}
        # Of an input without tokens nothing is known.
        held_rows = {layer: [info for info in infos if rows_of(info)] for layer, infos in inputs.items()}
        self._layers = {layer: infos for layer, infos in held_rows.items() if infos}
        self.several = steps_and_ranks(each for held in found.values() for each in held)
        """The steps and ranks that inputs are of, in words, where there are several."""

    @property
    def most_rows(self) -> int:
        """Rows of the layer with most of them."""
        return max((sum(map(rows_of, infos)) for infos in self._layers.values()), default=0)

    def has(self, step: TensorPlan) -> bool:
        """Return whether the input of a layer was captured."""
        return len(step.shape) == 2 and _module(step.tensor) in self._layers

    def check(self, steps: Iterable[TensorPlan]) -> None:
        """Raise InputError where nothing was captured of any of the layers, or inputs of another width."""
        served = [step for step in steps if self.has(step)]
        where = printable(self._captures.where)
        if not served:
            others = f"; it holds those of {', '.join(map(printable, list(self._layers)[:3]))}" if self._layers else ""
            raise InputError(
                f"{where}: holds no activations of the layers to be quantized{others}. Capture the input of each."
            )
        problems = [
            f"{where}: {printable(info.name)} {list(info.shape)} does not fit {printable(step.tensor.name)}, which "
            f"takes {step.shape[-1]} features."
            for step in served
            for info in self._layers[_module(step.tensor)]
            if not info.shape or info.shape[-1] != step.shape[-1]
        ]
        if problems:
            raise together(InputError, where, problems)

    def errors(
        self, checkpoint: Checkpoint, step: TensorPlan, made: Iterable[Quantized], backend: Backend
    ) -> list[tuple[float, float]]:
        """Return ||X (W - Y)^T||^2 and ||X W^T||^2 for each quantized form of a weight, in binary64."""
        import torch

        x = torch.from_numpy(self._input(step))
        weight = read(checkpoint, step.tensor)
        turned = np.swapaxes(weight, -1, -2) if step.axis == COLUMN else weight
        dtype, pieces = step.tensor.dtype, list(pieces_of(step.shape))
        output = math.fsum(_energy(x, torch.from_numpy(binary64(turned[piece], dtype))) for piece in pieces)
        found = []
        for quantized in made:
            scaled_back = backend.dequantize(quantized, "F32")
            noise = math.fsum(
                _energy(x, torch.from_numpy(binary64(turned[piece], dtype) - scaled_back[piece].astype(np.float64)))
                for piece in pieces
            )
            found.append((noise, output))
        return found

    def amax(self, step: TensorPlan, backend: Backend) -> float:
        """Return the largest magnitude among all captured inputs of a layer; raises InputError where one is not
        finite."""
        largest = 0.0
        for info in self._layers[_module(step.tensor)]:
            x = read(self._captures, info)
            found = backend.amax(x, info.dtype)
            if found.nonfinite:
                raise InputError(nonfinite_operand(self._captures.where, info))
            largest = max(largest, found.value)
        return largest

    def _input(self, step: TensorPlan) -> Array:
        """Return the captured rows of a layer, or a sample of them, in binary64; raises InputError if one is not
        finite."""
        infos = self._layers[_module(step.tensor)]
        rows = np.concatenate(
            [binary64(read(self._captures, info), info.dtype).reshape(-1, step.shape[-1]) for info in infos]
        )
        if len(rows) > MOST_ROWS:
            rows = rows[sorted(random.Random(_SEED).sample(range(len(rows)), MOST_ROWS))]
        if not np.isfinite(rows).all():
            raise InputError(nonfinite_operand(self._captures.where, infos[0]))
        return rows


def nonfinite_operand(where: object, info: TensorInfo) -> str:
    """Return the refusal of a captured tensor or weight with NaN or infinities, which is an operand of a product."""
    return (
        f"{printable(where)}: {printable(info.name)} holds NaN or infinities, so its products do too: capture another "
        "step, or leave its layer out (--exclude)."
    )


def binary64(x: Array, dtype: str) -> Array:
    """Return the values of an array as `read` returns it."""
    if dtype != "BF16" and DTYPES[dtype].is_raw:
        raise InputError(f"{dtype} values cannot be captured activations: give BF16, F16, F32 or F64.")
    return as_floats(x, dtype).astype(np.float64)


def _module(info: TensorInfo) -> str:
    return info.name.removesuffix(".weight")


def pieces_of(shape: tuple[int, ...]) -> Iterator[slice]:
    """Return the runs of rows of a weight, each of at most _PIECE elements or of one row."""
    height = max(_PIECE // max(shape[-1], 1), 1)
    return (slice(begin, begin + height) for begin in range(0, shape[0], height))


def _energy(x: object, weight: object) -> float:
    """Return the squared norm of x @ weight.T."""
    from torch import Tensor

    assert isinstance(x, Tensor)
    assert isinstance(weight, Tensor)
    return float((x @ weight.T).square().sum())
