"""Choices that a recommendation is compared with: each format throughout, and the budget dealt by simple rules."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mxcli.flows.recommend.candidates import BITS, KEEP, KEEP_PERCENT, Group, Option, Target

DRAWS = 64
"""Random orders whose harm is averaged."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Baseline:
    """A choice by a simple rule: its name, its bits per element, and its harm (of a random rule, the mean)."""

    name: str
    bits_per_element: float
    harm: float


@dataclass(frozen=True, slots=True)
class _Budget:
    """The limit of a target: the weight of an option of a group, and the sum of weights that is allowed."""

    weight: Callable[[Group, Option], int]
    capacity: int


def baselines(target: Target, groups: Sequence[Group], options: Sequence[Sequence[Option]]) -> tuple[Baseline, ...]:
    """Return the baselines within a target: formats that all groups can have, then the budget dealt at random and to
    the first and last blocks; none for a target that is not a budget."""
    budget = _budget_of(target, groups)
    if budget is None:
        return ()
    found = list(_throughout(groups, options, budget))
    elements = sum(group.elements for group in groups)
    for name, orders in (
        ("dealt at random", [_shuffled(len(groups), seed) for seed in range(DRAWS)]),
        ("first and last blocks high", [_outer_first(groups)]),
    ):
        dealt = [_dealt(order, groups, options, budget) for order in orders if order]
        harms = [math.fsum(option.harm for option in each) for each in dealt]
        bits = [sum(option.bits for option in each) / elements for each in dealt]
        if harms:
            found.append(Baseline(name, math.fsum(bits) / len(bits), math.fsum(harms) / len(harms)))
    return tuple(found)


def _budget_of(target: Target, groups: Sequence[Group]) -> _Budget | None:
    elements = sum(group.elements for group in groups)
    if target.kind == BITS:
        return _Budget(lambda group, option: option.bits, math.floor(target.exactly * elements))
    if target.kind == KEEP_PERCENT:
        weight: Callable[[Group, Option], int] = lambda group, option: group.elements * (option.name == KEEP)  # noqa: E731
        return _Budget(weight, math.floor(target.exactly * elements / Fraction(100)))
    return None


def _throughout(groups: Sequence[Group], options: Sequence[Sequence[Option]], budget: _Budget) -> Iterable[Baseline]:
    """Yield the formats that every group can have and that are small enough."""
    elements = sum(group.elements for group in groups)
    for name in dict.fromkeys(option.name for each in options for option in each if option.name != KEEP):
        same = [next((option for option in each if option.name == name), None) for each in options]
        chosen = [option for option in same if option is not None]
        if len(chosen) < len(groups) or _weight_of(groups, chosen, budget) > budget.capacity:
            continue
        bits = sum(option.bits for option in chosen) / elements
        yield Baseline(f"{name} throughout", bits, math.fsum(option.harm for option in chosen))


def _dealt(
    order: Sequence[int], groups: Sequence[Group], options: Sequence[Sequence[Option]], budget: _Budget
) -> list[Option]:
    """Return the smallest option of each group, but in an order the option with most bits that still fits."""
    chosen = [min(each, key=lambda option: option.bits) for each in options]
    used = _weight_of(groups, chosen, budget)
    for at in order:
        group, before = groups[at], budget.weight(groups[at], chosen[at])
        for option in sorted(options[at], key=lambda option: -option.bits):
            if used - before + budget.weight(group, option) <= budget.capacity:
                used += budget.weight(group, option) - before
                chosen[at] = option
                break
    return chosen


def _weight_of(groups: Sequence[Group], chosen: Sequence[Option], budget: _Budget) -> int:
    return sum(budget.weight(group, option) for group, option in zip(groups, chosen, strict=True))


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _outer_first(groups: Sequence[Group]) -> list[int]:
    """Return the groups by the distance of their block from the nearer end of the model; none if blocks are unknown."""
    found = [_BLOCK.search(group.name) for group in groups]
    blocks = [int(match[1]) if match else None for match in found]
    last = max((block for block in blocks if block is not None), default=0)
    if not last:
        return []
    distance = [math.inf if block is None else min(block, last - block) for block in blocks]
    return sorted(range(len(groups)), key=lambda at: (distance[at], at))
