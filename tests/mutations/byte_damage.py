"""Damage to the bytes of codes, scales and plain tensors; headers and shapes stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mutations.kinds import INPUT_SCALES, Damage, Harm, Random, one_of, plain_cells, tensor, two_alike, weights
from mutations.outputs import Bytes, Cells, Output, Stored

PAGE, MEBIBYTE = 4096, 1 << 20
MATRICES = ("embedding", "lm_head")
Numbers = np.ndarray[Any, Any]
Change = Callable[[Numbers, Random], Numbers]


def _weight(output: Output, random: Random, has: Callable[[Stored], bool] = lambda weight: True) -> Stored | None:
    return one_of(random, [weight for weight in output.stored if has(weight)])


def _is_bytes(cells: Cells | None) -> bool:
    return cells is not None and cells.dtype in ("U8", "F8_E4M3", "F8_E8M0", "I8", "F8_E5M2")


def _grid(weight: Stored) -> bool:
    """Return whether a weight has at least four scales."""
    return weight.scales is not None and np.prod(weight.scales.shape) >= 4


def _rows(weight: Stored) -> bool:
    return _grid(weight) and weight.scales is not None and min(_table_shape(weight.scales)) >= 2


def _table_shape(cells: Cells) -> tuple[int, int]:
    columns = cells.shape[-1]
    return int(np.prod(cells.shape)) // columns, columns


# Bits.


def _flip(output: Output, cells: Cells, at: int, bit: int) -> bool:
    """Flip a bit; return whether it is set now: a number of a larger magnitude, if it is of an exponent."""
    content = output.get(cells)
    content[at] ^= 1 << bit
    output.put(cells, content)
    return bool(content[at] >> bit & 1)


def _flip_code(output: Output, random: Random) -> Harm | None:
    weight = _weight(output, random)
    assert weight is not None
    at = int(random.integers(weight.codes.nbytes))
    # Bits of the magnitude: flipping one changes the value, which a sign of 0 would not.
    bits = {4: (0, 1, 2, 4, 5, 6), 6: (0, 1, 2, 3, 4) if at % 3 == 0 or weight.spread else (4, 5)}
    bit = int(random.choice(bits.get(weight.format.element.stored_bits, range(7))))
    _flip(output, weight.codes, at, bit)
    return weights(f"bit {bit} of byte {at:,} of its codes", weight)


def _flip_scale(output: Output, random: Random) -> Harm | None:
    weight = _weight(output, random, lambda weight: weight.scales is not None)
    if weight is None or weight.scales is None:
        return None
    cells = weight.scales
    at = int(random.integers(cells.nbytes))
    bit = int(random.integers(7 if cells.dtype == "F8_E4M3" else 8))
    grows = _flip(output, cells, at, bit)
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
    weight = _weight(output, random, lambda weight: weight.tensor_scale is not None)
    if weight is None or weight.tensor_scale is None:
        return None
    at, bit = int(random.integers(2, 4)), int(random.integers(7))
    grows = _flip(output, weight.tensor_scale, at, bit)
    fused = any(weight in group for group in output.fused())
    far = at == 3 and bit >= 2 and (grows or bit >= 3)
    return weights(f"bit {bit} of byte {at} of its tensor scale", weight, seen=fused or far)


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
        grows = _flip(output, cells, at, bit)
        far = grows and at % width == width - 1 and 2 <= bit <= 6
        return tensor(f"bit {bit} of byte {at:,}", cells.name, seen=far)

    return apply


# Pages.


def _zero(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    return np.zeros_like(page)


def _ones(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    return np.full_like(page, 0xFF)


def _noise(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    return random.integers(0, 256, page.size).astype(np.uint8)


def _elsewhere(page: Bytes, random: Random, whole: Bytes, begin: int) -> Bytes:
    other = (begin + page.size * int(random.integers(1, max(2, whole.size // page.size)))) % whole.size
    return np.take(whole, range(other, other + page.size), mode="wrap")


PageChange = Callable[[Bytes, Random, Bytes, int], Bytes]


def _page(output: Output, cells: Cells, random: Random, change: PageChange, size: int = PAGE) -> str | None:
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
        weight = _weight(output, random, lambda weight: part == "codes" or _grid(weight))
        cells = None if weight is None else getattr(weight, part)
        if weight is None or cells is None:
            return None
        where = _page(output, cells, random, change)
        return None if where is None else weights(f"{where} of its {part}", weight)

    return apply


def _page_of_plain(change: PageChange, size: int, *roles: str) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        cells = plain_cells(output, random, *roles, least=size)
        where = None if cells is None else _page(output, cells, random, change, size)
        return None if where is None or cells is None else tensor(where, cells.name)

    return apply


# Scales.


def _of_scales(
    what: str, change: Change, has: Callable[[Stored], bool] = _grid, values: bool | None = None
) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        weight = _weight(output, random, has)
        if weight is None or weight.scales is None:
            return None
        before = output.numbers(weight.scales)
        after = change(before.copy(), random)
        if np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
            return None
        output.set_numbers(weight.scales, after)
        return weights(f"its scales {what}", weight, values=values)

    return apply


def _shuffled(scales: Numbers, random: Random) -> Numbers:
    return random.permutation(scales.reshape(-1)).reshape(scales.shape)


def _transposed(scales: Numbers, random: Random) -> Numbers:
    rows = scales.reshape(-1, scales.shape[-1])
    return np.ascontiguousarray(rows.T).reshape(scales.shape)


def _reversed_rows(scales: Numbers, random: Random) -> Numbers:
    return scales.reshape(-1, scales.shape[-1])[::-1].reshape(scales.shape)


def _tiles(weight: Stored) -> bool:
    """Return whether scales fill whole tiles of 128x4."""
    if not _grid(weight) or weight.scales is None:
        return False
    rows, columns = _grid_of(weight)
    return _is_bytes(weight.scales) and rows % 128 == 0 and columns % 4 == 0


def _grid_of(weight: Stored) -> tuple[int, int]:
    assert weight.scales is not None
    rows, columns = weight.codes.shape[0], int(np.prod(weight.scales.shape)) // weight.codes.shape[0]
    return rows, columns


def _swizzled(forwards: bool) -> Callable[[Output, Random], Harm | None]:
    """Reorder scales from rows to tiles of 128x4 (each of 32 rows by 4 by 4 scales), or back."""

    def apply(output: Output, random: Random) -> Harm | None:
        weight = _weight(output, random, _tiles)
        if weight is None or weight.scales is None:
            return None
        rows, columns = _grid_of(weight)
        scales = output.get(weight.scales)
        if forwards:
            tiles = scales.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)
        else:
            tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        output.put(weight.scales, np.ascontiguousarray(tiles))
        return weights(f"its scales {'swizzled' if forwards else 'unswizzled'}", weight)

    return apply


def _step(scales: Numbers, down: bool) -> Numbers:
    """Return scales one step lower or higher: the next code, or half and twice a binary32."""
    if scales.dtype.kind == "f":
        return scales * (0.5 if down else 2)
    return np.clip(scales.astype(int) + (-1 if down else 1), 0, 0xFE).astype(np.uint8)


def _stepped(down: bool, where: str) -> Change:
    def change(scales: Numbers, random: Random) -> Numbers:
        table = scales.reshape(-1, scales.shape[-1])
        row, column = int(random.integers(table.shape[0])), int(random.integers(table.shape[1]))
        part = {"block": (row, slice(column, column + 1)), "row": (row, slice(None)), "all": (slice(None), slice(None))}
        table[part[where]] = _step(table[part[where]], down)
        return table.reshape(scales.shape)

    return change


def _a_tenth_off(scales: Numbers, random: Random) -> Numbers:
    flat = scales.reshape(-1)
    flat[int(random.integers(flat.size))] *= 1.1 if random.random() < 0.5 else 0.9
    return flat.reshape(scales.shape)


def _constant(value: str, share: float) -> Change:
    """Set a share of the scales to a constant."""

    def change(scales: Numbers, random: Random) -> Numbers:
        flat = scales.reshape(-1)
        count = max(1, int(share * flat.size))
        at = random.choice(flat.size, count, replace=False)
        if scales.dtype.kind == "f":
            flat[at] = {"nan": np.nan, "zero": 0.0, "one": 1.0}[value]
        else:
            flat[at] = {"nan": 0xFF, "zero": 0, "one": 127}[value]
        return flat.reshape(scales.shape)

    return change


def _exchange_rows(scales: Numbers, random: Random) -> Numbers:
    table = scales.reshape(-1, scales.shape[-1])
    first, second = random.choice(len(table), 2, replace=False)
    table[[first, second]] = table[[second, first]]
    return table.reshape(scales.shape)


def _is_binary32(weight: Stored) -> bool:
    return weight.scales is not None and weight.scales.dtype in ("F32", "BF16")


# Tensor scales.


def _of_tensor_scale(
    what: str, change: Callable[[float], float], choose: str = "alone"
) -> Callable[[Output, Random], Harm | None]:
    """Change the tensor scale of a weight that is not fused (`alone`), of one of a fused set (`fused`), or of any."""

    def apply(output: Output, random: Random) -> Harm | None:
        fused = {weight.name for group in output.fused() for weight in group}
        chosen = {
            "alone": lambda name: name not in fused,
            "fused": lambda name: name in fused,
            "any": lambda name: True,
        }
        weight = _weight(output, random, lambda weight: _scale_of(weight) is not None and chosen[choose](weight.name))
        if weight is None:
            return None
        cells = _scale_of(weight)
        assert cells is not None
        before = output.numbers(cells)
        after = np.full_like(before, change(float(before.reshape(-1)[0])))
        output.set_numbers(cells, after)
        if np.array_equal(output.numbers(cells), before):
            return None
        # Scales of whole tensors may differ in a set; tensor scales on top of block scales may not.
        seen = False if choose == "fused" and weight.tensor_scale is None else None
        return weights(f"its tensor scale {what}", weight, seen=seen)

    return apply


def _scale_of(weight: Stored) -> Cells | None:
    """Return the one scale of a tensor, be it on top of block scales or alone."""
    if weight.tensor_scale is not None:
        return weight.tensor_scale
    return weight.scales if weight.scales is not None and np.prod(weight.scales.shape) == 1 else None


def _next(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


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
        weight = _weight(output, random, lambda weight: weight.format.element.stored_bits in (4, 8))
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
        weight = _weight(output, random)
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
            lines = codes.reshape(-1, int(np.prod(weight.codes.shape[1:])))
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
    weight = _weight(output, random)
    assert weight is not None
    table = output.get(weight.codes).reshape(weight.codes.shape[0], -1)
    first, second = random.choice(len(table), 2, replace=False)
    table[[first, second]] = table[[second, first]]
    output.put(weight.codes, table)
    return weights(f"codes of rows {first} and {second} exchanged", weight)


def _shifted(output: Output, random: Random) -> Harm | None:
    weight = _weight(output, random)
    assert weight is not None
    output.put(weight.codes, np.roll(output.get(weight.codes), int(random.integers(1, 64))))
    return weights("its codes shifted by a few bytes", weight)


def _one_code_off(output: Output, random: Random) -> Harm | None:
    weight = _weight(output, random, lambda weight: weight.format.element.stored_bits == 8)
    if weight is None:
        return None
    codes = output.get(weight.codes)
    at = random.choice(codes.size, codes.size // 100, replace=False)
    small = (codes[at] & 0x7F) < 0x70
    codes[at[small]] += 1
    output.put(weight.codes, codes)
    return weights("1 % of its codes one higher", weight)


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


_NORMS = ("norm",)

BYTE_DAMAGE: tuple[Damage, ...] = (
    Damage("bit of a code", _flip_code, values=True, seen=False),
    Damage("bit of a block scale", _flip_scale, values=True, seen=False),
    Damage("bit of a tensor scale", _flip_tensor_scale, values=True, seen=False),
    Damage("bit of a norm", _flip_plain("norm"), values=True, seen=False),
    Damage("bit of an embedding", _flip_plain("embedding"), values=True, seen=False),
    Damage("bit of the head", _flip_plain("lm_head"), values=True, seen=False),
    Damage("bit of a bias or router", _flip_plain("bias", "router"), values=True, seen=False),
    Damage("codes: page of zeros", _page_of("codes", _zero), values=True, seen=True),
    Damage("codes: page of ones", _page_of("codes", _ones), values=True, seen=True),
    Damage("codes: page of noise", _page_of("codes", _noise), values=True, seen=True),
    Damage("codes: page from elsewhere", _page_of("codes", _elsewhere), values=True, seen=True),
    Damage("scales: page of zeros", _page_of("scales", _zero), values=True, seen=True),
    Damage("scales: page of ones", _page_of("scales", _ones), values=True, seen=True),
    Damage("scales: page of noise", _page_of("scales", _noise), values=True, seen=True),
    Damage("scales: page from elsewhere", _page_of("scales", _elsewhere), values=True, seen=False),
    Damage("plain: page of zeros", _page_of_plain(_zero, PAGE, *MATRICES), values=True, seen=False),
    Damage("plain: page of ones", _page_of_plain(_ones, PAGE, *MATRICES), values=True, seen=True),
    Damage("plain: page of noise", _page_of_plain(_noise, PAGE, *MATRICES), values=True, seen=True),
    Damage("plain: page from elsewhere", _page_of_plain(_elsewhere, PAGE, *MATRICES), values=True, seen=False),
    Damage("embedding: 1 MiB of zeros", _page_of_plain(_zero, MEBIBYTE, "embedding"), values=True, seen=True),
    Damage("scales shuffled", _of_scales("shuffled", _shuffled), values=True, seen=False),
    Damage("scales transposed", _of_scales("transposed", _transposed, _rows), values=True, seen=False),
    Damage("scales with rows reversed", _of_scales("reversed", _reversed_rows, _grid), values=True, seen=False),
    Damage("scales with two rows exchanged", _of_scales("with two rows exchanged", _exchange_rows), True, False),
    Damage("scales swizzled", _swizzled(True), values=True, seen=False),
    Damage("scales unswizzled", _swizzled(False), values=True, seen=False),
    *(
        Damage(
            f"scales one step {'lower' if down else 'higher'}, {where}",
            _of_scales(f"one step {'lower' if down else 'higher'}, {where}", _stepped(down, where)),
            values=True,
            seen=False,
        )
        for down in (True, False)
        for where in ("block", "row", "all")
    ),
    Damage("FP32 scale a tenth off", _of_scales("a tenth off", _a_tenth_off, _is_binary32), values=True, seen=False),
    Damage("a scale NaN", _of_scales("NaN, one", _constant("nan", 0)), values=True, seen=True),
    Damage("scales NaN", _of_scales("NaN, all", _constant("nan", 1)), values=True, seen=True),
    Damage("a scale zero", _of_scales("0, one", _constant("zero", 0)), values=True, seen=True),
    Damage("scales zero", _of_scales("0, half", _constant("zero", 0.5)), values=True, seen=True),
    Damage("scales a constant", _of_scales("constant", _constant("one", 1)), values=True, seen=True),
    Damage("tensor scale doubled", _of_tensor_scale("doubled", lambda x: 2 * x), values=True, seen=False),
    Damage("tensor scale halved", _of_tensor_scale("halved", lambda x: x / 2), values=True, seen=False),
    Damage("tensor scale inverted", _of_tensor_scale("inverted", lambda x: 1 / x), values=True, seen=True),
    Damage("tensor scale 1 ulp off", _of_tensor_scale("1 ulp off", _next), values=False, seen=False),
    Damage("tensor scale NaN", _of_tensor_scale("NaN", lambda x: np.nan, "any"), values=True, seen=True),
    Damage("tensor scale zero", _of_tensor_scale("0", lambda x: 0.0, "any"), values=True, seen=True),
    Damage("tensor scale negative", _of_tensor_scale("negative", lambda x: -x, "any"), values=True, seen=True),
    Damage("tensor scale unfused", _of_tensor_scale("doubled in a fused set", lambda x: 2 * x, "fused"), True, True),
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
