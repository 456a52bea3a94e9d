"""Errors of layers' products under quantization: Y = X W^T, dX = dY W and dW = dY^T X of captured tensors.

Both operands of a product are quantized along the dimension that it sums over, so a tensor has other codes in each of
its two products (Recipes for Pre-training LLMs with MXFP8, section 3.1; Pretraining LLMs with NVFP4, section 3).
Products are computed in binary64, of the values that codes stand for and of the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import InputError, RefusedError, import_extra, printable, together
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers, check_layers, steps_and_ranks
from mxcli.files.captures import incomplete_notes
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import COLUMN
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.products.operands import (
    PIECE,
    Energies,
    Weight,
    energies,
    held_of,
    product,
    scaled_back,
    shortened,
    side_of,
    stream,
    tokens_of,
    used_tokens,
    weight_of,
)
from mxcli.flows.products.shapes import OPERANDS, PASSES, W
from mxcli.numerics.blocks import divides
from mxcli.numerics.scheme import Scheme

TORCH_BYTES = 1 << 28
"""Approximate memory of torch, which multiplies."""
_BINARY64 = 8
_QUANTIZING = 10
"""Bytes an element takes while it is quantized: binary32 before and after, its code and its share of a scale."""
_TEMPORARIES = 3
"""Pieces of a product held while it is summed."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A layer by its name, the tokens that are used of it, its features, and the bytes of its largest stored tensor."""

    name: str
    tokens: int
    outputs: int
    inputs: int
    stored_bytes: int


def memory_of_products(layers: Iterable[Extent], draws: int = 1) -> Need:
    """Return the memory of the products of layers, computed one after another: operands, one product's sides plain and
    quantized, D, its error and, with several draws, the sum of their errors."""
    return need_of((layer.name, _working_bytes(layer, draws)) for layer in layers)


def _working_bytes(layer: Extent, draws: int) -> int:
    t, o, i = layer.tokens, layer.outputs, layer.inputs
    operands = _BINARY64 * (o * i + t * i + t * o)
    return TORCH_BYTES + layer.stored_bytes + operands + max(_pass_bytes(*of(t, o, i), draws) for of in PASSES.values())


def _pass_bytes(m: int, n: int, k: int, draws: int) -> int:
    a, b, d = m * k, n * k, m * n
    sides = 2 * _BINARY64 * (a + b) + _QUANTIZING * max(a, b)
    return sides + _BINARY64 * (d * (2 if draws == 1 else 3) + _TEMPORARIES * min(d, max(PIECE, n)))


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A layer whose products are computed: the decision on its weight, the weight, and the captures of the layer at
    each
    step and rank, with the number of tokens used."""

    step: TensorPlan
    weight: Weight
    places: tuple[tuple[CapturedLayer, int], ...]

    @property
    def name(self) -> str:
        """The module."""
        return _layer(self.step)

    def has(self, passes: str, place: CapturedLayer) -> bool:
        """Return whether both operands of a product are there."""
        return all(letter == W or letter in held_of(place) for letter, _ in OPERANDS[passes])

    def sizes(self, passes: str, tokens: int) -> tuple[int, int, int]:
        """Return m, n and k of a product of `tokens` tokens."""
        return PASSES[passes](tokens, *self.weight.shape)


@dataclass(frozen=True, slots=True)
class PlannedProducts:
    """The layers in the order of the source, the recipes by operand (W: of the first layer), and
    notes."""

    captures: Checkpoint
    layers: tuple[Multiplied, ...]
    recipes: Mapping[str, Scheme]
    notes: tuple[str, ...]

    def recipe_of(self, letter: str, layer: Multiplied) -> Scheme:
        """Return the scheme of an operand of a layer."""
        own = layer.step.scheme
        assert own is not None
        return own if letter == W else self.recipes[letter]


def plan_products(
    checkpoint: Checkpoint, captures: Checkpoint, plan: Plan, recipes: Mapping[str, Scheme]
) -> PlannedProducts:
    """Return every layer that the plan quantizes and that was captured; `recipes` are those of activations (X) and
    gradients (dY); weights have those of the plan.

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
    added = steps_and_ranks(place for place, _ in used)
    notes = [f"Products of {added} are added up, each of its own tokens."] if added else []
    first = layers[0].step.scheme
    assert first is not None
    planned = PlannedProducts(
        captures, layers, {**recipes, W: first}, (*incomplete_notes(captures.root), *notes, *shortened(used))
    )
    _check_lengths(planned, pads=plan.options.on_indivisible == "pad")
    return planned


def memory_to_multiply(planned: PlannedProducts) -> Need:
    """Return the memory of the products."""
    return memory_of_products(
        _extent(layer, place, tokens) for layer in planned.layers for place, tokens in layer.places
    )


def _extent(layer: Multiplied, place: CapturedLayer, tokens: int) -> Extent:
    outputs, inputs = layer.weight.shape
    infos = (layer.weight.info, place.activation, place.gradient)
    return Extent(layer.name, tokens, outputs, inputs, max(info.nbytes for info in infos if info))


