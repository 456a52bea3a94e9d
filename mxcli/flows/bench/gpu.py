"""`bench quantize` on a GPU: checks what every kernel gives against the CPU, then times it next to the device's
copy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mxcli.backends import cpu
from mxcli.backends import pipeline as gathered
from mxcli.backends.device import Buffer, Launch, TimedDevice, TimedQueue
from mxcli.backends.launches import SHARE_BYTES, SUMS, Addresses, KernelJob, amax_of
from mxcli.backends.pipeline import FOUND, clear_totals
from mxcli.errors import LimitError, UsageError
from mxcli.flows.bench.quantize import DTYPE, Peer, Timing, normal_bf16, timing_of
from mxcli.numerics.formats import FORMATS, find_format
from mxcli.numerics.scheme import Rules, Scheme, find_scale_rule, resolve, scale_rules
from mxcli.numerics.stats import Stats

TILE = 1 << 24
"""Different values of the tensor, which repeats them: what the CPU checks."""
FLUSH_BYTES = 256 << 20
"""Written before every timed call, more than any GPU's L2 cache holds."""
COPY, READ = "copy", "read"
CODES, ERRORS, STATISTICS, BOTH = "codes", "errors", "statistics", "codes, statistics"
WORK = (CODES, ERRORS, STATISTICS, BOTH)
"""Kinds of work timed under a scheme: codes and scales; statistics without a histogram of codes; all statistics;
both."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A timed row: the copy, the reading, ours, or another package's.

    Rates are from the median; bytes are input read and output written, once each. `limit_seconds` is what the device's
    copy and reading at their measured rates would take: the output written while the input is read, plus, where the
    tensor's amax must be known first, one more reading; `limit_percent` is that against the median.
    """

    name: str
    format: str | None
    scale_rounding: str | None
    work: str
    timing: Timing | None
    elements_per_second: float | None
    bytes_per_second: float | None
    limit_seconds: float | None
    limit_percent: float | None
    bytes_equal: bool | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The rows, the device and the settings."""

    device: str
    description: str
    clocks: tuple[str, str]
    shape: tuple[int, int]
    dtype: str
    data: str
    rounds: int
    checks: int
    rows: tuple[GpuRow, ...]


class Resident:
    """A BF16 tensor [rows, columns] on the device, and preallocated output buffers."""

    def __init__(self, device: TimedDevice, rows: int, columns: int) -> None:
        self.device, self.shape = device, (rows, columns)
        self.queue: TimedQueue = device.queues(1)[0]
        self.tile = normal_bf16(min(rows, max(1, TILE // columns)), columns)
        self.nbytes = rows * columns * 2
        self._kept: list[Buffer] = []
        self.x, self.other = self._room(self.nbytes), self._room(self.nbytes)
        tile = self.queue.upload(self.tile)
        for at in range(0, self.nbytes, self.tile.nbytes):
            self.queue.copy(tile, self.x, min(self.tile.nbytes, self.nbytes - at), at)
        self._flush = self._room(FLUSH_BYTES)
        self.found = self._room(FOUND.itemsize)
        self.totals = self._room(gathered.TOTALS * 8)
        self.queue.finish()

    def _room(self, nbytes: int) -> Buffer:
        self._kept.append(self.queue.empty(nbytes))
        return self._kept[-1]

    def flush(self) -> None:
        """Leave nothing of the tensor in the cache."""
        self.queue.fill(self._flush, 0, 0, FLUSH_BYTES)

    def copy(self) -> None:
        """Copy the tensor with the device's own copy."""
        self.queue.copy(self.x, self.other, self.nbytes)

    def read(self) -> None:
        """Read the tensor: its largest magnitudes."""
        self.queue.fill(self.found, 0, 0, FOUND.itemsize)
        elements = self.shape[0] * self.shape[1]
        self.queue.launch(amax_of(DTYPE, self.x.address, elements, 0, self.found.address, self.device.processors))


