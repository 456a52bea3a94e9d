"""The arrangement of a plan in files: layout, shards, configuration and memory, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import GGUF
from mxcli.files.layouts import (
    COLUMN,
    MXCLI,
    PREFERRED,
    Entry,
    Layout,
    Weight,
    find_layout,
)
from mxcli.files.layouts.torchao import TORCHAO
from mxcli.files.loaders.conditions import CLASS_NAME
from mxcli.files.loaders.verdict import Verdict
from mxcli.files.model_files import CONFIG
from mxcli.files.model_folder import carried_tensors
from mxcli.files.outline import Destination, OutputOutline
from mxcli.files.shard_file import Shard
from mxcli.files.tensors import LARGEST, Array
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.plan.reasons import nothing_to_quantize
from mxcli.flows.write.cache_scheme import with_cache_scheme
from mxcli.flows.write.containers import CONTAINERS
from mxcli.flows.write.ignored import ignored_modules
from mxcli.flows.write.loading import loader_notes, loader_verdicts, loading_of
from mxcli.flows.write.misread import refuse_caught, refuse_stale
from mxcli.flows.write.refused import refused_weights
from mxcli.flows.write.sharding import Unit
from mxcli.flows.write.split import Piece, pieces_of, stack_module

LINEAR_ROLES = frozenset({"weight", "mtp"})
"""Roles of linear layers that loaders may join with others."""


@dataclass(frozen=True, slots=True)
class Task:
    """A planned tensor, its destination (None: none), and the pieces it is quantized in; without pieces it is copied,
    or omitted if it is tied."""

    planned: TensorPlan
    target: Destination | None
    pieces: tuple[Piece, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors to write."""
        return tuple(entry for unit in self.units for entry in unit)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The tensors to write, by pieces."""
        if self.pieces:
            return tuple(piece.entries for piece in self.pieces)
        if self.target is None or self.planned.tied_to is not None:
            return ()
        return ((Entry(self.target.name, self.target.dtype, self.planned.tensor.shape),),)

    @property
    def working_bytes(self) -> int:
        """Memory of the task: the tensor, a copy if it is transposed or reordered, and the output of its largest
        piece."""
        largest = max((piece.nbytes for piece in self.pieces), default=0)
        copied = self.planned.axis == COLUMN or (self.target is not None and self.target.reorder is not None)
        copy = self.planned.tensor.nbytes // max(1, len(self.pieces)) if copied else 0
        return self.planned.tensor.nbytes + copy + largest


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The output: the tasks in order, the shards they fill, and configuration files by name; `ignored` are the modules
    that stay plain, `constants` are tensors missing in the source. `loaders` are the verdicts of engines, `engines`
    those that it is made for, `devices` the number that it must divide over (None: not requested)."""

    layout: Layout
    tasks: tuple[Task, ...]
    shards: tuple[Shard, ...]
    configs: Mapping[str, Mapping[str, object]]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    constants: Mapping[str, Array] = field(default_factory=dict)
    loaders: tuple[Verdict, ...] = ()
    engines: tuple[str, ...] = ()
    devices: int | None = None

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """The plan of each tensor, with those kept that the layout cannot hold."""
        return tuple(task.planned for task in self.tasks)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The quantized weights."""
        return tuple(piece.weight for task in self.tasks for piece in task.pieces)

    @property
    def output_bytes(self) -> int:
        """Size of the shards in bytes."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def need(self) -> Need:
        """The memory: the largest task while the output of the previous one is being written."""
        pending = max(piece.nbytes for task in self.tasks for piece in task.pieces)
        recorded = sum(task.planned.scheme is not None for task in self.tasks)
        working = ((task.planned.tensor.name, task.working_bytes) for task in self.tasks)
        return need_of(working, pending, recorded=recorded)


@dataclass(frozen=True, slots=True)
class Manner:
    """The way an output is made: the most bytes of a file (None: as the source is split), the engines that must load
    it, the devices that it must divide over (None: not requested), and notes on what goes before."""

    max_shard_bytes: int | None = None
    engines: tuple[str, ...] = ()
    devices: int | None = None
    notes: tuple[str, ...] = ()


