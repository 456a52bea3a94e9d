"""Captured tensors grouped by layer, step and rank, and the check that they fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.captures import OF_TOKENS, Capture, recorded_number, rows_of, shape_fault
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.files.tensors import TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """The tensors captured of a layer at one step on one rank (None if unrecorded): X, its input, dY, the gradient of
    the loss with respect to its output, and W [out, in]; tokens are the rows of X and dY."""

    layer: str
    step: int | None = None
    rank: int | None = None
    activation: TensorInfo | None = None
    gradient: TensorInfo | None = None
    weight: TensorInfo | None = None

    def of(self, role: str) -> TensorInfo | None:
        """Return the tensor of a captured role."""
        found: TensorInfo | None = getattr(self, role)
        return found

    @property
    def tokens(self) -> int:
        """Return the rows of the input, or of the gradient if there is no input."""
        held = self.activation or self.gradient
        return rows_of(held) if held else 0

    @property
    def label(self) -> str:
        """Return the layer, step and rank in words."""
        parts = (("step", self.step), ("rank", self.rank))
        return ", ".join([printable(self.layer), *(f"{name} {number}" for name, number in parts if number is not None)])


def captured_layers(tensors: Mapping[str, TensorInfo], records: Mapping[str, Capture]) -> tuple[CapturedLayer, ...]:
    """Group everything captured, by layer in the order of the source, then step, then rank.

    A second tensor of one role at the same layer, step and rank starts another group; `check_layers` refuses such a
    source.
    """
    found: dict[tuple[str, int | None, int | None, int], CapturedLayer] = {}
    before = Counter[tuple[str, int | None, int | None, str]]()
    for name, record in records.items():
        info = tensors.get(name)
        if info is None:
            continue
        layer, role = str(record["layer"]), str(record["role"])
        step, rank = recorded_number(record, "step"), recorded_number(record, "rank")
        key = (layer, step, rank, before[layer, step, rank, role])
        before[layer, step, rank, role] += 1
        found[key] = _WITH[role](found.get(key) or CapturedLayer(layer, step, rank), info)
    order = {layer: at for at, layer in enumerate(dict.fromkeys(each.layer for each in found.values()))}
    return tuple(
        sorted(found.values(), key=lambda each: (order[each.layer], none_first(each.step), none_first(each.rank)))
    )


_WITH: Mapping[str, Callable[[CapturedLayer, TensorInfo], CapturedLayer]] = {
    ACTIVATION: lambda layer, info: replace(layer, activation=info),
    GRADIENT: lambda layer, info: replace(layer, gradient=info),
    WEIGHT: lambda layer, info: replace(layer, weight=info),
}


def none_first(number: int | None) -> int:
    """Return a step or rank as a sort key: unrecorded ones come first."""
    return -1 if number is None else number


def by_layer(layers: Iterable[CapturedLayer], role: str | None = None) -> dict[str, list[CapturedLayer]]:
    """Group the records by layer, all or those that hold a role."""
    found: dict[str, list[CapturedLayer]] = {}
    for each in layers:
        if role is None or each.of(role) is not None:
            found.setdefault(each.layer, []).append(each)
    return found


def steps_of(layers: Iterable[CapturedLayer]) -> tuple[int, ...]:
    """Return the recorded steps, ascending."""
    return tuple(sorted({each.step for each in layers if each.step is not None}))


def ranks_of(layers: Iterable[CapturedLayer]) -> tuple[int, ...]:
    """Return the recorded ranks, ascending."""
    return tuple(sorted({each.rank for each in layers if each.rank is not None}))


def steps_and_ranks(layers: Iterable[CapturedLayer]) -> str:
    """Return `3 steps (0 to 200) and 2 ranks`, each part only if there are several; else an empty string."""
    listed = list(layers)
    steps, ranks = steps_of(listed), ranks_of(listed)
    parts = [f"{len(steps):,} steps ({steps[0]:,} to {steps[-1]:,})"] if len(steps) > 1 else []
    return " and ".join([*parts, *([f"{len(ranks):,} ranks"] if len(ranks) > 1 else [])])


def check_layers(where: Path, layers: Sequence[CapturedLayer], weights: Mapping[str, Shape] | None = None) -> None:
    """Raise InputError naming every captured tensor that does not fit its role or its partners: not floats, not
    [tokens, features], no tokens, two of a role at one layer, step and rank, different token counts, or features other
    than those of the layer's weight: the captured one, or its shape [out, in] in `weights`."""
    _raise(where, [*_unfit(layers, weights or {}), *_repeated(layers)])