class Case:
    """A recipe on a resident tensor: its launches for every kind of work."""

    def __init__(self, resident: Resident, scheme: Scheme) -> None:
        self.scheme, self._resident = scheme, resident
        self.job = KernelJob(resident.shape, DTYPE, scheme)
        self.piece = self.job.piece(0, self.job.cut.units)
        self.output_bytes = self.job.all_rows * self.job.row_bytes + self.job.blocks * self.job.scale_bytes
        queue = resident.queue
        self._codes = resident.other  # as large as the tensor, which no codes are larger than
        self._scales = queue.empty(self.job.blocks * self.job.scale_bytes)
        self._sums = queue.empty(self.job.cut.chunks * SUMS * 8)
        self._shares = queue.empty(self.job.cut.chunks * SHARE_BYTES if self.job.has_shares else 1)

    @property
    def reads_twice(self) -> bool:
        """True if the tensor's amax must be known before anything is made."""
        return self.job.whole or self.scheme.format.tensor_scale is not None

    def run(self, work: str) -> None:
        """Put the work into the queue."""
        if self.reads_twice:
            self._resident.read()
        for launch in self._launches(work):
            self._resident.queue.launch(launch)

    def _launches(self, work: str) -> Iterator[Launch]:
        device, job = self._resident.device, self.job
        at = Addresses(
            self._resident.x.address,
            self._resident.found.address,
            codes=self._codes.address,
            scales=self._scales.address,
            totals=self._resident.totals.address,
            sums=self._sums.address,
            shares=self._shares.address,
        )
        if work == CODES:
            yield job.quantize(self.piece, at, device.conversions)
            return
        codes, histogram = work == BOTH, work != ERRORS
        yield job.measure(
            self.piece, at, device.processors, conversions=device.conversions, codes=codes, histogram=histogram
        )
        if job.has_shares:
            yield job.measure_whole(at, device.conversions, codes=codes, histogram=histogram)

    def check(self) -> None:
        """Raise LimitError unless the bytes of the first tile and the last are the CPU's, and the counts of the tensor
        as many times the tile's."""
        resident, queue, job = self._resident, self._resident.queue, self.job
        wanted = cpu.quantize(resident.tile, DTYPE, self.scheme)
        repeats = resident.shape[0] // len(resident.tile)
        totals = np.empty(gathered.TOTALS, np.uint64)
        for work in (CODES, BOTH):
            if work == BOTH:
                clear_totals(queue, resident.totals)
            self.run(work)
            for tile in (0, repeats - 1):
                packed, scales = np.empty_like(wanted.packed), np.empty_like(wanted.scales)
                queue.download(self._codes, packed, tile * packed.nbytes)
                queue.download(self._scales, scales, 0 if job.whole else tile * scales.nbytes)
                queue.download(resident.totals, totals)
                queue.finish()
                if packed.tobytes() != wanted.packed.tobytes() or scales.tobytes() != wanted.scales.tobytes():
                    raise LimitError(f"{self.name} ({work}): the GPU's bytes are not the CPU's; nothing was timed.")
        assert wanted.stats is not None
        found = gathered.stats_of(totals, np.zeros((0, SUMS)), elements=0, blocks=0, worst=())
        if not job.whole and not _repeats(found, wanted.stats, repeats):
            raise LimitError(f"{self.name}: the GPU's counts are not the CPU's; nothing was timed.")

    @property
    def name(self) -> str:
        """Format and rule."""
        return f"{self.scheme.format.name} {self.scheme.scale_rule.name}"


def _repeats(found: Stats, tile: Stats, repeats: int) -> bool:
    """Return whether a tensor that repeats a tile has the tile's counts times the repeats."""
    counts = ("saturated", "saturated_blocks", "underflowed", "zero_blocks")
    bins = ("scale_bins", "code_bins", "block_code_bins", "sqnr_bins", "range_bins")
    return all(getattr(found, name) == repeats * getattr(tile, name) for name in counts) and all(
        dict(getattr(found, name).counted) == {at: repeats * n for at, n in getattr(tile, name).counted}
        for name in bins
    )


def recipes_to_time(formats: Sequence[str], scale_rounding: str | None, dialect: str | None) -> list[Scheme]:
    """Return every format (all rows if none is named) under the rule named, or under every rule that serves it.

    A rule that serves some formats only leaves the others out where none was named. Raises UsageError for names that
    mean nothing.
    """
    rows = [find_format(name) for name in formats] or list(FORMATS.values())
    if scale_rounding is not None and not formats:
        rule = find_scale_rule(scale_rounding)
        rows = [row for row in rows if rule is None or rule in scale_rules(row)]
    return [
        resolve(row, Rules(scale_rounding=rule, dialect=dialect))
        for row in rows
        for rule in ([scale_rounding] if scale_rounding or dialect else scale_rules(row))
    ]


