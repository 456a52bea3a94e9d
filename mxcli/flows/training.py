"""What recipes of low-precision training do to the products of captured layers, summed over layers and by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import add

import numpy as np

from mxcli.errors import InputError, printable, together
from mxcli.flows.gemm_shapes import PASSES
from mxcli.flows.products import Energies
from mxcli.flows.training_layers import Stacks, TrainedLayer, TrainedModel, block_of, operands_of
from mxcli.flows.training_products import Counts, TrainedProduct, Trial, products_of
from mxcli.numerics.training import TrainingRecipe, high_blocks

_Blocks = frozenset[tuple[str, int]]


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
    """All products, by layer, step and rank in the order of the source and then by recipe and pass; the blocks that
    stay high under each recipe, as words; and what there is to note."""

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
        """Sums by recipe and pass over the layers, of one step or (None) of all."""
        found: dict[tuple[str, str], list[TrainedProduct]] = {}
        for product in self.products:
            if step in (None, product.step):
                found.setdefault((product.recipe, product.passes), []).append(product)
        order = {(recipe.name, passes): None for recipe in self.trial.recipes for passes in PASSES}
        return {key: _summed(found[key]) for key in order if key in found}


def report_training(
    source: str,
    model: TrainedModel,
    trial: Trial,
    *,
    on_layer: Callable[[TrainedLayer], object] = lambda layer: None,
) -> TrainingReport:
    """Every product of every layer of the model under every recipe.

    Raises InputError naming every layer with too few tokens for a transform.
    """
    _check_tokens(model, trial)
    high = {recipe.name: _high(recipe, model.stacks) for recipe in trial.recipes}
    products: list[TrainedProduct] = []
    for name, of_layer in groupby(model.layers, key=lambda one: one.name):
        stays = {recipe for recipe, blocks in high.items() if block_of(name) in blocks}
        earlier: dict[str, list[float]] = {}
        for _, of_step in groupby(of_layer, key=lambda one: one.captured.step):
            amaxes: dict[str, float] = {}
            for layer in of_step:
                operands = operands_of(model.captures, layer)
                products += products_of(layer, operands, trial, stays, earlier)
                for letter, x in operands.items():
                    largest = trial.backend.amax(x.astype(np.float32), "F32").value
                    amaxes[letter] = max(amaxes.get(letter, 0.0), largest)
                on_layer(layer)
            # Ranks share the history of a tensor, as in data-parallel training.
            for letter, amax in amaxes.items():
                earlier.setdefault(letter, []).append(amax)
    notes = [*model.notes, *_high_notes(trial, high, model), *_history_notes(trial, model)]
    shown = {name: tuple(f"{stack}{number}" for stack, number in sorted(blocks)) for name, blocks in high.items()}
    return TrainingReport(source, str(model.captures.where), trial, tuple(products), shown, tuple(notes))


def _summed(products: Sequence[TrainedProduct]) -> Sums:
    operands: dict[str, Counts] = {}
    for product in products:
        for letter, counts in product.operands.items():
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


def _high(recipe: TrainingRecipe, stacks: Stacks) -> _Blocks:
    """The blocks that stay high under a recipe, in every stack of the model."""
    return frozenset(
        (stack, numbers[at]) for stack, numbers in stacks.items() for at in high_blocks(recipe.high, len(numbers))
    )


def _check_tokens(model: TrainedModel, trial: Trial) -> None:
    problems = [
        f"{printable(model.captures.where)}: {layer.captured.place} has {layer.tokens:,} tokens; "
        f"{recipe.name} transforms groups of {recipe.transform} tokens: capture more of them, or leave that recipe out."
        for layer in model.layers
        for recipe in trial.recipes
        if layer.tokens % recipe.transform
    ]
    if problems:
        raise together(InputError, "Tokens that Hadamard transforms do not divide", problems)


def _high_notes(trial: Trial, high: Mapping[str, _Blocks], model: TrainedModel) -> Iterator[str]:
    """A sentence about each set of blocks that recipes keep high."""
    blocks = sum(map(len, model.stacks.values()))
    names: dict[_Blocks, list[TrainingRecipe]] = {}
    for recipe in trial.recipes:
        if high[recipe.name]:
            names.setdefault(high[recipe.name], []).append(recipe)
    for kept, those in names.items():
        layers = len({layer.name for layer in model.layers if block_of(layer.name) in kept})
        shown = ", ".join(f"{stack}{number}" for stack, number in sorted(kept)[:3])
        yield (
            f"{', '.join(recipe.name for recipe in those)}: {len(kept):,} of {blocks:,} blocks stay high "
            f"({those[0].high.words}: {printable(shown)}{', …' if len(kept) > 3 else ''}); the products of "
            f"{layers:,} layer{'' if layers == 1 else 's'} there are exact."
        )


def _history_notes(trial: Trial, model: TrainedModel) -> Iterator[str]:
    """A sentence about what delayed scales know of earlier steps."""
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
