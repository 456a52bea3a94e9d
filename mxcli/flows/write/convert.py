"""Conversion of a quantized checkpoint to another layout: codes and scales are carried over as they are, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.accounting import ACCOUNTING, Accounting
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import GGUF
from mxcli.files.layouts import Layout
from mxcli.files.outline import OutputOutline
from mxcli.files.record import OutputRecord
from mxcli.files.record_schema import CONVERTED, CONVERTED_FROM, ORIGIN
from mxcli.files.tensors import Array
from mxcli.flows.doctor import own_version
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.plan.plan import TensorPlan
from mxcli.flows.write.accounting import accounting_of, converted_tensors
from mxcli.flows.write.arrange import Arrangement, Manner, Task, in_files
from mxcli.flows.write.carried import Carried, carried_weights
from mxcli.flows.write.containers import CONTAINERS
from mxcli.flows.write.conversion_notes import conversion_notes
from mxcli.flows.write.converted_record import ROUNDED, origin_of, rounded_before, source_record, tensor_records
from mxcli.flows.write.experts import join_experts, split_stacks
from mxcli.flows.write.hugging_face import as_hugging_face, has_other_names
from mxcli.flows.write.pipeline import Outcome, Work, WriteJob, WriteOptions, write_checkpoint
from mxcli.flows.write.quantize import constant_jobs, copy_job
from mxcli.flows.write.records import fingerprint
from mxcli.flows.write.restore import PlainView, omission_notes, plain_view
from mxcli.flows.write.split import Piece

_CARRIED, _KEPT = "its codes and scales are those of the source", "plain in the source"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A planned conversion: the plain view of the source without the scales of inputs that are carried, the weights as
    carried, the output, and the source's record if it states their rules. `replaced` are tensors of the source that
    are divided or put together, `made` what they are then."""

    view: PlainView
    carried: Mapping[str, Carried]
    arrangement: Arrangement
    known: OutputRecord | None = None
    replaced: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def need(self) -> Need:
        """The memory: a weight as stored and as written, while the previous one is being written."""
        pieces = {task.planned.tensor.name: piece for task in self.arrangement.tasks for piece in task.pieces}
        working = ((name, each.stored.nbytes * 2 + pieces[name].nbytes) for name, each in self.carried.items())
        others = ((task.planned.tensor.name, task.working_bytes) for task in self.arrangement.tasks if not task.pieces)
        return need_of((*working, *others), max(piece.nbytes for piece in pieces.values()))

    @property
    def formats(self) -> dict[str, int]:
        """The number of weights by format."""
        names = [each.weight.format.name for each in self.carried.values()]
        return {name: names.count(name) for name in dict.fromkeys(names)}


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a run: the plan, the files of the source, and the progress."""

    folder: Path
    conversion: Conversion
    accounting: Accounting
    outcome: Outcome


def plan_conversion(
    checkpoint: Checkpoint,
    layout: Layout,
    *,
    max_shard_bytes: int | None = None,
    engines: Sequence[str] = (),
    devices: int | None = None,
    rounds_scales: bool = False,
) -> Conversion:
    """Plan the conversion of a quantized source to a layout. With `rounds_scales` tensor scales that the layout stores
    as reciprocals are rounded where there is no exact one.

    Raises RefusedError, with all problems at once, for what the layout cannot hold and for what one of the engines does
    not load; InputError if tensors do not fit their configuration.
    """
    found = _named_for(layout, plain_view(checkpoint))
    before = found.tensors.keys()
    found = split_stacks(found, layout)
    known = source_record(found)
    found = join_experts(found, layout)
    replaced = tuple(name for name in before if name not in found.tensors)
    made = tuple(name for name in found.tensors if name not in before)
    carried = carried_weights(found, layout, known, rounds_scales=rounds_scales)
    taken = {name for each in carried.values() for name in each.input_scales}
    view = replace(found, unused=tuple(name for name in found.unused if name not in taken))
    plain = view.checkpoint(Cpu())
    outline = CONTAINERS[layout.kind].outline(plain, list(plain.tensors.values()))
    tasks = tuple(_task(plain, name, carried, layout, outline) for name in plain.tensors)
    notes = (*omission_notes(view), *conversion_notes(view, layout, carried))
    manner = Manner(max_shard_bytes, tuple(engines), devices, notes)
    return Conversion(view, carried, in_files(plain, layout, tasks, outline, manner), known, replaced, made)


def _named_for(layout: Layout, view: PlainView) -> PlainView:
    """Return a view with the names that loaders of a layout know. Raises RefusedError for a file of GGUF or of Mistral
    whose names in Hugging Face are not known, and for a GGUF file that is to be one again."""
    where = printable(view.source.where)
    if not has_other_names(view):
        return view
    if view.source.kind == layout.kind == GGUF:
        raise RefusedError(f"{where}: is a GGUF file already. Use another --layout.")
    try:
        return as_hugging_face(view)
    except (InputError, RefusedError) as error:
        headline = f"{where}: names and order of rows in Hugging Face are not known"
        reasons = [f"{headline}: {reason.rstrip('.')}." for reason in error.reasons]
        raise together(RefusedError, headline, reasons) from error


def _task(plain: Checkpoint, name: str, carried: Mapping[str, Carried], layout: Layout, outline: OutputOutline) -> Task:
    info, target = plain.tensors[name], outline.targets[name]
    if name not in carried or target is None:
        return Task(TensorPlan(info, None, _KEPT), target)
    each = carried[name]
    weight = replace(each.weight, name=target.name)
    planned = TensorPlan(info, weight.scheme, _CARRIED, weight.axis)
    return Task(planned, target, (Piece(weight, layout.contents(weight), None, reorder=target.reorder),))


def convert_checkpoint(
    checkpoint: Checkpoint,
    conversion: Conversion,
    output: str | Path,
    *,
    options: WriteOptions = WriteOptions(),
    command: Sequence[str] = (),
) -> Converted:
    """Write a planned conversion: complete under final names, or not at all. Raises like `write_checkpoint`."""
    accounting = accounting_of(checkpoint, conversion.view)
    work = Work(
        shards=conversion.arrangement.shards,
        jobs=tuple(_jobs(conversion)),
        configs=conversion.arrangement.configs,
        record=conversion_record(checkpoint, conversion, command),
    )
    outcome = write_checkpoint(checkpoint, Path(output), work, options)
    return Converted(Path(output), conversion, accounting, outcome)


def conversion_record(checkpoint: Checkpoint, conversion: Conversion, command: Sequence[str]) -> dict[str, object]:
    """Return the record of a converted checkpoint. Rules are those in the source's record, else they are not known."""
    view, arrangement = conversion.view, conversion.arrangement
    formats = {name: each.weight.format.name for name, each in conversion.carried.items()}
    return {
        "schema": CONVERTED,
        "version": own_version(),
        "command": list(command),
        "input": fingerprint(checkpoint),
        CONVERTED_FROM: view.layout.name,
        ORIGIN: origin_of(conversion.known),
        "layout": arrangement.layout.name,
        ROUNDED: _rounded(conversion),
        "engines": list(arrangement.engines),
        "tensor_parallel": arrangement.devices,
        "notes": list(arrangement.notes),
        ACCOUNTING: accounting_of(checkpoint, view).record(converted_tensors(view)),
        "tensors": tensor_records(
            arrangement.tasks, formats, conversion.known, _made_of(conversion), conversion.replaced
        ),
    }


