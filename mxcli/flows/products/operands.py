"""The operands of a layer's products: its weight, and the tokens that are used of its captured input and gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mxcli.backends import Backend
from mxcli.errors import InputError, printable
from mxcli.files.captured_layers import CapturedLayer
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.reading import release_pages
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.gemm_shapes import DY, W, X
from mxcli.flows.output_error import binary64
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.draws import stream_of
from mxcli.numerics.training import TRAINING_RECIPES

MOST_TOKENS = 1024
"""Captured tokens that are used of a layer, the first ones: blocks and transforms of wgrad run along them."""
_TRANSFORMS = frozenset((1, *(recipe.transform for recipe in TRAINING_RECIPES.values())))


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


def used_tokens(tokens: int, transform: int = 1) -> int:
    """How many of the captured tokens are used: MOST_TOKENS at most, and a multiple of the longest Hadamard transform
    that they suffice for, be it of any recipe of training or `transform`. So figures hang neither on the recipes beside
    them nor on which report they stand in."""
    most = min(tokens, MOST_TOKENS)
    return most - most % max(size for size in _TRANSFORMS | {transform} if size <= max(1, most))


def shortened(used: Sequence[tuple[CapturedLayer, int]]) -> Iterator[str]:
    """A sentence about the places of which not all tokens are used."""
    shorter = [(place, tokens) for place, tokens in used if tokens < place.tokens]
    if shorter:
        place, tokens = shorter[0]
        yield (
            f"The first tokens alone are used at {places_text(len(shorter))}, {tokens:,} of {place.tokens:,} at "
            f"{place.place}: {MOST_TOKENS:,} at most, and a multiple of what Hadamard transforms take."
        )


def places_text(count: int) -> str:
    """So many layers, steps and ranks."""
    return f"{count:,} place{'' if count == 1 else 's'}"


def weight_of(weight: Weight) -> Array:
    """W [out, in] in binary64; raises InputError where it is not finite."""
    stored = read(weight.source, weight.info)
    values = _finite(binary64(stored, weight.info.dtype), weight.info)
    release_pages(stored)
    return values.T if weight.turned else values


def held_of(place: CapturedLayer) -> dict[str, TensorInfo]:
    """What was captured of the operands of tokens, by letter."""
    infos = {X: place.activation, DY: place.gradient}
    return {letter: info for letter, info in infos.items() if info is not None}


def tokens_of(
    captures: Checkpoint, place: CapturedLayer, tokens: int, letters: Collection[str] = (X, DY)
) -> dict[str, Array]:
    """X [tokens, in] and dY [tokens, out] in binary64, as far as they are asked for and were captured: their first
    tokens. Raises InputError where one is not finite."""
    found = {}
    for letter, info in held_of(place).items():
        if letter in letters:
            stored = read(captures, info)
            found[letter] = _finite(binary64(stored.reshape(-1, info.shape[-1])[:tokens], info.dtype), info)
            release_pages(stored)
    return found


def amaxes_of(captures: Checkpoint, place: CapturedLayer, weight: Weight, backend: Backend) -> dict[str, float]:
    """The largest magnitude of each whole operand, by letter, of all tokens there are: what the next step's delayed
    scales know of this one. Raises InputError where one is not finite."""
    found = {}
    for letter, info in {W: weight.info, **held_of(place)}.items():
        stored = read(weight.source if letter == W else captures, info)
        amax = backend.amax(stored, info.dtype)
        release_pages(stored)
        if amax.nonfinite:
            raise InputError(_not_finite(info))
        found[letter] = amax.value
    return found


def side_of(operand: Array, turned: bool) -> Array:
    """The operand as [rows, k], k being what its product sums over."""
    return np.ascontiguousarray(operand.T if turned else operand)


def stream(place: CapturedLayer, letter: str, passes: str) -> int:
    """The random stream of an operand: a tensor draws anew in each of its two products, at each step and rank."""
    return stream_of(f"{place.layer}.{letter}.{passes}.{place.step}.{place.rank}")


def scaled_back(quantized: Quantized, backend: Backend, what: str) -> Array:
    """What codes stand for, in binary64, a transform undone; raises InputError naming `what` where that is beyond
    binary32: the code above its largest values may be."""
    values: Array = backend.dequantize(quantized).astype(np.float64)
    if not np.isfinite(values).all():
        raise InputError(
            f"{printable(what)}: under {quantized.recipe.format.name} the codes of its largest values stand for more "
            "than binary32 holds (3.4e38): scale them down, or leave the layer out (--exclude)."
        )
    return values


def _finite(values: Array, info: TensorInfo) -> Array:
    """The values, if binary32 has them all, in which they are quantized."""
    if not np.isfinite(values).all():
        raise InputError(_not_finite(info))
    largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(largest)):
            raise InputError(
                f"{printable(info.file)}: {printable(info.name)} reaches {largest:.3g}, and operands are quantized as "
                "binary32, which ends at 3.4e38: scale it down, or leave its layer out (--exclude)."
            )
    return values


def _not_finite(info: TensorInfo) -> str:
    return (
        f"{printable(info.file)}: {printable(info.name)} is not finite, so no product of it is: capture another step, "
        "or leave its layer out (--exclude)."
    )
