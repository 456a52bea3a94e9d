"""Random choices, which depend on seeds and tensor names only, never on order or threads: the rows of a sample, and the
stream of a tensor's stochastic rounding."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from mxcli.errors import UsageError, printable
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.samples import GROUPS

SEEDS = 1 << 32
"""Number of seeds of stochastic rounding, counted from 0."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """About which `fraction` of each tensor is read, and the `seed` that chooses the rows.

    Rows are read in runs of at least `run_bytes`, so that reading stays efficient. A tensor of less than `whole_bytes`
    is read whole, and one whose runs are too few to spare any.
    """

    fraction: float
    seed: int = 0
    run_bytes: int = 1 << 16
    whole_bytes: int = 1 << 21


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor as they are stored: `matrices` of `height` rows of `row_bytes` each. Blocks are whole in
    `unit` rows that begin at a multiple of it (None: in no fewer than all)."""

    matrices: int
    height: int
    row_bytes: int
    unit: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """Stored rows that follow one another, counted through all matrices."""

    first: int
    rows: int


Draw = tuple[tuple[Run, ...], ...]
"""The runs of a sample, by the GROUPS that are measured separately."""


def stated_sampling(fraction: str | None, seed: int | None) -> Sampling | None:
    """Return the requested sampling, if any; raises UsageError unless `fraction` is a number in (0, 1]."""
    if fraction is None:
        return None
    try:
        value = float(fraction)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(
            f"--sample '{printable(fraction)}' must be a fraction of a tensor: above 0, at most 1, such as 0.01."
        )
    return Sampling(value, seed or 0)


def unit_rows(rows: Iterable[BlockFormat], *, turned: bool) -> int | None:
    """Return the fewest stored rows in which the blocks of all formats are whole; None: blocks run through all of them.

    `turned` says that the last two dimensions are exchanged before quantizing. A block that is the whole tensor is
    never whole in a sample, which stands for it.
    """
    spans = [row.block[1 if turned else 0] for row in rows if row.block != (None, None)]
    known = [span for span in spans if span is not None]
    return math.lcm(*known) if len(known) == len(spans) else None


def draw(sampling: Sampling, name: str, rows: Rows) -> Draw | None:
    """Return the runs of the tensor called `name`; None: it is read whole.

    The runs of the tensor, in their order and beginning at a random one, are cut into equal strata. Each stratum gives
    one run to every group, so that every group is spread over the tensor, and every run is as likely as any other.
    """
    total = rows.matrices * rows.height
    if sampling.fraction >= 1 or rows.unit is None or total * rows.row_bytes < sampling.whole_bytes:
        return None
    # Units that fill the matrices may be counted through them; others start again in each.
    height = total if rows.height % rows.unit == 0 else rows.height
    unit_bytes = rows.unit * rows.row_bytes
    length = min(height, rows.unit * -(-sampling.run_bytes // unit_bytes))
    per_matrix = -(-height // length)
    runs = per_matrix * (total // height)
    strata = max(1, round(sampling.fraction * runs / GROUPS))
    if strata * GROUPS >= runs:
        return None
    digest = hashlib.sha256(f"{sampling.seed} ".encode() + name.encode("utf-8", "surrogatepass")).digest()
    # Of the generator only `random` is used: what it gives for a seed is the same under every version of Python.
    chance = random.Random(int.from_bytes(digest)).random
    start = int(chance() * runs)
    groups: list[list[Run]] = [[] for _ in range(GROUPS)]
    for stratum in range(strata):
        first, last = stratum * runs // strata, (stratum + 1) * runs // strata
        taken: set[int] = set()
        for group in groups:
            while (at := first + int(chance() * (last - first))) in taken:
                pass
            taken.add(at)
            matrix, place = divmod((start + at) % runs, per_matrix)
            group.append(Run(matrix * height + place * length, min(length, height - place * length)))
    return tuple(tuple(sorted(group, key=lambda run: run.first)) for group in groups)


def check_seed(seed: int | None, *, is_drawn: bool) -> None:
    """Raise UsageError for a seed where nothing is random."""
    if seed is not None and not is_drawn:
        raise UsageError(
            f"--seed {seed} has no effect: nothing is random. Add --rounding stochastic or --sample FRACTION."
        )


def check_draws(seed: int, draws: int = 1) -> None:
    """Raise UsageError unless seed, seed + 1, … are seeds, as many as there are draws."""
    if isinstance(seed, int) and 0 <= seed <= SEEDS - draws:
        return
    drawn = f" with --draws {draws}: the last draw has seed {seed + draws - 1}, and" if draws > 1 else ":"
    raise UsageError(f"--seed {seed}{drawn} a seed is an integer from 0 to {SEEDS - 1}.")


def stream_of(name: str) -> int:
    """Return the random stream (32 bits) of a tensor's name: tensors draw independently under one seed."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4], "little")
