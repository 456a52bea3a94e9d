"""Checks of scales that several weights must share, since loaders make one layer of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mxcli.flows.plan.fused import fused_sets
from mxcli.flows.verify.check import PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.check_files import activation_scales
from mxcli.flows.verify.subject import Subject
from mxcli.flows.verify.weight_summary import Summary


@dataclass(frozen=True, slots=True)
class Together:
    """A checkpoint and what was kept of the facts of each weight."""

    subject: Subject
    summaries: Mapping[str, Summary]


def _differing(scales: Mapping[str, float]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the fused sets of which not all members have the same scale; those without one are left out."""
    known = {name: scale for name, scale in scales.items() if not math.isnan(scale)}
    for key, members in fused_sets(known).items():
        own = {name: known[name] for name in members}
        if len(set(own.values())) > 1:
            yield key, own


def _spelled(scales: Mapping[str, float]) -> str:
    return ", ".join(f"{name.split('.')[-2]} {scale:.6g}" for name, scale in scales.items())


def _ratio(scales: Iterable[float]) -> str:
    known = [scale for scale in scales if scale > 0]
    return f"{max(known) / min(known):.4g} times" if known else "any factor"


def _of_format(together: Together, *, two_levels: bool) -> dict[str, float]:
    weights = together.subject.weights
    return {
        name: summary.scale
        for name, summary in together.summaries.items()
        if (weights[name].weight.format.tensor_scale is not None) == two_levels
    }


def _tensor_scales(together: Together) -> Iterator[Finding]:
    for key, scales in _differing(_of_format(together, two_levels=True)):
        yield Finding(
            key,
            f"tensor scales differ: {_spelled(scales)}",
            f"one tensor scale for the set: loaders that fuse it take one of them, and weights are wrong by up to "
            f"{_ratio(scales.values())}",
            "Quantize the set together, with the tensor scale of its largest magnitude.",
        )


def _single_scales(together: Together) -> Iterator[Finding]:
    for key, scales in _differing(_of_format(together, two_levels=False)):
        yield Finding(
            key,
            f"scales differ: {_spelled(scales)}",
            "one scale, or a loader that requantizes the set to the largest (vLLM and SGLang do), at a loss",
            "Quantize the set together, or with a scale for each row.",
        )


def _activations(together: Together) -> Iterator[Finding]:
    named: dict[str, dict[str, float]] = {}
    for name, values in activation_scales(together.subject):
        module, _, ending = name.rpartition(".")
        if values.size == 1:
            named.setdefault(ending, {})[f"{module}.weight"] = float(values.reshape(())[()])
    for ending, scales in named.items():
        for key, own in _differing(scales):
            yield Finding(
                key,
                f"{ending} differs: {_spelled(own)}",
                "one scale of activations for the set: loaders take the largest",
                "Calibrate the set together.",
            )


SET_CHECKS: tuple[Check[Together], ...] = (
    Check(
        "fused_tensor_scale",
        PROBLEM,
        "tensor scales that differ within a layer that loaders fuse",
        "tensor scales of q, k, v and of gate, up, in every layer and expert",
        _tensor_scales,
    ),
    Check(
        "fused_scale",
        WARNING,
        "single scales that differ within a layer that loaders fuse",
        "scales of whole tensors of q, k, v and of gate, up, in every layer and expert",
        _single_scales,
    ),
    Check(
        "fused_activation_scale",
        WARNING,
        "scales of activations that differ within a layer that loaders fuse",
        "input_scale and input_global_scale of q, k, v and of gate, up",
        _activations,
    ),
)
