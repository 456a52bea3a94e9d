"""The products of one captured layer under recipes of training: Y = X W^T, dX = dY W and dW = dY^T X.

They are computed in binary64, of the values that codes stand for and of the plain ones. Operands under a Hadamard
transform are turned back when they are scaled back, which is to multiply them as transformed: it is orthogonal and the
same on both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from mxcli.backends import Backend
from mxcli.files.tensors import Array
from mxcli.flows.gemm_shapes import OPERANDS, PASSES, W
from mxcli.flows.products import Energies
from mxcli.flows.training_layers import TrainedLayer
from mxcli.numerics.draws import stream_of
from mxcli.numerics.formats import find_format
from mxcli.numerics.measures import decibels, percent
from mxcli.numerics.stats import Stats
from mxcli.numerics.training import Operand, Pair, TrainingRecipe, delayed_amax, rules_of

_PIECE = 1 << 22
"""Elements of a product that are computed at a time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The recipes to compute products under, where, and the seed of stochastic rounding and how many times it is
    drawn: with seed, seed + 1, …"""

    recipes: tuple[TrainingRecipe, ...]
    backend: Backend
    seed: int = 0
    draws: int = 1


@dataclass(frozen=True, slots=True)
class Counts:
    """Of the statistics of quantized operands (`Stats`) those that are told, which add up over layers and draws."""

    elements: int
    measured: int
    saturated: int
    underflowed: int
    signal: float
    noise: float
    error: float

    @classmethod
    def of(cls, stats: Stats) -> Counts:
        """Those of one tensor."""
        return cls(*(getattr(stats, name) for name in cls.__slots__))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def metrics(self) -> dict[str, float | None]:
        """By the names of the metrics of tensors."""
        return {
            "saturated_percent": percent(self.saturated, self.elements),
            "underflowed_percent": percent(self.underflowed, self.elements),
            "sqnr_db": decibels(self.signal, self.noise),
            "bias": self.error / self.measured if self.measured else None,
        }


@dataclass(frozen=True, slots=True)
class TrainedProduct:
    """One product of a layer at a step under a recipe.

    `energies` are of one draw, on average; `averaged` of the mean of the products of all draws, whose error is what
    does not average out. `operands` has the counts of each operand that was quantized, by its letter, summed over
    draws; it is empty where the layer is `high`, and the product exact.
    """

    layer: str
    step: int | None
    rank: int | None
    recipe: str
    passes: str
    sizes: tuple[int, int, int]
    high: bool
    energies: Energies
    averaged: Energies
    operands: Mapping[str, Counts]


@dataclass(frozen=True, slots=True)
class _Side:
    """One operand of a product, [rows, k]: how it is quantized, the stream of its draws, and the amax that its scale is
    made from where that is delayed."""

    letter: str
    plain: Array
    operand: Operand | None
    stream: int
    tensor_amax: float | None


def products_of(
    layer: TrainedLayer,
    operands: Mapping[str, Array],
    trial: Trial,
    high: Collection[str],
    earlier: Mapping[str, Sequence[float]],
) -> Iterator[TrainedProduct]:
    """The products of one layer at one step on one rank, by recipe and pass.

    The layer stays high under the recipes that `high` names. `earlier` has the amax of each operand, by letter, at the
    steps before.
    """
    exact = {
        passes: _product(_side(operands[a], turn_a), _side(operands[b], turn_b))
        for passes, ((a, turn_a), (b, turn_b)) in OPERANDS.items()
        if a in operands and b in operands
    }
    made: dict[tuple[str, Pair], _Measured] = {}
    place = layer.captured
    for recipe in trial.recipes:
        stays = recipe.name in high
        for passes, plain in exact.items():
            pair = (None, None) if stays else recipe.pairs[passes]
            # Recipes that differ in other products have this one in common.
            if (passes, pair) not in made:
                sides = [
                    _Side(
                        letter,
                        _side(operands[letter], turned),
                        how,
                        stream_of(f"{place.layer}.{letter}.{passes}.{place.step}.{place.rank}"),
                        _delayed(how, earlier.get(letter, ())),
                    )
                    for (letter, turned), how in zip(OPERANDS[passes], pair, strict=True)
                ]
                made[passes, pair] = _measured(plain, sides, trial)
            sizes = PASSES[passes](layer.tokens, *operands[W].shape)
            yield TrainedProduct(
                place.layer, place.step, place.rank, recipe.name, passes, sizes, stays, *made[passes, pair]
            )


def _product(a: Array, b: Array) -> Array:
    """a @ b^T by torch, whose products, unlike numpy's, were the same with any number of threads when tried."""
    import torch

    product: Array = (torch.from_numpy(a) @ torch.from_numpy(b).T).numpy()
    return product


def _side(x: Array, turned: bool) -> Array:
    return np.ascontiguousarray(x.T if turned else x)


def _delayed(operand: Operand | None, earlier: Sequence[float]) -> float | None:
    history = None if operand is None else operand.history
    if operand is None or history is None:
        return None
    return delayed_amax(earlier, find_format(operand.format).element, history)


_Measured = tuple[Energies, Energies, Mapping[str, Counts]]


def _measured(exact: Array, sides: Sequence[_Side], trial: Trial) -> _Measured:
    """The energies of one draw on average and of the mean of all draws, and the counts of what was quantized."""
    if all(side.operand is None for side in sides):
        energies = _energies(exact, np.zeros_like(exact))
        return energies, energies, {}
    random = any(side.operand is not None and side.operand.is_random for side in sides)
    draws = trial.draws if random else 1
    counts: dict[str, Counts] = {}
    a, b = (_drawn(side, range(trial.seed, trial.seed + draws), counts, trial.backend) for side in sides)
    each, mean = list[Energies](), list[Energies]()
    height = max(1, _PIECE // max(1, exact.shape[0]))
    for begin in range(0, exact.shape[1], height):
        piece = slice(begin, begin + height)
        plain = exact[:, piece]
        offs = [_product(left, right[piece]) - plain for left, right in zip(a, b, strict=True)]
        each += [_energies(plain, off) for off in offs]
        mean.append(_energies(plain, reduce(add, offs) / draws))
    total, averaged = reduce(add, each), reduce(add, mean)
    noise, cross, error = (value / draws for value in (total.noise, total.cross, total.error))
    return Energies(exact.size, averaged.signal, noise, cross, error), averaged, counts


def _drawn(side: _Side, seeds: Sequence[int], counts: dict[str, Counts], backend: Backend) -> list[Array]:
    """The operand as each draw has it, the same again and again where nothing is drawn."""
    if side.operand is None:
        return [side.plain] * len(seeds)
    if not side.operand.is_random:
        return [_quantized(side, side.operand, seeds[0], counts, backend)] * len(seeds)
    return [_quantized(side, side.operand, seed, counts, backend) for seed in seeds]


def _quantized(side: _Side, operand: Operand, seed: int, counts: dict[str, Counts], backend: Backend) -> Array:
    """The operand in binary64 as its codes stand for it, a transform undone; its counts are added."""
    narrow, rules = side.plain.astype(np.float32), rules_of(operand, seed)
    quantized = backend.quantize(narrow, "F32", rules, tensor_amax=side.tensor_amax, stream=side.stream)
    assert quantized.stats is not None
    counted = Counts.of(quantized.stats)
    counts[side.letter] = counts[side.letter] + counted if side.letter in counts else counted
    values: Array = backend.dequantize(quantized).astype(np.float64)
    return values


def _energies(exact: Array, off: Array) -> Energies:
    sums = (np.square(exact), np.square(off), exact * off, off)
    return Energies(exact.size, *(float(each.sum()) for each in sums))
