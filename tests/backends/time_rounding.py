"""Time stochastic rounding and transforms on the CPU: `python tests/backends/time_rounding.py`, with mxcli installed.

A BF16 matrix of 4096x4096 on one thread, in billions of elements per second, without and with all statistics; the
median of seven passes. `mxcli bench quantize` times formats and rules.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from mxcli.backends import cpu
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules, Scheme, resolve

SIZE, PASSES = 4096, 7
WAYS = {
    "nearest-even": {},
    "stochastic": {"rounding": "stochastic"},
    "hadamard-16": {"hadamard": find_hadamard(16)},
    "hadamard-128": {"hadamard": find_hadamard(128)},
    "stochastic, hadamard-16": {"rounding": "stochastic", "hadamard": find_hadamard(16)},
}


def rate(x: np.ndarray, scheme: Scheme, *, stats: bool) -> float:
    seconds, made = [], None
    for _ in range(PASSES):
        start = time.perf_counter()
        made = cpu.quantize(x, "BF16", scheme, stats=stats, threads=1, reuse=made)
        seconds.append(time.perf_counter() - start)
    return x.size / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    values = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    for name in ("mxfp8", "nvfp4"):
        for what, options in WAYS.items():
            rates = [rate(bits, resolve(name, Rules(**options)), stats=stats) for stats in (False, True)]  # type: ignore[arg-type]
            print(f"{name} {what:24} {rates[0]:.2f}, with statistics {rates[1]:.2f}", flush=True)
