"""Differences of two checkpoints, tensor by tensor: in codes, scales and values, and the rules that explain them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.models.fused import fused_sets
from mxcli.files.selection import Rule, select
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.verify.diff_blocks import (
    NOTHING,
    BlockDifference,
    Explanation,
    block_difference,
    explanation,
    no_difference,
)
from mxcli.flows.verify.diff_rules import NO_STEPS, CodeSteps, code_steps
from mxcli.flows.verify.errors import Distance, distance, same_bytes
from mxcli.flows.verify.sides import Side
from mxcli.flows.write.pipeline import Progress
from mxcli.flows.write.restore import StoredWeight, values_of
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.hadamard import Hadamard

EQUAL, ONLY_A, ONLY_B = "equal", "only in A", "only in B"
CODES, SCALES, TENSOR_SCALE = "codes", "scales", "tensor scale"
SHAPE, FORMAT, DTYPE, VALUES = "shape", "format", "dtype", "values"
AXIS, TRANSFORM = "axis", "transform"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Treatment:
    """The axis of a weight's blocks, and its transform (None: none)."""

    axis: str
    hadamard: Hadamard | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a tensor: its kinds and shapes in A and B, and what `differs` (nothing: equal).

    `blocks` are counts if both have the same format, axis, transform and shape; others have no comparable codes and
    scales. `treatments` are set if both are quantized. `distance` is that of B's values from A's, if both have values
    of the same shape and something differs or is stored differently. `by_record`: it is equal by the hashes that both
    records have, and was not read.
    """

    name: str
    kinds: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    differs: tuple[str, ...]
    blocks: BlockDifference | None = None
    distance: Distance | None = None
    treatments: tuple[Treatment, Treatment] | None = None
    by_record: bool = False

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return not self.differs


@dataclass(frozen=True, slots=True)
class SideSummary:
    """A side in numbers; `kind` is that of its files."""

    name: str
    kind: str
    layout: str | None
    total: Total
    by_dtype: Mapping[str, Total]


@dataclass(frozen=True, slots=True)
class Diff:
    """The tensors of both, in the order of A, then of B; `explanations` by format, for those with power-of-two scales
    of which some differ; `code_steps` by format, of the weights whose codes differ. `fused` counts the fused sets that
    share a tensor scale in A only, and in B only."""

    sides: tuple[SideSummary, SideSummary]
    tensors: tuple[Difference, ...]
    explanations: Mapping[str, Explanation]
    fused: tuple[int, int]
    code_steps: Mapping[str, CodeSteps] = field(default_factory=dict)

    @property
    def differing(self) -> tuple[Difference, ...]:
        """The tensors that are not equal."""
        return tuple(each for each in self.tensors if not each.is_equal)

    @property
    def counts(self) -> Mapping[str, int]:
        """Tensors by what differs; a tensor may be counted several times."""
        return Counter(word for each in self.tensors for word in (each.differs or (EQUAL,)))


def memory_to_diff(a: Side, b: Side) -> Need:
    """Return the memory of `diff_sides`: a weight as stored and its values, of both sides."""
    return need_of((name, _working_bytes(a, name) + _working_bytes(b, name)) for name in (*a.tensors, *b.tensors))


def diff_sides(
    a: Side,
    b: Side,
    *,
    backend: Backend,
    selectors: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints, or only the tensors that some selector matches.

    Raises UsageError for a selector that matches nothing.
    """
    names = _names(a, b, selectors)
    sizes = {name: _size(a, name) + _size(b, name) for name in names}
    found, scales = list[Difference](), _Scales(a)
    explained: dict[str, Explanation] = {}
    steps: dict[str, CodeSteps] = {}
    total, done = sum(sizes.values()), 0
    for name in names:
        difference, pair = _difference(a, b, name, backend)
        found.append(difference)
        if pair is not None:
            scales.add(name, *map(_tensor_scales, pair), differs=TENSOR_SCALE in difference.differs)
            if difference.blocks is not None and difference.blocks.scales:
                fmt = pair[0].format.name
                explained[fmt] = explained.get(fmt, NOTHING) + explanation(*pair)
            if CODES in difference.differs and TENSOR_SCALE not in difference.differs:
                fmt = pair[0].format.name
                steps[fmt] = steps.get(fmt, NO_STEPS) + code_steps(*pair)
        elif difference.by_record and (stored := a.stored(name)) is not None:
            parts = _only_tensor_scales(a.checkpoint, stored)
            scales.add(name, parts, parts, differs=False)
        done += sizes[name]
        if on_progress is not None:
            on_progress(done, total, name)
    known = {fmt: each for fmt, each in explained.items() if each.blocks}
    return Diff((_side_summary(a), _side_summary(b)), tuple(found), known, scales.fused_in_one, steps)


