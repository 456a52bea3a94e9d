"""The operands of a layer's products: its weight, and the tokens used of its captured input and gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import InputError, printable
from mxcli.files.captured_layers import CapturedLayer
from mxcli.files.checkpoint import Checkpoint, read, read_rows
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo
from mxcli.flows.products.output_error import binary64, nonfinite_operand
from mxcli.flows.products.shapes import DY, W, X
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.metric_formulas import cosine_between, decibels, relative
from mxcli.numerics.streams import stream_of
from mxcli.numerics.training import TRAINING_RECIPES

MOST_TOKENS = 1024
"""The most captured tokens used of a layer, the first ones: blocks and transforms of wgrad run along them."""
_TRANSFORMS = frozenset((1, *(recipe.transform for recipe in TRAINING_RECIPES.values())))


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight, the source that holds it, and its training step (None: unknown); `turned`: it is stored as [in,
    out]."""

    source: Checkpoint
    info: TensorInfo
    step: int | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.info.shape[::-1] if self.turned else self.info.shape


def used_tokens(tokens: int, transform: int = 1) -> int:
    """Return the number of captured tokens used: at most MOST_TOKENS, and a multiple of the longest Hadamard transform
    that they suffice for, of any training recipe or `transform`. So figures do not depend on the other recipes or the
    kind of report."""
    most = min(tokens, MOST_TOKENS)
    return most - most % max(size for size in _TRANSFORMS | {transform} if size <= max(1, most))


def shortened(used: Sequence[tuple[CapturedLayer, int]]) -> Iterator[str]:
    """Yield a sentence on the captured layers of which not all tokens are used."""
    shorter = [(place, tokens) for place, tokens in used if tokens < place.tokens]
    if shorter:
        place, tokens = shorter[0]
        yield (
            f"The first tokens alone are used at {places_text(len(shorter))}, {tokens:,} of {place.tokens:,} at "
            f"{place.label}: {MOST_TOKENS:,} at most, and a multiple of what Hadamard transforms take."
        )


def places_text(count: int) -> str:
    """Return a count of places (layer, step, rank) in words."""
    return f"{count:,} place{'' if count == 1 else 's'}"


def weight_of(weight: Weight) -> Array:
    """Return W [out, in] in binary64; raises InputError where it is not finite."""
    stored = read(weight.source, weight.info)
    values = _finite(binary64(stored, weight.info.dtype), weight.info)
    return values.T if weight.turned else values


def held_of(place: CapturedLayer) -> dict[str, TensorInfo]:
    """Return the captured operands X and dY, by letter."""
    infos = {X: place.activation, DY: place.gradient}
    return {letter: info for letter, info in infos.items() if info is not None}


def tokens_of(
    captures: Checkpoint, place: CapturedLayer, tokens: int, letters: Collection[str] = (X, DY)
) -> dict[str, Array]:
    """Return X [tokens, in] and dY [tokens, out] in binary64, those that are requested and captured: their first
    tokens. Raises InputError where one is not finite."""
    found = {}
    for letter, info in held_of(place).items():
        if letter in letters:
            found[letter] = _finite(binary64(_first_rows(captures, info, tokens), info.dtype), info)
    return found


def _first_rows(captures: Checkpoint, info: TensorInfo, rows: int) -> Array:
    """Read the first rows of a tensor; nothing else of it if its bytes are in place."""
    if info.offset == IN_MEMORY:
        return read(captures, info).reshape(-1, info.shape[-1])[:rows]
    return read_rows(captures, info, [0], rows).reshape(-1, info.shape[-1])


def amaxes_of(captures: Checkpoint, place: CapturedLayer, weight: Weight, backend: Backend) -> dict[str, float]:
    """Return the largest magnitude of each whole operand, by letter, over all tokens, for the delayed
    scales of the next step. Raises InputError where one is not finite."""
    found = {}
    for letter, info in {W: weight.info, **held_of(place)}.items():
        stored = read(weight.source if letter == W else captures, info)
        amax = backend.amax(stored, info.dtype)
        if amax.nonfinite:
            raise InputError(nonfinite_operand(info.file, info))
        found[letter] = amax.value
    return found


def side_of(operand: Array, turned: bool) -> Array:
    """Return the operand as [rows, k], k being what its product sums over."""
    return np.ascontiguousarray(operand.T if turned else operand)


def stream(place: CapturedLayer, letter: str, passes: str) -> int:
    """Return the random stream of an operand: another one in each of a tensor's two products, at each step and rank."""
    return stream_of(f"{place.layer}.{letter}.{passes}.{place.step}.{place.rank}")


def scaled_back(quantized: Quantized, backend: Backend, what: str) -> Array:
    """Return dequantized values in binary64, with a transform undone; raises InputError naming `what` for values beyond
    binary32, which a code above the largest value can give."""
    values: Array = backend.dequantize(quantized).astype(np.float64)
    if not np.isfinite(values).all():
        raise InputError(
            f"{printable(what)}: under {quantized.scheme.format.name} the codes of its largest values stand for more "
            "than binary32 holds (3.4e38): scale them down, or leave the layer out (--exclude)."
        )
    return values


def _finite(values: Array, info: TensorInfo) -> Array:
    """Return the values if all are finite in binary32, in which they are quantized."""
    if not np.isfinite(values).all():
        raise InputError(nonfinite_operand(info.file, info))
    largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(largest)):
            raise InputError(
                f"{printable(info.file)}: {printable(info.name)} reaches {largest:.3g}, and operands are quantized as "
                "binary32, which ends at 3.4e38: scale it down, or leave its layer out (--exclude)."
            )
    return values


PIECE = 1 << 20
"""Elements of a product summed at a time, or a row."""
_RUN = 128
"""Rows of a product that a thread computes at a time."""


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


def product(a: Array, b: Array) -> Array:
    """Return a [m, k] @ b^T [k, n], the same bits with any number of threads.

    A library may split sums over k among its threads, so each thread here has runs of rows of its own, of the same
    length for any number of threads, and the library uses one thread.
    """
    import torch

    left, right, d = torch.from_numpy(a), torch.from_numpy(b).T, np.empty((len(a), len(b)))
    whole, threads = torch.from_numpy(d), torch.get_num_threads()

    def multiply(begin: int) -> None:
        run = slice(begin, begin + _RUN)
        torch.mm(left[run], right, out=whole[run])

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(multiply, range(0, len(a), _RUN)))
    finally:
        torch.set_num_threads(threads)
    return d


def energies(exact: Array, off: Array) -> Energies:
    """Return the sums of a product and of its errors. numpy computes them, independent of the number of threads."""
    pieces = [
        Energies(d.size, *(float(each.sum()) for each in (np.square(d), np.square(e), d * e, e)))
        for d, e in ((exact[piece], off[piece]) for piece in _pieces(*exact.shape))
    ]
    return reduce(add, pieces)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    height = max(1, PIECE // max(1, columns))
    return (slice(begin, begin + height) for begin in range(0, max(rows, 1), height))
