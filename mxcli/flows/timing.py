"""Honest timing of calls in one process: warm-up, interleaved rounds in random order, median and spread."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call over the counted rounds."""

    median: float
    p10: float
    p90: float
    rounds: int


def time_together(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    seed: int = 0,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Timing]:
    """Times every call once per round, in an order shuffled anew each round, after one uncounted round.

    What drifts (clocks, other processes) then reaches all calls alike. Raises nothing of its own.
    """
    order, order_of, seconds = list(calls), random.Random(seed), {name: list[float]() for name in calls}
    for number in range(rounds + 1):
        order_of.shuffle(order)
        for name in order:
            start = time.perf_counter()
            calls[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
        on_round(number + 1, rounds + 1)
    return {name: timing_of(taken) for name, taken in seconds.items()}


def timing_of(seconds: list[float]) -> Timing:
    """The median and spread of calls."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))
