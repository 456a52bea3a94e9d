"""The choice of kernels for a tensor under a scheme, and the division of work among threads; needs no device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mxcli.backends import cpu
from mxcli.backends.abi import kernel_scheme, rotation
from mxcli.backends.device import Kernel, Launch
from mxcli.numerics.blocks import folded, grid_shape, packed_columns
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import Scheme

THREADS = 256
"""Threads of a block, where kernels do not say otherwise; MX_SUMS of `kernels/measure.h`."""
VECTOR = 8
"""Elements that a thread of `quantize_blocks.cu` takes at once."""
TILE = 64
"""Rows and columns that `quantize_both.cu` holds at once."""
MOST_HELD = 8
MOST_BLOCKS = 2**31 - 1
"""Blocks of threads that one launch can have."""
WORST_OF = 4096
"""`mx_worst` finds the noisiest of this many blocks."""
SUMS, SHARE_BYTES = 4, 64
"""Numbers of a chunk, and bytes of `MxShare` in `kernels/measure_blocks.cu`."""


_ITEM_BYTES = {number: np.dtype(kind).itemsize for number, kind in cpu.TYPES.values()}


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a tensor's arrays on the device. For a piece: where they would begin if all of the tensor were
    there,
    so that kernels count rows, blocks and chunks from the tensor's first. 0: not wanted, or not needed."""

    x: int
    found: int = 0
    codes: int = 0
    scales: int = 0
    totals: int = 0
    sums: int = 0
    noise: int = 0
    others: int = 0
    shares: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Units `first` to `last` of a tensor: its rows, blocks and chunks that belong to them."""

    first: int
    last: int
    rows: tuple[int, int]
    blocks: tuple[int, int]
    chunks: tuple[int, int]


class KernelJob:
    """A tensor of a shape and type under a scheme: its cut into units, chunks and pieces, and the kernels for it."""

    def __init__(self, shape: tuple[int, ...], dtype: str, scheme: Scheme, stream: int = 0) -> None:
        self.scheme, self.shape, self.dtype = scheme, shape, dtype
        self._key = np.uint64(scheme.seed | stream << 32)
        self.batch, self.rows, self.columns = folded(shape)
        height, width = scheme.format.block
        self.whole = height is None and width is None
        self.block_rows = height or max(1, self.batch * self.rows if self.whole else self.rows)
        self.block_columns = width or max(1, self.columns)
        self.cut = cpu.cut(shape, scheme)
        grid = grid_shape(scheme.format, shape)
        self.across = grid[-1]
        self.blocks = int(np.prod(grid))
        self.row_bytes = packed_columns(scheme.format, self.columns)
        self.scale_bytes = scheme.format.scale.bits // 8
        self.item_bytes = np.dtype(cpu.TYPES[dtype][1]).itemsize
        self._numbers = kernel_scheme(scheme)
        self._scheme = bytes(self._numbers)

    @property
    def growth(self) -> int:
        """Bytes that a device needs for a byte of the tensor, at most: it, codes, scales, 24 bytes of numbers per
        block."""
        made = self.all_rows * self.row_bytes + self.blocks * (self.scale_bytes + 24)
        return 1 - -made // max(1, self.all_rows * self.columns * self.item_bytes)

    # ------------------------------------------------------------------------------------------------------ pieces

    @property
    def all_rows(self) -> int:
        """Rows over all leading dimensions."""
        return self.batch * self.rows

    def row_of(self, unit: int) -> int:
        """Return the first row of a unit: a row of blocks, or rows of the block that is the tensor."""
        if self.whole:
            return min(unit * int(self.cut.unit_rows), self.all_rows)
        down = max(1, -(-self.rows // self.block_rows))
        return unit // down * self.rows + unit % down * self.block_rows

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the tensor in runs of whole chunks, each of at most the given bytes of input; undivided where one block
        spans the tensor and its scale is tried on all of it."""
        per_chunk = self.cut.per_chunk
        row_bytes = max(1, self.columns * self.item_bytes)
        step = max(1, most_bytes // (row_bytes * self.cut.unit_rows * per_chunk)) * per_chunk
        if self.whole and not self.has_shares:
            step = max(1, self.cut.units)
        for first in range(0, self.cut.units, step):
            yield self.piece(first, min(first + step, self.cut.units))

    def piece(self, first: int, last: int) -> Piece:
        """Return units first to last, first a multiple of the units of a chunk."""
        cut = self.cut
        chunks = (first * cut.parts, last * cut.parts)
        if cut.parts == 1:
            chunks = (first // cut.per_chunk, -(-last // cut.per_chunk))
        blocks = (0, 1) if self.whole else (first * self.across, last * self.across)
        return Piece(first, last, (self.row_of(first), self.row_of(last)), blocks, chunks)

    # ----------------------------------------------------------------------------------------------------- kernels

    def worst(self, noise: int, blocks: int, values: int, places: int) -> Launch:
        """Return the noisiest of every 4096 blocks."""
        arguments = (_pointer(noise), np.int64(blocks), _pointer(values), _pointer(places))
        return Launch(_reduction("mx_worst", self.dtype), -(-blocks // WORST_OF), THREADS, arguments)

    def quantize(self, piece: Piece, at: Addresses, conversions: int, swizzled: bool = False) -> Launch:
        """Return codes and scales of a piece, without statistics."""
        return self._quantize(piece, at, {"MX_SWIZZLED": int(swizzled), "MX_HARDWARE": conversions})

    @property
    def has_values(self) -> bool:
        """True if one kernel quantizes and dequantizes: a thread holds the groups of a transform."""
        return self.scheme.hadamard is None or self._elements_per_thread() > 0

    def quantize_dequantize(self, piece: Piece, at: Addresses, dtype: str) -> Launch:
        """Return values of a piece in a type, at the address of codes."""
        return self._quantize(piece, at, {"MX_SWIZZLED": 0, "MX_HARDWARE": 0, "MX_TARGET": cpu.TYPES[dtype][0]})

    def _quantize(self, piece: Piece, at: Addresses, choices: dict[str, int]) -> Launch:
        taken = self._elements_per_thread()
        if taken and "MX_TARGET" in choices and self.scheme.hadamard is not None:
            taken = max(taken, self.scheme.hadamard.size)
        if taken:
            return self._quantize_rows(piece, at, taken, choices)
        height = min(self.block_rows, self.all_rows if self.whole else self.rows)
        vectors = -(-min(self.block_columns, self.columns) // VECTOR) * height
        # A group of a transform is read by several threads: nothing is held between the two looks.
        held = -(-vectors // THREADS) if self.scheme.hadamard is None else MOST_HELD + 1
        threads = min(THREADS, -(-vectors // 32) * 32) if held <= MOST_HELD else 1024
        kernel = self._kernel(
            "quantize_blocks.cu",
            "mx_quantize_blocks",
            MX_HELD=held if held <= MOST_HELD else 0,
            **choices,
        )
        arguments = (
            _pointer(at.x),
            np.int64(self.all_rows if self.whole else self.rows),
            *map(np.int64, (self.columns, self.block_rows, self.block_columns, *piece.blocks)),
            self._key,
            *map(_pointer, (at.found, at.codes, at.scales)),
        )
        return Launch(kernel, min(piece.blocks[1] - piece.blocks[0], MOST_BLOCKS), threads, arguments)

    @property
    def has_both(self) -> bool:
        """True if one kernel quantizes the tensor along rows and along columns, both being read once."""
        height, width = self.scheme.format.block
        served = height == 1 and width in (16, 32)  # a thread holds a block, and 128 elements would not fit
        return served and (self.scheme.hadamard is None or self.scheme.hadamard.size <= (width or 0))

    def quantize_both(self, row: Addresses, column: Addresses, processors: int, conversions: int) -> Launch:
        """Return codes and scales of the whole tensor along rows and along columns (the last two dimensions exchanged);
        the amaxes of both are at their addresses."""
        kernel = self._kernel(
            "quantize_both.cu",
            "mx_quantize_both",
            MX_SWIZZLED=0,
            MX_HARDWARE=conversions,
            MX_WIDTH=self.block_columns,
            MX_TILE=TILE,
        )
        ways = (row.found, row.codes, row.scales, column.found, column.codes, column.scales)
        arguments = (_pointer(row.x), *map(np.int64, (self.batch, self.rows, self.columns)), self._key)
        tiles = self.batch * -(-self.rows // TILE) * -(-self.columns // TILE)
        return Launch(kernel, min(tiles, 8 * processors), THREADS, (*arguments, *map(_pointer, ways)))

    def _elements_per_thread(self) -> int:
        """Return the number of neighbours that a thread of `quantize_rows.cu` takes; 0 if that kernel does not
        apply."""
        tries = bool(self._numbers.candidate_count)
        # A thread reads 16 bytes or more and writes 8 or more: fewer were slower on an H100.
        least = 8 if self.scheme.format.element.stored_bits == 8 else 32
        if self.whole:
            return 0 if tries else least
        width = self.block_columns
        if self.block_rows != 1 or self.scheme.format.block[1] is None or width & (width - 1):
            return 0
        if tries:
            return max(least, width) if width <= 32 else 0
        return least if width <= 32 * least else 0

    def _quantize_rows(self, piece: Piece, at: Addresses, taken: int, choices: dict[str, int]) -> Launch:
        width = 0 if self.whole else self.block_columns
        kernel = self._kernel(
            "quantize_rows.cu",
            "mx_quantize_rows",
            MX_WIDTH=width,
            MX_ELEMENTS=taken,
            **choices,
        )
        first, last = piece.rows
        group = max(width, taken)
        rows, columns = last - first, self.columns
        if columns % group == 0 and not choices["MX_SWIZZLED"]:
            rows, columns = 1, rows * columns
        threads = rows * -(-columns // group) * (group // taken)
        begin = first * self.columns
        made = first * self.row_bytes
        if "MX_TARGET" in choices:
            made = begin * _ITEM_BYTES[choices["MX_TARGET"]]
        arguments = (
            _pointer(at.x + begin * self.item_bytes),
            np.int64(rows),
            np.int64(columns),
            self._key,
            np.int64(begin),
            _pointer(at.found),
            _pointer(at.found + 4 if self.whole else 0),
            _pointer(at.codes + made),
            _pointer(at.scales + piece.blocks[0] * self.scale_bytes),
        )
        return Launch(kernel, -(-threads // THREADS), THREADS, arguments)

    def measure(
        self, piece: Piece, at: Addresses, processors: int, *, conversions: int, codes: bool, histogram: bool = True
    ) -> Launch:
        """Return statistics of a piece, with its codes and scales or without."""
        choices = {
            "MX_SWIZZLED": 0,
            "MX_HARDWARE": conversions,
            "MX_CODES": int(codes),
            "MX_HISTOGRAM": int(histogram),
        }
        tries = bool(self._numbers.candidate_count)
        if self.whole and not tries:
            return self._measure_parts(piece, at, processors, choices)
        width = self.block_columns
        in_rows = self.block_rows == 1 and (width <= 32 or (width % 16 == 0 and width <= 128 and not tries))
        chunks = (0, 1) if self.whole else piece.chunks
        ranges = (*chunks, *((1, 1, 1, 1) if self.whole else self._chunking()))
        outputs = (
            self._key,
            *map(_pointer, (at.found, at.codes, at.scales, at.noise, at.others)),
            np.int64(piece.blocks[1] - piece.blocks[0]),
            *map(_pointer, (at.totals, at.sums)),
        )
        grid = min(chunks[1] - chunks[0], 4 * processors)
        if in_rows and not self.whole and self.scheme.format.block[1] is not None:
            rows, columns = self.all_rows, self.columns
            if columns % width == 0:
                rows, columns = 1, rows * columns
            kernel = self._kernel("measure_rows.cu", "mx_measure_rows", MX_WIDTH=width, **choices)
            arguments = (_pointer(at.x), *map(np.int64, (rows, columns, *ranges)), *outputs)
            return Launch(kernel, grid, THREADS, arguments)
        rows = self.all_rows if self.whole else self.rows
        kernel = self._kernel("measure_blocks.cu", "mx_measure_blocks", MX_WHOLE=0, **choices)
        places = (rows, self.columns, self.block_rows, self.block_columns, *ranges)
        return Launch(kernel, grid, THREADS, (_pointer(at.x), *map(np.int64, places), *outputs))

    @property
    def has_shares(self) -> bool:
        """True if parts of the tensor are shares of its one block, for `measure_whole` to end."""
        return self.whole and not self._numbers.candidate_count

    def measure_whole(self, at: Addresses, conversions: int, *, codes: bool, histogram: bool = True) -> Launch:
        """End the statistics of a tensor that is one block, once all of its parts are measured."""
        kernel = self._kernel(
            "measure_blocks.cu",
            "mx_measure_whole",
            MX_WHOLE=1,
            MX_SWIZZLED=0,
            MX_HARDWARE=conversions,
            MX_CODES=int(codes),
            MX_HISTOGRAM=int(histogram),
        )
        arguments = (
            *map(_pointer, (at.found, at.found + 4, at.shares)),
            np.int64(self.cut.chunks),
            *map(_pointer, (at.noise, at.others, at.totals, at.sums)),
        )
        return Launch(kernel, 1, THREADS, arguments)

    def _measure_parts(self, piece: Piece, at: Addresses, processors: int, choices: dict[str, int]) -> Launch:
        kernel = self._kernel("measure_blocks.cu", "mx_measure_parts", MX_WHOLE=1, **choices)
        part_rows = self.cut.unit_rows * self.cut.per_chunk
        places = (self.all_rows, self.columns, part_rows, self.cut.part, *piece.chunks)
        outputs = (at.found, at.found + 4, at.codes, at.scales, at.totals, at.shares)
        grid = min(piece.chunks[1] - piece.chunks[0], 4 * processors)
        arguments = (_pointer(at.x), *map(np.int64, places), self._key, *map(_pointer, outputs))
        return Launch(kernel, grid, THREADS, arguments)

    def _chunking(self) -> tuple[int, int, int, int]:
        """Return the blocks, parts, unit_blocks and all_blocks of `MxChunking`."""
        cut = self.cut
        blocks = cut.per_chunk * self.across if cut.parts == 1 else -(-cut.part // self.block_columns)
        return blocks, cut.parts, self.across, self.blocks

    def dequantize(self, piece: Piece, at: Addresses, encode: float, decode: float) -> Launch:
        """Return values of the codes and scales of a piece, at address x."""
        kernel = self._kernel("dequantize.cu", "mx_dequantize", MX_SWIZZLED=0, MX_HARDWARE=0)
        rows = self.all_rows if self.whole else self.rows
        first, last = piece.rows
        arguments: tuple[np.generic, ...] = (
            *map(_pointer, (at.codes, at.scales)),
            np.float32(encode),
            np.float32(decode),
            *map(np.int64, (first, last, rows, self.columns, self.block_rows, self.block_columns)),
            _pointer(at.x),
        )
        each = VECTOR if self.scheme.hadamard is None else self.scheme.hadamard.size
        threads = (last - first) * -(-self.columns // each)
        return Launch(kernel, -(-threads // THREADS), THREADS, arguments)

    def _kernel(self, file: str, name: str, **choices: int) -> Kernel:
        choices |= {"MX_SOURCE": cpu.TYPES[self.dtype][0], "MX_BITS": self.scheme.format.element.stored_bits}
        definitions = _defined(choices) + rotation_definitions(self.scheme.hadamard)
        return Kernel(file, name, tuple(sorted(definitions)), self._scheme)


def amax_of(
    dtype: str, x: int, elements: int, base: int, found: int, processors: int, hadamard: Hadamard | None = None
) -> Launch:
    """Return largest magnitudes of `elements` elements (of a transform: whole groups) from address x on, of which the
    first is the tensor's `base`th."""
    per_thread = max(4, 16 // np.dtype(cpu.TYPES[dtype][1]).itemsize)
    grid = max(1, min(8 * processors, -(-elements // (THREADS * per_thread))))
    arguments = (_pointer(x), np.int64(elements), np.int64(base), _pointer(found))
    return Launch(_reduction("mx_amax", dtype, hadamard), grid, THREADS, arguments)


def _pointer(address: int) -> np.uint64:
    """Return an address as an argument; where a whole tensor would begin may be below 0."""
    return np.uint64(address & (2**64 - 1))


def rotation_definitions(hadamard: Hadamard | None) -> tuple[tuple[str, str], ...]:
    """Return the definitions of a transform; none where there is none."""
    if hadamard is None:
        return ()
    signs = ",".join(f"{word}u" for word in rotation(hadamard).signs)
    return (("MX_ROTATED", str(hadamard.size)), ("MX_SIGNS", signs), ("MX_ROTATED_BF16", str(int(hadamard.bf16))))


def _defined(choices: dict[str, int]) -> tuple[tuple[str, str], ...]:
    return tuple((key, str(value)) for key, value in choices.items())


def _reduction(name: str, dtype: str, hadamard: Hadamard | None = None) -> Kernel:
    definitions = _defined({"MX_SOURCE": cpu.TYPES[dtype][0]}) + rotation_definitions(hadamard)
    return Kernel("reduce.cu", name, tuple(sorted(definitions)))
