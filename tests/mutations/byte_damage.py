"""Damage to the bytes of codes, and bits and pages of scales; headers and shapes stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mutations.kinds import Damage, Harm, Random, one_of, two_alike, weights
from mutations.outputs import Bytes, Cells, Output, Stored

PAGE, MEBIBYTE = 4096, 1 << 20


def some_weight(output: Output, random: Random, has: Callable[[Stored], bool] = lambda weight: True) -> Stored | None:
    return one_of(random, [weight for weight in output.stored if has(weight)])


def has_grid(weight: Stored) -> bool:
    """Return whether a weight has at least four scales."""
    return weight.scales is not None and np.prod(weight.scales.shape) >= 4


# Bits.


def flip(output: Output, cells: Cells, at: int, bit: int) -> bool:
    """Flip a bit; return whether it is set now: a number of a larger magnitude, if it is of an exponent."""
    content = output.get(cells)
    content[at] ^= 1 << bit
    output.put(cells, content)
    return bool(content[at] >> bit & 1)


def _flip_code(output: Output, random: Random) -> Harm | None:
    weight = some_weight(output, random)
    assert weight is not None
    at = int(random.integers(weight.codes.nbytes))
    # Bits of the magnitude: flipping one changes the value, which a sign of 0 would not.
    bits = {4: (0, 1, 2, 4, 5, 6), 6: (0, 1, 2, 3, 4) if at % 3 == 0 or weight.spread else (4, 5)}
    bit = int(random.choice(bits.get(weight.format.element.stored_bits, range(7))))
    flip(output, weight.codes, at, bit)
    return weights(f"bit {bit} of byte {at:,} of its codes", weight)


def _flip_scale(output: Output, random: Random) -> Harm | None:
    weight = some_weight(output, random, lambda weight: weight.scales is not None)
    if weight is None or weight.scales is None:
        return None
    cells = weight.scales
    at = int(random.integers(cells.nbytes))
    bit = int(random.integers(7 if cells.dtype == "F8_E4M3" else 8))
    grows = flip(output, cells, at, bit)
    # A scale sixteen times as large as it was is out of the ordinary; a small one only where scales are powers of two.
    width = {"F32": 4, "BF16": 2}.get(cells.dtype, 1)
    if cells.dtype == "F8_E4M3":
        far = grows and bit >= 5
    elif width == 1:
        far = bit >= 2 if grows else bit >= 4
    else:
        far = grows and at % width == width - 1 and bit >= 1
    exact = not (width == 4 and at % width < 2)
    return weights(f"bit {bit} of byte {at:,} of its {cells.dtype} scales", weight, values=exact, seen=far)


def _flip_tensor_scale(output: Output, random: Random) -> Harm | None:
    weight = some_weight(output, random, lambda weight: weight.tensor_scale is not None)
    if weight is None or weight.tensor_scale is None:
        return None
    at, bit = int(random.integers(2, 4)), int(random.integers(7))
    grows = flip(output, weight.tensor_scale, at, bit)
    fused = any(weight in group for group in output.fused())
    far = at == 3 and bit >= 2 and (grows or bit >= 3)
    return weights(f"bit {bit} of byte {at} of its tensor scale", weight, seen=fused or far)


# Pages.


def zeros(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    return np.zeros_like(page)


def ones(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    return np.full_like(page, 0xFF)


def noise(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    return random.integers(0, 256, page.size).astype(np.uint8)


def elsewhere(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    other = (begin + page.size * int(random.integers(1, max(2, whole.size // page.size)))) % whole.size
    return np.take(whole, range(other, other + page.size), mode="wrap")


PageChange = Callable[[Bytes, Random, Bytes, int], Bytes]


def change_page(output: Output, cells: Cells, random: Random, change: PageChange, size: int = PAGE) -> str | None:
    """Change a page of a tensor, half of it if it is smaller than two pages; return where, None if nothing changed."""
    whole = output.get(cells)
    size = min(size, max(1, whole.size // 2))
    begin = int(random.integers(whole.size // size)) * size
    page = whole[begin : begin + size].copy()
    whole[begin : begin + size] = change(page, random, whole.copy(), begin)
    if (whole[begin : begin + size] == page).all():
        return None
    output.put(cells, whole)
    return f"{size:,} bytes from {begin:,}"


def _page_of(part: str, change: PageChange) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        weight = some_weight(output, random, lambda weight: part == "codes" or has_grid(weight))
        cells = None if weight is None else getattr(weight, part)
        if weight is None or cells is None:
            return None
        where = change_page(output, cells, random, change)
        return None if where is None else weights(f"{where} of its {part}", weight)

    return apply


# Codes.


def _exchanged(share: str) -> Callable[[Output, Random], Harm | None]:
    """Exchange the codes of each byte: in a part of a tensor, in a tensor, in all tensors."""

    def apply(output: Output, random: Random) -> Harm | None:
        fours = [weight for weight in output.stored if weight.format.element.stored_bits == 4]
        if not fours:
            return None
        chosen = fours if share == "all" else [fours[int(random.integers(len(fours)))]]
        for weight in chosen:
            codes = output.get(weight.codes)
            begin = int(random.integers(codes.size // 2)) if share == "part" else 0
            end = begin + codes.size // 4 if share == "part" else codes.size
            codes[begin:end] = (codes[begin:end] << 4) | (codes[begin:end] >> 4)
            output.put(weight.codes, codes)
        return weights(f"codes of each byte exchanged in {share}", *chosen)

    return apply


def _signs(share: float) -> Callable[[Output, Random], Harm | None]:
    """Flip the signs of a share of a tensor's codes."""

    def apply(output: Output, random: Random) -> Harm | None:
        weight = some_weight(output, random, lambda weight: weight.format.element.stored_bits in (4, 8))
        if weight is None or weight.format.element.twos_complement:
            return None
        codes = output.get(weight.codes)
        begin = int(random.integers(max(1, int((1 - share) * codes.size))))
        end = begin + int(share * codes.size)
        codes[begin:end] ^= 0x88 if weight.format.element.stored_bits == 4 else 0x80
        output.put(weight.codes, codes)
        return weights(f"signs of {share:.0%} of its codes flipped", weight)

    return apply


