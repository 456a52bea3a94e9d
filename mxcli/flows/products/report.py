"""What quantization does to the products of layers: Y = X W^T, dX = dY W and dW = dY^T X of captured tensors.

Both operands of a product are quantized along the dimension that it sums over, so a tensor has other codes in each of
its two products (Recipes for Pre-training LLMs with MXFP8, section 3.1; Pretraining LLMs with NVFP4, section 3).
Products are computed in binary64, of the values that codes stand for and of the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from mxcli.backends import Backend
from mxcli.files.captured_layers import CapturedLayer
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.gemm_shapes import OPERANDS, W
from mxcli.flows.products.energies import Energies, energies, product
from mxcli.flows.products.operands import scaled_back, side_of, stream, tokens_of, weight_of
from mxcli.flows.products.planned import Multiplied, PlannedProducts
from mxcli.numerics.recipe import Recipe


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """One product of a layer: D[m, n] = A[m, k] @ B[n, k]^T of operands in these formats."""

    layer: str
    passes: str
    sizes: tuple[int, int, int]
    formats: tuple[str, str]
    energies: Energies


@dataclass(frozen=True, slots=True)
class ProductReport:
    """All products in the order of the source, their sums by pass, and what there is to note."""

    source: str
    captures: str
    recipes: Mapping[str, Recipe]
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
    """The products of every layer that was planned. What was captured at several steps or ranks is multiplied by
    itself, and the sums added up.

    Raises InputError where a tensor is not finite, or its codes stand for more than binary32 holds.
    """
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
    """The products of a layer, pass by pass, at each place where both of their operands are there."""
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


def _side(plain: Array, recipe: Recipe, backend: Backend, drawn: tuple[CapturedLayer, str, str]) -> _Side:
    place, letter, _ = drawn
    made = backend.quantize(plain.astype(np.float32), "F32", recipe, stats=False, stream=stream(*drawn))
    return _Side(recipe.format.name, plain, scaled_back(made, backend, f"{letter} of {place.place}"))


def _added_up(layer: Multiplied, parts: Sequence[_Part]) -> Iterator[LayerProduct]:
    """One product of each pass, of the tokens of all places."""
    for passes in OPERANDS:
        own = [part for part in parts if part.passes == passes]
        if own:
            sizes = layer.sizes(passes, sum(part.tokens for part in own))
            yield LayerProduct(layer.name, passes, sizes, own[0].formats, reduce(add, (part.energies for part in own)))
