"""Candidates of a recommendation: groups of tensors that loaders treat alike, each with its possible formats or kept;
and targets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mxcli.errors import RefusedError, UsageError
from mxcli.files.models.fused import fused_sets, named_sets
from mxcli.files.models.names import Config
from mxcli.files.tensors import DTYPES, TensorInfo
from mxcli.flows.measure.measure import stored_bits
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.flows.recommend.knapsack import Optimum, least_weight, optimum
from mxcli.numerics.blocks import grid_shape

KEEP = "keep"
_EXPERTS = re.compile(r"(.+\.experts)\.(?:\d+\..+|gate_up_proj.*|down_proj.*|fc[12]\.weight|mlp\.(?:w1|v1|w2))")


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of an option on one tensor: stored bits, harm, and the SQNR in dB it is judged by (infinite:
    exact)."""

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


def group_name(name: str, keys: Mapping[str, str]) -> str:
    """Return the group of a weight: all experts of a module, a fused set (`keys` by weight), else itself."""
    experts = _EXPERTS.fullmatch(name)
    return experts[1] if experts else keys.get(name, name)


def groups_of(plans: Sequence[Plan], config: Config | None = None) -> tuple[Group, ...]:
    """Return the groups of the tensors that some plan quantizes, in the order of the source; `config` is that of the
    source."""
    found: dict[str, list[TensorInfo]] = {}
    fuse = plans[0].options.fuse
    columns = {step.tensor.name: step.inputs for step in plans[0].tensors}
    keys = fused_sets(config, named_sets(fuse) if fuse else ()).keys(columns)
    for steps in zip(*(plan.tensors for plan in plans), strict=True):
        if any(step.scheme for step in steps):
            found.setdefault(group_name(steps[0].tensor.name, keys), []).append(steps[0].tensor)
    return tuple(Group(name if len(infos) > 1 else infos[0].name, tuple(infos)) for name, infos in found.items())


def formats_of(group: Group, steps: Sequence[Mapping[str, TensorPlan]]) -> tuple[int, ...]:
    """Return the indices of the plans, each given as its tensors by name, that quantize all of a group."""
    names = [info.name for info in group.tensors]
    return tuple(at for at, of in enumerate(steps) if all(of[name].scheme for name in names))


def bits_of(step: TensorPlan) -> int:
    """Return the bits of a tensor as planned: codes and scales, or the tensor itself."""
    if step.scheme is None:
        return kept_bits(step.tensor)
    row = step.scheme.format
    return stored_bits(step.tensor.elements, math.prod(grid_shape(row, step.shape)), row)


def kept_bits(info: TensorInfo) -> int:
    """Return the bits of a tensor as it is."""
    return info.elements * DTYPES[info.dtype].bits


BITS, MIN_SQNR, KEEP_PERCENT = "bits", "min_sqnr", "keep_percent"
Options = Sequence[Option]


@dataclass(frozen=True, slots=True)
class Target:
    """A target: at most average BITS per element, a MIN_SQNR of every tensor in dB, or the percentage of elements that
    may
    be kept."""

    kind: str
    value: float

    @property
    def exactly(self) -> Fraction:
        """The value as it was typed."""
        return Fraction(repr(self.value))


def stated_target(bits: float | None, min_sqnr: float | None, keep_percent: float | None, formats: int) -> Target:
    """Return the one target that was stated; raises UsageError for none or several, and for values out of range."""
    stated = [(BITS, bits), (MIN_SQNR, min_sqnr), (KEEP_PERCENT, keep_percent)]
    named = [Target(kind, value) for kind, value in stated if value is not None]
    if len(named) != 1:
        raise UsageError(
            "state one target: --bits (average bits per element), --min-sqnr (dB, of every tensor) or --keep-percent "
            "(of the elements)."
        )
    (target,) = named
    limits = {BITS: (0.0, 64.0), MIN_SQNR: (-100.0, 400.0), KEEP_PERCENT: (0.0, 100.0)}
    low, high = limits[target.kind]
    if not low <= target.value <= high or (target.kind == BITS and not target.value):
        option = "--" + target.kind.replace("_", "-")
        raise UsageError(f"{option} {target.value:g}: it takes a number above {low:g} and up to {high:g}.")
    if target.kind == KEEP_PERCENT and formats != 1:
        raise UsageError(f"--keep-percent chooses what one format keeps: name one in --formats, not {formats}.")
    return target


def check_reachable(target: Target, groups: Sequence[Group], options: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Raise RefusedError, before anything is measured, if no choice of options, given with their bits, is small enough,
    or
    nothing needs to be quantized."""
    if target.kind != BITS:
        return
    elements = sum(group.elements for group in groups)
    least = sum(min(bits for _, bits in each) for each in options)
    if least > target.exactly * elements:
        names = {min(each, key=lambda option: option[1])[0] for each in options}
        raise RefusedError(
            f"--bits {target.value:g}: these formats need {_rounded_up(Fraction(least, elements))} bits per element at "
            f"least ({', '.join(sorted(names))}; scales included). Allow that, or name a smaller format in --formats."
        )
    kept = sum(next(bits for name, bits in each if name == KEEP) for each in options)
    if kept <= target.exactly * elements:
        raise RefusedError(
            f"--bits {target.value:g}: the tensors take {kept / elements:g} bits per element as they are; nothing has "
            "to be quantized."
        )


def choose(target: Target, groups: Sequence[Group], options: Sequence[Options]) -> Optimum:
    """Return the option of each group that serves the target best.

    BITS and KEEP_PERCENT: the least harm; MIN_SQNR: the fewest bits. Of equals the fewest bits, then the option named
    first in the group that comes first. Raises RefusedError where no choice serves it.
    """
    elements = sum(group.elements for group in groups)
    if target.kind == MIN_SQNR:
        return _smallest(target, options)
    if target.kind == BITS:
        weights: Callable[[Group, Option], int] = lambda group, option: option.bits  # noqa: E731
        capacity = int(target.exactly * elements)
    else:
        weights = lambda group, option: group.elements if option.name == KEEP else 0  # noqa: E731
        capacity = int(target.exactly * elements / 100)
    weighed = [
        [(weights(group, option), option.harm) for option in each] for group, each in zip(groups, options, strict=True)
    ]
    found = optimum(weighed, capacity)
    if found is None:
        least = Fraction(least_weight(weighed), elements)
        reach = f"{_rounded_up(least)} bits per element" if target.kind == BITS else f"{_rounded_up(100 * least)} %"
        raise RefusedError(
            f"--{target.kind.replace('_', '-')} {target.value:g}: {reach} is the least that can be reached, since a "
            "format does not serve every tensor."
        )
    return found


def _smallest(target: Target, options: Sequence[Options]) -> Optimum:
    """Return the smallest option of each group with enough SQNR; keeping is exact, so there is one."""
    chosen = []
    for each in options:
        enough = [at for at, option in enumerate(each) if option.sqnr_db >= target.value]
        chosen.append(min(enough, key=lambda at: (each[at].bits, each[at].harm, at)))
    picked = [each[at] for each, at in zip(options, chosen, strict=True)]
    harm = sum(option.harm for option in picked)
    return Optimum(tuple(chosen), sum(option.bits for option in picked), harm, harm, True)


def _rounded_up(value: Fraction) -> str:
    """Return the value rounded up to four decimals."""
    return f"{-(-value.numerator * 10_000 // value.denominator) / 10_000:g}"
