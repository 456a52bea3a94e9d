"""Time quantizing and dequantizing in one pass on the CPU: `python tests/backends/time_values.py`, mxcli installed.

A BF16 matrix of 1024x1024 on one thread, in billions of elements per second: the fastest of many passes into another
array and in place, of the two passes that it replaces, and of a copy. NVFP4 is given its amax. The load of the machine
is printed first; other work on it makes every figure lower.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

from mxcli.backends import cpu
from mxcli.numerics.scheme import resolve

SIZE, PASSES = 1024, 400


def rate(work: Callable[[], object], passes: int) -> float:
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return SIZE * SIZE / min(seconds) / 1e9


if __name__ == "__main__":
    values = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    out, own, one = np.empty_like(bits), bits.copy(), cpu.Cpu(threads=1)
    print(
        f"load {os.getloadavg()[0]:.1f}, {cpu.instruction_set()}, copy {rate(lambda: np.copyto(out, bits), PASSES):.2f}"
    )
    for name in sys.argv[1:] or ("mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "fp8_e4m3_1x128", "fp8_e4m3"):
        scheme = resolve(name)
        amax = None if scheme.format.tensor_scale is None else 0.1

        def values_into(to: np.ndarray, x: np.ndarray = bits) -> object:
            return one.quantize_dequantize(x, "BF16", scheme, tensor_amax=amax, out=to)  # noqa: B023 - called in the loop

        def twice() -> object:
            return one.dequantize(one.quantize(bits, "BF16", scheme, tensor_amax=amax, stats=False), "BF16")  # noqa: B023

        rates = rate(lambda: values_into(out), PASSES), rate(lambda: values_into(own, own), PASSES), rate(twice, 10)
        print("{:16} {:.2f}, in place {:.2f}, in two passes {:.2f}".format(name, *rates), flush=True)
