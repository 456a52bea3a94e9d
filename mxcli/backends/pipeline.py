"""The path of a tensor through a GPU: pieces in; codes, scales and statistics out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mxcli.backends.device import Buffer, Device, Launch, Queue
from mxcli.backends.launches import SHARE_BYTES, SUMS, WORST_OF, Addresses, KernelJob, Piece, amax_of
from mxcli.numerics import stats
from mxcli.numerics.blocks import PerBlock
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.stats import WORST_BLOCKS, Amax, Histogram, Stats

Array = np.ndarray
_COUNTED = (
    *("zero_blocks", "nan_blocks", "saturated", "saturated_blocks", "underflowed"),
    *("scale_underflowed_blocks", "nan", "infinite", "excluded"),
)
_LEAST = ("first_nonfinite", "min_block_sqnr", "min_block_range")
_LARGEST = ("amax", "max_abs_error", "max_rel_error")
_BINS = {
    "scale_bins": stats.SCALE_BINS,
    "code_bins": stats.CODE_BINS,
    "block_code_bins": stats.CODE_BINS,
    "sqnr_bins": stats.SQNR_BINS,
    "range_bins": stats.RANGE_BINS,
}
_NUMBERS = (*_COUNTED, *_LEAST, *_LARGEST)
TOTALS = len(_NUMBERS) + sum(_BINS.values())
"""64-bit numbers of a tensor's totals."""
LEAST = (len(_COUNTED), len(_COUNTED) + len(_LEAST))
"""Those of them that begin with all bits set."""


def merged(totals: Iterable[Array]) -> Array:
    """Return the totals of a tensor from those of its parts."""
    each = np.stack(list(totals))
    all_of_it: Array = each.sum(0, dtype=np.uint64)
    all_of_it[slice(*LEAST)] = each[:, slice(*LEAST)].min(0)
    largest = slice(LEAST[1], len(_NUMBERS))
    all_of_it[largest] = each[:, largest].max(0)
    return all_of_it


def stats_of(totals: Array, sums: Array, *, elements: int, blocks: int, worst: tuple[tuple[float, int], ...]) -> Stats:
    """Return statistics from a tensor's totals and its chunks' sums, [chunks, 4], which are added in their order."""
    numbers = dict(zip(_NUMBERS, totals.tolist(), strict=False))
    values: dict[str, object] = {name: numbers[name] for name in _COUNTED if name != "excluded"}
    least = totals[slice(*LEAST)]
    values["first_nonfinite"] = int(least[:1].view(np.int64)[0])  # all bits set: -1
    for name, value in zip(_LEAST[1:], least[1:], strict=True):
        # A negative double marks one that nothing set, as all bits set do: neither is the least of anything.
        values[name] = -1.0 if int(value) >> 63 else float(np.array(value).view(np.float64))
    for name in _LARGEST:
        values[name] = float(np.array(numbers[name], np.uint32).view(np.float32))
    at = len(_NUMBERS)
    for name, count in _BINS.items():
        values[name] = Histogram.of(totals[at : at + count].tobytes())
        at += count
    in_order = np.add.accumulate(sums, axis=0)[-1].tolist() if len(sums) else [0.0] * 4
    signal, noise, cross, error = in_order
    return Stats(
        elements=elements,
        blocks=blocks,
        measured=elements - numbers["excluded"],
        signal=signal,
        noise=noise,
        cross=cross,
        error=error,
        worst=worst,
        **values,  # type: ignore[arg-type]
    )


def noisiest(found: Iterable[tuple[Array, Array]]) -> tuple[tuple[float, int], ...]:
    """Return the blocks with the most noise, of candidates: (noise, block), of equals the one that stands first."""
    both = list(found)
    noise = np.concatenate([each for each, _ in both]) if both else np.empty(0)
    place = np.concatenate([each for _, each in both]) if both else np.empty(0, np.int64)
    order = np.lexsort((place, -noise))[: stats.WORST_BLOCKS]
    return tuple((float(noise[at]), int(place[at])) for at in order if noise[at] > 0)


FOUND = np.dtype([("finite", "<u4"), ("all", "<u4"), ("nonfinite", "<u8"), ("first", "<u8")])
"""`MxFound` in `kernels/reduce.cu`."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a run: where codes and scales go (empty: nowhere), whether statistics are counted, and where
    numbers per block go (None: nowhere). Or where values go (None: nowhere), with their type, and nothing else."""

    packed: Array
    scales: Array
    stats: bool
    per_block: PerBlock | None
    values: Array | None = None
    dtype: str = ""

    @property
    def codes(self) -> bool:
        """True if codes are wanted."""
        return self.packed.size > 0


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Numbers of the blocks from `first` on: the noisiest, and amax, decode, saturated, underflowed of each."""

    first: int
    noise: Array
    place: Array
    four: Array | None


Source = Callable[[Queue, Piece], Buffer]
"""Where a piece's elements are on the device, once the work before it in the queue is done."""


def uploaded(array: Array, job: KernelJob) -> Source:
    """Return pieces of an array in the host's memory."""
    rows = array.reshape(job.all_rows, -1)
    return lambda queue, piece: queue.upload(rows[slice(*piece.rows)])


