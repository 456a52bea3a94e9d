"""What tensors are summed up by: their role, the layer they are in, or what they are in every layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Protocol

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT

OUTSIDE = "outside layers"
_LAYER = re.compile(r"((?:.*?\.)?\d+)\.(.+)")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PARAMETER = re.compile(rf"\.({WEIGHT}|{ACTIVATION}|{GRADIENT}|bias)$")


class Named(Protocol):
    """A tensor as far as it is grouped."""

    @property
    def name(self) -> str:
        """As the file has it."""

    @property
    def role(self) -> str:
        """What it is for."""

    @property
    def layer(self) -> str:
        """The module that it was captured at; empty where it was not."""


def layer_of(info: Named) -> str:
    """The layer a tensor is in, such as `model.layers.3`: its name up to the first number."""
    found = _LAYER.fullmatch(_name(info))
    return found[1] if found else OUTSIDE


def kind_of(info: Named) -> str:
    """What a tensor is in every layer, such as `mlp.down_proj` or `mlp.experts.*.w1`: its module after the layer."""
    module = _PARAMETER.sub("", _name(info))
    found = _LAYER.fullmatch(module)
    return _NUMBER.sub("*", found[2]) if found else module


def _name(info: Named) -> str:
    """What a tensor is called at every step and rank: the names of captured ones may begin with their file's."""
    return f"{info.layer}.{info.role}" if info.layer else info.name


GROUPINGS: dict[str, Callable[[Named], str]] = {"layer": layer_of, "role": lambda info: info.role, "kind": kind_of}


def check_grouping(by: str) -> None:
    """Raises UsageError for a name that means nothing."""
    if by not in GROUPINGS:
        raise UsageError(f"--by {printable(by)}: it takes {', '.join(GROUPINGS)}.{did_you_mean(by, GROUPINGS)}")


def labels(by: str, infos: Iterable[Named]) -> dict[str, str]:
    """The group of each tensor by its name. Where there are several roles, each has groups of its own: a sum over
    activations and gradients would be one of activations, whose values are so much larger."""
    listed, group = list(infos), GROUPINGS[by]
    several = by != "role" and len({info.role for info in listed}) > 1
    return {info.name: f"{group(info)} {info.role}" if several else group(info) for info in listed}
