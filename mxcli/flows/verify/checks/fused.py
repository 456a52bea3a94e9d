"""Checks of scales that the weights of a fused layer must share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from mxcli.files.loaders.engine import ENGINES, listed_engines
from mxcli.files.loaders.verdict import Verdict
from mxcli.files.models.fused import fused_sets
from mxcli.flows.verify.checks.check import NOTE, PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.checks.files import activation_scales
from mxcli.flows.verify.subject import Subject
from mxcli.flows.verify.weight_summary import TensorSummary

_MOST = 0.5
"""A producer gives the layers of a set scales of their own if the scales differ in more than this share of the sets."""


@dataclass(frozen=True)
class Summarized:
    """A checkpoint with the summary of each weight, and the `verdicts` of engines on it (none: nothing is known to load
    it)."""

    subject: Subject
    summaries: Mapping[str, TensorSummary]
    verdicts: tuple[Verdict, ...] = ()

    @cached_property
    def joining(self) -> str:
        """The engines that load the layout and join the layers of a set."""
        return listed_engines([each.engine.name for each in self.verdicts if each.usual and each.engine.joins])

    @cached_property
    def apart(self) -> str:
        """The engine that loads the checkpoint and reads the layers of a set one by one; empty without one, and if an
        engine that must load it joins them."""
        if any(ENGINES[name].joins for name in self.subject.engines):
            return ""
        loading = (each for each in self.verdicts if each.usual and not each.engine.joins)
        return next((each.engine.title for each in loading if not each.is_certain_fault), "")

    def is_by_design(self, key: str) -> bool:
        """Return whether scales that differ in a set are its producer's way: they differ in most sets of these layers,
        or the usual engine of the layout joins none."""
        layout = self.subject.layout
        if not self.apart or layout is None:
            return False
        members = key.rpartition(".")[2]
        alike = [each for each in self.sets if each.rpartition(".")[2] == members]
        differing = [each for each in alike if each in self.differing]
        return bool(layout.fused_by) or (len(alike) > 1 and len(differing) > _MOST * len(alike))

    @cached_property
    def sets(self) -> Mapping[str, Mapping[str, float]]:
        """The scales of the members of each fused set of weights with a tensor scale on top of block scales."""
        return _sets_of(self.subject, _of_format(self, two_levels=True))

    @cached_property
    def differing(self) -> Mapping[str, Mapping[str, float]]:
        """The fused sets of these weights whose members have different tensor scales."""
        return {key: own for key, own in self.sets.items() if len(set(own.values())) > 1}


def sets_among(subject: Subject, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the sets among weights that engines join in the subject's model; none if those of its layout join none."""
    if subject.layout is not None and not subject.layout.fuses:
        return {}
    tensors = {} if subject.view is None else subject.view.tensors
    shapes = {name: tensors[name].shape for name in names if name in tensors}
    columns = {name: shape[-1] for name, shape in shapes.items() if shape}
    return fused_sets(subject.checkpoint.config).among(columns)


def sets_are_known(subject: Subject) -> bool:
    """Return whether engines have a class for the subject's model, so that its sets are not taken by their names."""
    return fused_sets(subject.checkpoint.config).known


def unshared_sets(subject: Subject, summaries: Mapping[str, TensorSummary]) -> tuple[str, ...]:
    """Return the fused sets whose members have different scales of the whole tensor."""
    return tuple(key for key, _ in _differing(subject, {name: each.scale for name, each in summaries.items()}))


