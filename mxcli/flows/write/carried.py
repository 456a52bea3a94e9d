"""The weights of a quantized source as another layout holds them, or every reason why it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mxcli.errors import RefusedError, printable, together
from mxcli.files.directory import GGUF
from mxcli.files.layouts import MXCLI, Layout, Weight, refusal
from mxcli.files.record import OutputRecord
from mxcli.files.tensors import Array
from mxcli.flows.write.carried_scales import (
    ENCODES,
    StoredInputScale,
    TensorScale,
    are_bfloat16,
    input_scale_names,
    input_scale_of,
    shown,
    tensor_scale_of,
    unsigned_scale_fault,
)
from mxcli.flows.write.converted_record import recorded_scheme, rounded_before
from mxcli.flows.write.experts import left_single
from mxcli.flows.write.restore import PlainView, StoredWeight
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.mantissa_rules import MantissaScaleRule
from mxcli.numerics.scheme import Scheme

NVFP4, NVFP4_ALONE = find_format("nvfp4"), find_format("e2m1:e4m3:1x16")
_NO_STACK = (
    "loaders of the layout take one stack of all experts of a layer, and these make none: one is missing, they differ "
    "in shape or format, or each has a tensor scale of its own. Use another --layout, such as compressed-tensors."
)
_INSTEAD = f"Use another --layout ({MXCLI.name} holds any format), or mxcli dequantize."


@dataclass(frozen=True, slots=True)
class Carried:
    """A weight of a source as stored, and as the target layout holds it with the same codes and block scales; `scale`
    is its tensor scale, `input_scales` the names of the scales of inputs that are carried with it, and `rounded` are
    the scales, by name, that are rounded on the way."""

    stored: StoredWeight
    weight: Weight
    scale: TensorScale
    input_scales: tuple[str, ...] = ()
    rounded: Mapping[str, float] = field(default_factory=dict)

    def of(self, quantized: Quantized, reorder: Callable[[Array], Array] | None) -> Quantized:
        """Return what to store, given what the source stores; `reorder` puts rows in the order of the target."""
        packed, scales = quantized.packed, quantized.scales
        if reorder is not None:
            packed, scales = reorder(np.asarray(packed)), reorder(np.asarray(scales))
        has_tensor_scale = self.weight.format.tensor_scale is not None
        return replace(
            quantized,
            scheme=self.weight.scheme,
            packed=packed,
            scales=scales,
            tensor_scale=self.scale.decode if has_tensor_scale else None,
            tensor_encode=self.scale.encode,
        )


class _Problems:
    """The reasons why a layout does not hold weights, each with the weights that it is true of; inexact scales are
    one of them."""

    def __init__(self, view: PlainView, layout: Layout) -> None:
        self._view, self._layout = view, layout
        self._by_reason: dict[str, list[str]] = {}
        self.inexact: dict[str, float] = {}

    def add(self, name: str, reason: str) -> None:
        """Add a reason that is true of a weight."""
        self._by_reason.setdefault(reason, []).append(name)

    def refuse(self) -> None:
        """Raise RefusedError with every reason, if there is one."""
        problems = [f"{_listed(names)}: {reason}" for reason, names in self._by_reason.items()]
        if self.inexact:
            problems.append(
                f"{_listed(list(self.inexact))}: the layout {self._layout.name} stores tensor scales as reciprocals of "
                f"those of {self._view.layout.name}, and for {len(self.inexact):,} of {len(self._view.weights):,} "
                f"weights 1 / (1 / x) is not x in binary32: {shown(self.inexact)}. --round-tensor-scales stores the "
                "nearest number, which changes the last bit of such a scale."
            )
        if problems:
            where = printable(self._view.source.where)
            raise together(RefusedError, f"{where}: cannot be converted to {self._layout.name}", problems)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"{printable(names[0])}{more}"


def carried_weights(
    view: PlainView, layout: Layout, known: OutputRecord | None = None, *, rounds_scales: bool = False
) -> dict[str, Carried]:
    """Return the weights of a source as a layout holds them, by plain name; `known` is the record that states their
    rules (None: they are not known).

    Raises RefusedError with every weight that the layout does not hold as it is.
    """
    problems = _Problems(view, layout)
    for name in view.foreign:
        kind = view.source.tensors[view.stored_name(name)].block_type or view.layout.name
        problems.add(name, f"its codes ({kind}) are of no format that other layouts have. Use mxcli dequantize.")
    found: dict[str, Carried] = {}
    for name, stored in view.weights.items():
        each = _carried(view, name, stored, layout, problems, known, rounds_scales=rounds_scales)
        if each is not None:
            found[name] = each
    _check_input_scales(found, layout, problems)
    problems.refuse()
    return found


def _carried(
    view: PlainView,
    name: str,
    stored: StoredWeight,
    layout: Layout,
    problems: _Problems,
    known: OutputRecord | None,
    *,
    rounds_scales: bool,
) -> Carried | None:
    """Return a weight as the layout holds it; None for a problem."""
    if left_single(view, name, layout):
        problems.add(name, _NO_STACK)
        return None
    scale = tensor_scale_of(view.source, stored)
    format = _format_in(layout, stored.weight.format, scale)
    if format is None:
        problems.add(name, _format_reason(layout, stored.weight.format))
        return None
    scheme = _scheme(view, stored, layout, recorded_scheme(known, stored.matrix.name))
    scheme = replace(scheme, format=format, nonfinite="error" if layout.kind == GGUF else scheme.nonfinite)
    weight = replace(stored.weight, scheme=scheme, variant="", input_scale=None)
    # A layout holds a stack that is put together for it if it holds its matrices.
    held = weight if layout.whole_stacks else replace(weight, name=stored.matrix.name, shape=stored.matrix.shape)
    reason = refusal(layout, held)
    if reason is None and layout.kind == GGUF:
        fault = unsigned_scale_fault(view.source, stored)
        reason = None if fault is None else f"it holds {fault}, which its readers take for another number"
    if reason is not None:
        problems.add(name, f"the layout {layout.name} cannot hold it: {reason}. {_INSTEAD}")
        return None
    scale = scale.restored(rounded_before(known).get(name), _parts(layout, weight))
    inputs = _inputs(view, stored, weight, layout, problems)
    weight = replace(weight, input_scale=None if inputs is None else inputs.scale.as_input_scale())
    needed = {name: scale} | ({} if inputs is None else {inputs.name: inputs.scale})
    parts = {name: _parts(layout, weight), **({} if inputs is None else {inputs.name: _input_parts(layout, weight)})}
    inexact = {each: value.lost(parts[each]) for each, value in needed.items() if not value.is_held(parts[each])}
    if any(not (rounds_scales and needed[each].is_positive) for each in inexact):
        problems.inexact |= inexact
        return None
    return Carried(stored, weight, scale, () if inputs is None else (inputs.name,), inexact)


def _format_in(layout: Layout, format: BlockFormat, scale: TensorScale) -> BlockFormat | None:
    """Return the format by which a layout holds the same codes and scales; None if it has none."""
    if layout is MXCLI or format.name in layout.formats:
        return format
    if format == NVFP4 and scale.is_one and NVFP4_ALONE.name in layout.formats:
        return NVFP4_ALONE
    return NVFP4 if format == NVFP4_ALONE and NVFP4.name in layout.formats else None


def _format_reason(layout: Layout, format: BlockFormat) -> str:
    if format == NVFP4 and NVFP4_ALONE.name in layout.formats:
        return f"nvfp4 of the layout {layout.name} has no tensor scale, and that of the source is not 1. {_INSTEAD}"
    return f"the layout {layout.name} has no {format.name}; it holds {', '.join(layout.formats)}. {_INSTEAD}"


def _scheme(view: PlainView, stored: StoredWeight, layout: Layout, known: Scheme | None) -> Scheme:
    """Return the scheme of a weight: the known one where the layout names its rules; else that by which the source is
    read, with the known rule for its scales if they do not need another type or order of operations for it."""
    scheme = stored.weight.scheme
    if known is None:
        return scheme
    if layout.names_rules:
        return replace(known, nonfinite=scheme.nonfinite)
    rule = known.scale_rule
    if isinstance(rule, MantissaScaleRule):
        fits = scheme.format.scale.bits == 32 and (not rule.bf16_scale or are_bfloat16(view.source, stored))
        return replace(scheme, scale_rule=rule) if fits else scheme
    return replace(scheme, scale_rule=rule)


def _inputs(
    view: PlainView, stored: StoredWeight, weight: Weight, layout: Layout, problems: _Problems
) -> StoredInputScale | None:
    """Return the scale of a layer's inputs, if the source has one and the layout holds it."""
    names = list(input_scale_names(view.source, stored))
    if not names or weight.format.name not in layout.input_scales:
        return None
    if len(names) > 1:
        problems.add(stored.weight.name, f"its layer has two scales of inputs, {' and '.join(map(printable, names))}.")
    return input_scale_of(view.source, names[0], weight)


