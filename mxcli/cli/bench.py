"""`mxcli bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.backends import CUDA, check_device
from mxcli.cli import options
from mxcli.cli.arguments import STDOUT
from mxcli.cli.streams import deliver, refuse_existing, stdout_screen, talk_on_stderr
from mxcli.errors import EnvironmentFailure, UsageError

bench = typer.Typer(help="Measure this machine honestly.", rich_markup_mode=None)

Formats = Annotated[
    str, typer.Option("--format", metavar="FORMAT[,FORMAT...]", help="Formats to time, separated by commas.")
]
ThreadCounts = Annotated[
    str, typer.Option("--threads", metavar="N[,N...]", help="Thread counts to time, separated by commas.")
]
Size = Annotated[int, typer.Option("--size", metavar="N", help="Rows and columns of the tensor, a multiple of 128.")]
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", help="Timed rounds; the median is reported.")]
Peers = Annotated[
    str,
    typer.Option(
        "--peers",
        metavar="NAME[,NAME...]",
        help="Other packages to time in the same run, where installed: torchao, torchao-compiled.",
    ),
]


@bench.command()
def quantize(
    format: Formats = "mxfp8_e4m3,mxfp4_e2m1,nvfp4",
    scale_rounding: options.ScaleRounding = None,
    dialect: options.Dialect = None,
    size: Size = 4096,
    rounds: Rounds = 9,
    peers: Peers = "",
    json: options.Json = None,
    csv: options.Csv = None,
    device: options.Device = "auto",
    threads: ThreadCounts = "1",
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Time quantization of a BF16 tensor, with and without statistics, beside a copy of memory.

    What is timed is checked first: the same bytes at one and two threads, and a measured error that is the error
    of the bytes. NVFP4 includes finding the tensor's amax. A peer's row says whether its bytes equal ours.

    \b
    Examples:
      mxcli bench quantize
      mxcli bench quantize --threads 1,2 --peers torchao --json bench.json
    """
    from mxcli.flows.bench import run_quantize_bench
    from mxcli.output.bench import RECORD_NAMES, bench_record, bench_text, row_records
    from mxcli.output.export import csv_text, json_text

    _refuse_gpu(device)
    if json == csv == STDOUT:
        raise UsageError("--json and --csv both ask for stdout: give one of them a FILE.")
    refuse_existing([json, csv], force=force)
    talk = talk_on_stderr(quiet=quiet, no_color=no_color)
    report = run_quantize_bench(
        _words(format),
        scale_rounding=scale_rounding,
        dialect=dialect,
        size=size,
        threads=_counts(threads),
        rounds=rounds,
        peers=_words(peers),
    )
    if json is not None:
        deliver(json_text("bench.quantize", bench_record(report)), json)
    if csv is not None:
        deliver(csv_text(row_records(report), RECORD_NAMES), csv)
    if STDOUT not in (json, csv):
        deliver(bench_text(report, stdout_screen(no_color=no_color)))
    talk.notes(row.problem for row in report.rows if row.problem)


def _refuse_gpu(device: str) -> None:
    check_device(device)
    if device.startswith(CUDA):
        raise EnvironmentFailure(f"--device {device}: this benchmark has no GPU path; use --device cpu.")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--threads {text} is not a list of positive numbers, such as 1,2")
    return [int(word) for word in words]
