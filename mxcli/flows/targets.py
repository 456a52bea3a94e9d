"""Targets of a recommendation, and the best choice for each: which option every group gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mxcli.errors import RefusedError, UsageError
from mxcli.flows.choices import KEEP, Group, Option
from mxcli.flows.optimum import Optimum, least_weight, optimum

BITS, MIN_SQNR, KEEP_PERCENT = "bits", "min_sqnr", "keep_percent"
Options = Sequence[Option]


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for: average BITS per element at most, a MIN_SQNR of every tensor in dB, or the percentage of
    elements that may be kept."""

    kind: str
    value: float

    @property
    def exactly(self) -> Fraction:
        """The value as it was typed."""
        return Fraction(repr(self.value))


def stated_target(bits: float | None, min_sqnr: float | None, keep_percent: float | None, formats: int) -> Target:
    """The one target that was stated; raises UsageError for none or several, and for values that mean nothing."""
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
    """Before anything is measured: raises RefusedError where no choice of options, given with their bits, is small
    enough, or where nothing needs to be quantized."""
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
    """The option of each group that serves the target best.

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
    """In each group the smallest option with enough SQNR; keeping is exact, so there is one."""
    chosen = []
    for each in options:
        enough = [at for at, option in enumerate(each) if option.sqnr_db >= target.value]
        chosen.append(min(enough, key=lambda at: (each[at].bits, each[at].harm, at)))
    picked = [each[at] for each, at in zip(options, chosen, strict=True)]
    harm = sum(option.harm for option in picked)
    return Optimum(tuple(chosen), sum(option.bits for option in picked), harm, harm, True)


def _rounded_up(value: Fraction) -> str:
    """Four decimals, never less than the value."""
    return f"{-(-value.numerator * 10_000 // value.denominator) / 10_000:g}"
