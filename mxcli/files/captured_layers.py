"""Captured tensors by the layer, step and rank that they belong together at, and whether they fit each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.captures import OF_TOKENS, Capture, number_told, rows_of, shape_fault
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.files.tensors import TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """What was captured of a layer at one step on one rank (None where none is told): X, its input, dY, the gradient
    of the loss with respect to its output, and W [out, in]; tokens are the rows of X and dY."""

    layer: str
    step: int | None = None
    rank: int | None = None
    activation: TensorInfo | None = None
    gradient: TensorInfo | None = None
    weight: TensorInfo | None = None

    def of(self, role: str) -> TensorInfo | None:
        """The tensor of a captured role."""
        found: TensorInfo | None = getattr(self, role)
        return found

    @property
    def tokens(self) -> int:
        """Rows of the input, or of the gradient where there is no input."""
        held = self.activation or self.gradient
        return rows_of(held) if held else 0

    @property
    def place(self) -> str:
        """The layer, step and rank in words."""
        parts = (("step", self.step), ("rank", self.rank))
        return ", ".join([printable(self.layer), *(f"{name} {number}" for name, number in parts if number is not None)])


def captured_layers(tensors: Mapping[str, TensorInfo], records: Mapping[str, Capture]) -> tuple[CapturedLayer, ...]:
    """Everything captured, by layer in the order of the source, then step, then rank.

    A second tensor of one role at the same layer, step and rank starts another record of them; `check_layers` refuses
    such a source.
    """
    found: dict[tuple[str, int | None, int | None, int], CapturedLayer] = {}
    before = Counter[tuple[str, int | None, int | None, str]]()
    for name, record in records.items():
        info = tensors.get(name)
        if info is None:
            continue
        layer, role = str(record["layer"]), str(record["role"])
        step, rank = number_told(record, "step"), number_told(record, "rank")
        place = (layer, step, rank, before[layer, step, rank, role])
        before[layer, step, rank, role] += 1
        found[place] = _WITH[role](found.get(place) or CapturedLayer(layer, step, rank), info)
    order = {layer: at for at, layer in enumerate(dict.fromkeys(each.layer for each in found.values()))}
    return tuple(sorted(found.values(), key=lambda each: (order[each.layer], ordered(each.step), ordered(each.rank))))


_WITH: Mapping[str, Callable[[CapturedLayer, TensorInfo], CapturedLayer]] = {
    ACTIVATION: lambda place, info: replace(place, activation=info),
    GRADIENT: lambda place, info: replace(place, gradient=info),
    WEIGHT: lambda place, info: replace(place, weight=info),
}


def ordered(number: int | None) -> int:
    """A step or rank for sorting: what is not told comes first."""
    return -1 if number is None else number


def by_layer(layers: Iterable[CapturedLayer], role: str | None = None) -> dict[str, list[CapturedLayer]]:
    """The records of each layer, all or those that hold a role."""
    found: dict[str, list[CapturedLayer]] = {}
    for each in layers:
        if role is None or each.of(role) is not None:
            found.setdefault(each.layer, []).append(each)
    return found


def steps_of(layers: Iterable[CapturedLayer]) -> tuple[int, ...]:
    """The steps that are told, ascending."""
    return tuple(sorted({each.step for each in layers if each.step is not None}))


def ranks_of(layers: Iterable[CapturedLayer]) -> tuple[int, ...]:
    """The ranks that are told, ascending."""
    return tuple(sorted({each.rank for each in layers if each.rank is not None}))


def several(layers: Iterable[CapturedLayer]) -> str:
    """`3 steps (0 to 200) and 2 ranks`, as far as there are several that are told; empty where there are not."""
    listed = list(layers)
    steps, ranks = steps_of(listed), ranks_of(listed)
    parts = [f"{len(steps):,} steps ({steps[0]:,} to {steps[-1]:,})"] if len(steps) > 1 else []
    return " and ".join([*parts, *([f"{len(ranks):,} ranks"] if len(ranks) > 1 else [])])


def check_layers(where: Path, layers: Sequence[CapturedLayer], weights: Mapping[str, Shape] | None = None) -> None:
    """Raises InputError naming every captured tensor that cannot be what its role says, or does not fit its partners:
    no floats, no [tokens, features], no tokens, two of a role at one place, other counts of tokens, or features that
    are not those of the layer's weight: the captured one, or its shape [out, in] in `weights`."""
    _raise(where, [*_unfit(layers, weights or {}), *_repeated(layers)])