def _between(*parts: str) -> Callable[[Output, Random], Harm | None]:
    """Exchange parts of two alike weights of two layers."""

    def apply(output: Output, random: Random) -> Harm | None:
        two = two_alike(output, random)
        if two is None:
            return None
        changed = False
        for part in parts:
            first, second = (getattr(weight, part) for weight in two)
            if first is None:
                continue
            one, other = output.get(first), output.get(second)
            output.put(first, other)
            output.put(second, one)
            changed |= not np.array_equal(one, other)
        return weights(f"{', '.join(parts)} exchanged", *two) if changed else None

    return apply


def _over(*parts: str) -> Callable[[Output, Random], Harm | None]:
    """Write parts of a weight over those of an alike one."""

    def apply(output: Output, random: Random) -> Harm | None:
        two = two_alike(output, random)
        if two is None:
            return None
        for part in parts:
            first, second = (getattr(weight, part) for weight in two)
            if first is not None:
                output.put(second, output.get(first))
        return weights(f"{', '.join(parts)} of {two[0].name} written over it", two[1])

    return apply


def _permuted(along: str) -> Callable[[Output, Random], Harm | None]:
    """Permute rows, codes and scales alike, or whole blocks along the rows of codes alone."""

    def apply(output: Output, random: Random) -> Harm | None:
        weight = some_weight(output, random)
        assert weight is not None
        codes = output.get(weight.codes)
        if along == "rows":
            rows = weight.codes.shape[0]
            order = _order(random, rows)
            output.put(weight.codes, np.ascontiguousarray(codes.reshape(rows, -1)[order]))
            scales = weight.scales
            if scales is not None and scales.shape[0] == rows:
                output.put(scales, np.ascontiguousarray(output.get(scales).reshape(rows, -1)[order]))
        else:
            lines = codes.reshape(weight.codes.shape[0], -1)
            blocks = lines.reshape(len(lines), -1, 16)
            order = _order(random, blocks.shape[1])
            output.put(weight.codes, np.ascontiguousarray(blocks[:, order]))
        return weights(f"its {along} permuted", weight)

    return apply


