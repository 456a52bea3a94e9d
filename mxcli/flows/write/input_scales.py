"""Scales of layers' inputs from captures, for checkpoints that store them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import LAYOUTS, InputScale, Layout
from mxcli.files.models.fused import fused_sets, named_sets
from mxcli.flows.measure.amax import SharedAmax
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.products.output_error import CapturedInputs
from mxcli.flows.write.arrange import layout_of
from mxcli.flows.write.split import pieces_of
from mxcli.numerics.scheme import Scheme


def with_input_scales(
    checkpoint: Checkpoint, plan: Plan, captures: Checkpoint, *, backend: Backend, layout: str | None = None
) -> Plan:
    """Return the plan with input scales for all layers that are stored with one: the rule of the layer's weight applied
    to the amax of the captured inputs. Layers that loaders fuse share a scale.

    Raises RefusedError if no layer is stored with an input scale, and with the names of all layers whose inputs were
    not captured; InputError if no inputs were captured, for inputs of another width, and for inputs that are not
    finite.
    """
    chosen = layout_of(checkpoint, plan, layout)
    layers = [each for each in plan.quantized if _has_scale(each, chosen, checkpoint)]
    if not layers:
        raise RefusedError(_no_use(plan, chosen))
    inputs = CapturedInputs(captures)
    inputs.check(layers)
    missing = [each for each in layers if not inputs.has(each)]
    if missing:
        raise _not_captured(missing, captures)
    by_name = {each.tensor.name: each for each in layers}
    sets = fused_sets(checkpoint.config, named_sets(plan.options.fuse) if plan.options.fuse else ())
    keys = sets.keys({name: each.inputs for name, each in by_name.items()})
    alike: dict[str, list[str]] = {}
    for name in by_name:
        alike.setdefault(keys.get(name, name), []).append(name)
    amax = SharedAmax(alike.values(), lambda name: inputs.amax(by_name[name], backend))
    zeros = [each for each in layers if not amax.of(each.tensor.name)]
    if zeros:
        names = ", ".join(printable(each.tensor.name) for each in zeros[:3])
        raise RefusedError(
            f"{printable(captures.where)}: the captured inputs of {len(zeros):,} layers are all zeros ({names}, …): "
            "they give no scale. Capture real inputs, or omit --captures."
        )
    scales = {
        each.tensor.name: scale_of(each.scheme, amax.of(each.tensor.name), backend) for each in layers if each.scheme
    }
    note = (
        f"Activations of {len(layers):,} layers are quantized with static scales calibrated on "
        f"{printable(captures.where.name)}; values above that amax saturate."
        f"{f' The amax is the largest over {inputs.several}.' if inputs.several else ''}"
    )
    scaled = (replace(each, input_scale=scales.get(each.tensor.name)) for each in plan.tensors)
    return replace(plan, tensors=tuple(scaled), notes=(*plan.notes, note))


def scale_of(scheme: Scheme, amax: float, backend: Backend) -> InputScale:
    """Return the scale of a scheme for an amax: the tensor scale if there is one, else the block's."""
    columns = scheme.format.block[1] or 1
    made = backend.quantize(np.full((1, columns), amax, np.float32), "F32", scheme, tensor_amax=amax)
    if made.tensor_scale is not None:
        return InputScale(amax, made.tensor_scale, made.tensor_encode)
    return InputScale(amax, float(np.asarray(made.scales).reshape(())), 1.0)


def _has_scale(planned: TensorPlan, layout: Layout, checkpoint: Checkpoint) -> bool:
    assert planned.scheme is not None
    return planned.scheme.format.name in layout.input_scales and not isinstance(
        pieces_of(planned, layout, checkpoint.config), str
    )


def _no_use(plan: Plan, layout: Layout) -> str:
    formats = sorted({each.scheme.format.name for each in plan.quantized if each.scheme})
    stored = "; ".join(
        f"{other.name} those of {', '.join(other.input_scales)}" for other in LAYOUTS.values() if other.input_scales
    )
    return (
        f"--captures: the layout {layout.name} stores no scales of inputs of {', '.join(formats)} layers; {stored}. "
        "Omit --captures."
    )


def _not_captured(missing: list[TensorPlan], captures: Checkpoint) -> Exception:
    where = printable(captures.where)
    problems = [
        f"{printable(each.tensor.name)}: its layer's inputs are not in {where}. Capture them, --exclude the layer, or "
        "omit --captures to quantize only weights."
        for each in missing
    ]
    return together(RefusedError, f"Inputs missing in {where}", problems)