def check_pairs(where: Path, layers: Sequence[CapturedLayer], weights: Mapping[str, Shape] | None = None) -> None:
    """Raises InputError like `check_layers`, and naming every input without its gradient and every gradient without
    its input: both have to be of the same layer, step and rank."""
    groups = by_layer(layers)
    missing = (fault for each in layers if (fault := _missing(each, groups[each.layer])))
    _raise(where, [*_unfit(layers, weights or {}), *_repeated(layers), *missing])


def _raise(where: Path, faults: Iterable[str]) -> None:
    problems = [f"{printable(where)}: {fault}." for fault in faults]
    if problems:
        raise together(InputError, printable(where), problems)


def _unfit(layers: Sequence[CapturedLayer], weights: Mapping[str, Shape]) -> Iterator[str]:
    """What is wrong with each tensor and its partners; a weight may have been captured once for all steps."""
    captured = {each.layer: each.weight.shape for each in layers if each.weight is not None}
    for each in layers:
        yield from _faults(each, captured.get(each.layer, weights.get(each.layer)))


def _faults(each: CapturedLayer, weight: Shape | None) -> Iterator[str]:
    """What is wrong with the tensors of one place."""
    sound = True
    for role in (*OF_TOKENS, WEIGHT):
        info = each.of(role)
        if info is None:
            continue
        fault = shape_fault(info)
        if fault is None and not info.elements:
            fault = f"{list(info.shape)} has no {'elements' if role == WEIGHT else 'tokens'}; leave its layer out"
        if fault:
            sound = False
            yield f"{role} {printable(info.name)} {fault}"
    if not sound:
        return
    if each.activation and each.gradient and rows_of(each.activation) != rows_of(each.gradient):
        yield (
            f"{each.place}: {rows_of(each.activation):,} tokens of activations and {rows_of(each.gradient):,} of "
            "gradients; both must be of the same tokens"
        )
    if weight is not None and len(weight) == 2:
        yield from _strangers(each, weight)


def _strangers(each: CapturedLayer, weight: Shape) -> Iterator[str]:
    """Tensors whose features are not those of the weight [out, in]."""
    for info, features, word in (
        (each.activation, weight[1], "input"),
        (each.gradient, weight[0], "output gradient"),
    ):
        if info is not None and info.shape[-1] != features:
            yield (
                f"{printable(info.name)} {list(info.shape)} is no {word} of {printable(each.layer)}, which has "
                f"{features} features there"
            )


def _missing(each: CapturedLayer, others: Iterable[CapturedLayer]) -> str | None:
    """What an input or a gradient lacks: its partner, which may be of another step or rank."""
    lacking = [role for role in OF_TOKENS if each.of(role) is None]
    if len(lacking) != 1:
        return None
    has, needs = (GRADIENT, ACTIVATION) if lacking == [ACTIVATION] else (ACTIVATION, GRADIENT)
    elsewhere = next((other for other in others if other.of(needs) is not None and other.of(has) is None), None)
    if elsewhere is None:
        return f"{each.place}: its {has} has no {needs} beside it; capture both"
    return f"{each.place}: its {has} has its {needs} at {elsewhere.place}; both must be of the same step and rank"


def _repeated(layers: Iterable[CapturedLayer]) -> Iterator[str]:
    """Tensors of one role at one place: which belong together cannot be told."""
    first: dict[tuple[str, int | None, int | None], CapturedLayer] = {}
    for each in layers:
        held = first.setdefault((each.layer, each.step, each.rank), each)
        for role in (*OF_TOKENS, WEIGHT):
            one, other = held.of(role), each.of(role)
            if held is not each and one is not None and other is not None:
                yield (
                    f"{printable(one.name)} and {printable(other.name)} are both the {role} of {each.place}; give "
                    "them a step or rank of their own"
                )
