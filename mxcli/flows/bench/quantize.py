"""`bench quantize`: checks what the kernel gives, then times it next to a memory copy and other packages."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from mxcli.backends import cpu
from mxcli.errors import LimitError, UsageError, did_you_mean
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.scheme import Rules, Scheme, resolve, resolve_all


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call over the counted rounds."""

    median: float
    p10: float
    p90: float
    rounds: int


def time_together(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    seed: int = 0,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Timing]:
    """Time every call once per round, in an order shuffled again each round, after one uncounted round.

    What drifts (clocks, other processes) then reaches all calls alike. Raises nothing of its own.
    """
    order, order_of, seconds = list(calls), random.Random(seed), {name: list[float]() for name in calls}
    for number in range(rounds + 1):
        order_of.shuffle(order)
        for name in order:
            start = time.perf_counter()
            calls[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
        on_round(number + 1, rounds + 1)
    return {name: timing_of(taken) for name, taken in seconds.items()}


def timing_of(seconds: list[float]) -> Timing:
    """Return the median and spread of calls."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


Codes = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A package's quantizer of one format and rule, on a BF16 tensor given as its bits.

    `quantizer(torch)` is the function as users call it: a torch tensor to scales and packed codes; it raises
    ImportError where the package is missing.
    """

    name: str
    format: str
    scale_rounding: str
    quantizer: Callable[[Any], Callable[[Any], tuple[Any, Any]]]

    def build(self, bits: Codes, threads: int) -> tuple[Callable[[], object], Callable[[], tuple[Codes, Codes]]]:
        """Return a call that quantizes and returns nothing of use, and one that returns packed codes and scales as
        bytes."""
        import torch

        x = torch.from_numpy(bits).view(torch.bfloat16)
        torch.set_num_threads(threads)
        quantizer = self.quantizer(torch)

        def call() -> Any:
            torch.set_num_threads(threads)  # the setting is the process's, and rows take turns
            return quantizer(x)

        return call, lambda: _bytes(torch, call())

    def on_gpu(
        self, tile: Codes, rows: int, device: str
    ) -> tuple[Callable[[Callable[[], None]], float], Callable[[], tuple[Codes, Codes]]]:
        """Return two GPU calls on the tile repeated to `rows` rows: one runs its argument (a cache flush), then returns
        device seconds; the other returns codes and scales of the tile."""
        import torch

        if not torch.cuda.is_available():
            raise ImportError(f"torch {torch.__version__} has no CUDA here")
        one = torch.from_numpy(tile).view(torch.bfloat16).to(device)
        x = one.repeat(rows // len(tile), 1)
        quantizer = self.quantizer(torch)

        def call(before: Callable[[], None]) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            start.record()
            quantizer(x)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return call, lambda: _bytes(torch, quantizer(one))


def _bytes(torch: Any, result: tuple[Any, Any]) -> tuple[Codes, Codes]:
    """Return codes and scales of a quantizer's result."""
    scales, codes = result
    return codes.view(torch.uint8).cpu().numpy(), scales.view(torch.uint8).cpu().numpy()


def _torchao(format: str, rule: str, compiled: bool) -> Peer:
    def quantizer(torch: Any) -> Callable[[Any], tuple[Any, Any]]:
        made = _nvfp4(torch) if format == "nvfp4" else _mx(torch, format, rule)
        return cast("Callable[[Any], tuple[Any, Any]]", torch.compile(made)) if compiled else made

    return Peer("torchao-compiled" if compiled else "torchao", format, rule, quantizer)


def _mx(torch: Any, format: str, rule: str) -> Callable[[Any], Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp4_e2m1": torch.float4_e2m1fn_x2}[format]
    mode = ScaleCalculationMode[rule.upper()]
    return lambda x: to_mx(x, element, 32, mode)


def _nvfp4(torch: Any) -> Callable[[Any], Any]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    return lambda x: nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))


PEERS: tuple[Peer, ...] = tuple(
    _torchao(format, rule, compiled)
    for compiled in (False, True)
    for format, rule in (("mxfp8_e4m3", "rceil"), ("mxfp4_e2m1", "rceil"), ("nvfp4", "torchao"))
)
PEER_NAMES = tuple(dict.fromkeys(peer.name for peer in PEERS))


def named_peers(names: list[str]) -> list[Peer]:
    """Return the rows of the peers called so; raises UsageError for an unknown name."""
    for name in names:
        if name not in PEER_NAMES:
            raise UsageError(
                f"unknown peer '{name}': known are {', '.join(PEER_NAMES)}.{did_you_mean(name, PEER_NAMES)}"
            )
    return [peer for peer in PEERS if peer.name in names]


Bits = np.ndarray[Any, Any]
DTYPE = "BF16"


@dataclass(frozen=True, slots=True)
class Row:
    """A timed thing: ours, the copy, or another package's.

    `elements_per_second` and `bytes_per_second` (input read plus output written, once each) are from the median.
    `copy_percent` is bytes_per_second against the copy's at the same thread count. `bytes_equal` says of a peer
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
    """The rows with the settings they were measured under."""

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
    scheme: Scheme | None
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
    """Time every format on a BF16 tensor [size, size] of normal random values, with and without statistics.

    Each result is checked before anything is timed; a wrong one raises LimitError. Peers that cannot be imported
    stay in the report with the reason.
    """
    if size < 256 or size % 128:
        raise UsageError(f"--size {size} is not a multiple of 128 of at least 256")
    if rounds < 1:
        raise UsageError(f"--rounds {rounds} is not a positive number")
    others = named_peers(list(peers))
    schemes = resolve_all(formats, Rules(scale_rounding=scale_rounding, dialect=dialect))
    bits = normal_bf16(size, size)
    checks = [_check(bits, scheme) for scheme in schemes]
    cases, failed = [], list[Row]()
    for count in threads:
        cases.append(_copy_case(bits, count))
        for scheme in schemes:
            cases += [_our_case(bits, scheme, count, statistics) for statistics in (False, True)]
        for peer in others:
            if peer.format not in {scheme.format.name for scheme in schemes}:
                continue
            try:
                cases.append(_peer_case(bits, peer, count))
            except ImportError as error:
                failed.append(_missing(peer, count, str(error)))
    timings = time_together({str(at): case.call for at, case in enumerate(cases)}, rounds, on_round=on_round)
    copies = {c.threads: c.nbytes / timings[str(at)].median for at, c in enumerate(cases) if c.scheme is None}
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
    """Return the tensor that is quantized: BF16 bits of normal random values, standard deviation 0.02, seed 0."""
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _check(bits: Bits, scheme: Scheme) -> str:
    """Check that one and two threads give the same bytes and statistics, and that the reported error is that of the
    bytes."""
    one, two = (cpu.quantize(bits, DTYPE, scheme, threads=threads) for threads in (1, 2))
    name = f"{scheme.format.name} {scheme.scale_rule.name}"
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


def _our_case(bits: Bits, scheme: Scheme, threads: int, statistics: bool) -> _Case:
    held = cpu.quantize(bits, DTYPE, scheme, stats=False, threads=threads)
    call = partial(cpu.quantize, bits, DTYPE, scheme, stats=statistics, threads=threads, reuse=held)
    return _Case("mxcli", scheme, threads, statistics, bits.nbytes + _output_bytes(held), call)


def _copy_case(bits: Bits, threads: int) -> _Case:
    """Return a copy of 256 MiB, in as many threads as the rows compared with it: more than any cache holds."""
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
    scheme = resolve(peer.format, Rules(scale_rounding=peer.scale_rounding))
    ours = cpu.quantize(bits, DTYPE, scheme, stats=False)
    codes, scales = result()
    equal = codes.tobytes() == ours.packed.tobytes() and scales.tobytes() == ours.scales.tobytes()
    return _Case(peer.name, scheme, threads, False, bits.nbytes + _output_bytes(ours), call, equal)


def _output_bytes(q: Quantized) -> int:
    return int(q.packed.nbytes + q.scales.nbytes)


def _row(case: _Case, timing: Timing, elements: int, copy_rate: float) -> Row:
    rate = case.nbytes / timing.median
    return Row(
        case.name,
        case.scheme.format.name if case.scheme else None,
        case.scheme.scale_rule.name if case.scheme else None,
        case.threads,
        case.statistics,
        timing,
        elements / timing.median if case.scheme else None,
        rate,
        100.0 * rate / copy_rate,
        case.bytes_equal,
    )


def _missing(peer: Peer, threads: int, reason: str) -> Row:
    return Row(peer.name, peer.format, peer.scale_rounding, threads, False, None, None, None, None, None, reason)


def processor_name() -> str:
    """Return the processor as it calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
            )
    except OSError:
        return platform.processor() or platform.machine()
