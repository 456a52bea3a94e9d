"""Stacks of experts of a source as matrices of single experts, and matrices as the stacks that a layout has.

Codes and scales of an expert are rows of those of its stack, so both ways are copies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN, ROW, Layout, Weight, quantized_from, refusal
from mxcli.files.models.names import names_of_model
from mxcli.files.models.stacks import stack_row
from mxcli.files.roles import role_of
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo, byte_count
from mxcli.flows.write.carried_scales import tensor_scale_of
from mxcli.flows.write.restack import Stack, stacks_of
from mxcli.flows.write.restore import PlainView, Renamed, StoredWeight
from mxcli.numerics.blocks import Quantized

_HALVES = ("gate_proj", "up_proj")
_TOGETHER = re.compile(r"(?P<module>.+\.experts)\.(?P<part>gate_up_proj|down_proj)(?:\.weight|(?P<bias>_bias))?")
_SINGLE = re.compile(
    r"(?P<module>.+)\.(?P<place>experts|switch_mlp)\.(?P<part>gate_proj|up_proj|down_proj)\.(?P<ending>weight|bias)"
)
_EXPERT = re.compile(
    r"(?P<module>.+)\.experts\.(?P<expert>\d{1,9})\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.(?P<ending>weight|bias)"
)
_OF_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""The parts of an expert by their names in stacks, and in modules called block_sparse_moe."""
_PART_OF = {short: part for part, short in _OF_MIXTRAL.items()}
_MIXTRAL = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a matrix within one expert of a stack: every `step`th from `first` on."""

    expert: int
    first: int = 0
    step: int = 1
    count: int = 0

    def of(self, x: Array) -> Array:
        """Return the rows of what is stored of the expert."""
        return x[self.first :: self.step][: self.count]


@dataclass(frozen=True, slots=True)
class OfStack(StoredWeight):
    """The matrix of one expert in a stored stack, whose contents are those of the whole stack."""

    stack: Weight | None = None
    rows: Rows = Rows(0)

    @property
    def nbytes(self) -> int:
        """Its share of the stack in bytes."""
        assert self.stack is not None
        whole = sum(content.entry.nbytes for content in self.contents)
        return whole * self.rows.count // (self.stack.shape[0] * self.stack.shape[1])

    def read(self, checkpoint: Checkpoint) -> Quantized:
        """Read the codes and scales of its expert, and return its rows."""
        assert self.stack is not None
        expert = replace(self.stack, shape=self.stack.shape[1:])
        arrays = []
        for content in self.contents:
            info = checkpoint.tensors[content.entry.name]
            is_stacked = len(info.shape) > 1
            arrays.append((content, read(checkpoint, info, self.rows.expert if is_stacked else None)))
        found = quantized_from(expert, arrays)
        packed, scales = self.rows.of(np.asarray(found.packed)), self.rows.of(np.asarray(found.scales))
        return replace(
            found,
            scheme=self.weight.scheme,
            shape=self.weight.shape,
            packed=np.ascontiguousarray(packed),
            scales=np.ascontiguousarray(scales),
        )


@dataclass(frozen=True, slots=True)
class StackOf(StoredWeight):
    """A stack that is put together from stored matrices: those of each expert, below each other or in turn if they
    `alternate`."""

    experts: tuple[tuple[StoredWeight, ...], ...] = ()
    alternate: bool = False

    @property
    def nbytes(self) -> int:
        """The size of its matrices in bytes."""
        return sum(part.nbytes for parts in self.experts for part in parts)

    @property
    def matrix(self) -> Weight:
        """The first of its matrices."""
        return self.experts[0][0].weight

    def read(self, checkpoint: Checkpoint) -> Quantized:
        """Read the codes and scales of all matrices."""
        packed: Array | None = None
        scales: Array | None = None
        found: Quantized | None = None
        for number, parts in enumerate(self.experts):
            for place, part in enumerate(parts):
                found = part.read(checkpoint)
                if packed is None or scales is None:
                    packed, scales = (
                        self._empty(np.asarray(each), len(parts)) for each in (found.packed, found.scales)
                    )
                self._rows(packed[number], place, len(parts))[:] = found.packed
                self._rows(scales[number], place, len(parts))[:] = found.scales
        assert found is not None
        assert packed is not None
        assert scales is not None
        return replace(found, scheme=self.weight.scheme, shape=self.weight.shape, packed=packed, scales=scales)

    def _empty(self, part: Array, parts: int) -> Array:
        return np.empty((len(self.experts), len(part) * parts, *part.shape[1:]), part.dtype)

    def _rows(self, expert: Array, place: int, parts: int) -> Array:
        height = len(expert) // parts
        return expert[place::parts] if self.alternate else expert[place * height : (place + 1) * height]


def split_stacks(view: PlainView, layout: Layout | None = None) -> PlainView:
    """Return a view in which stacks of experts are matrices of single experts: those of MLX and GGUF, and for a layout
    that does not hold them also those of Hugging Face."""
    parts: dict[str, list[_Piece]] = {}
    for name, info in view.tensors.items():
        pieces = _pieces(view, name, info, layout)
        if pieces:
            parts[name] = pieces
    if not parts:
        return view
    by_module: dict[str, list[_Piece]] = {}
    for pieces in parts.values():
        by_module.setdefault(pieces[0].module, []).extend(pieces)
    tensors: dict[str, TensorInfo] = {}
    for name, info in view.tensors.items():
        if name not in parts:
            tensors[name] = info
            continue
        # All matrices of a module follow each other, expert by expert.
        own = by_module.pop(parts[name][0].module, [])
        tensors |= {piece.info.name: piece.info for piece in sorted(own, key=lambda piece: piece.rows.expert)}
    weights = {name: stored for name, stored in view.weights.items() if name not in parts}
    foreign = {name: each for name, each in view.foreign.items() if name not in parts}
    renamed = {name: each for name, each in view.renamed.items() if name not in parts}
    for name, pieces in parts.items():
        for piece in pieces:
            own_name = piece.info.name
            if name in view.weights:
                weights[own_name] = _of_stack(view.weights[name], piece)
                continue
            renamed[own_name] = _renamed(view, name, piece, len(pieces))
            if name in view.foreign:
                plain = replace(view.foreign[name].plain, name=own_name, shape=piece.info.shape)
                foreign[own_name] = replace(view.foreign[name], plain=plain)
    tensors = view.source.model.with_roles(tensors)
    return replace(view, tensors=tensors, weights=weights, foreign=foreign, renamed=renamed)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A matrix, or bias, of one expert: the module of its stack, what it is called, and its rows in the stack."""

    module: str
    info: TensorInfo
    rows: Rows


