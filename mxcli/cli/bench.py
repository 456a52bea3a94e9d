"""`mxcli bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.backends import CPU, check_device, find_device, open_timed_device
from mxcli.cli import options
from mxcli.cli.arguments import STDOUT
from mxcli.cli.streams import deliver, refuse_existing, stdout_screen, talk_on_stderr
from mxcli.errors import UsageError

if TYPE_CHECKING:
    from mxcli.output.screen import Screen

bench = typer.Typer(help="Measure this machine honestly.", rich_markup_mode=None)

Formats = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT[,FORMAT...]",
        help="Formats to time, separated by commas.  [default: mxfp8_e4m3,mxfp4_e2m1,nvfp4; on a GPU, all]",
    ),
]
ThreadCounts = Annotated[
    str, typer.Option("--threads", metavar="N[,N...]", help="Thread counts to time, separated by commas.")
]
Size = Annotated[
    int | None,
    typer.Option(
        "--size",
        metavar="N",
        help="Rows and columns of the tensor, a multiple of 128.  [default: 4096; on a GPU, 16384]",
    ),
]
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
    format: Formats = None,
    scale_rounding: options.ScaleRounding = None,
    dialect: options.Dialect = None,
    size: Size = None,
    rounds: Rounds = 9,
    peers: Peers = "",
    json: options.Json = None,
    csv: options.Csv = None,
    device: options.Device = CPU,
    threads: ThreadCounts = "1",
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Time quantization of a BF16 tensor, with and without statistics, beside a copy of memory.

    What is timed is checked first: the same bytes at one and two threads (on a GPU: as on the CPU), and a measured
    error that is the error of the bytes. NVFP4 includes finding the tensor's amax. A peer's row says whether its
    bytes equal ours. On a GPU (--device cuda) the tensor lies in its memory, and every format is timed under every
    scale rounding that serves it unless one is named.

    \b
    Examples:
      mxcli bench quantize
      mxcli bench quantize --threads 1,2 --peers torchao --json bench.json
      mxcli bench quantize --device cuda --format mxfp8,nvfp4 --csv gpu.csv
    """
    from mxcli.output.export import csv_text, json_text

    check_device(device)
    if json == csv == STDOUT:
        raise UsageError("--json and --csv both ask for stdout: give one of them a FILE.")
    refuse_existing([json, csv], force=force, sources=[])
    talk = talk_on_stderr(quiet=quiet, no_color=no_color)
    found = find_device(device, lambda note: talk.notes([note]))
    asked = _Asked(listed_words(format or ""), scale_rounding, dialect, size, rounds, listed_words(peers))
    result = _on_cpu(asked, _counts(threads)) if found == CPU else _on_gpu(asked, found)
    if json is not None:
        deliver(json_text("bench.quantize", result.record), json)
    if csv is not None:
        deliver(csv_text(result.rows, result.names), csv)
    if STDOUT not in (json, csv):
        deliver(result.text(stdout_screen(no_color=no_color)))
    talk.notes(result.problems)


@dataclass(frozen=True, slots=True)
class _Asked:
    formats: list[str]
    scale_rounding: str | None
    dialect: str | None
    size: int | None
    rounds: int
    peers: list[str]


@dataclass(frozen=True, slots=True)
class _Result:
    """A benchmark in its forms."""

    record: dict[str, object]
    rows: list[dict[str, object]]
    names: tuple[str, ...]
    text: Callable[[Screen], str]
    problems: list[str]


def _on_cpu(asked: _Asked, threads: list[int]) -> _Result:
    from mxcli.flows.bench.quantize import run_quantize_bench
    from mxcli.output.bench import RECORD_NAMES, bench_record, bench_text, row_records

    report = run_quantize_bench(
        asked.formats or ["mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"],
        scale_rounding=asked.scale_rounding,
        dialect=asked.dialect,
        size=4096 if asked.size is None else asked.size,
        threads=threads,
        rounds=asked.rounds,
        peers=asked.peers,
    )
    problems = [row.problem for row in report.rows if row.problem]
    return _Result(bench_record(report), row_records(report), RECORD_NAMES, partial(bench_text, report), problems)


def _on_gpu(asked: _Asked, device: str) -> _Result:
    from mxcli.flows.bench.gpu import recipes_to_time, run_gpu_bench
    from mxcli.flows.bench.quantize import named_peers
    from mxcli.output.bench_gpu import RECORD_NAMES, bench_record, bench_text, row_records

    recipes = recipes_to_time(asked.formats, asked.scale_rounding, asked.dialect)
    peers = named_peers(asked.peers)
    report = run_gpu_bench(
        open_timed_device(device),
        recipes,
        size=16384 if asked.size is None else asked.size,
        rounds=asked.rounds,
        peers=peers,
    )
    problems = [row.problem for row in report.rows if row.problem]
    return _Result(bench_record(report), row_records(report), RECORD_NAMES, partial(bench_text, report), problems)


def listed_words(text: str) -> list[str]:
    """The words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(text: str) -> list[int]:
    words = listed_words(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--threads {text} is not a list of positive numbers, such as 1,2")
    return [int(word) for word in words]