class Pipeline:
    """A job's tensor goes through the queues of a device, a piece through each in turn."""

    def __init__(
        self, device: Device, queues: Sequence[Queue], job: KernelJob, source: Source, wanted: Outputs
    ) -> None:
        self._device, self._queues, self._job, self._wanted = device, queues, job, wanted
        self._source = source
        self._held: dict[Piece, Buffer] = {}
        self._found: list[Buffer] = []
        self._totals: list[Buffer] = []
        self._shares: Buffer | None = None
        self._blocks: list[_Blocks] = []
        self._sums = np.zeros((1 if job.has_shares else job.cut.chunks, SUMS))

    # ----------------------------------------------------------------------------------------------------- passes

    def find_amax(self, pieces: Iterable[Piece], room: int) -> Any:
        """Return the amaxes of the tensor, an element of type FOUND; pieces stay on the device while `room` bytes
        last."""

        def parts() -> Iterator[tuple[Callable[[Queue], Buffer], int]]:
            left = room
            for piece in pieces:
                elements = (piece.rows[1] - piece.rows[0]) * self._job.columns
                nbytes = elements * self._job.item_bytes
                if nbytes <= left:
                    left -= nbytes
                    yield partial(self._held_source, piece), elements
                else:
                    yield partial(self._source_of, piece), elements

        return look_at(self._device, self._queues, self._job.dtype, parts(), self._job.scheme.hadamard)

    def _source_of(self, piece: Piece, queue: Queue) -> Buffer:
        return self._source(queue, piece)

    def _held_source(self, piece: Piece, queue: Queue) -> Buffer:
        self._held[piece] = self._source(queue, piece)
        return self._held[piece]

    def set_amax(self, found: Any) -> None:
        """Put largest magnitudes where kernels read them."""
        self._found = [queue.upload(np.array([found], FOUND)) for queue in self._queues]

    def run(self, pieces: Iterable[Piece]) -> Stats | None:
        """Quantize and measure all pieces; afterwards the requested arrays are filled."""
        if not (self._wanted.stats or self._wanted.codes or self._wanted.values is not None):
            return None
        if self._wanted.stats:
            self._begin_totals()
        for number, piece in enumerate(pieces):
            self._queues[number % len(self._queues)].finish()
            self._send(number % len(self._queues), piece)
        for queue in self._queues:
            queue.finish()
        return self._end() if self._wanted.stats else None

    # ------------------------------------------------------------------------------------------------------ pieces

    def _begin_totals(self) -> None:
        for queue in self._queues:
            totals = queue.empty(TOTALS * 8)
            clear_totals(queue, totals)
            self._totals.append(totals)
        if self._job.has_shares:
            self._shares = self._queues[0].empty(self._job.cut.chunks * SHARE_BYTES)
            self._queues[0].finish()

    def _send(self, number: int, piece: Piece) -> None:
        job, queue, wanted = self._job, self._queues[number], self._wanted
        x = self._held.pop(piece, None) or self._source(queue, piece)
        (first_row, last_row), (first_block, last_block) = piece.rows, piece.blocks
        at = Addresses(x.address - first_row * job.columns * job.item_bytes, self._found[number].address)
        if wanted.values is not None:
            values = wanted.values.reshape(job.all_rows, -1)[first_row:last_row]
            made = queue.empty(values.nbytes)
            begin = first_row * job.columns * values.itemsize
            queue.launch(job.quantize_dequantize(piece, replace(at, codes=made.address - begin), wanted.dtype))
            queue.download(made, values)
            return
        if wanted.codes:
            codes = queue.empty((last_row - first_row) * job.row_bytes)
            scales = queue.empty((last_block - first_block) * job.scale_bytes)
            at = replace(
                at,
                codes=codes.address - first_row * job.row_bytes,
                scales=scales.address - first_block * job.scale_bytes,
            )
        if wanted.stats:
            self._measure(number, piece, replace(at, totals=self._totals[number].address))
        else:
            queue.launch(job.quantize(piece, at, self._device.conversions))
        if wanted.codes:
            queue.download(codes, wanted.packed.reshape(job.all_rows, -1)[first_row:last_row])
            queue.download(scales, wanted.scales.reshape(-1)[first_block:last_block])

    def _measure(self, number: int, piece: Piece, at: Addresses) -> None:
        job, queue = self._job, self._queues[number]
        if self._shares is not None:
            at = replace(at, shares=self._shares.address)
            queue.launch(self._measuring(piece, at))
            return
        (first_chunk, last_chunk), (first_block, last_block) = piece.chunks, piece.blocks
        if job.whole:
            first_chunk, last_chunk = 0, 1
        sums = queue.empty((last_chunk - first_chunk) * SUMS * 8)
        noise = queue.empty((last_block - first_block) * 8)
        others = self._others(queue, last_block - first_block)
        at = replace(
            at,
            sums=sums.address - first_chunk * SUMS * 8,
            noise=noise.address - first_block * 8,
            others=0 if others is None else others.address - first_block * 4,
        )
        queue.launch(self._measuring(piece, at))
        queue.download(sums, self._sums[first_chunk:last_chunk])
        self._read_blocks(queue, noise, others, piece.blocks)

    def _measuring(self, piece: Piece, at: Addresses) -> Launch:
        device = self._device
        return self._job.measure(piece, at, device.processors, conversions=device.conversions, codes=self._wanted.codes)

    def _others(self, queue: Queue, blocks: int) -> Buffer | None:
        return queue.empty(blocks * 16) if self._wanted.per_block is not None else None

    def _read_blocks(self, queue: Queue, noise: Buffer, others: Buffer | None, blocks: tuple[int, int]) -> None:
        first, count = blocks[0], blocks[1] - blocks[0]
        candidates = -(-count // WORST_OF) * WORST_BLOCKS
        values, places = queue.empty(candidates * 8), queue.empty(candidates * 8)
        queue.launch(self._job.worst(noise.address, count, values.address, places.address))
        read = _Blocks(first, np.empty(candidates), np.empty(candidates, np.int64), None)
        queue.download(values, read.noise)
        queue.download(places, read.place)
        if others is not None and self._wanted.per_block is not None:
            read = replace(read, four=np.empty((4, count), np.float32))
            queue.download(others, read.four)
            queue.download(noise, self._wanted.per_block.noise.reshape(-1)[first : first + count])
        self._blocks.append(read)

    # --------------------------------------------------------------------------------------------------------- end

    def _end(self) -> Stats:
        job, queue = self._job, self._queues[0]
        if self._shares is not None:
            sums, noise, others = queue.empty(SUMS * 8), queue.empty(8), self._others(queue, 1)
            at = Addresses(
                0,
                self._found[0].address,
                totals=self._totals[0].address,
                sums=sums.address,
                noise=noise.address,
                others=0 if others is None else others.address,
                shares=self._shares.address,
            )
            queue.launch(job.measure_whole(at, self._device.conversions, codes=self._wanted.codes))
            queue.download(sums, self._sums)
            self._read_blocks(queue, noise, others, (0, 1))
        totals = [np.empty(TOTALS, np.uint64) for _ in self._queues]
        for each, buffer, array in zip(self._queues, self._totals, totals, strict=True):
            each.download(buffer, array)
            each.finish()
        self._fill_per_block()
        return stats_of(
            merged(totals),
            self._sums,
            elements=job.all_rows * job.columns,
            blocks=job.blocks,
            worst=noisiest((blocks.noise, blocks.place + blocks.first) for blocks in self._blocks),
        )

    def _fill_per_block(self) -> None:
        per_block = self._wanted.per_block
        if per_block is None:
            return
        for blocks in self._blocks:
            assert blocks.four is not None
            place = slice(blocks.first, blocks.first + blocks.four.shape[1])
            per_block.amax.reshape(-1)[place] = blocks.four[0]
            per_block.decode.reshape(-1)[place] = blocks.four[1]
            per_block.saturated.reshape(-1)[place] = blocks.four[2].view(np.int32)
            per_block.underflowed.reshape(-1)[place] = blocks.four[3].view(np.int32)


def look_at(
    device: Device,
    queues: Sequence[Queue],
    dtype: str,
    parts: Iterable[tuple[Callable[[Queue], Buffer], int]],
    hadamard: Hadamard | None = None,
) -> Any:
    """Return the amaxes (an element of type FOUND) of parts, each given by its source and number of elements; those
    after a transform, if one is given, whose groups no part splits."""
    nothing = np.zeros(1, FOUND)
    nothing["first"] = ~np.uint64(0)
    found, base = [queue.upload(nothing) for queue in queues], 0
    for number, (source, elements) in enumerate(parts):
        queue, to = queues[number % len(queues)], found[number % len(queues)]
        queue.finish()
        x = source(queue)
        queue.launch(amax_of(dtype, x.address, elements, base, to.address, device.processors, hadamard))
        base += elements
    return _merged(queues, found)


def amax_from(found: Any) -> Amax:
    """Return the record of FOUND as an Amax."""
    first = int(found["first"].view(np.int64))  # all bits set: -1
    return Amax(float(found["finite"].view(np.float32)), int(found["nonfinite"]), first)


def clear_totals(queue: Queue, totals: Buffer) -> None:
    """Reset totals to those of no elements."""
    queue.fill(totals, 0, 0, TOTALS * 8)
    queue.fill(totals, 0xFF, LEAST[0] * 8, LEAST[1] * 8)


def _merged(queues: Sequence[Queue], found: Sequence[Buffer]) -> Any:
    """Merge the results of queues on their pieces: an element of type FOUND."""
    each = np.empty(len(found), FOUND)
    for queue, buffer, place in zip(queues, found, range(len(found)), strict=True):
        queue.download(buffer, each[place : place + 1])
        queue.finish()
    merged = np.zeros(1, FOUND)
    merged["finite"], merged["all"] = each["finite"].max(), each["all"].max()
    merged["nonfinite"], merged["first"] = each["nonfinite"].sum(), each["first"].min()
    return merged[0]
