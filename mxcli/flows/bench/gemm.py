"""`bench gemm`: every kernel's result is checked against an exact product before it is timed."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from mxcli.errors import EnvironmentFailure, LimitError
from mxcli.flows.bench.gemm_kernels import BASELINE, GEMM_KERNELS, GemmKernel, Product
from mxcli.flows.bench.gemm_operands import Engine, Values
from mxcli.flows.bench.quantize import Timing, timing_of
from mxcli.flows.products.shapes import Shape
from mxcli.numerics.metric_formulas import decibels

if TYPE_CHECKING:
    from torch import Tensor


GPU_FLUSH_BYTES, CPU_FLUSH_BYTES = 256 << 20, 64 << 20
"""Written before every timed call: more than the caches hold."""
STABLE = 0.03
"""The relative difference of two neighbouring batches' medians below which a call counts as warmed up."""
BATCH, MOST_BATCHES = 3, 8


class Clock(Protocol):
    """A clock for single calls."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Return seconds that a call takes with cold caches."""


class CpuClock:
    """The processor's clock; flushes the caches before each call."""

    def __init__(self) -> None:
        import torch

        self._flush = torch.zeros(CPU_FLUSH_BYTES // 4)

    def seconds(self, call: Callable[[], object]) -> float:
        """Implement `Clock`."""
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
        """Implement `Clock`."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(engine: Engine) -> Clock:
    """Return the clock of a device."""
    return GpuClock(engine.device) if engine.on_gpu else CpuClock()


def warm_up(call: Callable[[], object], clock: Clock) -> None:
    """Call until two batches in a row take as long, or enough have passed: by then compilation, clock ramp-up and first
    allocations are done."""
    before = None
    for _ in range(MOST_BATCHES):
        median = statistics.median(clock.seconds(call) for _ in range(BATCH))
        if before is not None and abs(median - before) <= STABLE * before:
            return
        before = median


def time_products(
    calls: Mapping[str, Callable[[], object]], clock: Clock, rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Return the seconds of every call in each round, after a warm-up of each; every round has its own random order, so
    that drift affects all alike and no call always follows the same other."""
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
    """Return by how many percent the median of the second half of a call's rounds exceeds that of the first: it shows
    throttling and other load."""
    half = len(seconds) // 2
    if not half:
        return 0.0
    return 100.0 * (statistics.median(seconds[-half:]) / statistics.median(seconds[:half]) - 1.0)


PROOF_ROWS = 512
"""Rows of D that are proven, spread over all of them: the reference is computed in binary64."""
OUTPUT_ERROR = 2.0**-8
"""Of a value: D is rounded to BF16, half of 2^-8 of it, and its accumulation may move it by as much at a tie."""
ACCUMULATION_ERROR = 2.0**-11
"""Of the sum of magnitudes: Hopper's FP8 tensor cores align products to 14 bits before they add them, within 128 of k;
libraries for BF16 add in binary32, which is far below."""
REFUSALS = (RuntimeError, ValueError)
"""What a library raises for arguments, types or a device it does not support, NotImplementedError among them."""


@dataclass(frozen=True, slots=True)
class GemmRow:
    """A product of a shape. `deviation` is the largest |D - exact| against what accumulation may make of it (at
    most 1), `sqnr_db` what quantization left against the unquantized product, `inexact` the elements that re-encoding
    rounded. Times are None where `problem` says why there are none. `drift_percent` is how much slower the second half
    of the rounds was, `quantize` the cost of making operand A; rates are from the median of the product, of both with
    `includes_quantize`. `speedup` is against the reference row of the same shape: above 1 is faster."""

    kernel: str
    formats: tuple[str, str] | None
    shape: Shape
    problem: str | None = None
    deviation: float | None = None
    sqnr_db: float | None = None
    inexact: int | None = None
    timing: Timing | None = None
    drift_percent: float | None = None
    quantize: Timing | None = None
    includes_quantize: bool = False
    tflops: float | None = None
    peak_percent: float | None = None
    speedup: float | None = None

    @property
    def seconds(self) -> float | None:
        """The time that rates are from."""
        if self.timing is None:
            return None
        made = self.quantize.median if self.includes_quantize and self.quantize else 0.0
        return self.timing.median + made


@dataclass(frozen=True, slots=True)
class GemmReport:
    """The rows, the device and the settings."""

    device: str
    description: str
    data: str
    rounds: int
    reference: str
    rows: tuple[GemmRow, ...]
    own_data: str
    peaks: str | None
    clocks: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Peak:
    """The stated peak of a GPU on dense operands, in TFLOP/s by arithmetic; `device` is the beginning of names."""

    device: str
    tflops: Mapping[str, float]
    source: str


_SXM = {"bf16": 989.4, "fp8": 1978.9}
PEAKS = (
    Peak("NVIDIA H100 80GB HBM3", _SXM, "NVIDIA H100 SXM data sheet, dense"),
    Peak("NVIDIA H200", _SXM, "NVIDIA H200 SXM data sheet, dense"),
)


def find_peak(name: str) -> Peak | None:
    """Return the stated peak of a GPU by its name, or None."""
    return next((peak for peak in PEAKS if name.startswith(peak.device)), None)


@dataclass(frozen=True, slots=True)
class GemmSettings:
    """Settings: rounds of timing (0: products are only proven), the row that speeds are compared with, and whether
    quantizing operand A is timed."""

    rounds: int = 9
    reference: str = BASELINE
    include_quantize: bool = False
    peak: Peak | None = None


def run_gemm_bench(
    engine: Engine,
    kernels: Sequence[GemmKernel],
    shapes: Sequence[Shape],
    values: Values,
    settings: GemmSettings,
    clock: Clock,
) -> list[GemmRow]:
    """Return a row for every product of every shape; what cannot be computed here stays with the reason.

    Raises LimitError where a product is not the one of its operands: nothing of that shape is timed then; and
    EnvironmentFailure where memory does not suffice.
    """
    from torch import OutOfMemoryError

    check_memory(shapes, engine)
    rows: list[GemmRow] = []
    for shape in shapes:
        try:
            rows += _rows(engine, kernels, shape, values, settings, clock)
        except OutOfMemoryError as error:
            raise EnvironmentFailure(
                f"{engine.device}: out of memory at {shape.text}: {_first_sentence(error)} Give smaller shapes."
            ) from error
        engine.release()
    return rows


def _rows(
    engine: Engine, kernels: Sequence[GemmKernel], shape: Shape, values: Values, settings: GemmSettings, clock: Clock
) -> list[GemmRow]:
    a, b = values.operands(shape, engine)
    return _timed([_proven(engine, kernel, shape, a, b) for kernel in kernels], settings, clock)


def bytes_needed(shape: Shape) -> int:
    """Return the memory of a shape: both operands in BF16 and, to prove a product, in binary32 and binary64; D; and
    the reference for the rows that are proven."""
    m, n, k = shape.sizes
    return (2 + 4 + 8) * (m + n) * k + 2 * m * n + 4 * 8 * min(m, PROOF_ROWS) * n


def check_memory(shapes: Sequence[Shape], engine: Engine) -> None:
    """Raise EnvironmentFailure naming every shape that needs more memory than there is."""
    free = engine.free_bytes()
    problems = [
        f"{shape.text} needs about {bytes_needed(shape):,} bytes and {engine.device} has {free:,}"
        for shape in shapes
        if bytes_needed(shape) > free
    ]
    if problems:
        raise EnvironmentFailure(f"{'; '.join(problems)}. Give smaller shapes.")


def refuse_unmet(engine: Engine, kernels: Sequence[GemmKernel]) -> None:
    """Raise EnvironmentFailure naming every requested product that cannot be computed on the device."""
    problems = [f"{kernel.name}: {unmet}" for kernel in kernels if (unmet := kernel.unmet(engine))]
    if problems:
        raise EnvironmentFailure("; ".join(problems) + ".")


def _proven(engine: Engine, kernel: GemmKernel, shape: Shape, a: Tensor, b: Tensor) -> tuple[GemmRow, Product | None]:
    from torch import OutOfMemoryError

    row = GemmRow(kernel.name, kernel.formats, shape)
    problem = kernel.unmet(engine) or kernel.misfit(shape.sizes)
    if problem:
        return replace(row, problem=problem), None
    product = kernel.prepare(kernel, engine, a, b)
    try:
        d = product.call()
    except OutOfMemoryError:  # a RuntimeError too, and no word of the library on what it supports
        raise
    except REFUSALS as refusal:
        return replace(row, problem=f"refused by the library: {_first_sentence(refusal)}"), None
    picked = _spread(shape.m)
    values_a, values_b = (operand.double() for operand in product.values())
    deviation = _deviation(d[picked], values_a[picked], values_b)
    if not deviation <= 1:
        raise LimitError(
            f"{kernel.name} {shape.text}: the product differs from that of its operands by {deviation:.3g} times what "
            "accumulation and rounding to BF16 may make of it; nothing of it was timed."
        )
    wanted = a[picked].double() @ b.double().t()
    sqnr_db = _sqnr_db(wanted, d[picked].double())
    return replace(row, deviation=deviation, sqnr_db=sqnr_db, inexact=product.inexact), product


def _spread(rows: int) -> slice:
    """Return at most PROOF_ROWS evenly spaced rows."""
    return slice(None, None, max(1, -(-rows // PROOF_ROWS)))


def _deviation(d: Tensor, a: Tensor, b: Tensor) -> float:
    """Return the largest error against what is allowed for it; NaN where D has one that the operands do not."""
    exact, magnitudes = a @ b.t(), a.abs() @ b.abs().t()
    allowed = OUTPUT_ERROR * exact.abs() + ACCUMULATION_ERROR * magnitudes
    error = (d.double() - exact).abs()
    ratio = error / allowed
    ratio[error == 0] = 0
    return float(ratio.max()) if ratio.numel() else 0.0


def _sqnr_db(wanted: Tensor, found: Tensor) -> float | None:
    """Return the signal over noise of a product; None where there is no noise, or no signal."""
    return decibels(float(wanted.square().sum()), float((found - wanted).square().sum()))


def _timed(proven: Sequence[tuple[GemmRow, Product | None]], settings: GemmSettings, clock: Clock) -> list[GemmRow]:
    calls: dict[str, Callable[[], object]] = {}
    for row, product in proven:
        if product is not None:
            calls[row.kernel] = product.call
            if product.quantize is not None:
                calls[_making(row)] = product.quantize
    if not settings.rounds or not calls:
        return [row for row, _ in proven]
    seconds = time_products(calls, clock, settings.rounds)
    rows = [_with_times(row, seconds, settings) for row, _ in proven]
    reference = next((row.seconds for row in rows if row.kernel == settings.reference), None)
    return [replace(row, speedup=reference / row.seconds) if reference and row.seconds else row for row in rows]


def _with_times(row: GemmRow, seconds: Mapping[str, list[float]], settings: GemmSettings) -> GemmRow:
    if row.kernel not in seconds:
        return row
    made = seconds.get(_making(row))
    timed = replace(
        row,
        timing=timing_of(seconds[row.kernel]),
        drift_percent=drift_percent(seconds[row.kernel]),
        quantize=timing_of(made) if made else None,
        includes_quantize=settings.include_quantize,
    )
    assert timed.seconds is not None
    tflops = row.shape.operations / timed.seconds / 1e12
    stated = settings.peak.tflops.get(GEMM_KERNELS[row.kernel].arithmetic) if settings.peak else None
    return replace(timed, tflops=tflops, peak_percent=100 * tflops / stated if stated else None)


def _making(row: GemmRow) -> str:
    return f"{row.kernel}, operand A"


def _first_sentence(refusal: Exception) -> str:
    text = " ".join(str(refusal).split()) or type(refusal).__name__
    return text if len(text) <= 160 else text[:157] + "..."