_TensorScales = tuple[float, float | None]
"""The encode and the decode scale of a tensor."""


def _tensor_scales(q: Quantized) -> _TensorScales | None:
    return None if q.format.tensor_scale is None else (q.tensor_encode, q.tensor_scale)


def _only_tensor_scales(checkpoint: Checkpoint, stored: StoredWeight) -> _TensorScales | None:
    """Read the tensor scales of a weight, and nothing else of it."""
    if stored.weight.format.tensor_scale is None:
        return None
    fields: dict[str, Any] = {"tensor_scale": None, "tensor_encode": 1.0}
    for content in stored.contents:
        if content.holds.name in ("encode", "decode"):
            array = read(checkpoint, checkpoint.tensors[content.entry.name])
            fields |= content.holds.load(array, stored.weight.format, stored.weight.shape)
    return fields["tensor_encode"], fields["tensor_scale"]


class _Scales:
    """Tensor scales of both sides, by weight."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._scales: dict[str, tuple[_TensorScales, _TensorScales]] = {}
        self._differing: set[str] = set()

    def add(self, name: str, a: _TensorScales | None, b: _TensorScales | None, *, differs: bool) -> None:
        """Record the tensor scales of a weight, if it has any, and whether they differ."""
        if a is not None and b is not None:
            self._scales[name] = a, b
            self._differing |= {name} if differs else set()

    @property
    def fused_in_one(self) -> tuple[int, int]:
        """Numbers of fused sets that share a tensor scale in A only, and in B only. Sets without a differing scale are
        skipped: they are stored differently, for instance as a number and its inverse, but equal."""
        only = [0, 0]
        columns = {name: self._side.tensors[name].shape[-1] for name in self._scales}
        for members in fused_sets(self._side.checkpoint.config).among(columns).values():
            if self._differing.isdisjoint(members):
                continue
            shared = [len({self._scales[name][at] for name in members}) == 1 for at in (0, 1)]
            if shared[0] != shared[1]:
                only[shared.index(True)] += 1
        return only[0], only[1]


def _names(a: Side, b: Side, selectors: Sequence[str]) -> list[str]:
    tensors = {**b.tensors, **a.tensors}
    names = list(dict.fromkeys((*a.tensors, *b.tensors)))
    if not selectors:
        return names
    roles = {info.role for info in tensors.values()}
    taken = set(select(tensors, [Rule(True, selector) for selector in selectors], roles).taken)
    return [name for name in names if name in taken]


def _difference(a: Side, b: Side, name: str, backend: Backend) -> tuple[Difference, tuple[Quantized, Quantized] | None]:
    """Return the difference of a tensor, and both quantized forms if they have the same format and shape."""
    kinds = a.kind(name), b.kind(name)
    infos = a.tensors.get(name), b.tensors.get(name)
    shapes = tuple(None if info is None else info.shape for info in infos)
    first = Difference(name, kinds, (shapes[0], shapes[1]), ())
    if infos[0] is None or infos[1] is None:
        return replace(first, differs=(ONLY_B if infos[0] is None else ONLY_A,)), None
    if shapes[0] != shapes[1]:
        return replace(first, differs=(SHAPE,)), None
    ours, theirs = a.stored(name), b.stored(name)
    if ours is None and theirs is None:
        return _plain_difference(a, b, infos[0], infos[1], first), None
    measure = _distance(a, b, name, backend)
    if ours is None or theirs is None:
        return replace(first, differs=(FORMAT,), distance=measure()), None
    first = replace(first, treatments=(_treatment(ours), _treatment(theirs)))
    if properties := _incomparable(ours, theirs):
        return replace(first, differs=properties, distance=measure()), None
    if _are_recorded_equal(a, b, ours, theirs):
        same = no_difference(ours.weight.format, ours.weight.shape)
        return replace(first, blocks=same, by_record=True), None
    pair = _quantized(a.checkpoint, ours), _quantized(b.checkpoint, theirs)
    blocks = block_difference(*pair)
    words = {CODES: blocks.codes, SCALES: blocks.scales, TENSOR_SCALE: blocks.tensor_scales}
    differs = tuple(word for word, some in words.items() if some)
    measured = measure() if differs or a.layout != b.layout else None
    return replace(first, differs=differs, blocks=blocks, distance=measured), pair


def _are_recorded_equal(a: Side, b: Side, ours: StoredWeight, theirs: StoredWeight) -> bool:
    """Return whether both records have the same hashes for all parts of a weight, stored in the same way."""
    if a.layout != b.layout or ours.weight.variant != theirs.weight.variant:
        return False
    one, other = (
        {(part.holds.name, part.entry.dtype): part.entry.name for part in each.contents} for each in (ours, theirs)
    )
    return one.keys() == other.keys() and _have_same_hash(a, b, [(one[key], other[key]) for key in one])


def _have_same_hash(a: Side, b: Side, names: Iterable[tuple[str, str]]) -> bool:
    pairs = [(a.recorded.get(one), b.recorded.get(other)) for one, other in names]
    return all(one is not None and other is not None and one.xxh3 == other.xxh3 for one, other in pairs)


def _treatment(stored: StoredWeight) -> Treatment:
    return Treatment(stored.weight.axis, stored.weight.scheme.hadamard)


def _incomparable(ours: StoredWeight, theirs: StoredWeight) -> tuple[str, ...]:
    """Return the properties in which two weights differ so that their codes and scales are not comparable."""
    one, other = _treatment(ours), _treatment(theirs)
    properties = {
        FORMAT: ours.weight.format != theirs.weight.format,
        AXIS: one.axis != other.axis,
        TRANSFORM: one.hadamard != other.hadamard or bool(ours.weight.adjusting or theirs.weight.adjusting),
    }
    return tuple(word for word, differs in properties.items() if differs)


def _plain_difference(a: Side, b: Side, ours: TensorInfo, theirs: TensorInfo, first: Difference) -> Difference:
    if ours.dtype == theirs.dtype:
        if _have_same_hash(a, b, [(ours.name, theirs.name)]):
            return replace(first, by_record=True)
        x, y = a.read(ours), b.read(theirs)
        if same_bytes(x, y):
            return first
        measured = distance(x, ours.dtype, y, theirs.dtype) if ours.dtype in _FLOATS else None
        return replace(first, differs=(VALUES,), distance=measured)
    both = ours.dtype in _FLOATS and theirs.dtype in _FLOATS
    measured = distance(a.read(ours), ours.dtype, b.read(theirs), theirs.dtype) if both else None
    return replace(first, differs=(DTYPE,), distance=measured)


def _quantized(checkpoint: Checkpoint, stored: StoredWeight) -> Quantized:
    return stored.read(checkpoint)


def _distance(a: Side, b: Side, name: str, backend: Backend) -> Callable[[], Distance | None]:
    """Return a function that computes the distance of B's values from A's; None if one has no floating-point values."""

    def compute() -> Distance | None:
        (x, x_dtype), (y, y_dtype) = (_values(side, name, backend) for side in (a, b))
        return None if x is None or y is None else distance(x, x_dtype, y, y_dtype)

    return compute


def _values(side: Side, name: str, backend: Backend) -> tuple[Array | None, str]:
    stored, info = side.stored(name), side.tensors[name]
    if stored is not None:
        return values_of(side.checkpoint, stored, backend), stored.weight.dtype
    if side.view is not None and name in side.view.foreign:
        return read(side.view.checkpoint(backend), info), info.dtype
    return (read(side.checkpoint, info), info.dtype) if info.dtype in _FLOATS else (None, info.dtype)


def _side_summary(side: Side) -> SideSummary:
    infos = side.checkpoint.tensors.values()
    return SideSummary(
        side.name, side.checkpoint.kind, side.layout, Total.of(infos), totals_by(lambda info: info.dtype, infos)
    )


def _size(side: Side, name: str) -> int:
    stored = side.stored(name)
    if stored is not None:
        return stored.nbytes
    return side.tensors[name].nbytes if name in side.tensors else 0


def _working_bytes(side: Side, name: str) -> int:
    stored = side.stored(name)
    if stored is not None:
        return stored.working_bytes + stored.nbytes
    return side.tensors[name].nbytes if name in side.tensors else 0
