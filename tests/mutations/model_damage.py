"""Damage to the set of tensors: lost, doubled, renamed, reinterpreted; the index is made to fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mutations.kinds import INPUT_SCALES, Damage, Harm, Random, names_of, one_of, tensor, two_alike, weights
from mutations.outputs import Output, Row, Stored


def _without(output: Output, lost: set[str]) -> None:
    output.change_tables(lambda rows: [row for row in rows if row.name not in lost])


def _layer_lost(which: str) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        layers = output.layers()
        at = len(layers) - 1 if which == "last" else int(random.integers(len(layers) - 1))
        layer = layers[at]
        _without(output, set(layer.names.values()))
        plain = {weight.name for weight in output.stored if weight.name.startswith(f"{layer.prefix}.")}
        return tensor(f"layer {layer.prefix} removed", layer.prefix, *layer.names.values(), *plain)

    return apply


def _layer_over_another(output: Output, random: Random) -> Harm | None:
    layers = output.layers()
    first, second = (layers[int(at)] for at in random.choice(len(layers), 2, replace=False))
    rows = {row.name: row for shard in output.shards for row in output.table(shard)}
    target = {second.names[rest]: rows[name] for rest, name in first.names.items() if rest in second.names}

    def change(table: list[Row]) -> list[Row]:
        return [replace(row, data=target[row.name].data) if row.name in target else row for row in table]

    output.change_tables(change)
    plain = [weight.name for weight in output.stored if weight.name.startswith(f"{second.prefix}.")]
    return tensor(f"{first.prefix} written over {second.prefix}", second.prefix, *second.names.values(), *plain)


def _layers_exchanged(output: Output, random: Random) -> Harm | None:
    layers = output.layers()
    first, second = (layers[int(at)] for at in random.choice(len(layers), 2, replace=False))
    new = {name: second.names[rest] for rest, name in first.names.items() if rest in second.names}
    new |= {other: name for name, other in new.items()}
    output.change_tables(lambda rows: [replace(row, name=new.get(row.name, row.name)) for row in rows])
    plain = [
        weight.name for weight in output.stored if weight.name.startswith((f"{first.prefix}.", f"{second.prefix}."))
    ]
    return tensor(f"{first.prefix} and {second.prefix} exchanged", first.prefix, second.prefix, *new, *plain)


def _part_lost(part: str) -> Callable[[Output, Random], Harm | None]:
    """Lose codes, scales or tensor scale of a weight that stores them in tensors of their own."""

    def has(weight: Stored) -> bool:
        cells = getattr(weight, part)
        return cells is not None and len(weight.entries) > 1

    def apply(output: Output, random: Random) -> Harm | None:
        weight = one_of(random, [weight for weight in output.stored if has(weight)])
        if weight is None:
            return None
        cells = getattr(weight, part)
        if sum(each.name == cells.name for each in weight.parts) > 1:
            return None
        _without(output, {cells.name})
        return weights(f"its {part} lost", weight)

    return apply


def _weight_lost(output: Output, random: Random) -> Harm | None:
    weight = one_of(random, output.stored)
    assert weight is not None
    _without(output, set(weight.entries))
    return weights("lost", weight)


def _expert_lost(output: Output, random: Random) -> Harm | None:
    module = re.compile(r".*\.experts\.\d+\.")
    experts = sorted({found[0] for weight in output.stored if (found := module.match(weight.name))})
    if not experts:
        return None
    expert = experts[int(random.integers(len(experts)))]
    lost = [weight for weight in output.stored if weight.name.startswith(expert)]
    _without(output, {entry for weight in lost for entry in weight.entries})
    places = (*map(names_of, lost), (expert.removesuffix("."),))
    return Harm(places, f"expert {expert} lost")


def _plain_lost(*roles: str, endings: tuple[str, ...] = ()) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        found = [name for name, (role, _) in output.plain.items() if role in roles or name.endswith(endings)]
        if not found:
            return None
        name = found[int(random.integers(len(found)))]
        _without(output, {name})
        return Harm(((name, name.rpartition(".")[0]),), "lost")

    return apply


def _changed_row(
    what: str, change: Callable[[Row, Random], Row | None], *roles: str
) -> Callable[[Output, Random], Harm | None]:
    """Change dtype, shape or name of a plain tensor."""

    def apply(output: Output, random: Random) -> Harm | None:
        found = [name for name, (role, _) in output.plain.items() if role in roles]
        if not found or output.is_gguf:
            return None
        name = found[int(random.integers(len(found)))]
        row = next(row for shard in output.shards for row in output.table(shard) if row.name == name)
        new = change(replace(row), random)
        if new is None:
            return None
        output.change_tables(lambda rows: [new if each.name == name else each for each in rows])
        return tensor(what, name)

    return apply


def _as_half(row: Row, random: Random) -> Row | None:
    return replace(row, dtype="F16") if row.dtype == "BF16" else None


def _as_bytes(row: Row, random: Random) -> Row | None:
    return replace(row, dtype="I16") if row.dtype == "BF16" else None


def _transposed(row: Row, random: Random) -> Row | None:
    if row.dtype != "BF16" or len(row.shape) != 2:
        return None
    values = np.frombuffer(row.data, np.uint16).reshape(row.shape)
    return replace(row, shape=row.shape[::-1], data=np.ascontiguousarray(values.T).tobytes())


def _shorter(row: Row, random: Random) -> Row | None:
    rows = row.shape[0] - int(random.integers(1, min(32, row.shape[0] // 2)))
    return replace(row, shape=(rows, *row.shape[1:]), data=row.data[: len(row.data) // row.shape[0] * rows])


def _renamed(row: Row, random: Random) -> Row | None:
    return replace(row, name=row.name.replace(".weight", ".wieght"))


def _codes_transposed(output: Output, random: Random) -> Harm | None:
    """Exchange rows and columns of the codes of a square byte matrix: the header still fits."""
    square = [w for w in output.stored if len(w.codes.shape) == 2 and w.codes.shape[0] == w.codes.shape[1]]
    weight = one_of(random, square)
    if weight is None or output.is_gguf:
        return None
    codes = output.get(weight.codes).reshape(weight.codes.shape)
    output.put(weight.codes, np.ascontiguousarray(codes.T))
    return weights("its codes transposed", weight)


def _scale_shape(output: Output, random: Random) -> Harm | None:
    """State the grid of a weight's scales with its sizes exchanged."""
    found = [w for w in output.stored if w.scales is not None and w.scales.shape != w.scales.shape[::-1]]
    weight = one_of(random, found)
    if weight is None or weight.scales is None or output.is_gguf:
        return None
    name, shape = weight.scales.name, weight.scales.shape

    def change(rows: list[Row]) -> list[Row]:
        return [replace(row, shape=shape[::-1]) if row.name == name else row for row in rows]

    output.change_tables(change)
    return weights(f"its scales have the shape {list(shape[::-1])}", weight)


