"""`mxcli bench gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.backends import CPU, find_device, open_timed_device
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine
from mxcli.cli.options import Captures
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.terminal import Messages
from mxcli.errors import UsageError, import_extra, printable, written_to

if TYPE_CHECKING:
    from mxcli.flows.bench.gemm import GemmReport
    from mxcli.flows.bench.gemm_kernels import GemmKernel
    from mxcli.flows.bench.gemm_operands import Values
    from mxcli.flows.products.shapes import Shape

MOST_DRIFT_PERCENT = 5.0
"""Drift between the halves of the rounds from which a note warns."""
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", help="Timed rounds; the median is reported.")]
SMALL, LARGE = "256x1024x1024", "4096x4096x4096,8192x8192x8192"


@dataclass(frozen=True, slots=True)
class OperandOptions:
    """The shapes of products, and the values of their operands."""

    heading: ClassVar[str] = "Operands"
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="MxNxK[,...]",
            help=f"Shapes of D[m, n] = A[m, k] @ B[n, k]^T.  [default: {SMALL}; on a GPU {LARGE}]",
        ),
    ] = None
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", metavar="FILE.csv", help="A CSV file of shapes, with columns m, n and k."),
    ] = None
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="SOURCE", help="A model: the shapes of its linear layers, and its weights as B."
        ),
    ] = None
    captures: Captures = None
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="N[,N...]", help="Tokens in the products of the layers of --from.")
    ] = "16,4096"
    passes: Annotated[
        str,
        typer.Option("--passes", metavar="PASS[,...]", help="Products of the layers of --from: fprop, dgrad, wgrad."),
    ] = "fprop"
    data: Annotated[
        str, typer.Option("--data", metavar="NAME", help="Values of operands: normal, heavy, uniform, ones or zeros.")
    ] = "normal"
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of the random values.")] = 0


@dataclass(frozen=True, slots=True)
class GemmOptions:
    """The products to time, their reference, and an earlier result to compare with."""

    heading: ClassVar[str] = "Benchmark"
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            metavar="NAME[,NAME...]",
            help="Products to compute in addition to bf16, by the names in the table.  [default: all]",
        ),
    ] = ""
    vs: Annotated[
        str, typer.Option("--vs", metavar="NAME", help="Product that speeds are relative to; above 1 is faster.")
    ] = "bf16"
    rounds: Rounds = 9
    include_quantize: Annotated[
        bool,
        typer.Option("--include-quantize", help="Add the time to quantize operand A, which every call needs."),
    ] = False
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare", metavar="FILE.json", help="An earlier --json: exit with code 5 if a product got slower."
        ),
    ] = None
    threshold: Annotated[
        float, typer.Option("--threshold", min=0.0, metavar="PERCENT", help="Slowdown that --compare tolerates.")
    ] = 5.0
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Plot TFLOP/s against size, as .png or .svg.")
    ] = None


_OPERANDS = vary(help={"captures": "Captured inputs and gradients of the layers of --from, as operands."})


@verb
def gemm(
    operands: Annotated[OperandOptions, _OPERANDS],
    timed: GemmOptions,
    results: Annotated[Results, vary(only=("json", "csv", "force"))],
    machine: Annotated[Machine, vary(only=("device",))],
    messages: Annotated[Messages, vary(without=("verbose",))],
) -> None:
    """Time block-scaled matrix products, after checking each one.

    Operands are codes quantized from random normal values, or from a model's own weights and captures. Every product
    is compared with the exact product of the same operands, from which only accumulation may differ, and with that of
    the unquantized operands, which gives the error (SQNR). Products that this device cannot compute are listed with
    the reason. Rows `-as-fp8-…` fold MX codes into FP8 for GPUs without MX hardware, and count inexact values.

    \b
    Examples:
      mxcli bench gemm --shape 64x256x256 --rounds 3
      mxcli bench gemm --from samples/tiny-llama --tokens 16 --passes fprop,dgrad,wgrad --rounds 3
      mxcli bench gemm --device cuda --kernel fp8-row,mxfp4-as-fp8-row --json gemm.json
    """
    from mxcli.output.bench_gemm import (
        RECORD_NAMES,
        compare_with,
        gemm_record,
        gemm_text,
        plot_rates,
        read_earlier,
        row_records,
    )
    from mxcli.output.export import csv_text, json_text

    _check(timed)
    results.check([operands.source, operands.captures], whole=[timed.plot])
    kernels = _kernels(timed)
    earlier = None if timed.compare is None else read_earlier(Path(timed.compare))
    shapes, values = _operands(operands)
    found = find_device(machine.device, lambda note: messages.notes([note]))
    shapes = shapes or _default_shapes(found)
    values.check(shapes)
    report = _run(found, kernels, shapes, values, timed)
    if timed.plot is not None:
        with written_to(Path(timed.plot)):
            plot_rates(report, Path(timed.plot))
    deliver_forms(
        results,
        messages.stdout(),
        json=lambda: json_text("bench.gemm", gemm_record(report)),
        csv=lambda: csv_text(row_records(report), RECORD_NAMES),
        text=lambda screen: gemm_text(report, screen),
    )
    messages.notes(_notes(report, values))
    if earlier is not None and timed.compare is not None:
        messages.notes(compare_with(report, earlier, timed.compare, timed.threshold))


def listed_words(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _check(timed: GemmOptions) -> None:
    """Raise UsageError for a plot of unknown type and for no rounds."""
    if timed.plot is not None and Path(timed.plot).suffix not in (".png", ".svg"):
        raise UsageError(f"--plot '{printable(timed.plot)}': its name must end in .png or .svg.")
    if timed.plot is not None:
        import_extra("matplotlib", "--plot")
    if timed.rounds < 1:
        raise UsageError(f"--rounds {timed.rounds} is not a positive number.")


def _kernels(timed: GemmOptions) -> list[GemmKernel]:
    """Return the products to time; raises UsageError if the reference is not one of them."""
    from mxcli.flows.bench.gemm_kernels import named_kernels

    kernels = named_kernels(listed_words(timed.kernel))
    if timed.vs not in {row.name for row in kernels}:
        known = ", ".join(row.name for row in kernels)
        raise UsageError(f"--vs '{printable(timed.vs)}' is not one of the products: {known}.")
    return kernels


def _operands(operands: OperandOptions) -> tuple[list[Shape], Values]:
    """Return the requested shapes (none: the default ones) and the values of operands."""
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.bench.gemm_operands import Values, find_distribution
    from mxcli.flows.products.shapes import layer_shapes, read_shapes, typed_shapes

    if operands.captures is not None and operands.source is None:
        raise UsageError("--captures needs a model: name it with --from.")
    distribution = find_distribution(operands.data)
    found = typed_shapes(operands.shape) if operands.shape is not None else []
    found += read_shapes(Path(operands.shapes)) if operands.shapes is not None else []
    if operands.source is None:
        return found, Values(distribution, operands.seed)
    words = listed_words(operands.tokens)
    if not words or not all(word.isdecimal() and 0 < int(word) <= 1 << 20 for word in words):
        raise UsageError(f"--tokens {printable(operands.tokens)} is not a list of positive numbers, such as 16,4096.")
    model = open_checkpoint(operands.source)
    found += layer_shapes(model, [int(word) for word in words], listed_words(operands.passes))
    captured = None if operands.captures is None else open_checkpoint(operands.captures)
    return found, Values(distribution, operands.seed, model, captured)


def _default_shapes(device: str) -> list[Shape]:
    from mxcli.flows.products.shapes import typed_shapes

    return typed_shapes(SMALL if device == CPU else LARGE)


def _run(device: str, kernels: list[GemmKernel], shapes: list[Shape], values: Values, timed: GemmOptions) -> GemmReport:
    from mxcli.flows.bench.gemm import GemmReport, GemmSettings, clock_of, find_peak, refuse_unmet, run_gemm_bench
    from mxcli.flows.bench.gemm_operands import open_engine
    from mxcli.flows.bench.quantize import processor_name

    engine = open_engine(device)
    names = listed_words(timed.kernel)
    refuse_unmet(engine, [row for row in kernels if row.name in names])
    gpu = None if device == CPU else open_timed_device(device)
    peak = None if gpu is None else find_peak(gpu.describe())
    before = None if gpu is None else gpu.clocks()
    settings = GemmSettings(timed.rounds, timed.vs, timed.include_quantize, peak)
    rows = run_gemm_bench(engine, kernels, shapes, values, settings, clock_of(engine))
    own = sorted({name for shape in shapes for name in values.own_data(shape)})
    return GemmReport(
        device=device,
        description=gpu.describe() if gpu else processor_name(),
        data=f"{values.distribution.meaning}, seed {values.seed}",
        rounds=timed.rounds,
        reference=timed.vs,
        rows=tuple(rows),
        own_data=f"{', '.join(own)} are the model's own" if own else "none are a model's",
        peaks=peak.source if peak else None,
        clocks=(before, gpu.clocks()) if gpu and before else None,
    )


def _notes(report: GemmReport, values: Values) -> list[str]:
    notes = []
    if report.device == CPU:
        notes.append(
            "A CPU shows the errors; the speed of block-scaled products needs a GPU (--device cuda): FP8 from compute "
            "capability 8.9 on, 1x128 blocks from 9.0, MXFP8, MXFP4 and NVFP4 from 10.0."
        )
    slowed = [row for row in report.rows if row.drift_percent is not None and row.drift_percent > MOST_DRIFT_PERCENT]
    if slowed and report.device != CPU:
        worst = max(slowed, key=lambda row: row.drift_percent or 0.0)
        notes.append(
            f"{len(slowed):,} products slowed down while they were timed, {worst.kernel} {worst.shape.text} by "
            f"{worst.drift_percent:.0f} %: the GPU throttles, or other work runs on it."
        )
    if len(values.steps) > 1:
        notes.append(f"Captured operands are those of a layer's first of {len(values.steps):,} captured steps.")
    if values.distribution.is_constant:
        notes.append(
            f"--data {values.distribution.name}: constant operands draw less power and run faster than a model's."
        )
    return notes
