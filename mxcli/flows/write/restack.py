"""Stacks of experts, put together again from the matrices of single experts that layouts store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN
from mxcli.files.models.names import names_of_model, parts_of, title_of_model
from mxcli.files.models.stacks import BEFORE_LAST, stack_row
from mxcli.files.record import read_record
from mxcli.files.record_schema import CONVERTED_FROM, REQUANTIZED_FROM
from mxcli.files.roles import role_of
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo, byte_count

if TYPE_CHECKING:
    from mxcli.flows.write.restore import PlainView

Recorded = TypeVar("Recorded")
STACKED_ON_DISK = frozenset(
    {"gemma4", "gemma4_text", "gpt_oss", "llama4", "llama4_text", "mistral4", "qwen3_vl_moe", "qwen3_vl_moe_text"}
)
"""Model types whose experts transformers 5.24 loads as stacks only, not one by one."""
_EXPERT = re.compile(r"(.+?\.experts)(?:\.experts)?\.(\d{1,9})\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a configuration that state the number of experts."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of stack: its name in a module, and the parts of an expert that it holds, below each other."""

    name: str
    parts: tuple[str, ...]
    parameter: str = "weight"


KINDS = (
    Kind("gate_up_proj", ("gate_proj", "up_proj")),
    Kind("down_proj", ("down_proj",)),
    Kind("gate_up_proj_bias", ("gate_proj", "up_proj"), "bias"),
    Kind("down_proj_bias", ("down_proj",), "bias"),
)
_OF_WEIGHTS = KINDS[:2]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stack to put together: its name, its kind, and how it is stored: matrices [in, out] if `transposed`, rows of
    gate and up in turn if they `alternate`. `shape` is the recorded one (None: not recorded)."""

    name: str
    kind: Kind
    transposed: bool
    alternates: bool = False
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack, the tensors of each expert that it is put together from, and how it is stored."""

    info: TensorInfo
    experts: tuple[tuple[TensorInfo, ...], ...]
    wanted: Wanted

    def read(self, plain: Checkpoint) -> Array:
        """Return the stack, read expert by expert."""
        stack: Array | None = None
        for number, parts in enumerate(self.experts):
            for place, part in enumerate(parts):
                x = read(plain, part)
                stack = np.empty(self.info.shape, x.dtype) if stack is None else stack
                rows = stack[number].T if self.wanted.transposed else stack[number]
                height = len(x)
                if self.wanted.alternates:
                    rows[place :: len(parts)] = x
                else:
                    rows[place * height : (place + 1) * height] = x
        assert stack is not None
        return stack


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of a plain view by name, and notes on what is stacked and what is not."""

    view: PlainView
    by_name: Mapping[str, Stack] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of the dequantized weights by name: of a stack if any part of it is dequantized."""
        found = self.view.dtypes
        stacked = {part.name: stack.info for stack in self.by_name.values() for part in _parts(stack)}
        return {stacked[name].name if name in stacked else name: dtype for name, dtype in found.items()}

    def working_bytes(self, info: TensorInfo) -> int:
        """Return the memory of reading a plain tensor: of a stack itself and one part of it."""
        stack = self.by_name.get(info.name)
        if stack is None:
            return self.view.working_bytes(info)
        return info.nbytes + max(self.view.working_bytes(part) for part in _parts(stack))

    def tensors(self) -> dict[str, TensorInfo]:
        """Return all plain tensors in order, each stack at the place of its first part."""
        stacked = {part.name: stack.info for stack in self.by_name.values() for part in _parts(stack)}
        placed = (stacked.get(name, info) for name, info in self.view.tensors.items())
        return {info.name: info for info in placed}

    def checkpoint(self, plain: Checkpoint) -> Checkpoint:
        """Return the plain checkpoint of the view with the stacks in the place of their parts."""

        def decoder(file: Path) -> Callable[[TensorInfo], Array]:
            def decode(info: TensorInfo) -> Array:
                stack = self.by_name.get(info.name)
                return plain.decoders[file](info) if stack is None else stack.read(plain)

            return decode

        files = {stack.info.file for stack in self.by_name.values()}
        decoders = {**plain.decoders, **{file: decoder(file) for file in files}}
        return replace(plain, tensors=self.tensors(), notes=(*plain.notes, *self.notes), decoders=decoders)