def check_pairs(where: Path, layers: Sequence[CapturedLayer], weights: Mapping[str, Shape] | None = None) -> None:
    """Raise InputError like `check_layers`, also naming every input without its gradient and every gradient without its
    input: both must be of the same layer, step and rank."""
    groups = by_layer(layers)
    missing = (fault for each in layers if (fault := _missing(each, groups[each.layer])))
    _raise(where, [*_unfit(layers, weights or {}), *_repeated(layers), *missing])


def _raise(where: Path, faults: Iterable[str]) -> None:
    problems = [f"{printable(where)}: {fault}." for fault in faults]
    if problems:
        raise together(InputError, printable(where), problems)


def _unfit(layers: Sequence[CapturedLayer], weights: Mapping[str, Shape]) -> Iterator[str]:
    """Yield the faults of each tensor and its partners; a weight may have been captured once for all steps."""
    captured = {each.layer: each.weight.shape for each in layers if each.weight is not None}
    for each in layers:
        yield from _faults(each, captured.get(each.layer, weights.get(each.layer)))


def _faults(each: CapturedLayer, weight: Shape | None) -> Iterator[str]:
    """Yield the faults of the tensors of one layer, step and rank."""
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
            f"{each.label}: {rows_of(each.activation):,} tokens of activations and {rows_of(each.gradient):,} of "
            "gradients; both must be of the same tokens"
        )
    if weight is not None and len(weight) == 2:
        yield from _wrong_features(each, weight)


def _wrong_features(each: CapturedLayer, weight: Shape) -> Iterator[str]:
    """Yield tensors whose features are not those of the weight [out, in]."""
    for info, features, word in (
        (each.activation, weight[1], "input"),
        (each.gradient, weight[0], "output gradient"),
    ):
        if info is not None and info.shape[-1] != features:
            yield (
                f"{printable(info.name)} {list(info.shape)} is not an {word} of {printable(each.layer)}, which has "
                f"{features} features there"
            )


def _missing(each: CapturedLayer, others: Iterable[CapturedLayer]) -> str | None:
    """Return the missing partner of an input or gradient, which may be at another step or rank."""
    lacking = [role for role in OF_TOKENS if each.of(role) is None]
    if len(lacking) != 1:
        return None
    has, needs = (GRADIENT, ACTIVATION) if lacking == [ACTIVATION] else (ACTIVATION, GRADIENT)
    elsewhere = next((other for other in others if other.of(needs) is not None and other.of(has) is None), None)
    if elsewhere is None:
        return f"{each.label}: its {has} has no {needs}; capture both"
    return f"{each.label}: its {has} has its {needs} at {elsewhere.label}; both must be of the same step and rank"


def _repeated(layers: Iterable[CapturedLayer]) -> Iterator[str]:
    """Yield tensors of one role at the same layer, step and rank: they are ambiguous."""
    first: dict[tuple[str, int | None, int | None], CapturedLayer] = {}
    for each in layers:
        held = first.setdefault((each.layer, each.step, each.rank), each)
        for role in (*OF_TOKENS, WEIGHT):
            one, other = held.of(role), each.of(role)
            if held is not each and one is not None and other is not None:
                yield (
                    f"{printable(one.name)} and {printable(other.name)} are both the {role} of {each.label}; give "
                    "them a step or rank of their own"
                )
