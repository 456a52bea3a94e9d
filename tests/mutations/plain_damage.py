"""Damage to plain tensors: norms, embeddings, heads, biases, scales of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mutations.byte_damage import MEBIBYTE, PAGE, PageChange, change_page, elsewhere, flip, noise, ones, zeros
from mutations.kinds import INPUT_SCALES, Damage, Harm, Random, plain_cells, tensor
from mutations.outputs import Output

Numbers = np.ndarray[Any, Any]
Change = Callable[[Numbers, Random], Numbers]
MATRICES, _NORMS = ("embedding", "lm_head"), ("norm",)


def _flip_plain(*roles: str) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        cells = plain_cells(output, random, *roles)
        if cells is None:
            return None
        width = {"F32": 4, "BF16": 2}.get(cells.dtype, 1)
        # A bit of the upper half: sign, exponent, or a leading bit of the mantissa.
        at = (
            int(random.integers(cells.nbytes // width)) * width
            + width
            - 1
            - int(random.integers(2 if width > 2 else 1))
        )
        bit = int(random.integers(8))
        grows = flip(output, cells, at, bit)
        far = grows and at % width == width - 1 and 2 <= bit <= 6
        return tensor(f"bit {bit} of byte {at:,}", cells.name, seen=far)

    return apply


def _page_of_plain(change: PageChange, size: int, *roles: str) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        cells = plain_cells(output, random, *roles, least=size)
        where = None if cells is None else change_page(output, cells, random, change, size)
        return None if where is None or cells is None else tensor(where, cells.name)

    return apply


# Plain tensors.


def _plain_numbers(
    what: str, change: Change, *roles: str, values: bool | None = None
) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        cells = plain_cells(output, random, *roles)
        if cells is None or cells.dtype not in ("F32", "BF16"):
            return None
        before = output.numbers(cells)
        output.set_numbers(cells, change(before.copy(), random))
        if np.array_equal(output.numbers(cells), before, equal_nan=True):
            return None
        return tensor(what, cells.name, values=values)

    return apply


def _filled(value: float, share: float = 1.0) -> Change:
    def change(numbers: Numbers, random: Random) -> Numbers:
        flat = numbers.reshape(-1)
        flat[random.choice(flat.size, max(1, int(share * flat.size)), replace=False)] = value
        return flat.reshape(numbers.shape)

    return change


def _scaled(factor: float) -> Change:
    return lambda numbers, random: numbers * np.float32(factor)


def _row_doubled(numbers: Numbers, random: Random) -> Numbers:
    numbers[int(random.integers(len(numbers)))] *= 2
    return numbers


def _rows_shuffled(numbers: Numbers, random: Random) -> Numbers:
    return random.permutation(numbers)


def _two_norms(output: Output, random: Random) -> Harm | None:
    norms = [cells for role, cells in output.plain.values() if role == "norm"]
    first, second = (norms[int(at)] for at in random.choice(len(norms), 2, replace=False))
    one, other = output.get(first), output.get(second)
    output.put(first, other)
    output.put(second, one)
    return tensor("exchanged", first.name, second.name)


def _input_scale(what: str, change: Callable[[float], float], seen: bool) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        found = [cells for name, (_, cells) in output.plain.items() if name.endswith(INPUT_SCALES)]
        found = [cells for cells in found if np.prod(cells.shape) == 1]
        if not found:
            return None
        cells = found[int(random.integers(len(found)))]
        output.set_numbers(cells, np.full_like(output.numbers(cells), change(float(output.numbers(cells).reshape(())))))
        return Harm(((cells.name, cells.name.rpartition(".")[0]),), what, seen=seen)

    return apply


PLAIN_DAMAGE: tuple[Damage, ...] = (
    Damage("bit of a norm", _flip_plain("norm"), values=True, seen=False),
    Damage("bit of an embedding", _flip_plain("embedding"), values=True, seen=False),
    Damage("bit of the head", _flip_plain("lm_head"), values=True, seen=False),
    Damage("bit of a bias or router", _flip_plain("bias", "router"), values=True, seen=False),
    Damage("plain: page of zeros", _page_of_plain(zeros, PAGE, *MATRICES), values=True, seen=False),
    Damage("plain: page of ones", _page_of_plain(ones, PAGE, *MATRICES), values=True, seen=True),
    Damage("plain: page of noise", _page_of_plain(noise, PAGE, *MATRICES), values=True, seen=True),
    Damage("plain: page from elsewhere", _page_of_plain(elsewhere, PAGE, *MATRICES), values=True, seen=False),
    Damage("embedding: 1 MiB of zeros", _page_of_plain(zeros, MEBIBYTE, "embedding"), values=True, seen=True),
    Damage("norm NaN", _plain_numbers("NaN", _filled(np.nan), *_NORMS), values=True, seen=True),
    Damage("norm NaN at one place", _plain_numbers("NaN once", _filled(np.nan, 0), *_NORMS), values=True, seen=True),
    Damage("norm zero", _plain_numbers("0", _filled(0), *_NORMS), values=True, seen=True),
    Damage("norm infinite", _plain_numbers("infinite once", _filled(np.inf, 0), *_NORMS), values=True, seen=True),
    Damage("norms exchanged", _two_norms, values=True, seen=False),
    Damage("norm doubled", _plain_numbers("doubled", _scaled(2), *_NORMS), values=True, seen=False),
    Damage("norm negated", _plain_numbers("negated", _scaled(-1), *_NORMS), values=True, seen=False),
    Damage("embedding NaN", _plain_numbers("NaN", _filled(np.nan), "embedding"), values=True, seen=True),
    Damage("embedding with a NaN", _plain_numbers("a NaN", _filled(np.nan, 0), "embedding"), values=True, seen=True),
    Damage("embedding zero", _plain_numbers("0", _filled(0), "embedding"), values=True, seen=True),
    Damage("embedding shuffled", _plain_numbers("rows shuffled", _rows_shuffled, "embedding"), True, False),
    Damage("head infinite", _plain_numbers("infinite", _filled(np.inf, 0.01), "lm_head"), values=True, seen=True),
    Damage("head zero", _plain_numbers("0", _filled(0), "lm_head"), values=True, seen=True),
    Damage("head a million times as large", _plain_numbers("times 2^20", _scaled(2.0**20), "lm_head"), True, True),
    Damage("plain tensor doubled", _plain_numbers("doubled", _scaled(2), *MATRICES), values=True, seen=False),
    Damage("plain tensor with a row doubled", _plain_numbers("a row doubled", _row_doubled, *MATRICES), True, False),
    Damage("bias NaN", _plain_numbers("NaN", _filled(np.nan), "bias", "router"), values=True, seen=True),
    Damage("input scale NaN", _input_scale("NaN", lambda x: np.nan, True), values=False, seen=True),
    Damage("input scale zero", _input_scale("0", lambda x: 0.0, True), values=False, seen=True),
    Damage("input scale doubled", _input_scale("doubled", lambda x: 2 * x, False), values=False, seen=False),
)