def _pieces(view: PlainView, name: str, info: TensorInfo, layout: Layout | None) -> list[_Piece]:
    """Return the matrices of a stack; none for any other tensor, and for a stack that stays one."""
    single, together = _SINGLE.fullmatch(name), _TOGETHER.fullmatch(name)
    if single is not None and len(info.shape) == (3 if single["ending"] == "weight" else 2):
        names = [_name(single["module"], single["part"])]
        return _cut(view, name, info, f"{single['module']}.experts", names, single["ending"], alternate=False)
    if layout is None or together is None or len(info.shape) != (2 if together["bias"] else 3):
        return []
    row = stack_row(name.removesuffix("_bias"), (1, 1, 1), names_of_model(view.source.config))
    weight = f"{together['module']}.{together['part']}"
    stored = view.weights.get(weight) or view.weights.get(f"{weight}.weight")
    if stored is None or row is None or refusal(layout, replace(stored.weight, variant="")) is None:
        return []
    parts = _HALVES if together["part"] == "gate_up_proj" else ("down_proj",)
    ending = "bias" if together["bias"] else "weight"
    return _cut(view, name, info, together["module"], parts, ending, alternate=row.alternates)


def _name(module: str, part: str) -> str:
    return _OF_MIXTRAL[part] if module.rpartition(".")[2] == _MIXTRAL else part


