"""`bench quantize`: checks what the kernel gives, then times it beside a memory copy and other packages."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mxcli.backends import cpu
from mxcli.errors import LimitError, UsageError
from mxcli.flows.peers import Peer, named_peers
from mxcli.flows.timing import Timing, time_together
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.recipe import Recipe, resolve, resolve_all

Bits = np.ndarray[Any, Any]
DTYPE = "BF16"


@dataclass(frozen=True, slots=True)
class Row:
    """One timed thing: ours, the copy, or another package's.

    `elements_per_second` and `bytes_per_second` (input read plus output written, once each) are from the median.
    `copy_percent` is bytes_per_second against the copy's at the same thread count. `bytes_equal` tells of a peer
    whether its bytes are ours under the rule it names; None where there was nothing to compare.
    """

    name: str
    format: str | None
    scale_rounding: str | None
    threads: int
    statistics: bool
    timing: Timing | None
    elements_per_second: float | None
    bytes_per_second: float | None
    copy_percent: float | None
    bytes_equal: bool | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All rows with the settings they were measured under."""

    rows: tuple[Row, ...]
    shape: tuple[int, int]
    dtype: str
    data: str
    rounds: int
    instruction_set: str
    processor: str
    checks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    recipe: Recipe | None
    threads: int
    statistics: bool
    nbytes: int
    call: Callable[[], object]
    bytes_equal: bool | None = None


def run_quantize_bench(
    formats: Sequence[str],
    *,
    scale_rounding: str | None = None,
    dialect: str | None = None,
    size: int = 4096,
    threads: Sequence[int] = (1,),
    rounds: int = 9,
    peers: Sequence[str] = (),
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> BenchReport:
    """Times every format on a BF16 tensor [size, size] of normal random values, with and without statistics.

    Each result is checked before anything is timed; a wrong one raises LimitError. Peers that cannot be imported
    stay in the report with the reason.
    """
    if size < 256 or size % 128:
        raise UsageError(f"--size {size} is not a multiple of 128 of at least 256")
    if rounds < 1:
        raise UsageError(f"--rounds {rounds} is not a positive number")
    others = named_peers(list(peers))
    recipes = resolve_all(formats, scale_rounding=scale_rounding, dialect=dialect)
    bits = normal_bf16(size, size)
    checks = [_check(bits, recipe) for recipe in recipes]
    cases, failed = [], list[Row]()
    for count in threads:
        cases.append(_copy_case(bits, count))
        for recipe in recipes:
            cases += [_our_case(bits, recipe, count, statistics) for statistics in (False, True)]
        for peer in others:
            if peer.format not in {recipe.format.name for recipe in recipes}:
                continue
            try:
                cases.append(_peer_case(bits, peer, count))
            except ImportError as error:
                failed.append(_missing(peer, count, str(error)))
    timings = time_together({str(at): case.call for at, case in enumerate(cases)}, rounds, on_round=on_round)
    copies = {c.threads: c.nbytes / timings[str(at)].median for at, c in enumerate(cases) if c.recipe is None}
    rows = [_row(case, timings[str(at)], bits.size, copies[case.threads]) for at, case in enumerate(cases)]
    return BenchReport(
        (*rows, *failed),
        (size, size),
        DTYPE,
        "normal, standard deviation 0.02, seed 0",
        rounds,
        cpu.instruction_set(),
        processor_name(),
        tuple(checks),
    )


def normal_bf16(rows: int, columns: int) -> Bits:
    """The tensor that is quantized: BF16 bits of normal random values, standard deviation 0.02, seed 0."""
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _check(bits: Bits, recipe: Recipe) -> str:
    """Any thread count gives the same bytes and statistics, and the values they stand for are the ones measured."""
    one, two = (cpu.quantize(bits, DTYPE, recipe, threads=threads) for threads in (1, 2))
    name = f"{recipe.format.name} {recipe.scale_rule.name}"
    if (
        one.packed.tobytes() != two.packed.tobytes()
        or one.scales.tobytes() != two.scales.tobytes()
        or one.stats != two.stats
    ):
        raise LimitError(f"{name}: one thread and two threads gave different results; this is a bug, nothing was timed")
    assert one.stats is not None
    difference = cpu.dequantize(one).astype(np.float64) - (bits.astype(np.uint32) << 16).view(np.float32)
    noise = float(np.square(difference).sum())
    if abs(noise - one.stats.noise) > 1e-5 * noise:
        raise LimitError(
            f"{name}: the error of the bytes is {noise}, the kernel measured {one.stats.noise}; nothing was timed"
        )
    return f"{name}: same bytes and statistics at 1 and 2 threads; measured error is the bytes' error"


def _our_case(bits: Bits, recipe: Recipe, threads: int, statistics: bool) -> _Case:
    held = cpu.quantize(bits, DTYPE, recipe, stats=False, threads=threads)
    call = partial(cpu.quantize, bits, DTYPE, recipe, stats=statistics, threads=threads, reuse=held)
    return _Case("mxcli", recipe, threads, statistics, bits.nbytes + _output_bytes(held), call)


def _copy_case(bits: Bits, threads: int) -> _Case:
    """A copy of 256 MiB, in as many threads as the rows beside it: more than any cache holds."""
    from concurrent.futures import ThreadPoolExecutor

    source = np.ones(1 << 25, np.float64)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    if threads == 1:
        return _Case("copy", None, 1, False, 2 * source.nbytes, lambda: np.copyto(target, source))
    pool = ThreadPoolExecutor(threads)
    return _Case(
        "copy", None, threads, False, 2 * source.nbytes, lambda: list(pool.map(lambda part: np.copyto(*part), parts))
    )


def _peer_case(bits: Bits, peer: Peer, threads: int) -> _Case:
    call, result = peer.build(bits, threads)
    recipe = resolve(peer.format, scale_rounding=peer.scale_rounding)
    ours = cpu.quantize(bits, DTYPE, recipe, stats=False)
    codes, scales = result()
    equal = codes.tobytes() == ours.packed.tobytes() and scales.tobytes() == ours.scales.tobytes()
    return _Case(peer.name, recipe, threads, False, bits.nbytes + _output_bytes(ours), call, equal)


def _output_bytes(q: Quantized) -> int:
    return int(q.packed.nbytes + q.scales.nbytes)


def _row(case: _Case, timing: Timing, elements: int, copy_rate: float) -> Row:
    rate = case.nbytes / timing.median
    return Row(
        case.name,
        case.recipe.format.name if case.recipe else None,
        case.recipe.scale_rule.name if case.recipe else None,
        case.threads,
        case.statistics,
        timing,
        elements / timing.median if case.recipe else None,
        rate,
        100.0 * rate / copy_rate,
        case.bytes_equal,
    )


def _missing(peer: Peer, threads: int, reason: str) -> Row:
    return Row(peer.name, peer.format, peer.scale_rounding, threads, False, None, None, None, None, None, reason)


def processor_name() -> str:
    """The processor as it calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
            )
    except OSError:
        return platform.processor() or platform.machine()
