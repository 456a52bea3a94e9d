"""Errors of captured layers' products under training recipes, summed over layers and by training step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import add

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import InputError, import_extra, printable, together
from mxcli.files.captured_layers import CapturedLayer
from mxcli.files.tensors import Array
from mxcli.flows.products.operands import (
    Energies,
    amaxes_of,
    energies,
    product,
    scaled_back,
    side_of,
    stream,
    tokens_of,
    weight_of,
)
from mxcli.flows.products.shapes import OPERANDS, PASSES, W
from mxcli.flows.products.trained_layers import TrainedLayer, TrainedModel, high_notes, shown
from mxcli.numerics.formats import find_format
from mxcli.numerics.metric_formulas import decibels, percent
from mxcli.numerics.stats import Stats
from mxcli.numerics.training import Operand, Pair, TrainingRecipe, delayed_amax, rules_of


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
    """The statistics of quantized operands (`Stats`) that are reported; they add up over layers and draws."""

    elements: int
    measured: int
    saturated: int
    underflowed: int
    signal: float
    noise: float
    error: float

    @classmethod
    def of(cls, stats: Stats) -> Counts:
        """Return the counts of one tensor."""
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
    """A product of a layer at a training step under a recipe.

    `energies`: mean over draws; `averaged`: error of the mean product, the bias that remains. `operands` has the counts
    of each operand that was quantized, by its letter, summed over draws; it is empty where the layer is `high`, and the
    product exact.
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
    """An operand of a product, [rows, k]: its name, how it is quantized, the stream of its draws, and the amax
    that its scale is made from where that is delayed."""

    letter: str
    what: str
    plain: Array
    operand: Operand | None
    stream: int
    tensor_amax: float | None

    @property
    def is_random(self) -> bool:
        """True if its values depend on the seed."""
        return self.operand is not None and self.operand.is_random


def products_of(
    layer: TrainedLayer,
    operands: Mapping[str, Array],
    trial: Trial,
    high: Collection[str],
    earlier: Mapping[str, Sequence[float]],
) -> Iterator[TrainedProduct]:
    """Yield the products of one layer at one step on one rank, by recipe and pass.

    The layer stays high under the recipes that `high` names. `earlier` has the amax of each operand, by letter, at the
    steps before. Raises InputError where codes stand for more than binary32 holds.
    """
    place = layer.captured
    passes_there = [passes for passes, pair in OPERANDS.items() if all(letter in operands for letter, _ in pair)]
    made: dict[tuple[str, Pair], _Measured] = {}
    for passes in passes_there:
        # Recipes that differ in other products have this one in common.
        pairs = dict.fromkeys(_pair(recipe, passes, high) for recipe in trial.recipes)
        for pair, measured in _of_pass(place, passes, operands, pairs, trial, earlier):
            made[passes, pair] = measured
    for recipe in trial.recipes:
        for passes in passes_there:
            yield TrainedProduct(
                place.layer,
                place.step,
                place.rank,
                recipe.name,
                passes,
                PASSES[passes](layer.tokens, *operands[W].shape),
                recipe.name in high,
                *made[passes, _pair(recipe, passes, high)],
            )


def _of_pass(
    place: CapturedLayer,
    passes: str,
    operands: Mapping[str, Array],
    pairs: Iterable[Pair],
    trial: Trial,
    earlier: Mapping[str, Sequence[float]],
) -> Iterator[tuple[Pair, _Measured]]:
    """Yield one product with its operands quantized in each of several ways. Only one
    exact product is held at a time."""
    plain = [side_of(operands[letter], turned) for letter, turned in OPERANDS[passes]]
    exact = product(*plain)
    for pair in pairs:
        sides = [
            _Side(
                letter,
                f"{letter} of {place.label}",
                x,
                how,
                stream(place, letter, passes),
                _delayed(how, earlier.get(letter, ())),
            )
            for (letter, _), x, how in zip(OPERANDS[passes], plain, pair, strict=True)
        ]
        yield pair, _measured(exact, sides, trial)


def _pair(recipe: TrainingRecipe, passes: str, high: Collection[str]) -> Pair:
    return (None, None) if recipe.name in high else recipe.pairs[passes]


def _delayed(operand: Operand | None, earlier: Sequence[float]) -> float | None:
    history = None if operand is None else operand.history
    if operand is None or history is None:
        return None
    return delayed_amax(earlier, find_format(operand.format).element, history)


_Measured = tuple[Energies, Energies, Mapping[str, Counts]]


def _measured(exact: Array, sides: Sequence[_Side], trial: Trial) -> _Measured:
    """Return the energies of one draw on average and of the mean of all draws, and the counts of what was quantized.
    One draw is held at a time."""
    if all(side.operand is None for side in sides):
        none = energies(exact, np.zeros_like(exact))
        return none, none, {}
    draws = trial.draws if any(side.is_random for side in sides) else 1
    counts: dict[str, Counts] = {}
    fixed = {side.letter: _values(side, trial.seed, counts, trial.backend) for side in sides if not side.is_random}
    found = list[Energies]()
    summed: Array | None = None
    for seed in range(trial.seed, trial.seed + draws):
        off = _error(
            exact,
            (
                fixed[each.letter] if each.letter in fixed else _values(each, seed, counts, trial.backend)
                for each in sides
            ),
        )
        found.append(energies(exact, off))
        if summed is None:
            summed = off
        else:
            summed += off
        del off  # before the next one is made
    if draws == 1:
        return found[0], found[0], counts
    assert summed is not None
    summed /= draws
    total = reduce(add, found)
    noise, cross, error = (value / draws for value in (total.noise, total.cross, total.error))
    return Energies(exact.size, found[0].signal, noise, cross, error), energies(exact, summed), counts


