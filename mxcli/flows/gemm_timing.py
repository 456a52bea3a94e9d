"""Honest timing of products: warmed up until stable, the cache emptied before each call, rounds in random order."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mxcli.flows.gemm_engine import Engine

GPU_FLUSH_BYTES, CPU_FLUSH_BYTES = 256 << 20, 64 << 20
"""Written before every timed call: more than the caches hold."""
STABLE = 0.03
"""How far the medians of two neighbouring batches of calls may lie apart when a call counts as warmed up."""
BATCH, MOST_BATCHES = 3, 8


class Clock(Protocol):
    """What takes the time of one call."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds that a call takes with cold caches."""


class CpuClock:
    """The processor's clock; the caches hold something else when it starts."""

    def __init__(self) -> None:
        import torch

        self._flush = torch.zeros(CPU_FLUSH_BYTES // 4)

    def seconds(self, call: Callable[[], object]) -> float:
        """See `Clock`."""
        self._flush.add_(1)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class GpuClock:
    """Events of the GPU on torch's current stream."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._flush = torch.empty(GPU_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """See `Clock`."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(engine: Engine) -> Clock:
    """The clock of a device."""
    return GpuClock(engine.device) if engine.on_gpu else CpuClock()


def warm_up(call: Callable[[], object], clock: Clock) -> None:
    """Calls until two batches in a row take as long, or enough have passed: compiling, growing clocks and first
    allocations are over then, or will not be."""
    before = None
    for _ in range(MOST_BATCHES):
        median = statistics.median(clock.seconds(call) for _ in range(BATCH))
        if before is not None and abs(median - before) <= STABLE * before:
            return
        before = median


def time_products(
    calls: Mapping[str, Callable[[], object]], clock: Clock, rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds of every call, once per round, in an order shuffled anew each round, after warming each up: what drifts
    reaches all alike, and none is always the one after another."""
    for call in calls.values():
        warm_up(call, clock)
    order, order_of = list(calls), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        order_of.shuffle(order)
        for name in order:
            seconds[name].append(clock.seconds(calls[name]))
    return seconds


def drift_percent(seconds: Sequence[float]) -> float:
    """How much longer the second half of a call's rounds took than the first, by their medians: a GPU that throttles,
    or other work, shows there."""
    half = len(seconds) // 2
    if not half:
        return 0.0
    return 100.0 * (statistics.median(seconds[-half:]) / statistics.median(seconds[:half]) - 1.0)
