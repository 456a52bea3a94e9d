"""The products to compute: shapes as typed, from a file, or those of a model's linear layers in each pass."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxcli.errors import InputError, UsageError, printable, together
from mxcli.files.roles import WEIGHT
from mxcli.files.tensors import DTYPES, TensorInfo

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint

LONGEST = 1 << 20
FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """D[m, n] = A[m, k] @ B[n, k]^T. `passes` names the layer's product, `layer` the layer (None: typed by hand),
    `layers` the number of layers of this shape."""

    m: int
    n: int
    k: int
    passes: str = FPROP
    layer: str | None = None
    layers: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(m, n, k)."""
        return self.m, self.n, self.k

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def text(self) -> str:
        """The shape as typed."""
        return f"{self.m}x{self.n}x{self.k}"


# A layer W[n, k] on m tokens: Y = X W^T, dX = dY W, dW = dY^T X; each sums over the last dimension of both operands.
PASSES: dict[str, Callable[[int, int, int], tuple[int, int, int]]] = {
    FPROP: lambda m, n, k: (m, n, k),
    DGRAD: lambda m, n, k: (m, k, n),
    WGRAD: lambda m, n, k: (n, k, m),
}

X, W, DY = "X", "W", "dY"
OPERANDS: dict[str, tuple[tuple[str, bool], tuple[str, bool]]] = {
    FPROP: ((X, False), (W, False)),
    DGRAD: ((DY, False), (W, True)),
    WGRAD: ((DY, True), (X, True)),
}
"""The operands A and B of each pass, and whether rows and columns are exchanged."""


def typed_shapes(text: str) -> list[Shape]:
    """Return shapes written MxNxK and separated by commas; raises UsageError naming every invalid one."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    shapes, problems = [], []
    for word in words:
        sizes = _SHAPE.fullmatch(word)
        if sizes is None or not all(0 < int(size) <= LONGEST for size in sizes.groups()):
            problems.append(f"--shape '{printable(word)}': a shape is MxNxK, three numbers from 1 to {LONGEST:,}.")
        else:
            m, n, k = map(int, sizes.groups())
            shapes.append(Shape(m, n, k))
    if problems or not shapes:
        raise together(UsageError, "Shapes", problems or ["--shape: name at least one, such as 4096x4096x4096."])
    return shapes


def read_shapes(path: Path) -> list[Shape]:
    """Return shapes of a CSV file with columns m, n and k; raises InputError naming every invalid line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{printable(path)}: cannot be read as CSV: {printable(error)}.") from error
    shapes, problems = [], []
    for number, row in enumerate(rows, start=2):
        sizes = [(row.get(name) or "").strip() for name in "mnk"]
        if all(size.isdecimal() and 0 < int(size) <= LONGEST for size in sizes):
            m, n, k = map(int, sizes)
            shapes.append(Shape(m, n, k))
        else:
            problems.append(f"{printable(path)}:{number}: {printable(','.join(sizes))}: needs m, n and k from 1 on.")
    if problems or not shapes:
        raise together(InputError, printable(path), problems or [f"{printable(path)}: holds no shapes."])
    return shapes


def linear_layers(checkpoint: Checkpoint) -> list[TensorInfo]:
    """Return the weights [n, k] of linear layers, one for each shape, in the order of the source."""
    found: dict[tuple[int, ...], TensorInfo] = {}
    for info in checkpoint.tensors.values():
        is_float = DTYPES[info.dtype].is_float and DTYPES[info.dtype].bits >= 16
        if info.role == WEIGHT and len(info.shape) == 2 and is_float and info.elements:
            found.setdefault(info.shape, info)
    return list(found.values())


def layer_shapes(checkpoint: Checkpoint, tokens: Sequence[int], passes: Iterable[str]) -> list[Shape]:
    """Return the products of every linear layer of another shape, for every number of tokens, in every pass.

    Raises UsageError for an unknown pass, and InputError for a source without linear layers.
    """
    requested = list(passes)
    unknown = [name for name in requested if name not in PASSES]
    if not requested:
        raise UsageError(f"--passes names none: it takes {', '.join(PASSES)}.")
    if unknown:
        raise UsageError(f"unknown pass {', '.join(map(printable, unknown))}: --passes takes {', '.join(PASSES)}.")
    layers = linear_layers(checkpoint)
    if not layers and checkpoint.dialect is not None:
        raise InputError(
            f"{printable(checkpoint.where)}: quantized already ({checkpoint.dialect}); take its original, or "
            "`mxcli dequantize` it."
        )
    if not layers:
        raise InputError(f"{printable(checkpoint.where)}: holds no weights of linear layers.")
    counts = [sum(info.shape == one.shape and info.role == WEIGHT for info in checkpoint.tensors.values())
              for one in layers]  # fmt: skip
    return [
        Shape(*PASSES[name](m, *info.shape), name, info.name, count)
        for info, count in zip(layers, counts, strict=True)
        for m in tokens
        for name in requested
    ]