def _names_exchanged(output: Output, random: Random) -> Harm | None:
    """Exchange the names of two alike weights' codes in the header."""
    two = two_alike(output, random)
    if two is None:
        return None
    first, second = two[0].codes.name, two[1].codes.name
    new = {first: second, second: first}
    output.change_tables(lambda rows: [replace(row, name=new.get(row.name, row.name)) for row in rows])
    return weights("names of their codes exchanged", *two)


def _foreign_tensor(output: Output, random: Random) -> Harm | None:
    """Add a tensor that no model of this kind has."""
    name = "model.layers.0.self_attn.rotated.weight"
    if output.is_gguf:
        return None
    shard = output.shards[int(random.integers(len(output.shards)))]
    added = Row(name, "BF16", (16, 16), random.integers(0, 64, 512).astype(np.uint8).tobytes())
    output.change_tables(lambda rows: [*rows, added] if rows == output.table(shard) else rows)
    return tensor("added", name)


MODEL_DAMAGE: tuple[Damage, ...] = (
    Damage("layer removed", _layer_lost("any"), values=True, seen=True),
    Damage("last layer removed", _layer_lost("last"), values=True, seen=True),
    Damage("layer written over another", _layer_over_another, values=True, seen=True),
    Damage("layers exchanged", _layers_exchanged, values=True, seen=False),
    Damage("codes lost", _part_lost("codes"), values=True, seen=True),
    Damage("scales lost", _part_lost("scales"), values=True, seen=True),
    Damage("tensor scale lost", _part_lost("tensor_scale"), values=True, seen=True),
    Damage("input scale lost", _plain_lost(endings=INPUT_SCALES), values=False, seen=True),
    Damage("weight lost", _weight_lost, values=True, seen=True),
    Damage("expert lost", _expert_lost, values=True, seen=True),
    Damage("norm lost", _plain_lost("norm"), values=True, seen=True),
    Damage("embedding lost", _plain_lost("embedding"), values=True, seen=True),
    Damage("head lost", _plain_lost("lm_head"), values=True, seen=True),
    Damage("bias or router lost", _plain_lost("bias", "router"), values=True, seen=True),
    Damage("plain tensor as F16", _changed_row("BF16 read as F16", _as_half, "embedding", "lm_head"), True, True),
    Damage("norm as F16", _changed_row("BF16 read as F16", _as_half, "norm"), values=True, seen=True),
    Damage("norm as integers", _changed_row("BF16 read as I16", _as_bytes, "norm"), values=True, seen=True),
    Damage("plain tensor transposed", _changed_row("transposed", _transposed, "embedding", "lm_head"), True, True),
    Damage("plain tensor cut", _changed_row("rows cut", _shorter, "embedding", "lm_head"), values=True, seen=True),
    Damage("norm cut", _changed_row("cut", _shorter, "norm"), values=True, seen=True),
    Damage("norm renamed", _changed_row("renamed", _renamed, "norm"), values=True, seen=True),
    Damage("codes transposed", _codes_transposed, values=True, seen=False),
    Damage("scales of another shape", _scale_shape, values=True, seen=True),
    Damage("names of codes exchanged", _names_exchanged, values=True, seen=False),
    Damage("foreign tensor added", _foreign_tensor, values=False, seen=True),
)
