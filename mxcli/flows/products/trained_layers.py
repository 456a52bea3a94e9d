"""The layers whose training products can be computed: captured activations and gradients of one step with the weight,
and the transformer blocks that they are in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import InputError, printable, together
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers, check_layers
from mxcli.files.captures import incomplete_notes
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import COLUMN
from mxcli.files.roles import WEIGHT, role_of
from mxcli.files.tensors import TensorInfo
from mxcli.flows.plan.memory import Need
from mxcli.flows.plan.plan import Plan
from mxcli.flows.products.operands import Weight, places_text, shortened, used_tokens
from mxcli.flows.products.report import Extent, memory_of_products
from mxcli.numerics.training import TrainingRecipe, high_blocks

Block = tuple[str, int]
"""A block: its stack (the text before the number in the names of its layers) and its number."""
High = Mapping[str, frozenset[Block]]
"""The blocks that stay high, by the name of the recipe."""

# Dumps may have made `_` of every dot, so where no name has a number between dots, one between those counts.
_NUMBERED = (re.compile(r"(^|.*?\.)(\d+)\."), re.compile(r"(^|.*?[._])(\d+)[._]"))


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block of each layer that is in one, and the numbers of the blocks of each stack, in order; `is_whole`:
    they come from all layers of the model, not from captured ones alone."""

    of: Mapping[str, Block]
    stacks: Mapping[str, tuple[int, ...]]
    is_whole: bool = True

    @property
    def count(self) -> int:
        """Blocks of all stacks."""
        return sum(map(len, self.stacks.values()))

    def high(self, recipe: TrainingRecipe) -> frozenset[Block]:
        """Return the blocks that stay high under a recipe, in every stack."""
        return frozenset(
            (stack, numbers[at])
            for stack, numbers in self.stacks.items()
            for at in high_blocks(recipe.high, len(numbers))
        )


def blocks_of(layers: Iterable[str], *, is_whole: bool = True) -> Blocks:
    """Return the blocks of layers by their names: the first number between dots; where none has one, between
    dots or underscores."""
    names = list(layers)
    found: dict[str, Block] = {}
    for pattern in _NUMBERED:
        found = {name: (match[1], int(match[2])) for name in names if (match := pattern.match(name))}
        if found:
            break
    stacks: dict[str, set[int]] = {}
    for stack, number in found.values():
        stacks.setdefault(stack, set()).add(number)
    return Blocks(found, {stack: tuple(sorted(numbers)) for stack, numbers in stacks.items()}, is_whole)


def shown(blocks: Iterable[Block]) -> tuple[str, ...]:
    """Return the blocks by the beginning of their layers' names."""
    return tuple(f"{stack}{number}" for stack, number in sorted(blocks))


