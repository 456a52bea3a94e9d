"""How much memory the products of a layer need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxcli.flows.gemm_shapes import PASSES
from mxcli.flows.memory import Need, need_of
from mxcli.flows.products.energies import PIECE

TORCH_BYTES = 1 << 28
"""Memory of torch, which multiplies, about."""
_BINARY64 = 8
_QUANTIZING = 10
"""Bytes an element takes while it is quantized: binary32 before and after, its code and its share of a scale."""
_TEMPORARIES = 3
"""Pieces of a product that there are while it is summed."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A layer by its name, the tokens that are used of it, its features, and the bytes of its largest stored tensor."""

    name: str
    tokens: int
    outputs: int
    inputs: int
    stored_bytes: int


def memory_of_products(layers: Iterable[Extent], draws: int = 1) -> Need:
    """What the products of layers need that are worked on one after another: operands, one product's sides plain and
    quantized, and D, its error and, of several draws, the sum of their errors."""
    return need_of((layer.name, _working_bytes(layer, draws)) for layer in layers)


def _working_bytes(layer: Extent, draws: int) -> int:
    t, o, i = layer.tokens, layer.outputs, layer.inputs
    operands = _BINARY64 * (o * i + t * i + t * o)
    return TORCH_BYTES + layer.stored_bytes + operands + max(_pass_bytes(*of(t, o, i), draws) for of in PASSES.values())


def _pass_bytes(m: int, n: int, k: int, draws: int) -> int:
    a, b, d = m * k, n * k, m * n
    sides = 2 * _BINARY64 * (a + b) + _QUANTIZING * max(a, b)
    return sides + _BINARY64 * (d * (2 if draws == 1 else 3) + _TEMPORARIES * min(d, max(PIECE, n)))
