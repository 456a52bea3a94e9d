"""`mxcli bench gemm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.backends import CPU, check_device, find_device, open_timed_device
from mxcli.cli import options
from mxcli.cli.arguments import STDOUT
from mxcli.cli.bench import Rounds, listed_words
from mxcli.cli.streams import deliver, on_disk, refuse_existing, stdout_screen, talk_on_stderr
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.flows.bench.gemm import GemmReport
    from mxcli.flows.bench.gemm_operands import Values
    from mxcli.flows.products.shapes import Shape

MOST_DRIFT_PERCENT = 5.0
"""Between the halves of the rounds; more is told of."""
SMALL, LARGE = "256x1024x1024", "4096x4096x4096,8192x8192x8192"

Products = Annotated[
    str,
    typer.Option(
        "--kernel",
        metavar="NAME[,NAME...]",
        help="Products to compute, beside bf16: as listed in the table without it.  [default: all]",
    ),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="MxNxK[,...]",
        help=f"Shapes of D[m, n] = A[m, k] @ B[n, k]^T.  [default: {SMALL}; on a GPU {LARGE}]",
    ),
]
ShapeFile = Annotated[
    str | None, typer.Option("--shapes", metavar="FILE.csv", help="A CSV file of shapes, with columns m, n and k.")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="SOURCE", help="A model: the shapes of its linear layers, and its weights for B."),
]
Tokens = Annotated[
    str, typer.Option("--tokens", metavar="N[,N...]", help="Tokens that a layer of --from is computed for.")
]
Passes = Annotated[
    str,
    typer.Option("--passes", metavar="PASS[,...]", help="Products of a layer of --from: fprop, dgrad, wgrad."),
]
Data = Annotated[
    str,
    typer.Option("--data", metavar="NAME", help="Values of operands: normal, heavy, uniform, ones or zeros."),
]
Seed = Annotated[int, options.SEED]
Reference = Annotated[
    str, typer.Option("--vs", metavar="NAME", help="The product that speeds are compared with; above 1 is faster.")
]
IncludeQuantize = Annotated[
    bool,
    typer.Option("--include-quantize", help="Count the time of quantizing operand A, which every call needs anew."),
]
Compare = Annotated[
    str | None,
    typer.Option(
        "--compare", metavar="FILE.json", help="An earlier --json: end with exit code 5 if a product got slower."
    ),
]
Threshold = Annotated[
    float, typer.Option("--threshold", min=0.0, metavar="PERCENT", help="How much slower --compare lets pass.")
]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Also TFLOP/s against size, as .png or .svg.")]


def gemm(
    kernel: Products = "",
    shape: Shapes = None,
    shapes: ShapeFile = None,
    source: From = None,
    captures: options.Captures = None,
    tokens: Tokens = "16,4096",
    passes: Passes = "fprop",
    data: Data = "normal",
    seed: Seed = 0,
    rounds: Rounds = 9,
    vs: Reference = "bf16",
    include_quantize: IncludeQuantize = False,
    compare: Compare = None,
    threshold: Threshold = 5.0,
    json: options.Json = None,
    csv: options.Csv = None,
    plot: Plot = None,
    device: options.Device = "auto",
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Time block-scaled matrix products, each proven first.

    Operands are codes quantized from random normal values, or from a model's own weights and captures. Every product
    is compared with the exact one of its own operands, which must agree but for accumulation, and with that of the
    unquantized ones, which tells the error (SQNR). Products that this device cannot compute are listed with the
    reason. Rows `-as-fp8-…` fold MX codes into FP8 for GPUs without MX hardware, and count what was not exact.

    \b
    Examples:
      mxcli bench gemm --shape 64x256x256 --rounds 3
      mxcli bench gemm --from samples/tiny-llama --tokens 16 --passes fprop,dgrad,wgrad --rounds 3
      mxcli bench gemm --device cuda --kernel fp8-row,mxfp4-as-fp8-row --json gemm.json
    """
    from mxcli.flows.bench.gemm import GemmReport, GemmSettings, clock_of, find_peak, refuse_unmet, run_gemm_bench
    from mxcli.flows.bench.gemm_kernels import named_kernels
    from mxcli.flows.bench.gemm_operands import open_engine
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

    check_device(device)
    if json == csv == STDOUT:
        raise UsageError("--json and --csv both ask for stdout: give one of them a FILE.")
    if plot is not None and Path(plot).suffix not in (".png", ".svg"):
        raise UsageError(f"--plot '{printable(plot)}': its name must end in .png or .svg.")
    if rounds < 1:
        raise UsageError(f"--rounds {rounds} is not a positive number.")
    refuse_existing([json, csv, plot], force=force, sources=[source, captures])
    talk = talk_on_stderr(quiet=quiet, no_color=no_color)
    names = listed_words(kernel)
    kernels = named_kernels(names)
    if vs not in {row.name for row in kernels}:
        raise UsageError(f"--vs '{printable(vs)}' is none of the products: {', '.join(row.name for row in kernels)}.")
    earlier = None if compare is None else read_earlier(Path(compare))
    wanted, values = _asked(shape, shapes, source, captures, tokens, passes, data, seed)
    found = find_device(device, lambda note: talk.notes([note]))
    wanted = wanted or _default_shapes(found)
    values.check(wanted)
    engine = open_engine(found)
    refuse_unmet(engine, [row for row in kernels if row.name in names])
    timed = None if found == CPU else open_timed_device(found)
    peak = None if timed is None else find_peak(timed.describe())
    before = None if timed is None else timed.clocks()
    settings = GemmSettings(rounds, vs, include_quantize, peak)
    rows = run_gemm_bench(engine, kernels, wanted, values, settings, clock_of(engine))
    own = sorted({name for each in wanted for name in values.own_data(each)})
    report = GemmReport(
        device=found,
        description=timed.describe() if timed else _processor(),
        data=f"{values.distribution.meaning}, seed {seed}",
        rounds=rounds,
        reference=vs,
        rows=tuple(rows),
        own_data=f"{', '.join(own)} are the model's own" if own else "none are a model's",
        peaks=peak.source if peak else None,
        clocks=(before, timed.clocks()) if timed and before else None,
    )
    if json is not None:
        deliver(json_text("bench.gemm", gemm_record(report)), json)
    if csv is not None:
        deliver(csv_text(row_records(report), RECORD_NAMES), csv)
    if plot is not None:
        with on_disk(Path(plot)):
            plot_rates(report, Path(plot))
    if STDOUT not in (json, csv):
        deliver(gemm_text(report, stdout_screen(no_color=no_color)))
    talk.notes(_notes(report, values))
    if earlier is not None and compare is not None:
        talk.notes(compare_with(report, earlier, compare, threshold))