def _made_of(conversion: Conversion) -> dict[str, str]:
    """Return the tensors that are divided or put together, each with its name or that of a part of it."""
    carried = conversion.carried
    return {name: carried[name].stored.matrix.name if name in carried else name for name in conversion.made}


def _rounded(conversion: Conversion) -> dict[str, float]:
    """Return the tensor scales that were rounded, now or earlier, as they were: a conversion back restores them."""
    before = rounded_before(conversion.known)
    found = {}
    for name, each in conversion.carried.items():
        if name in each.rounded:
            found[name] = each.rounded[name]
        elif name in before and each.scale.decode != before[name] != each.scale.encode:
            found[name] = before[name]
    return found


def _jobs(conversion: Conversion) -> Iterator[WriteJob]:
    """Yield a job for every tensor: a weight is stored again, everything else is copied."""
    view = conversion.view
    plain = view.checkpoint(Cpu())
    for task in conversion.arrangement.tasks:
        if task.pieces:
            yield _carrying(view, conversion.carried[task.planned.tensor.name], task.pieces[0])
        elif task.entries:
            yield copy_job(plain, task)
    yield from constant_jobs(conversion.arrangement.constants)


def _carrying(view: PlainView, carried: Carried, piece: Piece) -> WriteJob:
    stored = carried.stored
    infos = tuple(view.source.tensors[content.entry.name] for content in stored.contents)

    def make() -> Iterator[tuple[str, Array]]:
        quantized = carried.of(stored.read(view.source), piece.reorder)
        for content in piece.contents:
            yield content.entry.name, content.of(quantized)

    entries = tuple(entry.name for entry in piece.entries)
    return WriteJob(stored.weight.name, stored.nbytes, entries, make, infos)
