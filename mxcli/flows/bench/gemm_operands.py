"""Operands of timed products: random BF16 values of a chosen distribution, or a model's own weights and captures.

Zeros and constants draw less power and run faster than anything a model holds, so they are included only to show
that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mxcli.backends import CPU, open_resident
from mxcli.backends.backend import Backend
from mxcli.backends.cpu import Cpu
from mxcli.backends.reencode import reencode
from mxcli.errors import EnvironmentFailure, InputError, UsageError, did_you_mean, import_extra, printable, together
from mxcli.files.captured_layers import CapturedLayer, by_layer, captured_layers, steps_of
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.packing import swizzle
from mxcli.files.roles import ACTIVATION, GRADIENT
from mxcli.files.tensors import TensorInfo
from mxcli.flows.doctor import memory_bytes
from mxcli.flows.products.output_error import nonfinite_operand
from mxcli.flows.products.shapes import DY, OPERANDS, WGRAD, Shape, W, X
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.scheme import Scheme

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix [rows, k] of codes with block scales along k, on the device; `inexact` elements were rounded again when
    it was re-encoded."""

    quantized: Quantized
    inexact: int = 0

    @property
    def scheme(self) -> Scheme:
        """The scheme it was quantized under."""
        return self.quantized.scheme


@dataclass(frozen=True, slots=True)
class Engine:
    """A device, the backend that quantizes on it, and its compute capability (None: the CPU)."""

    device: str
    backend: Backend
    capability: tuple[int, int] | None = None

    @property
    def on_gpu(self) -> bool:
        """True if it is a GPU."""
        return self.capability is not None

    def quantize(self, x: Tensor, scheme: Scheme, *, swizzled: bool = False) -> Operand:
        """Return a BF16 matrix quantized; `swizzled` scales are flat, in the 128x4 order of block-scaled products."""
        import torch

        bits = x.contiguous().view(torch.uint16)
        if self.on_gpu:
            more = {"swizzled": True} if swizzled else {}
            return Operand(cast("Any", self.backend).quantize(bits, "BF16", scheme, stats=False, **more))
        return Operand(self.backend.quantize(bits.numpy(), "BF16", scheme, stats=False))

    def reencode(self, operand: Operand, scheme: Scheme) -> Operand:
        """Return the same values under another scheme, as far as it can hold them."""
        found = reencode(operand.quantized, scheme, self.backend)
        return Operand(found.quantized, found.inexact)

    def values(self, operand: Operand) -> Tensor:
        """Return the dequantized values, in binary32."""
        return self.tensor(self.backend.dequantize(operand.quantized))

    def codes(self, operand: Operand) -> Tensor:
        """Return the codes as the torch type that they are: float8, or pairs of 4-bit codes."""
        import torch

        types = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
        return self.tensor(operand.quantized.packed).view(types[operand.scheme.format.element.name])

    def scales(self, operand: Operand, *, swizzled: bool = False) -> Tensor:
        """Return the scales as the torch type that they are; in the 128x4 order if they were quantized so, or if that
        is requested on a CPU."""
        import torch

        scales = operand.quantized.scales
        if swizzled and not self.on_gpu:
            scales = swizzle(scales)
        types = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
        name = operand.scheme.format.scale.name
        found = self.tensor(scales)
        return found.view(types[name]) if name in types else found

    def tensor(self, array: Any) -> Tensor:
        """Return a torch tensor of an array of the backend, without a copy."""
        import torch

        return torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def free_bytes(self) -> int:
        """Return the available memory: what is free on a GPU, what the machine has on a CPU."""
        if self.on_gpu:
            import torch

            return int(torch.cuda.mem_get_info(self.device)[0])
        return memory_bytes() or 1 << 62

    def release(self) -> None:
        """Free memory that nothing refers to any more."""
        if self.on_gpu:
            import torch

            torch.cuda.empty_cache()


def open_engine(device: str) -> Engine:
    """Return the engine of `cpu` or `cuda:N`; raises EnvironmentFailure where torch or the kernels cannot use the
    GPU."""
    torch = import_extra("torch", "bench gemm")
    if device == CPU:
        return Engine(CPU, Cpu())
    if not torch.cuda.is_available():
        raise EnvironmentFailure(
            f"--device {device}: torch {torch.__version__} cannot use it (built without CUDA, or no driver); install "
            "torch for CUDA."
        )
    return Engine(device, open_resident(device), torch.cuda.get_device_capability(device))


@dataclass(frozen=True, slots=True)
class Distribution:
    """A row of values to multiply: `fill(torch shape, generator)` gives binary32 values; `is_constant`: timings look
    too fast."""

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
    """Return the distribution called `name`; raises UsageError for an unknown name."""
    row = DISTRIBUTIONS.get(name)
    if row is None:
        known = ", ".join(DISTRIBUTIONS)
        raise UsageError(f"unknown data '{printable(name)}': known are {known}.{did_you_mean(name, DISTRIBUTIONS)}")
    return row


@dataclass(frozen=True)
class Values:
    """Values of operands: from a distribution and a seed, or the weights of a model and the captures of its layers,
    where
    shapes are its layers'. Of several steps and ranks the first that has both X and dY of a layer is taken, or
    else the first with the requested operand."""

    distribution: Distribution
    seed: int = 0
    model: Checkpoint | None = None
    captures: Checkpoint | None = None

    def operands(self, shape: Shape, engine: Engine) -> tuple[Tensor, Tensor]:
        """Return A[m, k] and B[n, k] in BF16 on the device: the same for the same shape, independent of what else is
        timed."""
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
        """Raise InputError naming every captured tensor that is not its layer's, or where none is of any layer."""
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
                        f"{printable(self.captures.where)}: {printable(stored[1].name)} {list(stored[1].shape)} does "
                        f"not fit as {name} of {printable(layer)}, which has {features} features there."
                    )
        where = printable(self.captures.where)
        if not found:
            problems.append(f"{where}: holds no activations or gradients of the layers; leave --captures out.")
        if problems:
            raise together(InputError, where, problems)

    def own_data(self, shape: Shape) -> tuple[str, ...]:
        """Return which of X, W and dY of a product are the model's own."""
        names = dict.fromkeys(name for name, _ in OPERANDS[shape.passes])
        return tuple(name for name in names if self._stored(name, shape) is not None)

    @property
    def steps(self) -> tuple[int, ...]:
        """The recorded training steps of captures."""
        return steps_of(each for places in self._captured.values() for each in places)

    @cached_property
    def _captured(self) -> Mapping[str, Sequence[CapturedLayer]]:
        """The captures of each layer, gathered once: there may be thousands of tensors, and every product needs
        them."""
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
        raise InputError(f"{printable(info.name)}: {info.dtype} is not a float type that a product takes.")
    array = torch.from_numpy(np.array(read(source, info)))
    found = array.view(torch.bfloat16) if info.dtype == "BF16" else array.to(torch.bfloat16)
    if not torch.isfinite(found).all():
        raise InputError(nonfinite_operand(source.where, info))
    return found.reshape(-1, found.shape[-1])