def arrange(
    checkpoint: Checkpoint,
    plan: Plan,
    layout: str | None = None,
    *,
    max_shard_bytes: int | None = None,
    engines: Sequence[str] = (),
    devices: int | None = None,
) -> Arrangement:
    """Arrange a plan in files; `layout` None: that of the plan's options, else the preferred one if it can hold the
    plan. Without `max_shard_bytes` the sharding of the source is kept. `engines` must load the output, divided over
    `devices`.

    Tensors that the layout cannot hold are kept, and single ones that an engine does not load in it, with a note.
    Raises RefusedError, with all problems at once, for a format or padding that a named layout cannot hold, for what
    one of the engines does not load otherwise, for names that would occur twice, and if nothing is quantized.
    """
    chosen = layout_of(checkpoint, plan, layout)
    _refuse_impossible(plan, chosen)
    outline = CONTAINERS[chosen.kind].outline(checkpoint, [each.tensor for each in plan.tensors])
    tasks = tuple(_task(each, chosen, checkpoint.config, outline.targets[each.tensor.name]) for each in plan.tensors)
    tasks = _whole_modules(tasks, chosen)
    if not any(task.pieces for task in tasks):
        infos, reasons = [task.planned.tensor for task in tasks], [task.planned.reason for task in tasks]
        refused = chosen is not MXCLI and any(each.scheme for each in plan.tensors)
        raise RefusedError(nothing_to_quantize(checkpoint.where, infos, reasons, in_other_layout=refused))
    notes = (*plan.notes, *_notes(plan, tasks, chosen, named=bool(layout or plan.options.layout)))
    tasks, engine_notes = _without_refused(tasks, chosen, checkpoint.config, engines, devices)
    manner = Manner(max_shard_bytes, tuple(engines), devices, (*notes, *engine_notes))
    return in_files(checkpoint, chosen, tasks, outline, manner)


def in_files(
    checkpoint: Checkpoint, layout: Layout, tasks: tuple[Task, ...], outline: OutputOutline, manner: Manner
) -> Arrangement:
    """Return tasks as the files of an output. Raises RefusedError like `arrange`."""
    units: dict[Path, list[Unit]] = {}
    for task in tasks:
        units.setdefault(task.planned.tensor.file, []).extend(task.units)
    kept = [task.planned.tensor for task in tasks if not task.pieces]
    weights = [piece.weight for task in tasks for piece in task.pieces]
    loading = loading_of(layout, weights, _plain_columns(tasks), checkpoint.config, manner.devices)
    loaders = loader_verdicts(loading, manner.engines)
    ignored = ignored_modules(
        [*kept, *carried_tensors(checkpoint.root, checkpoint.side_files)],
        checkpoint.tied,
        [weight.name for weight in weights],
    )
    settings = layout.settings(weights, ignored)
    configs: Mapping[str, Mapping[str, object]] = {
        # A source without configuration gets only the settings that describe the codes.
        CONFIG: {**(checkpoint.config or {}), **(dict.fromkeys(layout.settings_keys, settings) if settings else {})},
        **layout.extra_configs(weights, ignored),
    }
    configs, cache_notes = with_cache_scheme(configs, checkpoint, layout)
    refuse_caught(checkpoint, layout, configs, weights)
    limit = _limit(checkpoint, layout, manner.max_shard_bytes)
    filled = CONTAINERS[layout.kind].shards(checkpoint, outline, units, weights, limit)
    shards = _described(filled, tasks, layout, checkpoint.config)
    _refuse_divided(checkpoint, layout, shards)
    refuse_stale(checkpoint, kept, weights)
    remarks = (*layout.remarks(weights), *loader_notes(loading, loaders, manner.engines), *outline.remarks)
    configs = {name: content for name, content in configs.items() if content}
    return Arrangement(
        layout,
        tasks,
        shards,
        configs,
        ignored,
        (*manner.notes, *remarks, *cache_notes),
        outline.constants,
        loaders,
        manner.engines,
        manner.devices,
    )


def layout_of(checkpoint: Checkpoint, plan: Plan, layout: str | None = None) -> Layout:
    """Return the named layout, else that of the plan's options, else the preferred one if it can hold the plan."""
    name = layout or plan.options.layout
    if checkpoint.kind != GGUF:
        return find_layout(name) if name else _default_layout(checkpoint, plan)
    chosen = find_layout(name) if name else MXCLI
    if chosen is not MXCLI and chosen.kind != GGUF:
        raise RefusedError(
            f"{printable(checkpoint.where)}: a GGUF file has the tensor names and the q and k row order of llama.cpp, "
            f"which loaders of {chosen.name} do not read. Use --layout gguf or {MXCLI.name}, or quantize the "
            "checkpoint it was made from."
        )
    return chosen


