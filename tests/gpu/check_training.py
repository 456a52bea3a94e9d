"""The training features of check.py: stochastic rounding, transforms, given amax, both axes in one read, values in one
pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from kernel_samples import normal
from same_results import differences

from mxcli.backends import cpu
from mxcli.backends.backend import Backend
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules, Scheme, resolve

NAMES = ("mxfp8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_1x128")
SIZES = (None, 16, 128)
STREAM = 5


def compare(
    gpu: Backend,
    resident: Backend,
    there: Callable[[torch.Tensor], torch.Tensor],
    names: Sequence[str] = NAMES,
    sizes: Sequence[int | None] = SIZES,
) -> tuple[int, list[str]]:
    """Return how many schemes were compared with the CPU's bytes and statistics, and the differences; `there` moves a
    tensor to the device of `resident`."""
    x = (normal(256, 640).view(np.uint32) >> 16).astype(np.uint16)
    schemes = [_scheme(name, size) for name in names for size in sizes]
    wrong = [
        f"{scheme.format.name} {scheme.hadamard.name if scheme.hadamard else 'stochastic'}: {each}"
        for scheme in schemes
        for each in (*_of_arrays(gpu, x, scheme), *_of_both(resident, there(torch.from_numpy(x)), x, scheme))
    ]
    delayed = resolve("fp8_e4m3")
    given, wanted = (each.quantize(x, "BF16", delayed, tensor_amax=0.5) for each in (gpu, cpu.Cpu()))
    wrong += [f"fp8_e4m3 with a given amax: {each}" for each in differences(given, wanted)]
    return len(schemes), wrong


def timed(resident: Backend, device: str, size: int) -> Iterator[tuple[str, str]]:
    """Yield what was timed for a BF16 matrix on the GPU, and its time."""
    x = torch.randn(size, size, device=device).bfloat16().view(torch.uint16)
    for name in ("mxfp8", "nvfp4"):
        for what, scheme in (
            ("nearest even", resolve(name)),
            ("stochastic", resolve(name, Rules(rounding="stochastic"))),
            ("hadamard-16", resolve(name, Rules(hadamard=find_hadamard(16)))),
        ):
            amax = 5.0 if scheme.format.tensor_scale else None
            one = _milliseconds(lambda r=scheme, a=amax: resident.quantize(x, "BF16", r, stats=False, tensor_amax=a))
            both = _milliseconds(lambda r=scheme: resident.quantize_both(x, "BF16", r))
            yield f"{name} {what} {size}x{size}", f"{one:.3f} ms along rows, {both:.3f} ms along both, amax included"
    out = torch.empty_like(x)
    copy = _milliseconds(lambda: out.copy_(x))
    for name in (*NAMES, "mxfp4"):
        scheme = resolve(name)
        amax = 5.0 if scheme.format.tensor_scale else None
        passed = _milliseconds(
            lambda r=scheme, a=amax: resident.quantize_dequantize(x, "BF16", r, tensor_amax=a, out=out)
        )
        share = f"{100 * copy / passed:.0f} % of a copy's speed (goal 95 %; fp8_e4m3 reads twice)"
        yield f"{name} values in one pass {size}x{size}", f"{passed:.3f} ms, {share}"


def _scheme(name: str, size: int | None) -> Scheme:
    hadamard = None if size is None else find_hadamard(size, 1)
    return resolve(name, Rules(rounding="stochastic", seed=7, hadamard=hadamard))


def _of_arrays(gpu: Backend, x: np.ndarray, scheme: Scheme) -> list[str]:
    wanted = cpu.quantize(x, "BF16", scheme, stream=STREAM, per_block=True)
    found = differences(gpu.quantize(x, "BF16", scheme, stream=STREAM, per_block=True), wanted)
    plain = gpu.quantize(x, "BF16", scheme, stream=STREAM, stats=False)
    if plain.packed.tobytes() != wanted.packed.tobytes():
        found.append("codes without statistics")
    if gpu.quantize_dequantize(x, "BF16", scheme, stream=STREAM).tobytes() != (
        cpu.quantize_dequantize(x, "BF16", scheme, stream=STREAM).tobytes()
    ):
        found.append("values in one pass")
    if gpu.dequantize(plain).tobytes() != cpu.dequantize(wanted).tobytes():
        found.append("dequantized")
    return found


def _of_both(resident: Backend, x: torch.Tensor, here: np.ndarray, scheme: Scheme) -> list[str]:
    ours = resident.quantize_both(x, "BF16", scheme, stream=STREAM)
    theirs = cpu.Cpu().quantize_both(here, "BF16", scheme, stream=STREAM)
    return [
        f"{part} of both, along {axis}s"
        for axis, one, other in zip(("row", "column"), ours, theirs, strict=True)
        for part in ("packed", "scales")
        if getattr(one, part).cpu().numpy().tobytes() != getattr(other, part).tobytes()
    ]


def _milliseconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Return the median time of some work on torch's stream."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))
