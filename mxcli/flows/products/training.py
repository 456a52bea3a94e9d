"""What recipes of low-precision training do to the products of captured layers, summed over layers and by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import add

from mxcli.errors import InputError, printable, together
from mxcli.flows.gemm_shapes import PASSES, W
from mxcli.flows.products.blocks import high_notes, shown
from mxcli.flows.products.energies import Energies
from mxcli.flows.products.operands import amaxes_of, tokens_of, weight_of
from mxcli.flows.products.trained_layers import TrainedLayer, TrainedModel
from mxcli.flows.products.trained_products import Counts, TrainedProduct, Trial, products_of


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
