"""Which products of layers are computed, of how many tokens, and whether their operands can be quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers, check_layers, several
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import COLUMN
from mxcli.flows.gemm_shapes import OPERANDS, PASSES, W
from mxcli.flows.memory import Need
from mxcli.flows.plan import Plan, Step
from mxcli.flows.products.memory import Extent, memory_of_products
from mxcli.flows.products.operands import Weight, held_of, shortened, used_tokens
from mxcli.numerics.blocks import divides
from mxcli.numerics.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A layer whose products are computed: its weight, what becomes of that, and what was captured of the layer at each
    place, with how many tokens of it are used."""

    step: Step
    weight: Weight
    places: tuple[tuple[CapturedLayer, int], ...]

    @property
    def name(self) -> str:
        """The module."""
        return _layer(self.step)

    def has(self, passes: str, place: CapturedLayer) -> bool:
        """Whether both operands of a product are there."""
        return all(letter == W or letter in held_of(place) for letter, _ in OPERANDS[passes])

    def sizes(self, passes: str, tokens: int) -> tuple[int, int, int]:
        """m, n and k of a product of so many tokens."""
        return PASSES[passes](tokens, *self.weight.shape)


@dataclass(frozen=True, slots=True)
class PlannedProducts:
    """The layers in the order of the source, the recipes by operand (W: of the first layer), and what there is to
    note."""

    captures: Checkpoint
    layers: tuple[Multiplied, ...]
    recipes: Mapping[str, Recipe]
    notes: tuple[str, ...]

    def recipe_of(self, letter: str, layer: Multiplied) -> Recipe:
        """How an operand of a layer is quantized."""
        own = layer.step.recipe
        assert own is not None
        return own if letter == W else self.recipes[letter]


def plan_products(
    checkpoint: Checkpoint, captures: Checkpoint, plan: Plan, recipes: Mapping[str, Recipe]
) -> PlannedProducts:
    """Every layer that the plan quantizes and that was captured; `recipes` are those of activations (X) and gradients
    (dY), weights have their step's.

    Raises InputError naming every capture that does not fit its layer, or where nothing fits, and RefusedError naming
    every length along which a transform, or blocks where the plan does not pad, cannot be applied.
    """
    every = captured_layers(captures.tensors, captures.captures)
    found = by_layer(each for each in every if each.activation or each.gradient)
    steps = {_layer(step): step for step in plan.quantized if len(step.shape) == 2 and _layer(step) in found}
    _check(captures, steps, found)
    transform = max(recipe.hadamard.size if recipe.hadamard else 1 for recipe in recipes.values())
    layers = tuple(
        Multiplied(
            step,
            Weight(checkpoint, step.tensor, turned=step.axis == COLUMN),
            tuple((place, used_tokens(place.tokens, transform)) for place in found[name]),
        )
        for name, step in steps.items()
    )
    used = [pair for layer in layers for pair in layer.places]
    added = several(place for place, _ in used)
    notes = [f"Products of {added} are added up, each of its own tokens."] if added else []
    first = layers[0].step.recipe
    assert first is not None
    planned = PlannedProducts(captures, layers, {**recipes, W: first}, (*notes, *shortened(used)))
    _check_lengths(planned, pads=plan.options.on_indivisible == "pad")
    return planned


def memory_to_multiply(planned: PlannedProducts) -> Need:
    """What the products need."""
    return memory_of_products(
        _extent(layer, place, tokens) for layer in planned.layers for place, tokens in layer.places
    )


def _extent(layer: Multiplied, place: CapturedLayer, tokens: int) -> Extent:
    outputs, inputs = layer.weight.shape
    infos = (layer.weight.info, place.activation, place.gradient)
    return Extent(layer.name, tokens, outputs, inputs, max(info.nbytes for info in infos if info))


def _check(captures: Checkpoint, steps: Mapping[str, Step], found: Mapping[str, Sequence[CapturedLayer]]) -> None:
    if not steps:
        held = ", ".join(map(printable, list(found)[:3])) or "none"
        raise InputError(
            f"{printable(captures.where)}: holds no activations or gradients of the layers to be quantized; it holds "
            f"those of {held}."
        )
    places = [place for name in steps for place in found[name]]
    check_layers(captures.where, places, {name: step.shape for name, step in steps.items()})


def _check_lengths(planned: PlannedProducts, *, pads: bool) -> None:
    """Raises RefusedError naming the operands that a transform, or blocks, do not divide along their product's sum."""
    problems = [
        f"{place.place}: {letter} in {passes}, [{rows}, {k}]: {fault}."
        for layer in planned.layers
        for place, tokens in layer.places
        for passes, pair in OPERANDS.items()
        if layer.has(passes, place)
        for m, n, k in [layer.sizes(passes, tokens)]
        for (letter, _), rows in zip(pair, (m, n), strict=True)
        if (fault := _length_fault(planned.recipe_of(letter, layer), (rows, k), pads=pads))
    ]
    if problems:
        raise together(RefusedError, f"{printable(planned.captures.where)}: lengths that do not divide", problems)


def _length_fault(recipe: Recipe, shape: tuple[int, int], *, pads: bool) -> str | None:
    """Why an operand [rows, k] cannot be quantized, and what to do; None: it can."""
    if recipe.hadamard and shape[-1] % recipe.hadamard.size:
        return (
            f"the Hadamard transform takes multiples of {recipe.hadamard.size} along the sum; use a smaller "
            "--hadamard or captures of more tokens, or leave the layer out (--exclude)"
        )
    if not pads and not divides(recipe.format, shape):
        return f"{recipe.format.name} takes whole blocks; use --on-indivisible pad, or leave the layer out (--exclude)"
    return None


def _layer(step: Step) -> str:
    return step.tensor.name.removesuffix(".weight")
