"""`mxcli bench`, and `mxcli bench quantize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.backends import CPU, find_device, open_timed_device
from mxcli.cli.bench_gemm import Rounds, gemm, listed_words
from mxcli.cli.groups import GroupedHelp, vary, verb
from mxcli.cli.machine import Machine
from mxcli.cli.options import FORMAT_NAMES, SchemeOptions, completes
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.terminal import Messages
from mxcli.errors import UsageError

if TYPE_CHECKING:
    from mxcli.output.screen import Screen

bench = typer.Typer(help="Measure the speed of this machine.", rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The formats and threads to time, and the tensor."""

    heading: ClassVar[str] = "Benchmark"
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT[,FORMAT...]",
            autocompletion=completes(FORMAT_NAMES, listed=True),
            help="Formats to time, separated by commas.  [default: mxfp8_e4m3,mxfp4_e2m1,nvfp4; on a GPU, all]",
        ),
    ] = None
    threads: Annotated[
        str, typer.Option("--threads", metavar="N[,N...]", help="Thread counts to time, separated by commas.")
    ] = "1"
    size: Annotated[
        int | None,
        typer.Option(
            "--size",
            metavar="N",
            help="Rows and columns of the tensor, a multiple of 128.  [default: 4096; on a GPU, 16384]",
        ),
    ] = None
    rounds: Rounds = 9
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            metavar="NAME[,NAME...]",
            help="Other packages to time in the same run, if installed: torchao, torchao-compiled.",
        ),
    ] = ""


@bench.command(cls=GroupedHelp)
@verb
def quantize(
    timed: BenchOptions,
    scheme: Annotated[SchemeOptions, vary(only=("scale_rounding", "dialect"))],
    results: Annotated[Results, vary(only=("json", "csv", "force"))],
    machine: Annotated[Machine, vary(only=("device",), device=CPU)],
    messages: Annotated[Messages, vary(without=("verbose",))],
) -> None:
    """Time quantization of a BF16 tensor, with and without statistics, next to a memory copy.

    Checks the work first: the same bytes with one and two threads (on a GPU: as on the CPU), and a measured error
    that is the error of the bytes. NVFP4 includes finding the amax of the tensor. A peer's row reports whether its
    bytes equal ours. With --device cuda the tensor is in GPU memory, and every format is timed under every scale
    rounding that serves it, unless one is named.

    \b
    Examples:
      mxcli bench quantize
      mxcli bench quantize --threads 1,2 --peers torchao --json bench.json
      mxcli bench quantize --device cuda --format mxfp8,nvfp4 --csv gpu.csv
    """
    from mxcli.output.export import csv_text, json_text

    results.check()
    found = find_device(machine.device, lambda note: messages.notes([note]))
    result = _on_cpu(timed, scheme) if found == CPU else _on_gpu(timed, scheme, found)
    deliver_forms(
        results,
        messages.stdout(),
        json=lambda: json_text("bench.quantize", result.record),
        csv=lambda: csv_text(result.rows, result.names),
        text=result.text,
    )
    messages.notes(result.problems)


@dataclass(frozen=True, slots=True)
class _Result:
    """A benchmark in its forms."""

    record: dict[str, object]
    rows: list[dict[str, object]]
    names: tuple[str, ...]
    text: Callable[[Screen], str]
    problems: list[str]


def _on_cpu(timed: BenchOptions, scheme: SchemeOptions) -> _Result:
    from mxcli.flows.bench.quantize import run_quantize_bench
    from mxcli.output.bench import RECORD_NAMES, bench_record, bench_text, row_records

    report = run_quantize_bench(
        listed_words(timed.format or "") or ["mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"],
        scale_rounding=scheme.scale_rounding,
        dialect=scheme.dialect,
        size=4096 if timed.size is None else timed.size,
        threads=_counts(timed.threads),
        rounds=timed.rounds,
        peers=listed_words(timed.peers),
    )
    problems = [row.problem for row in report.rows if row.problem]
    return _Result(bench_record(report), row_records(report), RECORD_NAMES, partial(bench_text, report), problems)


def _on_gpu(timed: BenchOptions, scheme: SchemeOptions, device: str) -> _Result:
    from mxcli.flows.bench.gpu import recipes_to_time, run_gpu_bench
    from mxcli.flows.bench.quantize import named_peers
    from mxcli.output.bench import GPU_RECORD_NAMES, bench_record, bench_text, row_records

    schemes = recipes_to_time(listed_words(timed.format or ""), scheme.scale_rounding, scheme.dialect)
    report = run_gpu_bench(
        open_timed_device(device),
        schemes,
        size=16384 if timed.size is None else timed.size,
        rounds=timed.rounds,
        peers=named_peers(listed_words(timed.peers)),
    )
    problems = [row.problem for row in report.rows if row.problem]
    return _Result(bench_record(report), row_records(report), GPU_RECORD_NAMES, partial(bench_text, report), problems)


def _counts(text: str) -> list[int]:
    words = listed_words(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--threads {text} is not a list of positive numbers, such as 1,2")
    return [int(word) for word in words]


bench.command(cls=GroupedHelp)(gemm)
