"""What quantization does to the products of layers: Y = X W^T, dX = dY W and dW = dY^T X of captured tensors.

Both operands of a product are quantized along the dimension that it sums over, so a tensor has other codes in each of
its two products (Recipes for Pre-training LLMs with MXFP8, section 3.1; Pretraining LLMs with NVFP4, section 3).
Products are computed in binary64, of the values that codes stand for and of the plain ones.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mxcli.backends import Backend
from mxcli.errors import InputError, printable
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers, check_layers, several
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.gemm_shapes import DY, OPERANDS, PASSES, W, X
from mxcli.flows.output_error import binary64
from mxcli.flows.plan import Plan, Step
from mxcli.numerics.draws import stream_of
from mxcli.numerics.measures import cosine_between, decibels, relative
from mxcli.numerics.recipe import Recipe

MOST_TOKENS = 1024
"""Captured tokens that are used of a layer at a step and rank, the same of its input and of its gradient."""
_PIECE = 1 << 22
"""Elements of an operand that are multiplied at a time."""


@dataclass(frozen=True, slots=True)
class Energies:
    """Sums over the elements of a product, which add up over layers: of D^2, of the squared error of D of quantized
    operands, of D times its error, and of its error; named as those of a tensor (`Stats`)."""

    elements: int
    signal: float
    noise: float
    cross: float
    error: float

    def __add__(self, other: Energies) -> Energies:
        return Energies(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def metrics(self) -> dict[str, float | None]:
        """By the names of the metrics of tensors: sqnr_db (None: no noise, or no signal), relative_error, cosine and
        bias (mean error)."""
        return {
            "sqnr_db": decibels(self.signal, self.noise),
            "relative_error": relative(self.signal, self.noise),
            "cosine": cosine_between(self.signal, self.noise, self.cross),
            "bias": self.error / self.elements if self.elements else None,
        }


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
        for product in self.products:
            before = sums.get(product.passes)
            sums[product.passes] = product.energies if before is None else before + product.energies
        return sums


def report_products(
    source: str,
    checkpoint: Checkpoint,
    captures: Checkpoint,
    plan: Plan,
    recipes: Mapping[str, Recipe],
    *,
    backend: Backend,
    on_layer: Callable[[TensorInfo], object] = lambda info: None,
) -> ProductReport:
    """The products of every layer that the plan quantizes and that was captured; `recipes` are those of activations
    (X) and gradients (dY), weights have their step's. What was captured at several steps or ranks is multiplied by
    itself, and the sums added up.

    Raises InputError naming every capture that does not fit its layer, or where nothing fits.
    """
    every = captured_layers(captures.tensors, captures.captures)
    found = by_layer(each for each in every if each.activation or each.gradient)
    steps = {_layer(step): step for step in plan.quantized if len(step.shape) == 2 and _layer(step) in found}
    _check(captures, steps, found)
    products, lacking = list[LayerProduct](), 0
    for name, step in steps.items():
        on_layer(step.tensor)
        made = list(_products(checkpoint, captures, step, found[name], {**recipes, W: step.recipe}, backend))
        lacking += len(found[name]) * len(OPERANDS) - len(made)
        products += _added_up(step, made)
    places = several(each for name in steps for each in found[name])
    notes = [f"Products of {places} are added up, each of its own tokens."] if places else []
    if lacking:
        notes.append(f"{lacking:,} products are left out: their activation or gradient was not captured.")
    shown = {**recipes, W: next(iter(steps.values())).recipe}
    return ProductReport(
        source, str(captures.where), {k: r for k, r in shown.items() if r}, tuple(products), tuple(notes)
    )


def _products(
    checkpoint: Checkpoint,
    captures: Checkpoint,
    step: Step,
    places: Iterable[CapturedLayer],
    recipes: Mapping[str, Recipe | None],
    backend: Backend,
) -> Iterator[_Part]:
    """The products of a layer at each place where both of their operands are there."""
    weight = binary64(np.array(read(checkpoint, step.tensor)), step.tensor.dtype)
    sides: dict[tuple[str, bool], _Side] = {}
    for place in places:
        # The weight, and with it what its codes stand for, is the same at every place.
        sides = {key: side for key, side in sides.items() if key[0] == W}
        operands = {W: weight.T if step.axis == COLUMN else weight, **_tokens_of(captures, place)}
        for passes, pair in OPERANDS.items():
            if any(letter not in operands for letter, _ in pair):
                continue
            for letter, turned in pair:
                recipe = recipes[letter]
                assert recipe is not None
                if (letter, turned) not in sides:
                    stream = stream_of(f"{place.place} {letter} {turned}")
                    sides[letter, turned] = _Side(operands[letter], turned, recipe, backend, stream)
            left, right = (sides[key] for key in pair)
            tokens = next(len(operands[letter]) for letter in (X, DY) if letter in operands)
            yield _Part(passes, tokens, (left.format, right.format), _energies(left, right))


def _added_up(step: Step, parts: Iterable[_Part]) -> Iterator[LayerProduct]:
    """One product of each pass, of the tokens of all places."""
    listed = list(parts)
    for passes in OPERANDS:
        own = [part for part in listed if part.passes == passes]
        if own:
            sizes = PASSES[passes](sum(part.tokens for part in own), *step.shape)
            yield LayerProduct(_layer(step), passes, sizes, own[0].formats, _sum(part.energies for part in own))


@dataclass(frozen=True, slots=True)
class _Part:
    """A product of a layer at one place."""

    passes: str
    tokens: int
    formats: tuple[str, str]
    energies: Energies


class _Side:
    """An operand [rows, k]: plain in binary64, and scaled back from its codes."""

    def __init__(self, plain: Array, turned: bool, recipe: Recipe, backend: Backend, stream: int) -> None:
        self.plain = np.ascontiguousarray(plain.T if turned else plain)
        self.format = recipe.format.name
        narrow = self.plain.astype(np.float32)
        made = backend.quantize(narrow, "F32", recipe, stats=False, stream=stream)
        self.quantized = backend.dequantize(made).astype(np.float64)


def _energies(a: _Side, b: _Side) -> Energies:
    """Sums over D, a run of rows of B at a time."""
    import torch

    height = max(1, _PIECE // max(1, b.plain.shape[1]))
    left, left_quantized = torch.from_numpy(a.plain), torch.from_numpy(a.quantized)
    parts = []
    for begin in range(0, len(b.plain), height):
        exact = left @ torch.from_numpy(b.plain[begin : begin + height]).T
        found = left_quantized @ torch.from_numpy(b.quantized[begin : begin + height]).T
        off = found - exact
        sums = (exact.square(), off.square(), exact * off, off)
        parts.append(Energies(exact.numel(), *(float(each.sum()) for each in sums)))
    return _sum(parts)


def _sum(energies: Iterable[Energies]) -> Energies:
    return functools.reduce(operator.add, energies)


def _tokens_of(captures: Checkpoint, place: CapturedLayer) -> dict[str, Array]:
    """X and dY of a place as far as they were captured, [tokens, features], as binary64: the same tokens of both."""
    operands = {}
    for name, info in ((X, place.activation), (DY, place.gradient)):
        if info is not None:
            operands[name] = binary64(read(captures, info), info.dtype).reshape(-1, info.shape[-1])
    tokens = place.tokens
    if tokens > MOST_TOKENS:
        chosen = sorted(random.Random(0).sample(range(tokens), MOST_TOKENS))
        operands = {name: x[chosen] for name, x in operands.items()}
    for name, x in operands.items():
        if not np.isfinite(x).all():
            raise InputError(f"{printable(captures.where)}: {name} of {place.place} is not finite.")
    return operands


def _check(captures: Checkpoint, steps: Mapping[str, Step], found: Mapping[str, Sequence[CapturedLayer]]) -> None:
    if not steps:
        held = ", ".join(map(printable, list(found)[:3])) or "none"
        raise InputError(
            f"{printable(captures.where)}: holds no activations or gradients of the layers to be quantized; it holds "
            f"those of {held}."
        )
    places = [place for name in steps for place in found[name]]
    check_layers(captures.where, places, {name: step.shape for name, step in steps.items()})


def _layer(step: Step) -> str:
    return step.tensor.name.removesuffix(".weight")