def _sets_of(subject: Subject, scales: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the fused sets with the scales of their members; members without a scale are skipped."""
    known = {name: scale for name, scale in scales.items() if not math.isnan(scale)}
    return {key: {name: known[name] for name in members} for key, members in sets_among(subject, known).items()}


def _differing(subject: Subject, scales: Mapping[str, float]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the fused sets whose members have different scales."""
    for key, own in _sets_of(subject, scales).items():
        if len(set(own.values())) > 1:
            yield key, own


def _listed(scales: Mapping[str, float]) -> str:
    return ", ".join(f"{name.split('.')[-2]} {scale:.6g}" for name, scale in scales.items())


def _ratio(scales: Iterable[float]) -> str:
    known = [scale for scale in scales if scale > 0]
    return f"{max(known) / min(known):.4g} times" if known else "an unknown factor"


def _of_format(summarized: Summarized, *, two_levels: bool) -> dict[str, float]:
    weights = summarized.subject.weights
    return {
        name: summary.scale
        for name, summary in summarized.summaries.items()
        if (weights[name].weight.format.tensor_scale is not None) == two_levels
    }


def _tensor_scales(summarized: Summarized) -> Iterator[Finding]:
    if not sets_are_known(summarized.subject):
        return
    for key, scales in summarized.differing.items():
        if not summarized.is_by_design(key):
            yield Finding(
                key,
                f"tensor scales differ: {_listed(scales)}",
                f"one tensor scale for the set: loaders that fuse it use one of them, so weights are wrong by up to "
                f"{_ratio(scales.values())}",
                "Requantize the set with the tensor scale of its shared amax.",
            )


def _some_tensor_scales(summarized: Summarized) -> Iterator[Finding]:
    if not sets_are_known(summarized.subject):
        return
    apart, joining = summarized.apart, summarized.joining
    for key, scales in summarized.differing.items():
        if summarized.is_by_design(key):
            yield Finding(
                key,
                f"tensor scales differ: {_listed(scales)}",
                f"one tensor scale for {joining}, which would use one of them for the set, so that weights are wrong "
                f"by up to {_ratio(scales.values())}; {apart} keeps the layers apart and reads each as it is",
                f"Load it with {apart}, or requantize the set with a shared tensor scale for {joining}.",
            )


def _perhaps_joined(summarized: Summarized) -> Iterator[Finding]:
    subject = summarized.subject
    sets = fused_sets(subject.checkpoint.config)
    if sets.known:
        return
    scales = {name: summary.scale for name, summary in summarized.summaries.items()}
    for key, own in _differing(subject, scales):
        yield Finding(
            key,
            f"scales differ: {_listed(own)}",
            f"one scale for the set if a loader joins it. {sets.note}",
            "Use a loader that keeps them apart, such as transformers, or requantize the set with a shared scale.",
        )


def _single_scales(summarized: Summarized) -> Iterator[Finding]:
    if not sets_are_known(summarized.subject):
        return
    for key, scales in _differing(summarized.subject, _of_format(summarized, two_levels=False)):
        yield Finding(
            key,
            f"scales differ: {_listed(scales)}",
            "one scale, or a loader that requantizes the set to the largest (vLLM and SGLang do, with a loss)",
            "Requantize the set with a shared scale, or with a scale per row.",
        )


def _activations(summarized: Summarized) -> Iterator[Finding]:
    if not sets_are_known(summarized.subject):
        return
    named: dict[str, dict[str, float]] = {}
    for name, values in activation_scales(summarized.subject):
        module, _, ending = name.rpartition(".")
        if values.size == 1:
            named.setdefault(ending, {})[f"{module}.weight"] = float(values.reshape(())[()])
    for ending, scales in named.items():
        for key, own in _differing(summarized.subject, scales):
            yield Finding(
                key,
                f"{ending} differs: {_listed(own)}",
                "one activation scale for the set: loaders take the largest",
                "Calibrate the set with a shared amax.",
            )


FUSED_CHECKS: tuple[Check[Summarized], ...] = (
    Check(
        "fused_tensor_scale",
        PROBLEM,
        "tensor scales that differ within a layer that loaders fuse",
        "tensor scales of q, k, v and of gate, up, in every layer and expert",
        _tensor_scales,
    ),
    Check(
        "some_fused_tensor_scale",
        WARNING,
        "tensor scales that differ within a layer that some loaders fuse",
        "like fused_tensor_scale, where an engine that loads the checkpoint keeps the layers apart, and so does its "
        "producer: the scales differ in most sets of these layers",
        _some_tensor_scales,
    ),
    Check(
        "fused_scale",
        WARNING,
        "per-tensor scales that differ within a layer that loaders fuse",
        "scales of whole tensors of q, k, v and of gate, up, in every layer and expert",
        _single_scales,
    ),
    Check(
        "fused_activation_scale",
        WARNING,
        "activation scales that differ within a layer that loaders fuse",
        "input_scale and input_global_scale of q, k, v and of gate, up",
        _activations,
    ),
    Check(
        "perhaps_fused_scale",
        NOTE,
        "scales that differ within layers that a loader may fuse, in a model that no engine is known to have a class "
        "for",
        "scales of whole tensors of q, k, v and of gate, up, by their names",
        _perhaps_joined,
    ),
)
