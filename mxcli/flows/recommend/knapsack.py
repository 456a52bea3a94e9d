"""The multiple-choice knapsack, solved exactly: an option for each group, at least cost within a capacity.

Options that another of their group beats in both weight and cost go first. The linear relaxation (each group on the
lower convex hull of its options, steps taken by what they save per weight) gives a bound and a first solution; what
is between the two rules out most other options by their reduced cost. The rest is dynamic programming over pairs of
weight and cost, of which those are dropped that another beats or whose own relaxation is beyond the best solution
known. Costs are compared as exact integers: equal ones are decided by the lower weight, then by the first group in
which an earlier option is chosen. See Kellerer, Pferschy, Pisinger: Knapsack Problems, chapter 11.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

Option = tuple[int, float]
"""Weight and cost, which is finite."""

EFFORT = 2_000_000
"""Pairs examined before an exact answer is given up for one within a proven bound."""
_BEAM, _NARROW = 64, 256
_MARGIN = 1e-11
"""The relative error of sums in binary64; bounds are relaxed by it."""

_State = tuple[int, int, float]
"""Weight, exact cost with its ties, cost as a float."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The option chosen of each group, what they weigh and cost, and a proven lower bound on what any choice costs.

    `exact` says that no other choice is better.
    """

    chosen: tuple[int, ...]
    weight: int
    cost: float
    bound: float
    exact: bool


def least_weight(groups: Sequence[Sequence[Option]]) -> int:
    """Return the weight of the lightest choice."""
    return sum(min(weight for weight, _ in options) for options in groups)


def optimum(groups: Sequence[Sequence[Option]], capacity: int, effort: int = EFFORT) -> Optimum | None:
    """Return the cheapest choice that weighs no more than the capacity; None where there is none.

    With less `effort` than it takes, the best choice found, not `exact`, and how good any can be.
    """
    if least_weight(groups) > capacity:
        return None
    problem = _Problem(groups, capacity)
    best = problem.greedy()
    if problem.slope > 0:
        for limit, width in ((effort, _BEAM), (effort, None)):
            found, dropped = problem.searched(best, limit, width)
            best = min(best, found, key=lambda state: state[1])
            bound = dropped
    else:
        bound = None
    chosen = problem.chosen(best)
    cost = fsum(groups[at][option][1] for at, option in enumerate(chosen))
    lowest = cost if bound is None else min(cost, bound - problem.margin)
    return Optimum(chosen, sum(groups[at][option][0] for at, option in enumerate(chosen)), cost, lowest, bound is None)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An option that no other of its group beats; `exact` is its cost, with weight and index encoded as
    tie-breakers."""

    weight: int
    exact: int
    cost: float