def _limit(checkpoint: Checkpoint, layout: Layout, requested: int | None) -> int | None:
    """Return the size limit of shards (None: those of the source): none where loaders take one file."""
    return LARGEST if requested is None and layout.sole_file and len(checkpoint.files) > 1 else requested


def _refuse_divided(checkpoint: Checkpoint, layout: Layout, shards: Sequence[Shard]) -> None:
    """Raise RefusedError if a requested size divides a model whose loaders take one file."""
    if layout.sole_file and len(shards) > 1:
        total = sum(shard.data_bytes for shard in shards)
        raise RefusedError(
            f"{printable(checkpoint.where)}: loaders of the layout {layout.name} take one file, here with {total:,} "
            f"bytes of tensors; --max-shard-size makes {len(shards):,} of it. Omit it."
        )


def _plain_columns(tasks: Sequence[Task]) -> dict[str, int]:
    """Return the linear layers that stay plain, by name, with their columns."""
    return {
        task.target.name: task.planned.tensor.shape[-1]
        for task in tasks
        if not task.pieces and task.target is not None and len(task.planned.tensor.shape) == 2
        if task.planned.tensor.role in LINEAR_ROLES
    }


def _described(
    shards: tuple[Shard, ...], tasks: Sequence[Task], layout: Layout, config: Mapping[str, object] | None
) -> tuple[Shard, ...]:
    """Return the shards with the layout's metadata in each header. diffusers needs names of tensors outside modules in
    it, which transformers does not take."""
    weights = [piece.weight for task in tasks for piece in task.pieces]
    names = [entry.name for task in tasks if not task.pieces for entry in task.entries]
    metadata = layout.metadata(weights, [name for name in names if "." in name or CLASS_NAME in (config or {})])
    return tuple(replace(shard, metadata={**shard.metadata, **metadata}) for shard in shards)


def _task(planned: TensorPlan, layout: Layout, config: Mapping[str, object] | None, target: Destination | None) -> Task:
    if planned.scheme is None:
        return Task(planned, target)
    pieces = "it has no place for it" if target is None else pieces_of(planned, layout, config, target)
    if isinstance(pieces, str):
        return Task(_kept(planned, layout, pieces), target)
    return Task(planned, target, pieces)


def _whole_modules(tasks: tuple[Task, ...], layout: Layout) -> tuple[Task, ...]:
    """Return the tasks with a stack of experts quantized only if all stacks of its module are, where it is split or the
    layout holds whole stacks: loaders treat a module as quantized or plain as a whole."""
    modules = [stack_module(task.planned.tensor.name) for task in tasks]
    partly_kept = {module for module, task in zip(modules, tasks, strict=True) if module and not task.pieces}
    return tuple(
        Task(_kept(task.planned, layout, "another stack of its experts is kept"), task.target)
        if module in partly_kept and any(layout.whole_stacks or piece.expert is not None for piece in task.pieces)
        else task
        for module, task in zip(modules, tasks, strict=True)
    )


def _kept(planned: TensorPlan, layout: Layout, reason: str) -> TensorPlan:
    return _plain(planned, f"{layout.name} cannot hold it: {reason}")


def _without_refused(
    tasks: tuple[Task, ...],
    layout: Layout,
    config: Mapping[str, object] | None,
    engines: Sequence[str],
    devices: int | None,
) -> tuple[tuple[Task, ...], tuple[str, ...]]:
    """Return the tasks without the single layers that engines do not load in a layout, which stay plain, and a note."""
    pieces = [[piece.weight for piece in task.pieces] for task in tasks]
    loading = loading_of(layout, [weight for each in pieces for weight in each], _plain_columns(tasks), config, devices)
    together = [[weight.name for weight in each] for each in pieces if len(each) > 1]
    reasons = refused_weights(loading, engines, together) if engines else {}
    if not reasons:
        return tasks, ()
    kept = tuple(
        task
        if not task.pieces or task.pieces[0].weight.name not in reasons
        else Task(_plain(task.planned, reasons[task.pieces[0].weight.name]), task.target)
        for task in tasks
    )
    spared = [task.planned for task, new in zip(tasks, kept, strict=True) if task is not new]
    share = 100 * _elements(spared) / _elements(task.planned for task in tasks)
    which = f"'{printable(spared[0].tensor.name)}'{' and others' if len(spared) > 1 else ''}"
    count = f"{_elements(spared):,} parameters ({share:.1f} % of the model, {len(spared):,} tensors)"
    return kept, (f"{count} are not quantized, {which}: {next(iter(reasons.values()))}.",)