def _parts(stack: Stack) -> Iterator[TensorInfo]:
    for parts in stack.experts:
        yield from parts


def recorded_of(recorded: Mapping[str, Recorded], name: str) -> Recorded | None:
    """Return what is recorded of a weight: its own record, or that of the stack it is from; None without one."""
    match = None if name in recorded else _EXPERT.fullmatch(name)
    if match is None:
        return recorded.get(name)
    kinds = (kind for kind in KINDS if match[3] in kind.parts and match[4] == kind.parameter)
    names = [each for kind in kinds for each in _names(match[1], kind)]
    # Stacks of single parts, as MLX and GGUF have them.
    names += [
        f"{place}.{match[3]}.{match[4]}" for place in (match[1], f"{match[1].removesuffix('.experts')}.switch_mlp")
    ]
    return next((recorded[each] for each in names if each in recorded), None)


def stacks_of(view: PlainView) -> Stacks:
    """Return the stacks of experts that a source's matrices of single experts are from: those in its record, else those
    of its model if transformers loads it with stacks only. Matrices of other models keep their names."""
    modules: dict[str, dict[tuple[str, str], dict[int, TensorInfo]]] = {}
    for name, info in view.tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            modules.setdefault(match[1], {}).setdefault((match[3], match[4]), {})[int(match[2])] = info
    if not modules:
        return Stacks(view)
    record = read_record(view.source.root)
    recorded = {} if record is None else record.tensors
    by_model = record is None or any(record.content.get(key) for key in (REQUANTIZED_FROM, CONVERTED_FROM))
    found: dict[str, list[Stack]] = {"record": [], "model": []}
    problems: dict[str, str] = {}
    for module, parts in modules.items():
        why, wanted = "record", _recorded(view, recorded, module, parts)
        if not wanted and by_model:
            why, wanted = "model", _of_model(view, module, parts)
        stacks = [_stack(view, each, parts, counted=why == "model") for each in wanted]
        problem = next((each for each in stacks if isinstance(each, str)), None)
        if problem is not None:
            problems[module] = problem
        else:
            found[why] += [each for each in stacks if isinstance(each, Stack)]
    by_name = {stack.info.name: stack for stacks in found.values() for stack in stacks}
    return Stacks(view, by_name, tuple(_notes(view, found, problems)))


def _names(module: str, kind: Kind) -> tuple[str, ...]:
    return (f"{module}.{kind.name}", f"{module}.{kind.name}.weight")


def _recorded(
    view: PlainView,
    recorded: Mapping[str, Mapping[str, object]],
    module: str,
    parts: Mapping[tuple[str, str], object],
) -> list[Wanted]:
    """Return the stacks of a module that the record has as quantized and the source as single matrices; biases if the
    record has stacks of them and the source has single ones."""
    models, wanted = names_of_model(view.source.config), []
    for kind in _OF_WEIGHTS:
        for name in _names(module, kind):
            each = recorded.get(name, {})
            shape = each.get("shape")
            if each.get("decision") == "quantized" and name not in view.tensors and isinstance(shape, list):
                row = stack_row(name, (1, 1, 1), models)
                turns = row is not None and row.alternates and kind.parts != ("down_proj",)
                wanted.append(Wanted(name, kind, each.get("axis") == COLUMN, turns, shape=tuple(shape)))
    if all(each.kind.parts != _OF_WEIGHTS[0].parts for each in wanted):
        return []  # Stacks of single parts, as MLX has them, are not those of the model.
    for kind in KINDS[len(_OF_WEIGHTS) :]:
        name = f"{module}.{kind.name}"
        shape = recorded.get(name, {}).get("shape")
        if (kind.parts[0], kind.parameter) in parts and isinstance(shape, list):
            turns = any(each.alternates and each.kind.parts == kind.parts for each in wanted)
            wanted.append(Wanted(name, kind, transposed=False, alternates=turns, shape=tuple(shape)))
    return wanted