def run_gpu_bench(
    device: TimedDevice,
    schemes: Sequence[Scheme],
    *,
    size: int = 16384,
    rounds: int = 9,
    peers: Sequence[Peer] = (),
    work: Sequence[str] = WORK,
    check: bool = True,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> GpuReport:
    """Time every recipe on a BF16 tensor [size, size] that stays on the device, next to its own copy and reading.

    Calls are timed on the device, in rounds, in an order shuffled again each round, after one round that does not count
    and compiles; before every call the L2 cache is overwritten. Each recipe's bytes and counts are compared with the
    CPU's first, unless `check` is false since the caller has compared them: LimitError says which differ. Peers that
    cannot be imported stay in the report with the reason.
    """
    if size < 256 or size % 128:
        raise UsageError(f"--size {size} is not a multiple of 128 of at least 256")
    if rounds < 1:
        raise UsageError(f"--rounds {rounds} is not a positive number")
    resident = Resident(device, size, size)
    cases = [Case(resident, scheme) for scheme in schemes]
    for case in cases if check else ():
        case.check()
    calls: dict[tuple[str, ...], Callable[[], None]] = {(COPY,): resident.copy, (READ,): resident.read}
    for number, case in enumerate(cases):
        for kind in work:
            calls[str(number), kind] = _call(case, kind)
    clocks = device.clocks()
    timings = _time(resident, calls, rounds, on_round)
    rates = (2 * resident.nbytes / timings[(COPY,)].median, resident.nbytes / timings[(READ,)].median)
    rows = [
        GpuRow(COPY, None, None, COPY, timings[(COPY,)], None, rates[0], None, None),
        GpuRow(READ, None, None, READ, timings[(READ,)], None, rates[1], None, None),
    ]
    for number, case in enumerate(cases):
        rows += [_row(case, kind, timings[str(number), kind], resident, rates) for kind in work]
    rows += _peer_rows(resident, peers, rounds, rates)
    return GpuReport(
        device.name,
        device.describe(),
        (clocks, device.clocks()),
        resident.shape,
        DTYPE,
        "normal, standard deviation 0.02, seed 0",
        rounds,
        len(cases) if check else 0,
        tuple(rows),
    )


def _call(case: Case, kind: str) -> Callable[[], None]:
    return lambda: case.run(kind)


def _time(
    resident: Resident,
    calls: dict[tuple[str, ...], Callable[[], None]],
    rounds: int,
    on_round: Callable[[int, int], None],
) -> dict[tuple[str, ...], Timing]:
    order, order_of = list(calls), random.Random(0)
    seconds: dict[tuple[str, ...], list[float]] = {name: [] for name in order}
    for number in range(rounds + 1):
        order_of.shuffle(order)
        for name in order:
            taken = resident.queue.seconds(calls[name], resident.flush)
            if number:
                seconds[name].append(taken)
        on_round(number + 1, rounds + 1)
    return {name: timing_of(taken) for name, taken in seconds.items()}


def _row(case: Case, kind: str, timing: Timing, resident: Resident, rates: tuple[float, float]) -> GpuRow:
    elements = resident.shape[0] * resident.shape[1]
    written = case.output_bytes if kind in (CODES, BOTH) else 0
    limit = _limit(resident.nbytes, written, case.reads_twice, rates)
    return GpuRow(
        "mxcli",
        case.scheme.format.name,
        case.scheme.scale_rule.name,
        kind,
        timing,
        elements / timing.median,
        (resident.nbytes + written) / timing.median,
        limit,
        100.0 * limit / timing.median,
    )


def _limit(read: int, written: int, reads_twice: bool, rates: tuple[float, float]) -> float:
    """Return the seconds at the rates of copy and reading."""
    copy_rate, read_rate = rates
    once = (read + written) / copy_rate if written else read / read_rate
    return once + (read / read_rate if reads_twice else 0.0)


def _flushed(resident: Resident) -> Callable[[], None]:
    """Return a call that empties the L2 cache and waits for it."""

    def flush() -> None:
        resident.flush()
        resident.queue.finish()

    return flush


def _peer_rows(resident: Resident, peers: Sequence[Peer], rounds: int, rates: tuple[float, float]) -> Iterator[GpuRow]:
    """Yield other packages on the same values, timed the same way; their bytes are compared on the first tile."""
    for peer in peers:
        row = GpuRow(peer.name, peer.format, peer.scale_rounding, CODES, None, None, None, None, None)
        try:
            call, result = peer.on_gpu(resident.tile, resident.shape[0], resident.device.name)
            resident.queue.finish()
        except ImportError as error:
            yield replace(row, problem=str(error))
            continue
        scheme = resolve(peer.format, Rules(scale_rounding=peer.scale_rounding))
        wanted = cpu.quantize(resident.tile, DTYPE, scheme, stats=False)
        codes, scales = result()
        equal = codes.tobytes() == wanted.packed.tobytes() and scales.tobytes() == wanted.scales.tobytes()
        timing = timing_of([call(_flushed(resident)) for _ in range(rounds + 1)][1:])
        made = _row(Case(resident, scheme), CODES, timing, resident, rates)
        yield replace(made, name=peer.name, bytes_equal=equal)