def _cut(
    view: PlainView, name: str, info: TensorInfo, module: str, parts: Sequence[str], ending: str, *, alternate: bool
) -> list[_Piece]:
    stored = view.weights.get(name)
    if stored is not None and stored.weight.format.block[0] != 1:
        return []
    transposed = stored is not None and stored.weight.axis == COLUMN
    height = info.shape[-1] if transposed or ending == "bias" else info.shape[1]
    columns = () if ending == "bias" else (info.shape[-2] if transposed else info.shape[-1],)
    count = height // len(parts)
    found = []
    for expert in range(info.shape[0]):
        for place, part in enumerate(parts):
            own = f"{module}.{expert}.{part}.{ending}"
            rows = Rows(expert, place, len(parts), count) if alternate else Rows(expert, place * count, 1, count)
            shape = (count, *columns)
            size = byte_count(info.dtype, shape)
            role = role_of(own, shape, info.dtype)
            found.append(_Piece(module, TensorInfo(own, info.dtype, shape, role, info.file, IN_MEMORY, size), rows))
    return found if count * len(parts) == height else []


def _of_stack(stored: StoredWeight, piece: _Piece) -> OfStack:
    weight = replace(stored.weight, name=piece.info.name, shape=piece.info.shape, axis=ROW)
    return OfStack(weight, stored.contents, None, replace(stored.weight, axis=ROW), piece.rows)


def _renamed(view: PlainView, name: str, piece: _Piece, share: int) -> Renamed:
    """Return how a plain or foreign matrix of an expert is read, one of a `share` of its stack."""
    before = view.renamed.get(name)
    return Renamed(
        view.stored_name(name),
        partial(_rows_of, piece.rows, None if before is None else before.made_of),
        at=piece.rows.expert,
        share=share,
    )


def _rows_of(rows: Rows, made_of: Callable[[Array], Array] | None, x: Array) -> Array:
    return np.ascontiguousarray(rows.of(x if made_of is None else made_of(x)))


def left_single(view: PlainView, name: str, layout: Layout) -> bool:
    """Return whether a weight is that of a single expert where loaders of a layout take stacks."""
    return layout.stack_names(view.source.config or {}) is not None and _EXPERT.fullmatch(name) is not None


def join_experts(view: PlainView, layout: Layout) -> PlainView:
    """Return a view in which matrices of single experts are the stacks that loaders of a layout take; matrices that
    make no whole stack stay as they are."""
    if layout.whole_stacks:
        return _joined(view, layout, [_as_in_model(stack) for stack in stacks_of(view).by_name.values()])
    names = layout.stack_names(view.source.config or {})
    return view if names is None else _joined(view, layout, list(_alike(view, names)))


@dataclass(frozen=True, slots=True)
class _Join:
    """A stack to put together: its name, its matrices or biases by expert, and how they are stored in it."""

    name: str
    experts: tuple[tuple[str, ...], ...]
    axis: str = ROW
    alternate: bool = False

    @property
    def parts(self) -> Iterator[str]:
        """The names of all of its matrices."""
        for parts in self.experts:
            yield from parts


def _as_in_model(stack: Stack) -> _Join:
    names = tuple(tuple(part.name for part in parts) for parts in stack.experts)
    axis = COLUMN if stack.wanted.transposed and len(stack.info.shape) == 3 else ROW
    return _Join(stack.info.name, names, axis, stack.wanted.alternates)


def _alike(view: PlainView, names: str) -> Iterator[_Join]:
    """Yield a stack for each part of the experts of a module, if all of its experts have it."""
    found: dict[str, dict[int, str]] = {}
    for name in view.tensors:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            part = _PART_OF.get(match["part"], match["part"])
            stack = names.format(module=match["module"], part=part)
            found.setdefault(f"{stack}.{match['ending']}", {})[int(match["expert"])] = name
    for name, experts in found.items():
        if sorted(experts) == list(range(len(experts))):
            yield _Join(name, tuple((experts[number],) for number in sorted(experts)))


