"""The plan for a source: what is done with every tensor and why, from headers alone, before any work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mxcli.errors import RefusedError, UsageError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import COLUMN, PREFERRED, ROW, InputScale, find_layout
from mxcli.files.models.fused import fused_sets, named_sets
from mxcli.files.models.names import Config
from mxcli.files.models.stacks import LAST, UNKNOWN, Orientation, orientations
from mxcli.files.selection import Decision, Rule, select
from mxcli.files.tensors import TensorInfo
from mxcli.flows.plan.left_plain import left_plain
from mxcli.flows.plan.overrides import Override, Request, requests_for, supports_rule
from mxcli.flows.plan.reasons import (
    already_quantized,
    misfit,
    nothing_to_quantize,
    refused_groups,
    refused_length,
    requantized,
    transformed,
    why_kept,
)
from mxcli.numerics.blocks import BOTH, axes_of, divides
from mxcli.numerics.floats import FP32
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.scheme import Rules, Scheme, resolve

INDIVISIBLE_POLICIES = ("error", "pad", "keep")
AXES = (ROW, COLUMN)
BFLOAT16_RULE = "amax-bf16-scale"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a plan, by the names of the command line.

    `axis` None: blocks run along the dimension that a layer sums over, however it is stored; BOTH: one plan along each
    (`make_plans`). `layout` None: the preferred one that can hold the result. `fuse` names further sets that share a
    tensor scale (`named_sets`). `analysis`: nothing is written, so rules do not depend on a layout.
    """

    format: str
    rules: Rules = Rules(nonfinite="error")
    on_indivisible: str = "error"
    selection: tuple[Rule, ...] = ()
    overrides: tuple[Override, ...] = ()
    layout: str | None = None
    axis: str | None = None
    fuse: str | None = None
    analysis: bool = False

    @property
    def default_request(self) -> Request:
        """The request for tensors that no override selects."""
        return Request(find_format(self.format), self.rules)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The decision on a tensor: its scheme (None: kept), and the reason in words.

    `axis` COLUMN exchanges the last two dimensions before quantizing. `padded`: the last block of rows is completed
    with zeros. `group` names the set of tensors that share a tensor scale. `tied_to` names the stored tensor that this
    one is another name of; it is not stored again. `input_scale` is the scale of the layer's inputs, if they are
    quantized too. `summed` is the axis that the layer sums over; None: not known.
    """

    tensor: TensorInfo
    scheme: Scheme | None
    reason: str
    axis: str = ROW
    padded: bool = False
    group: str | None = None
    tied_to: str | None = None
    input_scale: InputScale | None = None
    summed: str | None = ROW

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as quantized: blocks run along its last dimension."""
        shape = self.tensor.shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.axis == COLUMN else shape

    @property
    def inputs(self) -> int:
        """Length of the dimension that the layer sums over."""
        shape = self.tensor.shape
        return shape[-2 if self.summed == COLUMN and len(shape) > 1 else -1] if shape else 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions on all tensors of a source, in its order, and notes.

    `axis` is the requested one (None: the dimension that each layer sums over).
    """

    options: Options
    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...] = ()
    axis: str | None = None

    @property
    def quantized(self) -> tuple[TensorPlan, ...]:
        """The tensors that are quantized."""
        return tuple(planned for planned in self.tensors if planned.scheme is not None)

    @property
    def groups(self) -> dict[str, tuple[TensorPlan, ...]]:
        """The sets of tensors that share a tensor scale, by name."""
        found: dict[str, list[TensorPlan]] = {}
        for planned in self.tensors:
            if planned.group is not None:
                found.setdefault(planned.group, []).append(planned)
        return {name: tuple(decided) for name, decided in found.items()}


def make_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """Return the plan for a source.

    Raises UsageError for an unknown name or a selector without match, and RefusedError with all refusals at once: a
    source that is already quantized, lengths that blocks do not divide, nothing to quantize.
    """
    _check_choice(options.axis or ROW, "--axis", AXES)
    return make_plans(checkpoint, options)[0]


def make_plans(checkpoint: Checkpoint, options: Options) -> tuple[Plan, ...]:
    """Return the plan along the requested axis; for BOTH one for each of AXES.

    Lengths are checked per axis. Raises like `make_plan`, with the refusals of both axes at once.
    """
    _check_names(options)
    if checkpoint.dialect is not None:
        raise RefusedError(already_quantized(checkpoint.where, checkpoint.dialect, checkpoint.tensors.values()))
    decisions = select(checkpoint.tensors, options.selection).decisions
    requests, taken = requests_for(checkpoint.tensors, options.default_request, options.overrides)
    axes = axes_of(options.axis)
    along = {axis: list(_tensor_plans(checkpoint, axis, decisions, requests, options)) for axis in axes}
    every = list(chain.from_iterable(along.values()))
    problems = [
        refused_groups(planned.tensor, problem)
        for planned in every
        if (problem := split_transform(planned)) is not None
    ]
    problems += [
        refused_length(planned.tensor, planned.scheme.format, planned.shape)
        for planned in every
        if planned.padded and planned.scheme and options.on_indivisible == "error"
    ]
    if problems:
        raise together(RefusedError, "Lengths that blocks do not divide", problems)
    if not any(planned.scheme for planned in every):
        first = along[axes[0]]
        infos, reasons = [planned.tensor for planned in first], [planned.reason for planned in first]
        raise RefusedError(nothing_to_quantize(checkpoint.where, infos, reasons))
    plans = []
    for axis, decided in along.items():
        grouped, notes = _grouped(decided, checkpoint.config, options.fuse)
        if checkpoint.restored_from is not None:
            notes.append(requantized(checkpoint.restored_from))
        if options.rules.hadamard is not None:
            notes.append(transformed(options.rules.hadamard))
        assumed = [] if axis else _assumed(grouped)
        plans.append(Plan(options, grouped, (*notes, *assumed, *_override_notes(options, grouped, taken)), axis))
    return tuple(plans)


def _assumed(decided: Iterable[TensorPlan]) -> list[str]:
    """Return a note on stacks whose layers sum over a dimension that is only assumed."""
    names = [planned.tensor.name for planned in decided if planned.scheme is not None and planned.summed is None]
    if not names:
        return []
    others = ", …" if len(names) > 1 else ""
    return [
        f"{len(names):,} {'stacks' if len(names) > 1 else 'stack'} of layers ('{printable(names[0])}'{others}): "
        f"{UNKNOWN.reason}, so blocks run along the last dimension. Name another with --axis column."
    ]


def is_stochastic(plans: Iterable[Plan]) -> bool:
    """Return whether some tensor is rounded stochastically."""
    return any(
        planned.scheme.rounding.is_random for plan in plans for planned in plan.tensors if planned.scheme is not None
    )


def split_transform(planned: TensorPlan) -> str | None:
    """Return why the requested transform does not divide a tensor; None if it does, or none is requested."""
    hadamard = planned.scheme.hadamard if planned.scheme is not None else None
    if hadamard is None or planned.shape[-1] % hadamard.size == 0:
        return None
    return f"its length {planned.shape[-1]} along the blocks is not a multiple of {hadamard.size} (Hadamard transform)"


def _check_names(options: Options) -> None:
    resolve(options.format, options.rules)
    _check_choice(options.on_indivisible, "--on-indivisible", INDIVISIBLE_POLICIES)
    _check_choice(options.axis or ROW, "--axis", (*AXES, BOTH))
    if options.layout is not None:
        find_layout(options.layout)
    if options.fuse is not None:
        named_sets(options.fuse)


def _check_choice(value: str, flag: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"unknown value '{printable(value)}': {flag} takes {', '.join(known)}")


def _tensor_plans(
    checkpoint: Checkpoint,
    axis: str | None,
    decisions: Mapping[str, Decision],
    requests: Mapping[str, Request],
    options: Options,
) -> Iterator[TensorPlan]:
    """Yield the decision on each tensor along an axis (None: the dimension that its layer sums over)."""
    known = orientations(checkpoint.tensors, checkpoint.config)
    for name, info in checkpoint.tensors.items():
        tied_to = _tied(checkpoint, info)
        if tied_to is not None:
            yield TensorPlan(info, None, f"tied: the same as '{printable(tied_to)}', stored once", tied_to=tied_to)
            continue
        plain = left_plain(checkpoint, info, decisions[name])
        if plain is not None:
            yield TensorPlan(info, None, f"kept: {plain}")
            continue
        stored = known.of(info)
        yield _tensor_plan(info, decisions[name], requests[name], axis or axis_of(stored), stored, options)


def axis_of(stored: Orientation) -> str:
    """Return the axis of the dimension that a layer sums over."""
    return ROW if stored.axis == LAST else COLUMN


def _tensor_plan(
    info: TensorInfo, decision: Decision, request: Request, axis: str, stored: Orientation, options: Options
) -> TensorPlan:
    fmt = request.format
    kept = why_kept(info, decision, fmt)
    if kept is not None or fmt is None:
        return TensorPlan(info, None, f"kept: {kept}")
    reason = f"quantized: {decision.reason}" if stored.known else f"quantized: {decision.reason}; {stored.reason}"
    summed = axis_of(stored) if stored.known else None
    planned = TensorPlan(info, _scheme(fmt, request, info.dtype, options), reason, axis, summed=summed)
    if (problem := split_transform(planned)) is not None and options.on_indivisible == "keep":
        return TensorPlan(info, None, f"kept: {problem}")
    if divides(fmt, planned.shape):
        return planned
    if options.on_indivisible == "keep":
        return TensorPlan(info, None, f"kept: {misfit(fmt, planned.shape)}")
    return replace(planned, padded=True, reason=f"{planned.reason}; padded, as {misfit(fmt, planned.shape)}")


def _scheme(fmt: BlockFormat, request: Request, dtype: str, options: Options) -> Scheme:
    """Return the scheme of a tensor of that dtype.

    Where loaders of the layout hold FP8 scales in the dtype of the model, the default rule for BF16 weights rounds
    them to BF16 first.
    """
    layout = PREFERRED if options.layout is None else find_layout(options.layout)
    rules = request.rules
    unnamed = rules.scale_rounding is None and rules.dialect is None and not options.analysis
    if unnamed and dtype == "BF16" and fmt.scale is FP32 and layout.model_scales and fmt.name in layout.formats:
        rules = replace(rules, scale_rounding=BFLOAT16_RULE)
    return resolve(fmt, rules)


def _override_notes(options: Options, decided: Sequence[TensorPlan], taken: Sequence[Sequence[str]]) -> list[str]:
    """Return notes on overrides without effect (their tensors are kept), and on rules that do not serve a format."""
    notes = []
    quantized = {planned.tensor.name for planned in decided if planned.scheme is not None}
    reasons = {planned.tensor.name: planned.reason for planned in decided}
    for override, names in zip(options.overrides, taken, strict=True):
        if not override.keep and quantized.isdisjoint(names):
            name = printable(names[0]) if names else "none"
            why = f"'{name}' is {reasons[names[0]]}" if names else "it takes no weight"
            notes.append(f"The override of {printable(override.selector)} changes nothing: {why}. Use --include.")
    formats = {find_format(each.format) for each in options.overrides if each.format and not each.rules.scale_rounding}
    unserved = sorted(fmt.name for fmt in formats if not supports_rule(options.default_request, fmt))
    if unserved:
        notes.append(
            f"{', '.join(unserved)} {'takes' if len(unserved) == 1 else 'take'} no {options.rules.scale_rounding}: "
            "those tensors have the dialect's rule."
        )
    return notes


def _tied(checkpoint: Checkpoint, info: TensorInfo) -> str | None:
    """Return the stored tensor that an output head, or an embedding, is another name of: loaders tie these again.

    Other tensors that share storage are written under each of their names.
    """
    stored = checkpoint.tensors.get(checkpoint.tied.get(info.name, ""))
    if stored is None:
        return None
    is_tied_again = info.role == "lm_head" or info.role == stored.role == "embedding"
    return stored.name if is_tied_again else None


def _grouped(
    decided: list[TensorPlan], config: Config | None, fuse: str | None
) -> tuple[tuple[TensorPlan, ...], list[str]]:
    """Return the decisions with their groups, and notes on fused sets: those that share a scale, those not quantized
    alike."""
    by_name = {planned.tensor.name: planned for planned in decided}
    group_of: dict[str, str] = {}
    shared, torn = 0, []
    requested = named_sets(fuse) if fuse else ()
    joined = fused_sets(config, requested)
    sets = joined.among({name: planned.inputs for name, planned in by_name.items()})
    idle = ["+".join(each) for each in requested if not any(_named_by(each, names) > 1 for names in sets.values())]
    if idle:
        raise UsageError(
            f"--fuse: {', '.join(map(printable, idle))} matches no two layers of one module; give the last "
            "parts of their module paths."
        )
    for key, names in sets.items():
        scheme = by_name[names[0]].scheme
        if any(by_name[name].scheme != scheme for name in names):
            torn.append(key)
        elif scheme is not None and scheme.format.scales_whole_tensor:
            group_of |= dict.fromkeys(names, key)
            shared += 1
    notes = []
    if shared:
        notes.append(
            f"{shared:,} fused {'sets' if shared > 1 else 'set'} (such as q, k, v or gate, up): one tensor scale each."
        )
    if torn:
        notes.append(
            f"{len(torn):,} fused sets ('{printable(torn[0])}'{', …' if len(torn) > 1 else ''}) are quantized in "
            "part or differently; loaders that fuse them, such as vLLM, refuse that."
        )
    if joined.note is not None and (shared or torn):
        notes.append(joined.note)
    grouped = (
        replace(planned, group=group_of[planned.tensor.name]) if planned.tensor.name in group_of else planned
        for planned in decided
    )
    return tuple(grouped), notes


def _named_by(parts: Sequence[str], names: Sequence[str]) -> int:
    """Return the number of a set's weights whose module paths end in one of the parts."""
    return sum(name.rpartition(".")[0].rpartition(".")[2] in parts for name in names)
