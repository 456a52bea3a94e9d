"""Scales of layers' inputs, from captured ones, for checkpoints that store them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import LAYOUTS, InputScale, Layout
from mxcli.flows.measure.amax import SharedAmax
from mxcli.flows.plan.fused import fused_set, joined_sets, named_sets
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.products.output_error import CapturedInputs
from mxcli.flows.write.arrange import layout_of
from mxcli.flows.write.split import pieces_of
from mxcli.numerics.scheme import Scheme


def with_input_scales(
    checkpoint: Checkpoint, plan: Plan, captures: Checkpoint, *, backend: Backend, layout: str | None = None
) -> Plan:
    """Return the plan with a scale of the inputs of every layer that is stored with one: what the rule of the layer's
    weight makes of the largest magnitude that was captured. Layers that loaders fuse have the same.

    Raises RefusedError where no layer is stored with one, and naming every layer whose inputs were not captured;
    InputError where those of none were, for inputs of another width, and for some that are not finite.
    """
    chosen = layout_of(checkpoint, plan, layout)
    steps = [step for step in plan.quantized if _has_scale(step, chosen, checkpoint)]
    if not steps:
        raise RefusedError(_no_use(plan, chosen))
    inputs = CapturedInputs(captures)
    inputs.check(steps)
    missing = [step for step in steps if not inputs.has(step)]
    if missing:
        raise _not_captured(missing, captures)
    sets = joined_sets(named_sets(plan.options.fuse) if plan.options.fuse else ())
    by_name = {step.tensor.name: step for step in steps}
    alike: dict[str, list[str]] = {}
    for name in by_name:
        alike.setdefault(fused_set(name, sets) or name, []).append(name)
    amax = SharedAmax(alike.values(), lambda name: inputs.amax(by_name[name], backend))
    nothing = [step for step in steps if not amax.of(step.tensor.name)]
    if nothing:
        names = ", ".join(printable(step.tensor.name) for step in nothing[:3])
        raise RefusedError(
            f"{printable(captures.where)}: what was captured of the inputs of {len(nothing):,} layers is all zeros "
            f"({names}, …): no scale follows from it. Capture real inputs, or leave --captures out."
        )
    scales = {
        step.tensor.name: scale_of(step.scheme, amax.of(step.tensor.name), backend) for step in steps if step.scheme
    }
    note = (
        f"Loaders quantize the inputs of {len(steps):,} layers too, with scales from {printable(captures.where.name)}: "
        f"inputs larger than those saturate.{f' They fit the largest of {inputs.several}.' if inputs.several else ''}"
    )
    scaled = (replace(step, input_scale=scales.get(step.tensor.name)) for step in plan.tensors)
    return replace(plan, tensors=tuple(scaled), notes=(*plan.notes, note))


def scale_of(scheme: Scheme, amax: float, backend: Backend) -> InputScale:
    """Return the scale that a recipe makes of an amax: that of the tensor where there is one, else the block's."""
    columns = scheme.format.block[1] or 1
    made = backend.quantize(np.full((1, columns), amax, np.float32), "F32", scheme, tensor_amax=amax)
    if made.tensor_scale is not None:
        return InputScale(amax, made.tensor_scale, made.tensor_encode)
    return InputScale(amax, float(np.asarray(made.scales).reshape(())), 1.0)


def _has_scale(step: TensorPlan, layout: Layout, checkpoint: Checkpoint) -> bool:
    assert step.scheme is not None
    return step.scheme.format.name in layout.input_scales and not isinstance(
        pieces_of(step, layout, checkpoint.config), str
    )


def _no_use(plan: Plan, layout: Layout) -> str:
    formats = sorted({step.scheme.format.name for step in plan.quantized if step.scheme})
    stored = "; ".join(
        f"{row.name} those of {', '.join(row.input_scales)}" for row in LAYOUTS.values() if row.input_scales
    )
    return (
        f"--captures: the layout {layout.name} stores no scales of inputs of {', '.join(formats)} layers; {stored}. "
        "Leave --captures out."
    )


def _not_captured(missing: list[TensorPlan], captures: Checkpoint) -> Exception:
    where = printable(captures.where)
    problems = [
        f"{printable(step.tensor.name)}: its layer's inputs are not in {where}. Capture them, --exclude the layer, or "
        "leave --captures out to quantize weights alone."
        for step in missing
    ]
    return together(RefusedError, f"Inputs that {where} lacks", problems)
