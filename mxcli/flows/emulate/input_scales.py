"""Static scales of layers' inputs: stated, or from captured inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mxcli.backends import CPU, choose_backend
from mxcli.backends.backend import Backend
from mxcli.errors import RefusedError, UsageError, did_you_mean, printable, together
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import InputScale
from mxcli.files.models.fused import fused_sets
from mxcli.flows.emulate.decisions import Decided, Part
from mxcli.flows.measure.amax import SharedAmax
from mxcli.flows.products.output_error import CapturedInputs
from mxcli.flows.write.input_scales import scale_of
from mxcli.numerics.scheme import Scheme

_CLOSE = 2.0**-21
"""The most that a scale may differ from one that is stated, as a part of it."""
InputScales = Mapping[str, float | InputScale] | str | Path


def static_amaxes(given: InputScales | None, decided: Decided, config: Mapping[str, object] | None) -> dict[str, float]:
    """Return the amax that the scale of each layer's inputs is made for, by the name of its weight in files: of a
    mapping of layers to scales, or of the captured inputs in a directory, where fused layers share a scale.

    Raises UsageError for layers that are not emulated, and RefusedError for inputs in a format without a scale of the
    whole tensor, and for numbers that are not scales.
    """
    if given is None:
        return {}
    parts = [part for parts in decided.parts.values() for part in parts if part.inputs is not None]
    if isinstance(given, str | Path):
        return _captured(given, parts, decided, config)
    if not isinstance(given, Mapping):
        raise UsageError(f"input_scales {printable(repr(given))}: give a mapping of layers to scales, or a directory.")
    by_name = {part.name: part for part in parts}
    backend, found, problems = choose_backend(CPU, threads=1), dict[str, float](), []
    for name, scale in given.items():
        part = by_name.get(name) or by_name.get(f"{name}.weight")
        if part is None or part.inputs is None:
            hint = did_you_mean(str(name), by_name)
            problems.append(f"input_scales: {printable(name)} is not a layer whose inputs are quantized.{hint}")
            continue
        _check(part)
        found[part.name] = scale.amax if isinstance(scale, InputScale) else _amax_of(part, scale, backend)
    if problems:
        raise together(UsageError, "Layers of input_scales", problems)
    return found


def _captured(
    where: str | Path, parts: Iterable[Part], decided: Decided, config: Mapping[str, object] | None
) -> dict[str, float]:
    """Return the amaxes of captured inputs."""
    planned = {each.tensor.name: each for each in decided.plan.quantized}
    served = {part.name: part for part in parts if part.name in planned}
    inputs, backend = CapturedInputs(open_checkpoint(where)), choose_backend(CPU)
    inputs.check([planned[name] for name in served])
    there = [name for name in served if inputs.has(planned[name])]
    for name in there:
        _check(served[name])
    keys = fused_sets(config).keys({name: planned[name].inputs for name in there})
    sets: dict[str, list[str]] = {}
    for name in there:
        sets.setdefault(keys.get(name, name), []).append(name)
    amax = SharedAmax(sets.values(), lambda name: inputs.amax(planned[name], backend))
    return {name: amax.of(name) for name in there}


def _check(part: Part) -> None:
    """Raise RefusedError for inputs without a scale of the whole tensor."""
    assert part.inputs is not None
    if not part.inputs.format.scales_whole_tensor:
        raise RefusedError(
            f"input_scales: {printable(part.name)} has inputs in {part.inputs.format.name}, whose scales are those of "
            "blocks, found in every call: leave input_scales out."
        )


def _amax_of(part: Part, scale: Any, backend: Backend) -> float:
    """Return the amax whose scale is the one given, to the last bits of binary32: producers round it in several
    orders."""
    assert part.inputs is not None
    value = float(np.float32(scale)) if isinstance(scale, int | float | np.floating) else math.nan
    amax = float(np.float32(value * _largest(part.inputs)))
    if value > 0 and math.isfinite(amax):
        made = scale_of(part.inputs, amax, backend).decode
        if abs(made - value) <= value * _CLOSE:
            return amax
    raise RefusedError(
        f"input_scales: {printable(part.name)} has {printable(repr(scale))}, which is not a scale under "
        f"{part.inputs.format.name} ({part.inputs.scale_rule.name}): give the factor that scales codes back, as a "
        "positive number."
    )


def _largest(scheme: Scheme) -> float:
    """Return what a scale of the whole tensor is multiplied by to give an amax."""
    fmt = scheme.format
    return fmt.element.max * (fmt.scale.max if fmt.tensor_scale is not None else 1.0)