def _check(captures: Checkpoint, steps: Mapping[str, TensorPlan], found: Mapping[str, Sequence[CapturedLayer]]) -> None:
    if not steps:
        held = ", ".join(map(printable, list(found)[:3])) or "none"
        raise InputError(
            f"{printable(captures.where)}: holds no activations or gradients of the layers to be quantized; it holds "
            f"those of {held}."
        )
    places = [place for name in steps for place in found[name]]
    check_layers(captures.where, places, {name: step.shape for name, step in steps.items()})


def _check_lengths(planned: PlannedProducts, *, pads: bool) -> None:
    """Raise RefusedError naming the operands that a transform, or blocks, do not divide along their product's sum."""
    problems = [
        f"{place.label}: {letter} in {passes}, [{rows}, {k}]: {fault}."
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


def _length_fault(recipe: Scheme, shape: tuple[int, int], *, pads: bool) -> str | None:
    """Return why an operand [rows, k] cannot be quantized, and what to do, or None."""
    if recipe.hadamard and shape[-1] % recipe.hadamard.size:
        return (
            f"the Hadamard transform takes multiples of {recipe.hadamard.size} along the sum; use a smaller "
            "--hadamard or captures of more tokens, or leave the layer out (--exclude)"
        )
    if not pads and not divides(recipe.format, shape):
        return f"{recipe.format.name} takes whole blocks; use --on-indivisible pad, or leave the layer out (--exclude)"
    return None


def _layer(step: TensorPlan) -> str:
    return step.tensor.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """A product of a layer: D[m, n] = A[m, k] @ B[n, k]^T of operands in these formats."""

    layer: str
    passes: str
    sizes: tuple[int, int, int]
    formats: tuple[str, str]
    energies: Energies


@dataclass(frozen=True, slots=True)
class ProductReport:
    """The products in the order of the source, their sums by pass, and notes."""

    source: str
    captures: str
    recipes: Mapping[str, Scheme]
    products: tuple[LayerProduct, ...]
    notes: tuple[str, ...]

    @property
    def by_pass(self) -> dict[str, Energies]:
        """Sums over the layers."""
        sums: dict[str, Energies] = {}
        for one in self.products:
            before = sums.get(one.passes)
            sums[one.passes] = one.energies if before is None else before + one.energies
        return sums


def report_products(
    source: str,
    planned: PlannedProducts,
    backend: Backend,
    *,
    on_layer: Callable[[TensorInfo], object] = lambda info: None,
) -> ProductReport:
    """Return the products of every planned layer. Captures of several steps or ranks are multiplied one by one, and the
    sums added up.

    Raises InputError where a tensor is not finite, or its codes stand for more than binary32 holds.
    """
    import_extra("torch", "computing products")
    products, lacking = list[LayerProduct](), 0
    for layer in planned.layers:
        on_layer(layer.step.tensor)
        made = list(_products(planned, layer, backend))
        lacking += len(layer.places) * len(OPERANDS) - len(made)
        products += _added_up(layer, made)
    notes = list(planned.notes)
    if lacking:
        notes.append(f"{lacking:,} products are left out: their activation or gradient was not captured.")
    return ProductReport(source, str(planned.captures.where), planned.recipes, tuple(products), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Part:
    """A product of a layer at one place."""

    passes: str
    tokens: int
    formats: tuple[str, str]
    energies: Energies


@dataclass(frozen=True, slots=True)
class _Side:
    """An operand [rows, k] in binary64: plain, and scaled back from its codes."""

    format: str
    plain: Array
    quantized: Array


def _products(planned: PlannedProducts, layer: Multiplied, backend: Backend) -> Iterator[_Part]:
    """Yield the products of a layer, pass by pass, at each place where both of their operands are there."""
    weight = weight_of(layer.weight)
    for passes, pair in OPERANDS.items():
        # The weight, and with it what its codes stand for, is the same at every place.
        fixed: dict[str, _Side] = {}
        for place, tokens in layer.places:
            if not layer.has(passes, place):
                continue
            operands = {W: weight, **tokens_of(planned.captures, place, tokens, [letter for letter, _ in pair])}
            sides = []
            for letter, turned in pair:
                side = fixed.get(letter)
                if side is None:
                    recipe = planned.recipe_of(letter, layer)
                    side = _side(side_of(operands[letter], turned), recipe, backend, (place, letter, passes))
                sides.append(side)
                if letter == W:
                    fixed[W] = side
            yield _Part(passes, tokens, (sides[0].format, sides[1].format), _compared(*sides))


def _compared(a: _Side, b: _Side) -> Energies:
    exact = product(a.plain, b.plain)
    off = product(a.quantized, b.quantized)
    off -= exact
    return energies(exact, off)


def _side(plain: Array, recipe: Scheme, backend: Backend, drawn: tuple[CapturedLayer, str, str]) -> _Side:
    place, letter, _ = drawn
    made = backend.quantize(plain.astype(np.float32), "F32", recipe, stats=False, stream=stream(*drawn))
    return _Side(recipe.format.name, plain, scaled_back(made, backend, f"{letter} of {place.label}"))


def _added_up(layer: Multiplied, parts: Sequence[_Part]) -> Iterator[LayerProduct]:
    """Yield one product of each pass, of the tokens of all places."""
    for passes in OPERANDS:
        own = [part for part in parts if part.passes == passes]
        if own:
            sizes = layer.sizes(passes, sum(part.tokens for part in own))
            yield LayerProduct(layer.name, passes, sizes, own[0].formats, reduce(add, (part.energies for part in own)))
