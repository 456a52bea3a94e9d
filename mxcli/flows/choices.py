"""What a recommendation chooses among: groups of tensors that loaders treat alike, and for each the formats it may have
or that it is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxcli.files.tensors import DTYPES, TensorInfo
from mxcli.flows.fused import FUSED, fused_set, named_sets
from mxcli.flows.measuring import stored_bits
from mxcli.flows.plan import Plan, Step
from mxcli.numerics.blocks import grid_shape

KEEP = "keep"
_EXPERTS = re.compile(r"(.+\.experts)\.(?:\d+\..+|gate_up_proj.*|down_proj.*)")


@dataclass(frozen=True, slots=True)
class Effect:
    """What an option does to one tensor: stored bits, harm, and the SQNR in dB it is judged by (infinite: exact)."""

    bits: int
    harm: float
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class Option:
    """A format, or KEEP, for a group: its effect on each of the tensors, in their order."""

    name: str
    effects: tuple[Effect, ...]

    @property
    def bits(self) -> int:
        """Stored bits of the group."""
        return sum(effect.bits for effect in self.effects)

    @property
    def harm(self) -> float:
        """The harm of the group: that of its tensors added up."""
        return math.fsum(effect.harm for effect in self.effects)

    @property
    def sqnr_db(self) -> float:
        """The lowest SQNR in the group."""
        return min(effect.sqnr_db for effect in self.effects)


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are quantized alike or kept together, by one name."""

    name: str
    tensors: tuple[TensorInfo, ...]

    @property
    def elements(self) -> int:
        """Elements of all its tensors."""
        return sum(info.elements for info in self.tensors)


def group_name(name: str, sets: Iterable[Sequence[str]] = FUSED) -> str:
    """The set that a weight moves with: all experts of a module, a fused set, else itself."""
    experts = _EXPERTS.fullmatch(name)
    return experts[1] if experts else fused_set(name, sets) or name


def groups_of(plans: Sequence[Plan]) -> tuple[Group, ...]:
    """The groups of the tensors that some plan quantizes, in the order of the source."""
    found: dict[str, list[TensorInfo]] = {}
    fuse = plans[0].options.fuse
    sets = (*named_sets(fuse), *FUSED) if fuse else FUSED
    for steps in zip(*(plan.steps for plan in plans), strict=True):
        if any(step.recipe for step in steps):
            found.setdefault(group_name(steps[0].tensor.name, sets), []).append(steps[0].tensor)
    return tuple(Group(name if len(infos) > 1 else infos[0].name, tuple(infos)) for name, infos in found.items())


def formats_of(group: Group, steps: Sequence[Mapping[str, Step]]) -> tuple[int, ...]:
    """Which plans, given their steps by name, quantize all of a group."""
    names = [info.name for info in group.tensors]
    return tuple(at for at, of in enumerate(steps) if all(of[name].recipe for name in names))


def bits_of(step: Step) -> int:
    """Bits of a tensor as a step stores it: codes and scales, or the tensor itself."""
    if step.recipe is None:
        return kept_bits(step.tensor)
    row = step.recipe.format
    return stored_bits(step.tensor.elements, math.prod(grid_shape(row, step.shape)), row)


def kept_bits(info: TensorInfo) -> int:
    """Bits of a tensor as it is."""
    return info.elements * DTYPES[info.dtype].bits
