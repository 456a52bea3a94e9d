"""What quantization does to the products of layers: Y = X W^T, dX = dY W and dW = dY^T X of captured tensors.

Both operands of a product are quantized along the dimension that it sums over, so a tensor has other codes in each of
its two products (Recipes for Pre-training LLMs with MXFP8, section 3.1; Pretraining LLMs with NVFP4, section 3).
Products are computed in binary64, of the values that codes stand for and of the plain ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mxcli.backends import Backend
from mxcli.errors import InputError, printable, together
from mxcli.files.captures import captured_by_layer
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN
from mxcli.files.roles import ACTIVATION, GRADIENT
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.gemm_shapes import DY, OPERANDS, PASSES, W, X
from mxcli.flows.output_error import binary64
from mxcli.flows.plan import Plan, Step
from mxcli.numerics.measures import cosine_between, decibels, relative
from mxcli.numerics.recipe import Recipe

MOST_TOKENS = 1024
"""Captured tokens that are used of a layer, the same of its input and of its gradient."""
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
    (X) and gradients (dY), weights have their step's.

    Raises InputError naming every capture that does not fit its layer, or where nothing fits.
    """
    found = {role: captured_by_layer(captures.tensors, captures.captures, role) for role in (ACTIVATION, GRADIENT)}
    layers = [step for step in plan.quantized if len(step.shape) == 2 and _layer(step) in found[ACTIVATION]]
    steps = {_layer(step): step for step in layers}
    steps |= {_layer(s): s for s in plan.quantized if len(s.shape) == 2 and _layer(s) in found[GRADIENT]}
    _check(captures, steps, found)
    products, lacking = [], 0
    for name, step in steps.items():
        operands = _operands(checkpoint, captures, step, found)
        on_layer(step.tensor)
        used = {X: recipes[X], DY: recipes[DY], W: step.recipe}
        for passes, ((a, turn_a), (b, turn_b)) in OPERANDS.items():
            if a not in operands or b not in operands:
                lacking += 1
                continue
            recipe_a, recipe_b = used[a], used[b]
            assert recipe_a is not None
            assert recipe_b is not None
            left = _Side(operands[a], turn_a, recipe_a, backend)
            right = _Side(operands[b], turn_b, recipe_b, backend)
            tokens = next(len(operands[each]) for each in (X, DY) if each in operands)
            products.append(
                LayerProduct(
                    name,
                    passes,
                    PASSES[passes](tokens, *step.shape),
                    (recipe_a.format.name, recipe_b.format.name),
                    _energies(left, right),
                )
            )
    notes = [f"{lacking:,} products are left out: their activation or gradient was not captured."] if lacking else []
    shown = {**recipes, W: next(iter(steps.values())).recipe}
    return ProductReport(
        source, str(captures.where), {k: r for k, r in shown.items() if r}, tuple(products), tuple(notes)
    )


class _Side:
    """An operand [rows, k]: plain in binary64, and scaled back from its codes."""

    def __init__(self, plain: Array, turned: bool, recipe: Recipe, backend: Backend) -> None:
        self.plain = np.ascontiguousarray(plain.T if turned else plain)
        narrow = self.plain.astype(np.float32)
        self.quantized = backend.dequantize(backend.quantize(narrow, "F32", recipe, stats=False)).astype(np.float64)


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
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _operands(
    checkpoint: Checkpoint, captures: Checkpoint, step: Step, found: Mapping[str, Mapping[str, list[TensorInfo]]]
) -> dict[str, Array]:
    """W [out, in] and what was captured of a layer, [tokens, features], as binary64."""
    weight = binary64(np.array(read(checkpoint, step.tensor)), step.tensor.dtype)
    operands = {W: weight.T if step.axis == COLUMN else weight}
    for name, role in ((X, ACTIVATION), (DY, GRADIENT)):
        infos = found[role].get(_layer(step), [])
        if infos:
            rows = [binary64(read(captures, info), info.dtype).reshape(-1, info.shape[-1]) for info in infos]
            operands[name] = np.concatenate(rows)
    tokens = next(len(operands[name]) for name in (X, DY) if name in operands)
    if tokens > MOST_TOKENS:
        chosen = sorted(random.Random(0).sample(range(tokens), MOST_TOKENS))
        operands |= {name: operands[name][chosen] for name in (X, DY) if name in operands}
    for name in (X, DY):
        if name in operands and not np.isfinite(operands[name]).all():
            raise InputError(f"{printable(captures.where)}: {name} of {printable(_layer(step))} is not finite.")
    return operands


def _check(
    captures: Checkpoint, steps: Mapping[str, Step], found: Mapping[str, Mapping[str, list[TensorInfo]]]
) -> None:
    where = printable(captures.where)
    if not steps:
        held = [*dict.fromkeys([*found[ACTIVATION], *found[GRADIENT]])][:3]
        raise InputError(
            f"{where}: holds no activations or gradients of the layers to be quantized; it holds those of "
            f"{', '.join(map(printable, held)) or 'none'}."
        )
    problems = []
    for name, step in steps.items():
        rows, columns = step.shape
        for role, features, word in ((ACTIVATION, columns, "input"), (GRADIENT, rows, "output gradient")):
            problems += [
                f"{where}: {printable(info.name)} {list(info.shape)} is no {word} of {printable(name)}, which has "
                f"{features} features there."
                for info in found[role].get(name, [])
                if not info.shape or info.shape[-1] != features
            ]
        tokens = {role: _tokens(found[role].get(name, [])) for role in (ACTIVATION, GRADIENT)}
        if all(found[role].get(name) for role in tokens) and len(set(tokens.values())) > 1:
            problems.append(
                f"{where}: {printable(name)}: {tokens[ACTIVATION]:,} tokens of activations and "
                f"{tokens[GRADIENT]:,} of gradients; both must be of the same tokens."
            )
    if problems:
        raise together(InputError, where, problems)


def _tokens(infos: Iterable[TensorInfo]) -> int:
    return sum(info.elements // info.shape[-1] if info.shape and info.shape[-1] else 0 for info in infos)


def _layer(step: Step) -> str:
    return step.tensor.name.removesuffix(".weight")
