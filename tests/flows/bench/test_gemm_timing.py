"""A clock that is fooled where nothing was warmed up, or where one order is kept, must not fool the speeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median

from mxcli.flows.bench.gemm import BATCH, MOST_BATCHES, drift_percent, time_products, warm_up


class FakeClock:
    """A clock that returns `seconds_of(name, number of earlier calls of it)` for a call."""

    def __init__(self, seconds_of: Callable[[str, int], float]) -> None:
        self._seconds_of = seconds_of
        self.called: list[str] = []

    def seconds(self, call: Callable[[], object]) -> float:
        name = str(call())
        taken = self._seconds_of(name, self.called.count(name))
        self.called.append(name)
        return taken


def named(*names: str) -> dict[str, Callable[[], object]]:
    return {name: (lambda name=name: name) for name in names}


def test_first_calls_that_compile_do_not_count() -> None:
    clock = FakeClock(lambda name, before: 5.0 if before < BATCH else 0.001)
    assert time_products(named("a"), clock, rounds=5)["a"] == [0.001] * 5


def test_warming_up_goes_on_while_clocks_still_rise() -> None:
    clock = FakeClock(lambda name, before: 1.0 / (1 + before // BATCH))
    warm_up(lambda: "a", clock)
    assert len(clock.called) == BATCH * MOST_BATCHES  # halves, thirds, ... never within 3 % so early
    steady = FakeClock(lambda name, before: 1.0)
    warm_up(lambda: "a", steady)
    assert len(steady.called) == 2 * BATCH


def test_every_product_is_timed_once_a_round_in_no_fixed_order() -> None:
    clock = FakeClock(lambda name, before: 1.0)
    time_products(named("a", "b", "c"), clock, rounds=20)
    timed = clock.called[3 * 2 * BATCH :]
    rounds = [tuple(timed[at : at + 3]) for at in range(0, len(timed), 3)]
    assert len(rounds) == 20
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) == 6  # every order occurs


def test_a_clock_that_slows_down_reaches_all_alike() -> None:
    ticks = itertools.count()
    clock = FakeClock(lambda name, before: 1.0 + 0.01 * next(ticks))
    found = time_products(named("a", "b"), clock, rounds=40)
    assert abs(median(found["a"]) / median(found["b"]) - 1) < 0.03
    assert all(drift_percent(seconds) > 20 for seconds in found.values())  # and it is told
    assert drift_percent([1.0, 1.1, 1.0, 1.1]) == 0.0
    assert drift_percent([1.0]) == 0.0


def test_the_same_seed_times_in_the_same_order() -> None:
    first, second = (FakeClock(lambda name, before: 1.0) for _ in range(2))
    for clock in (first, second):
        time_products(named("a", "b", "c"), clock, rounds=5, seed=3)
    assert first.called == second.called