def _error(exact: Array, sides: Iterable[Array]) -> Array:
    """Return the product of quantized sides, less the exact one."""
    off = product(*sides)
    off -= exact
    return off


def _values(side: _Side, seed: int, counts: dict[str, Counts], backend: Backend) -> Array:
    """Return the operand in binary64 as its codes stand for it, a transform undone; its counts are added."""
    if side.operand is None:
        return side.plain
    narrow, rules = side.plain.astype(np.float32), rules_of(side.operand, seed)
    quantized = backend.quantize(narrow, "F32", rules, tensor_amax=side.tensor_amax, stream=side.stream)
    assert quantized.stats is not None
    counted = Counts.of(quantized.stats)
    counts[side.letter] = counts[side.letter] + counted if side.letter in counts else counted
    return scaled_back(quantized, backend, side.what)


@dataclass(frozen=True, slots=True)
class Sums:
    """Products taken together: all of them, those that were quantized, and their operands by letter."""

    energies: Energies
    quantized: Energies | None
    averaged: Energies
    operands: Mapping[str, Counts]
    products: int
    high: int


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The products, by layer, step and rank in the order of the source, then by recipe and pass; the blocks that each
    recipe does not quantize, in words; and notes."""

    source: str
    captures: str
    trial: Trial
    products: tuple[TrainedProduct, ...]
    high: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """The captured steps, in order."""
        return tuple(sorted({product.step for product in self.products if product.step is not None}))

    def sums(self, step: int | None = None) -> dict[tuple[str, str], Sums]:
        """Sum by recipe and pass over the layers, of one step or (None) of all."""
        found: dict[tuple[str, str], list[TrainedProduct]] = {}
        for each in self.products:
            if step in (None, each.step):
                found.setdefault((each.recipe, each.passes), []).append(each)
        order = {(recipe.name, passes): None for recipe in self.trial.recipes for passes in PASSES}
        return {key: _summed(found[key]) for key in order if key in found}


def report_training(
    source: str,
    model: TrainedModel,
    trial: Trial,
    *,
    on_layer: Callable[[TrainedLayer], object] = lambda layer: None,
) -> TrainingReport:
    """Return every product of every layer of the model under every recipe.

    Raises InputError naming every layer with too few tokens for a transform.
    """
    import_extra("torch", "computing products")
    _check_tokens(model, trial)
    high = {recipe.name: model.blocks.high(recipe) for recipe in trial.recipes}
    remembers = any(recipe.history for recipe in trial.recipes)
    products: list[TrainedProduct] = []
    for name, of_layer in groupby(model.layers, key=lambda one: one.name):
        stays = {recipe for recipe, blocks in high.items() if model.blocks.of.get(name) in blocks}
        earlier: dict[str, list[float]] = {}
        for _, of_step in groupby(of_layer, key=lambda one: one.captured.step):
            amaxes: dict[str, float] = {}
            for layer in of_step:
                tokens = tokens_of(model.captures, layer.captured, layer.tokens)
                operands = {W: weight_of(layer.weight), **tokens}
                products += products_of(layer, operands, trial, stays, earlier)
                if remembers:
                    found = amaxes_of(model.captures, layer.captured, layer.weight, trial.backend)
                    amaxes |= {letter: max(amax, amaxes.get(letter, 0.0)) for letter, amax in found.items()}
                on_layer(layer)
            # Ranks share the history of a tensor, as in data-parallel training.
            for letter, amax in amaxes.items():
                earlier.setdefault(letter, []).append(amax)
    there = list(dict.fromkeys(layer.name for layer in model.layers))
    notes = [*model.notes, *high_notes(trial.recipes, model.blocks, there), *_history_notes(trial, model)]
    kept = {name: shown(blocks) for name, blocks in high.items()}
    return TrainingReport(source, str(model.captures.where), trial, tuple(products), kept, tuple(notes))


def _summed(products: Sequence[TrainedProduct]) -> Sums:
    operands: dict[str, Counts] = {}
    for each in products:
        for letter, counts in each.operands.items():
            operands[letter] = operands[letter] + counts if letter in operands else counts
    quantized = [product.energies for product in products if not product.high]
    return Sums(
        reduce(add, (product.energies for product in products)),
        reduce(add, quantized) if quantized else None,
        reduce(add, (product.averaged for product in products)),
        operands,
        len(products),
        len(products) - len(quantized),
    )


def _check_tokens(model: TrainedModel, trial: Trial) -> None:
    problems = [
        f"{printable(model.captures.where)}: {layer.captured.label} has {layer.tokens:,} tokens; "
        f"{recipe.name} transforms groups of {recipe.transform} tokens: capture more of them, or leave that recipe out."
        for layer in model.layers
        for recipe in trial.recipes
        if layer.tokens % recipe.transform
    ]
    if problems:
        raise together(InputError, "Tokens that Hadamard transforms do not divide", problems)


def _history_notes(trial: Trial, model: TrainedModel) -> Iterator[str]:
    """Yield notes on the earlier steps that delayed scales depend on."""
    delayed = [recipe.name for recipe in trial.recipes if recipe.history]
    if not delayed:
        return
    steps = sorted({layer.captured.step for layer in model.layers if layer.captured.step is not None})
    names = ", ".join(delayed)
    if len(steps) < 2:
        yield (
            f"{names}: one step was captured, so that scales have no history and are 1, as in the first step of a "
            "training; capture several steps to see delayed scales at work."
        )
    else:
        yield (
            f"{names}: the history of a scale is the captured steps before, {len(steps) - 1:,} at most; at step "
            f"{steps[0]:,} there is none, and scales are 1."
        )
