"""The layers whose training products can be computed: captured activations and gradients of the same step beside
the weight, and the blocks of the model that they are in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers, check_layers
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN
from mxcli.files.roles import WEIGHT, role_of
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.gemm_shapes import DY, W, X
from mxcli.flows.output_error import binary64
from mxcli.flows.plan import Plan
from mxcli.numerics.training import TRAINING_RECIPES

MOST_TOKENS = 1024
"""Captured tokens that are used of a layer, the first ones: blocks and transforms of wgrad run along them."""
_TRANSFORMS = sorted({1, *(recipe.transform for recipe in TRAINING_RECIPES.values())}, reverse=True)
_BLOCK = re.compile(r"(^|.*?\.)(\d+)\.")

Stacks = Mapping[str, tuple[int, ...]]
"""Numbers of the blocks of a model, in order, by what stands before the number in the names of its layers."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight, the source that holds it, and the step it is of (None: not told); `turned` says that it is stored
    [in, out]."""

    source: Checkpoint
    info: TensorInfo
    step: int | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.info.shape[::-1] if self.turned else self.info.shape


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """What was captured of a layer at one step on one rank, of which the first `tokens` are used, and its weight."""

    captured: CapturedLayer
    weight: Weight
    tokens: int

    @property
    def name(self) -> str:
        """The module."""
        return self.captured.layer

    @property
    def nbytes(self) -> int:
        """What was captured of it."""
        return sum(info.nbytes for info in (self.captured.activation, self.captured.gradient) if info)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The layers in the order of the source, each through its steps, the blocks of the whole model, and notes."""

    captures: Checkpoint
    layers: tuple[TrainedLayer, ...]
    stacks: Stacks
    notes: tuple[str, ...]


def trained_model(checkpoint: Checkpoint, captures: Checkpoint, plan: Plan) -> TrainedModel:
    """The linear layers of the plan that `captures`, which may be the same source, hold tensors of.

    A weight is that of the step where it was captured, else the one captured last before, else that of `checkpoint`.
    Tokens are cut to a multiple of the longest Hadamard transform of any recipe that they suffice for, so that figures
    of a recipe do not hang on those beside it. Raises InputError naming everything that does not fit, or where
    nothing is left.
    """
    found = captured_layers(captures.tensors, captures.captures)
    order, stored = _stored(checkpoint, plan, found)
    check_layers(captures.where, found, {name: weight.shape for name, weight in stored.items()})
    own = by_layer(found, WEIGHT)
    held = [each for each in found if each.activation or each.gradient]
    layers = [
        TrainedLayer(each, weight, _used(each.tokens))
        for each in held
        if each.layer in stored
        if (weight := _own(captures, each, own.get(each.layer, [])) or stored[each.layer])
    ]
    if not layers:
        raise InputError(_nothing(captures, held))
    places = {name: at for at, name in enumerate(order)}
    layers.sort(key=lambda each: places[each.name])
    notes = [*_left_out(held, layers), *_shortened(layers), *_other_weights(layers)]
    return TrainedModel(captures, tuple(layers), _stacks(order), tuple(notes))


def operands_of(captures: Checkpoint, layer: TrainedLayer) -> dict[str, Array]:
    """W [out, in], X [tokens, in] and dY [tokens, out] in binary64, as far as they are there; raises InputError where
    one is not finite."""
    infos = {X: layer.captured.activation, DY: layer.captured.gradient}
    weight = binary64(np.array(read(layer.weight.source, layer.weight.info)), layer.weight.info.dtype)
    operands = {W: weight.T if layer.weight.turned else weight}
    for name, info in infos.items():
        if info is not None:
            operands[name] = binary64(read(captures, info), info.dtype).reshape(-1, info.shape[-1])[: layer.tokens]
    for name, x in operands.items():
        if not np.isfinite(x).all():
            info = infos.get(name) or layer.weight.info
            raise InputError(f"{printable(info.file)}: {printable(info.name)} is not finite: capture another step.")
    return operands


def block_of(layer: str) -> tuple[str, int] | None:
    """The stack and the number of the block that a layer is in; None: it is in none."""
    match = _BLOCK.match(layer)
    return (match[1], int(match[2])) if match else None


def _stored(checkpoint: Checkpoint, plan: Plan, found: Sequence[CapturedLayer]) -> tuple[list[str], dict[str, Weight]]:
    """All linear layers of the source in its order, and the weights of those that the plan takes."""
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
    """Whether a captured weight is of a linear layer that recipes quantize: no output head, no router."""
    return len(info.shape) == 2 and role_of(f"{layer}.weight", info.shape, info.dtype) == WEIGHT


def _own(captures: Checkpoint, place: CapturedLayer, weights: Sequence[CapturedLayer]) -> Weight | None:
    """The weight that was captured of a layer there, else on another rank, else last before."""
    before = [each for each in weights if each.step is None or place.step is None or each.step <= place.step]
    best = max(before, key=lambda each: (_number(each.step), each.rank == place.rank), default=None)
    return Weight(captures, best.weight, best.step) if best and best.weight else None


def _number(step: int | None) -> int:
    return -1 if step is None else step


def _used(tokens: int) -> int:
    most = min(tokens, MOST_TOKENS)
    return most - most % next(size for size in _TRANSFORMS if size <= max(1, most))


def _stacks(layers: Iterable[str]) -> Stacks:
    found: dict[str, set[int]] = {}
    for layer in layers:
        block = block_of(layer)
        if block is not None:
            found.setdefault(block[0], set()).add(block[1])
    return {stack: tuple(sorted(numbers)) for stack, numbers in found.items()}


def _nothing(captures: Checkpoint, held: Sequence[CapturedLayer]) -> str:
    where = printable(captures.where)
    if not held:
        return f"{where}: holds no captured activations or gradients: name a file that does with --products."
    names = ", ".join(printable(each.layer) for each in held[:3])
    return (
        f"{where}: holds activations or gradients of {names}, but there is no weight of a linear layer for any of its "
        "layers: give their model as SOURCE, and the captures with --products."
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
            f"{2 * len(partial):,} products are left out, as at {partial[0].captured.place}: its activation or "
            "gradient was not captured at that step and rank."
        )


def _places(layers: Sequence[TrainedLayer]) -> str:
    return f"{len(layers):,} place{'s' if len(layers) > 1 else ''}"


def _shortened(layers: Sequence[TrainedLayer]) -> Iterator[str]:
    shorter = [one for one in layers if one.tokens < one.captured.tokens]
    if shorter:
        first = shorter[0]
        yield (
            f"The first tokens alone are used at {_places(shorter)}, {first.tokens:,} of "
            f"{first.captured.tokens:,} at {first.captured.place}: {MOST_TOKENS:,} at most, and a multiple of what "
            "Hadamard transforms take."
        )


def _other_weights(layers: Sequence[TrainedLayer]) -> Iterator[str]:
    other = [one for one in layers if one.weight.step is not None and one.weight.step != one.captured.step]
    if other:
        yield (
            f"At {_places(other)} the weight is that of another step, {other[0].weight.step} at "
            f"{other[0].captured.place}: none was captured there."
        )
