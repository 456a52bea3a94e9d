"""The modules of linear layers that stay plain, which layouts list for their loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mxcli.files.layouts.layout import WEIGHT
from mxcli.files.roles import role_of
from mxcli.files.tensors import TensorInfo

NEVER_LINEAR = frozenset({"norm", "embedding", "conv", "bias", "buffer", "scale", "codes", "lora"})
"""Roles outside linear layers: loaders do not look for their codes."""
STACKED = frozenset({"weight", "mtp"})
"""Roles of stacks of linear layers, which are parameters of the module that holds them."""


def ignored_modules(kept: Iterable[TensorInfo], tied: Mapping[str, str], quantized: Iterable[str]) -> tuple[str, ...]:
    """Return full paths of modules that stay plain, sorted: routers, output heads (tied ones included), and all others
    that may be linear layers.

    `quantized` are names of quantized weights; a stack of experts stands for the module that holds it, unless that
    holds a quantized weight too. Other bare parameters say nothing about the module that they are in.
    """
    kept = list(kept)
    modules = {alias.removesuffix(WEIGHT) for alias in tied if alias.endswith(WEIGHT) and _is_linear_alias(alias)}
    modules |= {info.name.removesuffix(WEIGHT) for info in kept if info.name.endswith(WEIGHT) and _may_be_linear(info)}
    stacks = {info.name.rpartition(".")[0] for info in kept if _is_stack(info)}
    others = {name.removesuffix(WEIGHT) for name in quantized}
    parents = {parent for name in others for parent in _parents(name)} if stacks else set()
    return tuple(sorted((modules | (stacks - parents)) - others - {""}))


def _may_be_linear(info: TensorInfo) -> bool:
    return info.role not in NEVER_LINEAR and len(info.shape) > 1


def _is_linear_alias(name: str) -> bool:
    """Return whether a tied name is that of a linear layer, such as an output head, and not of a further table."""
    return role_of(name, (1, 1), "F32") not in NEVER_LINEAR


def _is_stack(info: TensorInfo) -> bool:
    """Return whether a bare parameter is a stack of several matrices, one per expert, and not a table of shifts such
    as `blocks.0.modulation` [1, 6, 128]."""
    return not info.name.endswith(WEIGHT) and info.role in STACKED and len(info.shape) > 2 and min(info.shape) > 1


def _parents(module: str) -> Iterator[str]:
    """Yield the modules that contain a module."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module
