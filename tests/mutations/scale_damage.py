"""Damage to the scales of blocks and of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mutations.byte_damage import has_grid, some_weight
from mutations.kinds import Damage, Harm, Random, weights
from mutations.outputs import Cells, Output, Stored

Numbers = np.ndarray[Any, Any]
Change = Callable[[Numbers, Random], Numbers]


def _is_bytes(cells: Cells | None) -> bool:
    return cells is not None and cells.dtype in ("U8", "F8_E4M3", "F8_E8M0", "I8", "F8_E5M2")


def _rows(weight: Stored) -> bool:
    return has_grid(weight) and weight.scales is not None and min(_table_shape(weight.scales)) >= 2


def _table_shape(cells: Cells) -> tuple[int, int]:
    columns = cells.shape[-1]
    return int(np.prod(cells.shape)) // columns, columns


# Scales.


def _of_scales(
    what: str, change: Change, has: Callable[[Stored], bool] = has_grid, values: bool | None = None
) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        weight = some_weight(output, random, has)
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
    if not has_grid(weight) or weight.scales is None:
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
        weight = some_weight(output, random, _tiles)
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
        weight = some_weight(
            output, random, lambda weight: _scale_of(weight) is not None and chosen[choose](weight.name)
        )
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


SCALE_DAMAGE: tuple[Damage, ...] = (
    Damage("scales shuffled", _of_scales("shuffled", _shuffled), values=True, seen=False),
    Damage("scales transposed", _of_scales("transposed", _transposed, _rows), values=True, seen=False),
    Damage("scales with rows reversed", _of_scales("reversed", _reversed_rows, has_grid), values=True, seen=False),
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
)