def high_notes(recipes: Sequence[TrainingRecipe], blocks: Blocks, layers: Sequence[str]) -> list[str]:
    """Return notes on the blocks that recipes do not quantize, `layers` being those whose products are computed: a
    sentence about each set of blocks, or that blocks are unknown, or that the model's last blocks may be others."""
    recipes_by_blocks: dict[tuple[frozenset[Block], str], list[str]] = {}
    for recipe in recipes:
        if recipe.high.is_any:
            recipes_by_blocks.setdefault((blocks.high(recipe), recipe.high.words), []).append(recipe.name)
    notes = []
    for (kept, words), names in recipes_by_blocks.items():
        recipe_names = ", ".join(names)
        if not kept:
            notes.append(
                f"{recipe_names}: no block stays high, though {words} should: names of layers, such as "
                f"'{printable(layers[0])}', have no number of a block."
            )
            continue
        there = sum(blocks.of.get(layer) in kept for layer in layers)
        first = ", ".join(shown(kept)[:3])
        notes.append(
            f"{recipe_names}: {len(kept):,} of {blocks.count:,} blocks stay high ({words}: {printable(first)}"
            f"{', …' if len(kept) > 3 else ''}); the products of {there:,} layer{'' if there == 1 else 's'} there are "
            "exact."
        )
    if recipes_by_blocks and blocks.count and not blocks.is_whole:
        notes.append(
            "Blocks were counted among the captured layers, as the captures do not say which others the model has: its "
            "first and last may be others."
        )
    return notes


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """The captures of a layer at one step on one rank, of which the first `tokens` are used, and its weight."""

    captured: CapturedLayer
    weight: Weight
    tokens: int

    @property
    def name(self) -> str:
        """The module."""
        return self.captured.layer

    @property
    def nbytes(self) -> int:
        """Bytes of its captured tensors."""
        return sum(info.nbytes for info in (self.captured.activation, self.captured.gradient) if info)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The layers in the order of the source, each through its steps, the blocks of the whole model, and notes."""

    captures: Checkpoint
    layers: tuple[TrainedLayer, ...]
    blocks: Blocks
    notes: tuple[str, ...]


def trained_model(checkpoint: Checkpoint, captures: Checkpoint, plan: Plan) -> TrainedModel:
    """Return the linear layers of the plan that `captures`, which may be the same source, hold tensors of.

    A weight is that of the step where it was captured, else the one captured last before, else that of `checkpoint`.
    Tokens are cut to a multiple of the longest Hadamard transform of any recipe that they suffice for, so that figures
    of a recipe do not depend on the other recipes. Raises InputError naming everything that does not fit, or where
    nothing is left.
    """
    found = captured_layers(_selected(checkpoint, captures, plan), captures.captures)
    order, stored = _stored(checkpoint, plan, found)
    check_layers(captures.where, found, {name: weight.shape for name, weight in stored.items()})
    own = by_layer(found, WEIGHT)
    held = [each for each in found if each.activation or each.gradient]
    layers = [
        TrainedLayer(each, weight, used_tokens(each.tokens))
        for each in held
        if each.layer in stored
        if (weight := _own(captures, each, own.get(each.layer, [])) or stored[each.layer])
    ]
    if not layers:
        raise InputError(_nothing(captures, held))
    odd = {each.name: each.weight for each in layers if each.weight.shape != stored[each.name].shape}
    if odd:
        faults = [
            f"{printable(weight.info.name)}: has the shape {list(weight.shape)}, and the weight of its layer "
            f"{list(stored[name].shape)}."
            for name, weight in odd.items()
        ]
        raise together(InputError, printable(captures.where), faults)
    places = {name: at for at, name in enumerate(order)}
    layers.sort(key=lambda each: places[each.name])
    notes = [
        *incomplete_notes(captures.root),
        *_left_out(held, layers),
        *shortened([(each.captured, each.tokens) for each in layers]),
        *_other_weights(layers),
    ]
    return TrainedModel(captures, tuple(layers), _blocks(checkpoint, captures, order), tuple(notes))


def _selected(checkpoint: Checkpoint, captures: Checkpoint, plan: Plan) -> Mapping[str, TensorInfo]:
    """Return the captured tensors, of SOURCE itself only those that were not excluded; weights are judged as layers."""
    if captures is not checkpoint:
        return captures.tensors
    taken = {step.tensor.name for step in plan.quantized}
    return {name: info for name, info in captures.tensors.items() if info.role == WEIGHT or name in taken}


def memory_to_train(model: TrainedModel, draws: int) -> Need:
    """Return the memory of the products of its layers, under any recipes."""
    return memory_of_products((_extent(layer) for layer in model.layers), draws)


def _stored(checkpoint: Checkpoint, plan: Plan, found: Sequence[CapturedLayer]) -> tuple[list[str], dict[str, Weight]]:
    """Return all linear layers of the source in its order, and the weights of those that the plan takes."""
    taken = {step.tensor.name: step for step in plan.quantized if len(step.shape) == 2}
    if not checkpoint.captures:
        linear = [info.name for info in checkpoint.tensors.values() if info.role == WEIGHT and len(info.shape) == 2]
        steps = {name.removesuffix(".weight"): taken[name] for name in linear if name in taken}
        weights = {name: Weight(checkpoint, s.tensor, turned=s.axis == COLUMN) for name, s in steps.items()}
        return [name.removesuffix(".weight") for name in linear], weights
    own = [each for each in found if each.weight and _is_linear(each.layer, each.weight)]
    return list(dict.fromkeys(each.layer for each in own)), {
        each.layer: Weight(checkpoint, each.weight, each.step)
        for each in reversed(own)
        if each.weight and each.weight.name in taken
    }


def _is_linear(layer: str, info: TensorInfo) -> bool:
    """Return whether a captured weight is of a linear layer that recipes quantize: not an output head or router."""
    return len(info.shape) == 2 and role_of(f"{layer}.weight", info.shape, info.dtype) == WEIGHT


def _own(captures: Checkpoint, place: CapturedLayer, weights: Sequence[CapturedLayer]) -> Weight | None:
    """Return the weight that was captured of a layer there, else on another rank, else last before."""
    before = [each for each in weights if each.step is None or place.step is None or each.step <= place.step]
    latest = [each for each in before if each.step == before[-1].step]  # as steps ascend
    best = next((each for each in latest if each.rank == place.rank), latest[0] if latest else None)
    return Weight(captures, best.weight, best.step) if best and best.weight else None


def _blocks(checkpoint: Checkpoint, captures: Checkpoint, order: Sequence[str]) -> Blocks:
    """Return the blocks of the model: a checkpoint has all its layers, of captures some may say which there are."""
    if not checkpoint.captures:
        return blocks_of(order)
    stated = checkpoint.layers_of_model or captures.layers_of_model
    return blocks_of(stated or order, is_whole=bool(stated))


def _extent(layer: TrainedLayer) -> Extent:
    outputs, inputs = layer.weight.shape
    infos = (layer.weight.info, layer.captured.activation, layer.captured.gradient)
    return Extent(layer.name, layer.tokens, outputs, inputs, max(info.nbytes for info in infos if info))


def _nothing(captures: Checkpoint, held: Sequence[CapturedLayer]) -> str:
    where = printable(captures.where)
    if not held:
        return f"{where}: holds no captured activations or gradients: name a file that does with --captures."
    names = ", ".join(printable(each.layer) for each in held[:3])
    return (
        f"{where}: holds activations or gradients of {names}, but there is no weight of a linear layer for any of its "
        "layers: give their model as SOURCE, and the captures with --captures."
    )


def _left_out(held: Sequence[CapturedLayer], layers: Sequence[TrainedLayer]) -> Iterator[str]:
    without = list(dict.fromkeys(each.layer for each in held if each.layer not in {one.name for one in layers}))
    if without:
        yield (
            f"{len(without):,} captured {'layer is' if len(without) == 1 else 'layers are'} left out "
            f"('{printable(without[0])}'{', …' if len(without) > 1 else ''}): no linear layer of SOURCE, or not taken."
        )
    partial = [one for one in layers if not (one.captured.activation and one.captured.gradient)]
    if partial:
        yield (
            f"{2 * len(partial):,} products are left out, as at {partial[0].captured.label}: its activation or "
            "gradient was not captured at that step and rank."
        )


def _other_weights(layers: Sequence[TrainedLayer]) -> Iterator[str]:
    other = [one for one in layers if one.weight.step is not None and one.weight.step != one.captured.step]
    if other:
        yield (
            f"At {places_text(len(other))} the weight is that of another step, {other[0].weight.step} at "
            f"{other[0].captured.label}: none was captured there."
        )