def _joined(view: PlainView, layout: Layout, joins: Sequence[_Join]) -> PlainView:
    tensors, weights, renamed = dict(view.tensors), dict(view.weights), dict(view.renamed)
    places: dict[str, TensorInfo] = {}
    taken: set[str] = set()
    for join in joins:
        names = list(join.parts)
        if len({_form(view, layout, name) for name in names}) != 1:
            continue
        first = view.tensors[names[0]]
        shape = (len(join.experts), first.shape[0] * len(join.experts[0]), *first.shape[1:])
        plain = (*shape[:-2], shape[-1], shape[-2]) if join.axis == COLUMN else shape
        size = byte_count(first.dtype, plain)
        role = role_of(join.name, plain, first.dtype)
        places[names[0]] = TensorInfo(join.name, first.dtype, plain, role, first.file, IN_MEMORY, size)
        taken |= set(names)
        if names[0] in view.weights:
            weights[join.name] = _stack_of(view, join, shape)
        elif names[0] not in view.foreign:
            renamed[join.name] = _plain_stack(view, join)
    placed = (places.get(name, info) for name, info in tensors.items() if name in places or name not in taken)
    kept = view.source.model.with_roles({info.name: info for info in placed})
    return replace(
        view,
        tensors=kept,
        weights={name: stored for name, stored in weights.items() if name not in taken},
        renamed={name: each for name, each in renamed.items() if name not in taken},
    )


def _form(view: PlainView, layout: Layout, name: str) -> tuple[object, ...]:
    """Return what matrices of a stack have in common; a tensor scale of its own makes a matrix unlike all others,
    unless it is 1 and the layout stores none."""
    info, stored = view.tensors[name], view.weights.get(name)
    if name in view.foreign:
        return (name,)
    if stored is None:
        return info.shape, info.dtype, None
    scheme = stored.weight.scheme
    is_alone = scheme.format.tensor_scale is None or (
        scheme.format.name not in layout.formats and tensor_scale_of(view.source, stored).is_one
    )
    return info.shape, info.dtype, scheme, None if is_alone else name


def _stack_of(view: PlainView, join: _Join, shape: tuple[int, ...]) -> StackOf:
    experts = tuple(tuple(view.weights[name] for name in parts) for parts in join.experts)
    weight = replace(experts[0][0].weight, name=join.name, shape=shape, axis=join.axis, input_scale=None)
    contents = tuple(content for parts in experts for part in parts for content in part.contents)
    return StackOf(weight, contents, None, experts, join.alternate)


def _plain_stack(view: PlainView, join: _Join) -> Renamed:
    """Return how a stack of plain matrices, or of biases, is read."""
    names = list(join.parts)
    makes = [view.renamed[name].made_of if name in view.renamed else None for name in names]
    places = [view.renamed[name].at if name in view.renamed else None for name in names]
    stored = [view.stored_name(name) for name in names]
    return Renamed(
        stored[0],
        partial(_put_together, join, makes),
        at=places[0],
        others=tuple(zip(stored[1:], places[1:], strict=True)),
    )


def _put_together(join: _Join, makes: Sequence[Callable[[Array], Array] | None], *arrays: Array) -> Array:
    made = iter([x if make is None else make(x) for x, make in zip(arrays, makes, strict=True)])
    experts = []
    for parts in join.experts:
        own = [next(made) for _ in parts]
        if join.alternate and len(own) > 1:
            experts.append(np.stack(own, axis=1).reshape(-1, *own[0].shape[1:]))
        else:
            experts.append(np.concatenate(own))
    stack = np.stack(experts)
    return np.ascontiguousarray(np.swapaxes(stack, -1, -2)) if join.axis == COLUMN else stack