def _plain(planned: TensorPlan, reason: str) -> TensorPlan:
    return replace(planned, scheme=None, padded=False, group=None, reason=f"kept: {reason}")


def _default_layout(checkpoint: Checkpoint, plan: Plan) -> Layout:
    """Return the layout that diffusers loads for its models, else the preferred one, if it has every format; that of
    mxcli if it has not, and for what only that holds: padding, transforms, and blocks along columns by request."""
    if any(each.padded for each in plan.quantized) or _needs_own_layout(plan):
        return MXCLI
    preferred = (TORCHAO, PREFERRED) if CLASS_NAME in (checkpoint.config or {}) else (PREFERRED,)
    formats = _formats(plan.quantized)
    return next((layout for layout in preferred if formats <= set(layout.formats)), MXCLI)


def _needs_own_layout(plan: Plan) -> bool:
    return plan.options.rules.hadamard is not None or plan.options.axis == COLUMN


def _refuse_impossible(plan: Plan, layout: Layout) -> None:
    """Raise RefusedError for formats that a layout lacks, for padding that it does not store, and for missing input
    scales that it requires."""
    problems = [
        f"{name}: the layout {layout.name} cannot hold it; it holds {', '.join(layout.formats)}. Use --layout "
        f"{MXCLI.name} for any format."
        for name in sorted(_formats(plan.quantized) - set(layout.formats))
        if layout is not MXCLI
    ]
    problems += [
        f"{printable(each.tensor.name)} {list(each.tensor.shape)}: the layout {layout.name} stores no padding. Use "
        f"--layout {MXCLI.name} or --on-indivisible keep."
        for each in plan.quantized
        if each.padded and layout is not MXCLI
    ]
    problems += [
        f"{name}: loaders of the layout {layout.name} take a stored scale of each layer's inputs. Give captured inputs "
        f"with --captures, or use a format with dynamic input scales, such as {_without_input_scales(layout, name)}."
        for name in sorted({each.scheme.format.name for each in plan.quantized if each.scheme and not each.input_scale})
        if name in layout.needs_input_scales
    ]
    if problems:
        raise together(RefusedError, f"Not supported by the layout {layout.name}", problems)


def _without_input_scales(layout: Layout, name: str) -> str:
    """Return a format of a layout whose loaders need no stored scales of inputs, the most like another one first."""
    return next(
        each
        for each in (f"{name}_channel", *layout.formats)
        if each in layout.formats and each not in layout.needs_input_scales
    )


def _notes(plan: Plan, tasks: Sequence[Task], layout: Layout, *, named: bool) -> list[str]:
    """Return notes on weights kept because of the layout, and on a layout other than the preferred one."""
    unsupported = [each for each, task in zip(plan.tensors, tasks, strict=True) if each.scheme and not task.pieces]
    notes = []
    if unsupported:
        share = 100 * _elements(unsupported) / _elements(plan.tensors)
        notes.append(
            f"{_elements(unsupported):,} parameters ({share:.1f} % of the model, {len(unsupported):,} tensors) are not "
            f"quantized, since {layout.name} cannot hold "
            f"'{printable(unsupported[0].tensor.name)}'{' and others' if len(unsupported) > 1 else ''}. Use --layout "
            f"{MXCLI.name} to quantize them."
        )
    if not named and layout is TORCHAO:
        notes.append(f"Written in the layout {layout.name}, since diffusers does not load {PREFERRED.name}.")
    elif not named and layout is not PREFERRED:
        missing = sorted(_formats(plan.quantized) - set(PREFERRED.formats))
        padded = any(each.padded for each in plan.quantized) and not missing
        lacks = f"has no {', '.join(missing)}" if missing else "holds no transforms and no blocks along columns"
        reason = "stores no padding" if padded else lacks
        notes.append(f"Written in the layout {layout.name}, since {PREFERRED.name} {reason}.")
    return notes


def _formats(tensors: Sequence[TensorPlan]) -> set[str]:
    return {each.scheme.format.name for each in tensors if each.scheme is not None}


def _elements(tensors: Iterable[TensorPlan]) -> int:
    return sum(each.tensor.elements for each in tensors)
