"""Products in binary64 and how far others are from them, in sums that add up over layers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from mxcli.files.tensors import Array
from mxcli.numerics.measures import cosine_between, decibels, relative

PIECE = 1 << 20
"""Elements of a product that are summed at a time, or a row."""
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
    """a [m, k] @ b^T [k, n], the same bits with any number of threads.

    A library splits sums over k among its threads where it likes to, so that each thread here has rows of its own, runs
    of them as long whatever the number of threads, and the library one thread.
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
    """The sums of a product and of its errors. They are numpy's, which hang on no number of threads."""
    pieces = [
        Energies(d.size, *(float(each.sum()) for each in (np.square(d), np.square(e), d * e, e)))
        for d, e in ((exact[piece], off[piece]) for piece in _pieces(*exact.shape))
    ]
    return reduce(add, pieces)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    height = max(1, PIECE // max(1, columns))
    return (slice(begin, begin + height) for begin in range(0, max(rows, 1), height))