def _asked(
    shape: str | None,
    shapes: str | None,
    source: str | None,
    captures: str | None,
    tokens: str,
    passes: str,
    data: str,
    seed: int,
) -> tuple[list[Shape], Values]:
    """The shapes that are asked for (none: the default ones) and where operands come from."""
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.bench.gemm_operands import Values, find_distribution
    from mxcli.flows.products.shapes import layer_shapes, read_shapes, typed_shapes

    if captures is not None and source is None:
        raise UsageError("--captures are of a model's layers: name the model with --from.")
    distribution = find_distribution(data)
    found = typed_shapes(shape) if shape is not None else []
    found += read_shapes(Path(shapes)) if shapes is not None else []
    if source is None:
        return found, Values(distribution, seed)
    words = listed_words(tokens)
    if not words or not all(word.isdecimal() and 0 < int(word) <= 1 << 20 for word in words):
        raise UsageError(f"--tokens {printable(tokens)} is not a list of positive numbers, such as 16,4096.")
    model = open_checkpoint(source)
    found += layer_shapes(model, [int(word) for word in words], listed_words(passes))
    held = None if captures is None else open_checkpoint(captures)
    return found, Values(distribution, seed, model, held)


def _default_shapes(device: str) -> list[Shape]:
    from mxcli.flows.products.shapes import typed_shapes

    return typed_shapes(SMALL if device == CPU else LARGE)


def _processor() -> str:
    from mxcli.flows.bench.quantize import processor_name

    return processor_name()


def _notes(report: GemmReport, values: Values) -> list[str]:
    notes = []
    if report.device == CPU:
        notes.append(
            "A CPU shows the errors; how fast block-scaled products are, a GPU tells (--device cuda): FP8 from compute "
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
