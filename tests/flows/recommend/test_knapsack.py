"""The multiple-choice knapsack against trying everything, and its speed on the size of a large model."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from fractions import Fraction

import pytest

from mxcli.flows.recommend.knapsack import Optimum, Option, least_weight, optimum

Groups = Sequence[Sequence[Option]]


def tried(groups: Groups, capacity: int) -> tuple[int, ...] | None:
    """The best of all choices: cost, then weight, then earlier options in earlier groups."""
    choices = itertools.product(*(range(len(options)) for options in groups))
    fitting = (choice for choice in choices if weight(groups, choice) <= capacity)
    return min(fitting, key=lambda choice: (cost(groups, choice), weight(groups, choice), choice), default=None)


def weight(groups: Groups, choice: Sequence[int]) -> int:
    return sum(options[at][0] for options, at in zip(groups, choice, strict=True))


def cost(groups: Groups, choice: Sequence[int]) -> Fraction:
    return sum((Fraction(options[at][1]) for options, at in zip(groups, choice, strict=True)), Fraction(0))


def instance(seed: int) -> tuple[list[list[Option]], int]:
    """Small integers (many ties), any floats, floats of widely different sizes, and the shapes of formats."""
    random_ = random.Random(seed)
    kind = seed % 4
    groups: list[list[Option]] = []
    for _ in range(random_.randint(1, 6)):
        size = random_.choice([1, 3, 4])
        options: list[Option] = []
        for _ in range(random_.randint(1, 4)):
            if kind == 0:
                options.append((random_.randint(0, 6), float(random_.randint(0, 4))))
            elif kind == 1:
                options.append((random_.randint(0, 1000), random_.random()))
            elif kind == 2:
                options.append((random_.randint(0, 50), 10.0 ** random_.uniform(-12, 2)))
            else:
                bits = random_.choice([4, 5, 8, 16])
                options.append((bits * size, 0.0 if bits == 16 else 4.0**-bits * random_.choice([1.0, 1.5])))
        groups.append(options)
    least, most = least_weight(groups), sum(max(o[0] for o in options) for options in groups)
    return groups, random_.randint(max(least - 1, 0), most + 1)


@pytest.mark.parametrize("start", range(0, 1200, 100))
def test_it_is_the_best_of_all_choices(start: int) -> None:
    for seed in range(start, start + 100):
        groups, capacity = instance(seed)
        found, best = optimum(groups, capacity), tried(groups, capacity)
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert found.chosen == best, seed
        assert found.exact
        assert found.weight == weight(groups, best)
        assert found.cost == pytest.approx(float(cost(groups, best)))
        assert found.bound == found.cost


def test_ties_go_to_fewer_bits_then_to_the_order_of_the_source() -> None:
    same: list[Option] = [(4, 1.0), (8, 0.0)]
    assert optimum([same] * 4, 24) == Optimum((0, 0, 1, 1), 24, 2.0, 2.0, True)
    assert optimum([[(4, 1.0), (8, 1.0)], [(4, 0.5), (4, 0.5)]], 100) == Optimum((0, 0), 8, 1.5, 1.5, True)


def test_sums_that_are_equal_as_floats_are_distinguished() -> None:
    tiny: list[list[Option]] = [[(0, 1.0), (1, 1.0 - 2**-53)], [(0, 1e9), (1, 1e9)], [(0, 2.0**-60), (1, 0.0)]]
    found = optimum(tiny, 1)
    assert found is not None
    assert found.chosen == (1, 0, 0)


def test_no_choice_fits() -> None:
    assert optimum([[(4, 1.0)], [(5, 0.0), (3, 1.0)]], 6) is None
    assert optimum([], 0) == Optimum((), 0, 0.0, 0.0, True)


def large(kind: str, groups: int = 500) -> list[list[Option]]:
    """A model of 125 layers: four groups of shapes each, four options, as measured, as random, or all alike."""
    random_ = random.Random(0)
    found: list[list[Option]] = []
    for at in range(groups):
        elements = [4096 * 6144, 4096 * 4096, 2 * 4096 * 14336, 4096 * 14336][at % 4]
        tensors = [3, 1, 2, 1][at % 4]
        bits = [elements * 17 // 4, elements * 9 // 2 + 32 * tensors, elements * 33 // 4, elements * 16]
        if kind == "alike":
            found.append(list(zip(bits, [0.013, 0.009, 0.0007, 0.0], strict=True)))
        elif kind == "measured":
            noise = [0.013 * random_.uniform(0.7, 2), 0.009 * random_.uniform(0.7, 2), 7e-4 * random_.uniform(0.9, 1.1)]
            found.append(list(zip(bits, [tensors * each for each in noise] + [0.0], strict=True)))
        elif kind == "correlated":
            weights = sorted(random_.randint(1, 10**6) for _ in range(4))
            found.append([(w, 1.0 - w / 10**6) for w in weights])
        else:
            weights = sorted(random_.randint(1, 10**9) for _ in range(4))
            found.append([(w, random_.random()) for w in weights])
    return found


@pytest.mark.parametrize("kind", ["measured", "alike", "random"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_a_large_model_takes_no_time(kind: str, share: float) -> None:
    groups = large(kind)
    least, most = least_weight(groups), sum(options[-1][0] for options in groups)
    began = time.process_time()
    found = optimum(groups, int(least + share * (most - least)))
    assert time.process_time() - began < 2
    assert found is not None
    assert found.exact


def test_an_answer_that_had_to_stop_early_says_how_good_it_is() -> None:
    groups = large("correlated", 60)
    capacity = least_weight(groups) + 7_654_321
    stopped, whole = optimum(groups, capacity, effort=10), optimum(groups, capacity, effort=200_000)
    assert stopped is not None
    assert whole is not None
    assert max(stopped.bound, whole.bound) <= min(stopped.cost, whole.cost)
    assert not stopped.exact
    assert stopped.bound > 0.9999 * stopped.cost
