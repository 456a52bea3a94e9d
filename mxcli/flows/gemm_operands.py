"""Operands of timed products: random BF16 values of a chosen distribution, or a model's own weights and captures.

Zeros and constants draw less power and run faster than anything a model holds, so they are there to show just that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mxcli.errors import InputError, UsageError, did_you_mean, printable, together
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers, steps_of
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.roles import ACTIVATION, GRADIENT
from mxcli.files.tensors import TensorInfo
from mxcli.flows.gemm_engine import Engine
from mxcli.flows.gemm_shapes import DY, OPERANDS, WGRAD, Shape, W, X

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Distribution:
    """A row of values to multiply: `fill(torch shape, generator)` gives binary32 values; `is_constant` ones time too
    well."""

    name: str
    meaning: str
    fill: Callable[[tuple[int, int], Generator], Tensor]
    is_constant: bool = False


def _normal(shape: tuple[int, int], generator: Generator) -> Tensor:
    import torch

    return torch.randn(shape, generator=generator, device=generator.device)


def _heavy(shape: tuple[int, int], generator: Generator) -> Tensor:
    return _normal(shape, generator) * (2 * _normal(shape, generator)).exp()


def _uniform(shape: tuple[int, int], generator: Generator) -> Tensor:
    import torch

    return 2 * torch.rand(shape, generator=generator, device=generator.device) - 1


def _constant(value: float) -> Callable[[tuple[int, int], Generator], Tensor]:
    def fill(shape: tuple[int, int], generator: Generator) -> Tensor:
        import torch

        return torch.full(shape, value, device=generator.device)

    return fill


DISTRIBUTIONS: Mapping[str, Distribution] = {
    row.name: row
    for row in (
        Distribution("normal", "normal random values", _normal),
        Distribution("heavy", "normal values times exp(2 z) of others: heavy tails", _heavy),
        Distribution("uniform", "uniform from -1 to 1", _uniform),
        Distribution("ones", "ones everywhere, which no model holds", _constant(1.0), is_constant=True),
        Distribution("zeros", "zeros everywhere, which no model holds", _constant(0.0), is_constant=True),
    )
}


def find_distribution(name: str) -> Distribution:
    """The distribution called `name`; raises UsageError for an unknown name."""
    row = DISTRIBUTIONS.get(name)
    if row is None:
        known = ", ".join(DISTRIBUTIONS)
        raise UsageError(f"unknown data '{printable(name)}': known are {known}.{did_you_mean(name, DISTRIBUTIONS)}")
    return row


@dataclass(frozen=True)
class Values:
    """Where operands come from: a distribution and a seed; weights of a model and what was captured of its layers,
    where shapes are its layers'. Of several steps and ranks the first that has both X and dY of a layer is taken, or
    else the first that has what is asked for."""

    distribution: Distribution
    seed: int = 0
    model: Checkpoint | None = None
    captures: Checkpoint | None = None

    def operands(self, shape: Shape, engine: Engine) -> tuple[Tensor, Tensor]:
        """A[m, k] and B[n, k] in BF16 on the device: the same for the same shape, whatever else is timed."""
        import torch

        made = []
        for letter, rows, source in zip("ab", (shape.m, shape.n), OPERANDS[shape.passes], strict=True):
            own = self._own(source, shape)
            if own is None:
                generator = torch.Generator(engine.device)
                generator.manual_seed(random.Random(f"{self.seed} {letter} {shape.text}").getrandbits(63))
                own = self.distribution.fill((rows, shape.k), generator).to(torch.bfloat16)
            made.append(own.contiguous().to(engine.device))
        return made[0], made[1]

    def check(self, shapes: Sequence[Shape]) -> None:
        """Raises InputError naming every captured tensor that is not its layer's, or where none is of any layer."""
        if self.model is None or self.captures is None:
            return
        problems, found = [], False
        for layer in dict.fromkeys(shape.layer for shape in shapes if shape.layer):
            rows, columns = self.model.tensors[layer].shape
            for name, features in ((X, columns), (DY, rows)):
                stored = self._stored(name, Shape(1, 1, 1, layer=layer))
                found = found or stored is not None
                if stored is not None and (not stored[1].shape or stored[1].shape[-1] != features):
                    problems.append(
                        f"{printable(self.captures.where)}: {printable(stored[1].name)} {list(stored[1].shape)} is no "
                        f"{name} of {printable(layer)}, which has {features} features there."
                    )
        where = printable(self.captures.where)
        if not found:
            problems.append(f"{where}: holds no activations or gradients of the layers; leave --captures out.")
        if problems:
            raise together(InputError, where, problems)

    def own_data(self, shape: Shape) -> tuple[str, ...]:
        """Which of X, W and dY of a product are the model's own."""
        names = dict.fromkeys(name for name, _ in OPERANDS[shape.passes])
        return tuple(name for name in names if self._stored(name, shape) is not None)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that tensors were captured at, where they are told."""
        return steps_of(each for places in self._captured.values() for each in places)

    @cached_property
    def _captured(self) -> Mapping[str, Sequence[CapturedLayer]]:
        """What was captured of each layer, gathered once: there may be thousands of tensors, and every product asks."""
        return by_layer(captured_layers(self.captures.tensors, self.captures.captures)) if self.captures else {}

    def _own(self, source: tuple[str, bool], shape: Shape) -> Tensor | None:
        name, turned = source
        stored = self._stored(name, shape)
        if stored is None:
            return None
        x = _bf16(*stored)
        if name != W:  # as many tokens as there are to be, over and over
            tokens = shape.k if shape.passes == WGRAD else shape.m
            x = x.repeat(-(-tokens // x.shape[0]), 1)[:tokens]
        return x.t() if turned else x

    def _stored(self, name: str, shape: Shape) -> tuple[Checkpoint, TensorInfo] | None:
        if self.model is None or shape.layer is None:
            return None
        if name == W:
            return self.model, self.model.tensors[shape.layer]
        if self.captures is None:
            return None
        places = self._captured.get(shape.layer.removesuffix(".weight"), ())
        held = [each for each in places if each.of(_ROLES[name])]
        best = next((each for each in held if each.activation and each.gradient), held[0] if held else None)
        info = best.of(_ROLES[name]) if best else None
        return (self.captures, info) if info else None


_ROLES = {X: ACTIVATION, DY: GRADIENT}


def _bf16(source: Checkpoint, info: TensorInfo) -> Tensor:
    import torch

    if info.dtype not in ("BF16", "F16", "F32", "F64"):
        raise InputError(f"{printable(info.name)}: {info.dtype} is no float that a product takes.")
    array = torch.from_numpy(np.array(read(source, info)))
    found = array.view(torch.bfloat16) if info.dtype == "BF16" else array.to(torch.bfloat16)
    if not torch.isfinite(found).all():
        raise InputError(f"{printable(source.where)}: {printable(info.name)} is not finite, so no product of it is.")
    return found.reshape(-1, found.shape[-1])