def _order(random: Random, count: int) -> np.ndarray[Any, Any]:
    """Return a random order of at least two things other than theirs."""
    order = random.permutation(count)
    return order if (order != np.arange(count)).any() else np.roll(order, 1)


def _two_rows(output: Output, random: Random) -> Harm | None:
    weight = some_weight(output, random)
    assert weight is not None
    table = output.get(weight.codes).reshape(weight.codes.shape[0], -1)
    first, second = random.choice(len(table), 2, replace=False)
    table[[first, second]] = table[[second, first]]
    output.put(weight.codes, table)
    return weights(f"codes of rows {first} and {second} exchanged", weight)


def _shifted(output: Output, random: Random) -> Harm | None:
    weight = some_weight(output, random)
    assert weight is not None
    output.put(weight.codes, np.roll(output.get(weight.codes), int(random.integers(1, 64))))
    return weights("its codes shifted by a few bytes", weight)


def _one_code_off(output: Output, random: Random) -> Harm | None:
    weight = some_weight(output, random, lambda weight: weight.format.element.stored_bits == 8)
    if weight is None:
        return None
    codes = output.get(weight.codes)
    at = random.choice(codes.size, codes.size // 100, replace=False)
    small = (codes[at] & 0x7F) < 0x70
    codes[at[small]] += 1
    output.put(weight.codes, codes)
    return weights("1 % of its codes one higher", weight)


BYTE_DAMAGE: tuple[Damage, ...] = (
    Damage("bit of a code", _flip_code, values=True, seen=False),
    Damage("bit of a block scale", _flip_scale, values=True, seen=False),
    Damage("bit of a tensor scale", _flip_tensor_scale, values=True, seen=False),
    Damage("codes: page of zeros", _page_of("codes", zeros), values=True, seen=True),
    Damage("codes: page of ones", _page_of("codes", ones), values=True, seen=True),
    Damage("codes: page of noise", _page_of("codes", noise), values=True, seen=True),
    Damage("codes: page from elsewhere", _page_of("codes", elsewhere), values=True, seen=True),
    Damage("scales: page of zeros", _page_of("scales", zeros), values=True, seen=True),
    Damage("scales: page of ones", _page_of("scales", ones), values=True, seen=True),
    Damage("scales: page of noise", _page_of("scales", noise), values=True, seen=True),
    Damage("scales: page from elsewhere", _page_of("scales", elsewhere), values=True, seen=False),
    Damage("tensor scales of two layers exchanged", _between("tensor_scale"), values=True, seen=False),
    Damage("nibbles exchanged in a part", _exchanged("part"), values=True, seen=False),
    Damage("nibbles exchanged in a tensor", _exchanged("tensor"), values=True, seen=False),
    Damage("nibbles exchanged in all", _exchanged("all"), values=True, seen=False),
    Damage("signs of a part flipped", _signs(0.1), values=True, seen=False),
    Damage("signs of a tensor flipped", _signs(1.0), values=True, seen=False),
    Damage("codes of two layers exchanged", _between("codes"), values=True, seen=False),
    Damage("scales of two layers exchanged", _between("scales"), values=True, seen=False),
    Damage("weights of two layers exchanged", _between("codes", "scales", "tensor_scale"), values=True, seen=False),
    Damage("weight written over another", _over("codes", "scales", "tensor_scale"), values=True, seen=True),
    Damage("codes written over others", _over("codes"), values=True, seen=True),
    Damage("rows permuted", _permuted("rows"), values=True, seen=False),
    Damage("blocks permuted", _permuted("blocks"), values=True, seen=False),
    Damage("two rows of codes exchanged", _two_rows, values=True, seen=False),
    Damage("codes shifted", _shifted, values=True, seen=False),
    Damage("1 % of codes one higher", _one_code_off, values=True, seen=False),
)