class _Problem:
    """The groups with their undominated options, and the relaxation of all of them."""

    def __init__(self, groups: Sequence[Sequence[Option]], capacity: int) -> None:
        self.capacity = capacity
        self.base = max(map(len, groups), default=1)
        self.groups = [_undominated(options) for options in self._exact(groups)]
        self.margin = _MARGIN * fsum(max(abs(o.cost) for o in options) for options in self.groups)
        self.slope = 0.0
        """The value of weight at the break of the relaxation: 0 if the capacity does not bind."""
        self.relaxed = [0] * len(self.groups)

    def greedy(self) -> _State:
        """Return a good choice: steps along the hulls, best first, each that fits; sets `slope` and `relaxed`."""
        at = [0] * len(self.groups)
        hulls = [_hull(options) for options in self.groups]
        left = self.capacity - sum(options[0].weight for options in self.groups)
        steps = sorted(
            (-_saving(options[a], options[b]), group, place)
            for group, (options, hull) in enumerate(zip(self.groups, hulls, strict=True))
            for place, (a, b) in enumerate(pairwise(hull))
        )
        broken = False
        for saving, group, place in steps:
            options, hull = self.groups[group], hulls[group]
            step = options[hull[place + 1]].weight - options[hull[place]].weight
            if step > left and not broken:
                broken, self.slope = True, -saving
                self.relaxed = [hulls[g][a] for g, a in enumerate(at)]
            if step <= left and at[group] == place:
                at[group], left = place + 1, left - step
        return self._sum(options[hull[a]] for options, hull, a in zip(self.groups, hulls, at, strict=True))

    def searched(self, best: _State, effort: int, width: int | None) -> tuple[_State, float | None]:
        """Return the best choice among those that may be better than one known, and, where some were given up, the
        least that one of those may cost.

        `width` is how many pairs are kept at most.
        """
        fixed, core = self._core(best)
        weight, exact, cost = self._sum(fixed)
        states: list[_State] = [(weight, exact, cost)]
        tails = _tails(core)
        limit = best[2] + self.margin
        dropped: float | None = None
        for options, tail in zip(core, tails, strict=True):
            room = [self.capacity - tail.weight - o.weight for o in options]
            merged = [
                (w + o.weight, e + o.exact, c + o.cost)
                for o, most in zip(options, room, strict=True)
                for w, e, c in states
                if w <= most
            ]
            effort -= len(merged)
            merged.sort()
            states, lowest = [], None
            for state in merged:
                if (lowest is None or state[1] < lowest) and tail.bound(state, self.capacity) <= limit:
                    states.append(state)
                    lowest = state[1]
            most_kept = width or max(_NARROW, effort // 4)
            if len(states) > most_kept:
                ranked = sorted(states, key=lambda state: (tail.bound(state, self.capacity), state[1]))
                least = tail.bound(ranked[most_kept], self.capacity)
                dropped = least if dropped is None else min(dropped, least)
                states = sorted(ranked[:most_kept])
        return min([*states, best], key=lambda state: state[1]), dropped

    def chosen(self, state: _State) -> tuple[int, ...]:
        """Return the options of a choice, read from the digits of its exact cost."""
        digits, rest = [], state[1]
        for _ in self.groups:
            rest, digit = divmod(rest, self.base)
            digits.append(digit)
        return tuple(reversed(digits))

    def _exact(self, groups: Sequence[Sequence[Option]]) -> Iterator[list[_Candidate]]:
        """Yield options with costs as integers of one unit, followed by digits for their weight and their place."""
        ratios = [[cost.as_integer_ratio() for _, cost in options] for options in groups]
        shift = max((d.bit_length() for row in ratios for _, d in row), default=1)
        heaviest = 1 + sum(max(weight for weight, _ in options) for options in groups)
        places = self.base ** len(groups)
        digit = places
        for options, row in zip(groups, ratios, strict=True):
            digit //= self.base
            yield [
                _Candidate(weight, ((n << (shift - d.bit_length())) * heaviest + weight) * places + at * digit, cost)
                for at, ((weight, cost), (n, d)) in enumerate(zip(options, row, strict=True))
            ]

    def _core(self, best: _State) -> tuple[list[_Candidate], list[list[_Candidate]]]:
        """Return the groups of which one option is left by its reduced cost, and the others, the least flexible
        first."""
        gap = best[2] - self._relaxation() + 2 * self.margin
        fixed, core = [], []
        for options, at in zip(self.groups, self.relaxed, strict=True):
            worth = [o.cost + self.slope * o.weight for o in options]
            left = [o for o, value in zip(options, worth, strict=True) if value - worth[at] <= gap]
            if len(left) == 1:
                fixed += left
            else:
                others = sorted(value - worth[at] for value in worth)
                core.append((-others[1], left))
        core.sort(key=lambda pair: pair[0])
        return fixed, [left for _, left in core]

    def _relaxation(self) -> float:
        chosen = [options[at] for options, at in zip(self.groups, self.relaxed, strict=True)]
        return fsum(o.cost for o in chosen) - self.slope * (self.capacity - sum(o.weight for o in chosen))

    def _sum(self, chosen: Iterator[_Candidate] | Sequence[_Candidate]) -> _State:
        listed = list(chosen)
        return sum(o.weight for o in listed), sum(o.exact for o in listed), fsum(o.cost for o in listed)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The relaxation of the groups to come: at least `weight` they cost `cost`, and less by `savings` at more."""

    weight: int
    cost: float
    weights: Sequence[int]
    savings: Sequence[float]
    slopes: Sequence[float]

    def bound(self, state: _State, capacity: int) -> float:
        """Return a lower bound on any completion of this partial choice."""
        left = capacity - self.weight - state[0]
        at = bisect_right(self.weights, left) - 1
        return state[2] + self.cost - self.savings[at] - self.slopes[at] * (left - self.weights[at])


def _tails(core: Sequence[Sequence[_Candidate]]) -> list[_Tail]:
    """Return, for each group, the relaxation of the groups after it."""
    tails = [_Tail(0, 0.0, [0], [0.0], [0.0])]
    steps: list[tuple[float, int, float]] = []
    weight, cost = 0, 0.0
    for options in reversed(core[1:]):
        hull = _hull(options)
        pairs = [(options[a], options[b]) for a, b in pairwise(hull)]
        steps += [(-_saving(a, b), b.weight - a.weight, a.cost - b.cost) for a, b in pairs]
        steps.sort()
        weight, cost = weight + options[0].weight, cost + options[0].cost
        weights, savings = [0], [0.0]
        for _, more, saved in steps:
            weights.append(weights[-1] + more)
            savings.append(savings[-1] + saved)
        tails.append(_Tail(weight, cost, weights, savings, [*(-step[0] for step in steps), 0.0]))
    return tails[::-1] if core else []


def _undominated(options: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the options that no other dominates in weight and cost, by rising weight and falling cost."""
    kept: list[_Candidate] = []
    for option in sorted(options, key=lambda o: (o.weight, o.exact)):
        if not kept or option.exact < kept[-1].exact:
            kept.append(option)
    return kept


def _hull(options: Sequence[_Candidate]) -> list[int]:
    """Place of the options on the lower convex hull: what a step saves per weight falls from step to step."""
    hull: list[int] = []
    for at, option in enumerate(options):
        while len(hull) > 1 and _saving(options[hull[-2]], options[hull[-1]]) <= _saving(options[hull[-1]], option):
            hull.pop()
        hull.append(at)
    return hull


def _saving(light: _Candidate, heavy: _Candidate) -> float:
    """Return the cost saved per unit of weight (hull slope)."""
    return (light.cost - heavy.cost) / (heavy.weight - light.weight)
