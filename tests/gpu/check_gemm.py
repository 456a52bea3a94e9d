"""The matrix products of check.py: all products of this GPU on small and ragged shapes, then their speed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from mxcli.errors import LimitError
from mxcli.flows.bench.gemm import BATCH, Clock, GemmSettings, clock_of, find_peak, run_gemm_bench
from mxcli.flows.bench.gemm_kernels import BASELINE, GEMM_KERNELS
from mxcli.flows.bench.gemm_operands import DISTRIBUTIONS, Engine, Values
from mxcli.flows.products.shapes import Shape

Line = tuple[str, str, bool]
SMALL = (Shape(1, 16, 32), Shape(16, 128, 128), Shape(17, 48, 96), Shape(130, 384, 640), Shape(512, 256, 1024))
LARGE = (Shape(4096, 4096, 4096), Shape(8192, 8192, 8192))
REENCODED = ("mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8")


def products(engine: Engine, name: str, shapes: tuple[Shape, ...] = LARGE, rounds: int = 15) -> Iterator[Line]:
    """Yield the table's lines; `name` is the GPU's."""
    yield same_reencoding(engine)
    yield from proofs(engine)
    kernels = [row for row in GEMM_KERNELS.values() if row.unmet(engine) is None]
    values, settings = Values(DISTRIBUTIONS["normal"]), GemmSettings(rounds, peak=find_peak(name))
    for row in run_gemm_bench(engine, kernels, shapes, values, settings, clock_of(engine)):
        what = f"{row.kernel} {row.shape.text}"
        if row.timing is None:
            yield what, row.problem or "", True
            continue
        spread = 100 * (row.timing.p90 - row.timing.p10) / row.timing.median
        peak = f", {row.peak_percent:.1f} % of peak" if row.peak_percent else ""
        made = f", making A {row.quantize.median * 1e3:.3f} ms" if row.quantize else ""
        error = f", SQNR {row.sqnr_db:.1f} dB" if row.sqnr_db is not None else ""
        again = f", {row.inexact:,} not exact" if row.inexact is not None else ""
        result = f"{row.tflops:8.1f} TFLOP/s, {row.speedup:.2f} x bf16{peak}, spread {spread:.1f} %{made}{error}{again}"
        yield what, result, spread < 3 or not engine.on_gpu
    for shape in shapes:
        yield directly(engine, shape, values, rounds)


def proofs(engine: Engine) -> Iterator[Line]:
    """Verify all products of the device on all small shapes against the product of their operands."""
    for kernel in GEMM_KERNELS.values():
        unmet = kernel.unmet(engine)
        if unmet:
            yield f"{kernel.name} proven", unmet, True
            continue
        worst, done, reasons = 0.0, 0, dict[str, None]()
        try:
            for data in ("normal", "heavy"):
                values = Values(DISTRIBUTIONS[data])
                rows = run_gemm_bench(engine, [kernel], SMALL, values, GemmSettings(0), clock=_never)
                done += sum(row.problem is None for row in rows)
                worst = max([worst, *(row.deviation or 0.0 for row in rows)])
                reasons |= dict.fromkeys(row.problem for row in rows if row.problem)
        except LimitError as error:
            yield f"{kernel.name} proven", error.message, False
            continue
        refused = [reason for reason in reasons if reason.startswith("refused")]
        refusal = f"; {refused[0]}" if refused else ""
        yield f"{kernel.name} proven", f"{done} products, at most {worst:.2f} of the tolerance{refusal}", True


def same_reencoding(engine: Engine) -> Line:
    """Compare re-encoding to FP8 on the device and the CPU: same bytes, same count."""
    import torch

    import mxcli

    wrong = []
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 1024)
    for format in REENCODED:
        for target in ("row", "1x128"):
            here, count_here = mxcli.quantize(x, format, device="cpu").reencode(target)
            there, count_there = mxcli.quantize(x.to(engine.device), format).reencode(target)
            same = all(torch.equal(getattr(here, part), getattr(there, part).cpu()) for part in ("packed", "scales"))
            if not same or count_here != count_there:
                wrong.append(f"{format} {target}: {count_here} not exact, there {count_there}")
    return "re-encoding to FP8", f"{2 * len(REENCODED)} times: " + (wrong[0] if wrong else "equal"), not wrong


def directly(engine: Engine, shape: Shape, values: Values, rounds: int) -> Line:
    """Time the BF16 product of the table and torch.mm, alternating."""
    import torch

    a, b = values.operands(shape, engine)
    kernel, clock = GEMM_KERNELS[BASELINE], clock_of(engine)
    ours = kernel.prepare(kernel, engine, a, b).call
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(BATCH + rounds):
        for mine in (True, False):
            taken = clock.seconds(ours) if mine else clock.seconds(lambda: torch.mm(a, b.t()))
            if number >= BATCH:
                seconds[mine].append(taken)
    apart = 100 * (statistics.median(seconds[True]) / statistics.median(seconds[False]) - 1)
    return (
        f"bf16 {shape.text} against torch.mm",
        f"{apart:+.2f} % (goal: within 2 %)",
        abs(apart) < 2 or not engine.on_gpu,
    )


class _Never:
    def seconds(self, call: object) -> float:
        raise AssertionError("nothing is timed here")


_never: Clock = _Never()