def _of_model(view: PlainView, module: str, parts: Mapping[tuple[str, str], object]) -> list[Wanted]:
    """Return the stacks of a module in a model that has them on disk; biases too if the source has any."""
    models = names_of_model(view.source.config) & STACKED_ON_DISK
    kinds = [kind for kind in KINDS if kind.parameter == "weight" or (kind.parts[0], kind.parameter) in parts]
    wanted = []
    for kind in kinds if models else ():
        row = stack_row(f"{module}.{kind.name.removesuffix('_bias')}", (1, 1, 1), models)
        if row is not None and f"{module}.{kind.name}" not in view.tensors:
            wanted.append(Wanted(f"{module}.{kind.name}", kind, row.axis == BEFORE_LAST, row.alternates))
    return wanted


def _stack(
    view: PlainView, wanted: Wanted, found: Mapping[tuple[str, str], Mapping[int, TensorInfo]], *, counted: bool
) -> Stack | str:
    """Return a stack, or the reason why it cannot be put together; with `counted`, the configuration must state the
    number of its experts."""
    of_part = [found.get((part, wanted.kind.parameter), {}) for part in wanted.kind.parts]
    count = max((max(each) + 1 for each in of_part if each), default=0)
    stated = _stated_counts(view) if counted else {wanted.shape[0] if wanted.shape else 0}
    if count not in stated:
        expected = " or ".join(f"{each:,}" for each in sorted(stated)) or "an unknown number"
        return f"the source has {count:,} of them; the model has {expected}"
    for part, each in zip(wanted.kind.parts, of_part, strict=True):
        missing = next((number for number in range(count) if number not in each), None)
        if missing is not None:
            return f"expert {missing:,} has no {part}.{wanted.kind.parameter}"
    experts = tuple(tuple(each[number] for each in of_part) for number in range(count))
    first = experts[0][0]
    other = next((info for each in experts for info in each if (info.shape, info.dtype) != _form(first)), None)
    if other is not None:
        return (
            f"{printable(other.name)} is {other.dtype} {list(other.shape)}, and {printable(first.name)} "
            f"{first.dtype} {list(first.shape)}"
        )
    rows, *columns = first.shape
    rows *= len(wanted.kind.parts)
    shape = (count, *columns, rows) if wanted.transposed and columns else (count, rows, *columns)
    if wanted.shape not in (None, shape):
        return f"they make a stack {list(shape)}; the record has {list(wanted.shape or ())}"
    role = role_of(wanted.name, shape, first.dtype)
    size = byte_count(first.dtype, shape)
    info = TensorInfo(wanted.name, first.dtype, shape, role, first.file, IN_MEMORY, size)
    return Stack(view.source.model.with_roles({info.name: info})[info.name], experts, wanted)


def _form(info: TensorInfo) -> tuple[tuple[int, ...], str]:
    return info.shape, info.dtype


def _stated_counts(view: PlainView) -> set[int]:
    """Return the numbers of experts that the configuration states."""
    values = (part.get(key) for part in parts_of(view.source.config) for key in _COUNTS)
    return {value for value in values if type(value) is int}


def _notes(view: PlainView, found: Mapping[str, Sequence[Stack]], problems: Mapping[str, str]) -> Iterator[str]:
    title = printable(title_of_model(view.source.config) or "")
    reasons = {
        "record": "as the record of the source has them",
        "model": f"as transformers loads models of type {title}",
    }
    for why, stacks in found.items():
        if stacks:
            matrices = sum(1 for stack in stacks for _ in _parts(stack))
            verb = "is" if len(stacks) == 1 else "are"
            yield (
                f"{len(stacks):,} {'stack' if len(stacks) == 1 else 'stacks'} of experts "
                f"('{printable(stacks[0].info.name)}'{', …' if len(stacks) > 1 else ''}) {verb} put together from "
                f"{matrices:,} tensors of single experts, {reasons[why]}."
            )
    if problems:
        module, reason = next(iter(problems.items()))
        more = f" and {len(problems) - 1:,} other modules" if len(problems) > 1 else ""
        yield (
            f"'{printable(module)}'{more}: the experts keep their own names and are not stacked, since {reason}. "
            "Loaders of this model expect stacks."
        )