def _parts(layout: Layout, weight: Weight) -> frozenset[str]:
    """Return the parts that a layout stores of a weight."""
    return frozenset(content.holds.name for content in layout.contents(weight))


def _input_parts(layout: Layout, weight: Weight) -> frozenset[str]:
    """Return the part that a layout stores of the scale of a weight's inputs."""
    encodes = any(content.entry.name.endswith(ENCODES) for content in layout.contents(weight))
    return frozenset({"encode" if encodes else "decode"})


def _check_input_scales(found: Mapping[str, Carried], layout: Layout, problems: _Problems) -> None:
    """Add weights without a scale of inputs that loaders expect: always, or because others of their format have one."""
    scaled = {each.weight.format.name for each in found.values() if each.input_scales}
    for name, each in found.items():
        format = each.weight.format.name
        if not each.input_scales and (format in scaled or format in layout.needs_input_scales):
            problems.add(
                name,
                f"loaders of the layout {layout.name} take a stored scale of the inputs of each {format} layer, and "
                "the source has none. Use another --layout.",
            )


def rounded_scales(carried: Mapping[str, Carried]) -> Iterator[tuple[str, float]]:
    """Yield the scales that are rounded on the way: their names and stored numbers."""
    for each in carried.values():
        yield from each.rounded.items()
