"""The modules that a loader must be told to leave alone: every linear layer that is not quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mxcli.files.tensors import TensorInfo

NEVER_LINEAR = frozenset({"norm", "embedding", "bias", "buffer", "scale", "codes", "lora"})
"""Roles that are no linear layer, so that no loader would look for their codes."""


def ignored_modules(kept: Iterable[TensorInfo], tied: Mapping[str, str], quantized: Iterable[str]) -> tuple[str, ...]:
    """Full paths of modules, sorted: routers, output heads (tied ones too), whatever else may be a linear layer.

    `quantized` are names of quantized weights; a stack of experts names the module that holds it.
    """
    modules = {alias.removesuffix(".weight") for alias in tied if alias.endswith(".weight")}
    for info in kept:
        if info.role in NEVER_LINEAR or len(info.shape) < 2:
            continue
        if info.name.endswith(".weight"):
            modules.add(info.name.removesuffix(".weight"))
        elif len(info.shape) > 2 and "." in info.name:
            modules.add(info.name.rpartition(".")[0])
    return tuple(sorted(modules - {name.removesuffix(".weight") for name in quantized}))
