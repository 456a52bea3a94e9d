"""Choice of kernels, their arguments, and the split of tensors, as literal numbers; no kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_oracle import CHANNELS, SPELLED, scheme_of
from kernel_samples import normal

from mxcli.backends import cpu
from mxcli.backends.cuda import PIECE_BYTES, Cuda
from mxcli.backends.device import Launch
from mxcli.backends.launches import Addresses, KernelJob, Piece, amax_of
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import scale_rules

MOST_BLOCKS = 2**31 - 1
"""Thread blocks of a launch."""
PROCESSORS = 132


@dataclass
class Recorded:
    """A buffer."""

    address: int


class Recorder:
    """A device and its only queue, which record launches without running them; buffer n starts at n * 2^32."""

    name, processors, conversions = "cuda:0", PROCESSORS, 1

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.buffers = 0

    def free_bytes(self) -> int:
        return 1 << 40

    def queues(self, count: int) -> Sequence[Recorder]:
        return [self] * count

    def empty(self, nbytes: int) -> Recorded:
        self.buffers += 1
        return Recorded(self.buffers << 32)

    def upload(self, array: Any) -> Recorded:
        return self.empty(array.nbytes)

    def fill(self, buffer: Recorded, byte: int, begin: int, end: int) -> None:
        pass

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)

    def download(self, buffer: Recorded, array: Any) -> None:
        array[...] = 0

    def finish(self) -> None:
        pass


def at(n: int, offset: int = 0) -> int:
    """Return the address `offset` bytes into buffer n."""
    return (n << 32) + offset


def everything(job: KernelJob) -> Piece:
    """Return the tensor as one piece."""
    return job.piece(0, job.cut.units)


def codes_and_scales(job: KernelJob, piece: Piece | None = None) -> Launch:
    return job.quantize(piece or everything(job), Addresses(at(1), at(2), at(3), at(4)), conversions=1)


def statistics(job: KernelJob, piece: Piece | None = None, codes: bool = True) -> Launch:
    places = Addresses(*(at(n) for n in range(1, 10)))
    return job.measure(piece or everything(job), places, PROCESSORS, conversions=1, codes=codes)


def described(launch: Launch) -> tuple[Any, ...]:
    """Return a launch's file, kernel, compiled-in sizes, grid and threads."""
    named = {name: int(value) for name, value in launch.kernel.definitions}
    chosen = {name: named[name] for name in ("MX_WIDTH", "MX_ELEMENTS", "MX_HELD") if name in named}
    return launch.kernel.file, launch.kernel.name.removeprefix("mx_"), chosen, launch.grid, launch.threads


# --- The kernel for a format -------------------------------------------------------------------------------

BYTES = ("quantize_rows.cu", "quantize_rows", {"MX_WIDTH": 32, "MX_ELEMENTS": 8}, 8192, 256)
NARROW = ("quantize_rows.cu", "quantize_rows", {"MX_WIDTH": 32, "MX_ELEMENTS": 32}, 2048, 256)
QUANTIZING = {
    **dict.fromkeys(("mxfp8_e4m3", "mxfp8_e5m2", "mxint8"), BYTES),
    **dict.fromkeys(("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1"), NARROW),
    "nvfp4": ("quantize_rows.cu", "quantize_rows", {"MX_WIDTH": 16, "MX_ELEMENTS": 32}, 2048, 256),
    "nvfp4_2d": ("quantize_blocks.cu", "quantize_blocks", {"MX_HELD": 1}, 65536, 32),
    **{
        f"fp8_{element}{region}": launch
        for element in ("e4m3", "e5m2")
        for region, launch in {
            "": ("quantize_rows.cu", "quantize_rows", {"MX_WIDTH": 0, "MX_ELEMENTS": 8}, 8192, 256),
            "_channel": ("quantize_blocks.cu", "quantize_blocks", {"MX_HELD": 2}, 4096, 256),
            "_1x128": ("quantize_rows.cu", "quantize_rows", {"MX_WIDTH": 128, "MX_ELEMENTS": 8}, 8192, 256),
            "_128x128": ("quantize_blocks.cu", "quantize_blocks", {"MX_HELD": 8}, 1024, 256),
        }.items()
    },
}
TRYING = {
    **dict.fromkeys(("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"), NARROW),
    "fp8_e4m3": ("quantize_blocks.cu", "quantize_blocks", {"MX_HELD": 0}, 1, 1024),
    "fp8_e4m3_channel": QUANTIZING["fp8_e4m3_channel"],
    "fp8_e4m3_1x128": ("quantize_blocks.cu", "quantize_blocks", {"MX_HELD": 1}, 131072, 32),
    "fp8_e4m3_128x128": QUANTIZING["fp8_e4m3_128x128"],
}
"""With rule `best`."""


@pytest.mark.parametrize("name", QUANTIZING)
def test_codes_and_scales_of_a_matrix(name: str) -> None:
    assert described(codes_and_scales(KernelJob((4096, 4096), "BF16", scheme_of(name)))) == QUANTIZING[name]


@pytest.mark.parametrize("name", TRYING)
def test_codes_and_scales_by_rule_best(name: str) -> None:
    assert described(codes_and_scales(KernelJob((4096, 4096), "BF16", scheme_of(name, "best")))) == TRYING[name]


@pytest.mark.parametrize("name", QUANTIZING)
def test_statistics_of_a_matrix(name: str) -> None:
    width = {"nvfp4": 16, **dict.fromkeys(("fp8_e4m3_1x128", "fp8_e5m2_1x128"), 128)}.get(name, 32)
    in_blocks = QUANTIZING[name][0] == "quantize_blocks.cu"
    wanted: tuple[Any, ...] = ("measure_rows.cu", "measure_rows", {"MX_WIDTH": width}, 256, 256)
    if in_blocks or name in ("fp8_e4m3", "fp8_e5m2"):
        wanted = ("measure_blocks.cu", "measure_blocks" if in_blocks else "measure_parts", {}, 256, 256)
    assert described(statistics(KernelJob((4096, 4096), "BF16", scheme_of(name)))) == wanted


def test_dequantization_and_reductions_of_a_matrix() -> None:
    job = KernelJob((4096, 4096), "BF16", scheme_of("mxfp8"))
    values = job.dequantize(everything(job), Addresses(at(1), codes=at(3), scales=at(4)), 1.0, 0.5)
    assert described(values) == ("dequantize.cu", "dequantize", {}, 8192, 256)
    assert described(job.worst(at(1), 524_288, at(2), at(3))) == ("reduce.cu", "worst", {}, 128, 256)
    assert described(amax_of("BF16", at(1), 4096 * 4096, 0, at(2), PROCESSORS)) == ("reduce.cu", "amax", {}, 1056, 256)
    assert amax_of("F64", at(1), 1, 0, at(2), PROCESSORS).grid == 1


@pytest.mark.parametrize(
    ("name", "shape", "held", "grid", "threads"),
    [
        ("e4m3:e8m0:1x24", (8, 240), 1, 80, 32),
        ("e4m3:e8m0:channel", (8, 16_384), 8, 8, 256),
        ("e4m3:e8m0:channel", (8, 16_385), 0, 8, 1024),
        ("e4m3:e8m0:1x1024", (8, 1024), 1, 8, 128),
        ("e4m3:fp32:3x3", (9, 9), 1, 9, 32),
        ("e4m3:e8m0:128x128", (5, 70), 1, 1, 64),
    ],
)
def test_threads_for_block_shapes(name: str, shape: tuple[int, int], held: int, grid: int, threads: int) -> None:
    wanted = ("quantize_blocks.cu", "quantize_blocks", {"MX_HELD": held}, grid, threads)
    assert described(codes_and_scales(KernelJob(shape, "F32", scheme_of(name)))) == wanted


# --- Pieces ------------------------------------------------------------------------------------------------

EVERY = (*FORMATS, *SPELLED, *CHANNELS)
SHAPES = [(), (45,), (3, 31), (5, 70), (2, 17, 40), (300, 551), (3, 130, 200), (2, 70_003), (5_000, 33), (4096, 4096)]


@pytest.mark.parametrize("name", EVERY)
def test_pieces_cover_the_tensor(name: str) -> None:
    """No gaps or overlaps in rows, blocks and chunks; pieces start at chunks and stay within the limit or one chunk."""
    for shape in SHAPES:
        job = KernelJob(shape, "F32", scheme_of(name))
        cut = cpu.cut(shape, job.scheme)
        for most in (1, 10_000, 1 << 20, 1 << 40):
            pieces = list(job.pieces(most))
            ends = [(0, 0, 0, 0), *((p.last, p.rows[1], p.blocks[1], p.chunks[1]) for p in pieces)]
            begins = [(p.first, p.rows[0], p.blocks[0], p.chunks[0]) for p in pieces]
            if job.whole:
                assert {p.blocks for p in pieces} == {(0, 1)}
                ends = [(last, row, 0, chunk) for last, row, _, chunk in ends]
            assert begins == ends[:-1]
            assert ends[-1] == (cut.units, job.all_rows, 0 if job.whole else job.blocks, cut.chunks)
            for piece in pieces:
                assert piece.first % cut.per_chunk == 0
                size = (piece.rows[1] - piece.rows[0]) * job.columns * 4
                assert size <= most or piece.last - piece.first <= cut.per_chunk


@pytest.mark.parametrize("name", EVERY)
def test_chunks_cover_the_blocks(name: str) -> None:
    """The blocks of chunks, computed as in `mx_chunk`, are all blocks once."""
    for shape in SHAPES:
        job = KernelJob(shape, "F32", scheme_of(name))
        if job.whole:
            continue
        launch = statistics(job)
        skipped = 3 if launch.kernel.name == "mx_measure_rows" else 5
        first, last, blocks, parts, unit_blocks, all_blocks = (
            int(number) for number in launch.arguments[skipped : skipped + 6]
        )
        assert (first, last, all_blocks) == (0, job.cut.chunks, job.blocks)
        after = 0
        for chunk in range(first, last):
            unit = chunk // parts if parts > 1 else 0
            begin = unit * unit_blocks + (chunk - unit * parts) * blocks
            assert begin == after
            after = min(begin + blocks, (unit + 1) * unit_blocks if parts > 1 else all_blocks)
            assert after > begin
        assert after == all_blocks


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("mxfp8", (4096, 4096), (0, 256, 2048, 1, 128, 524_288)),
        ("mxfp8", (2, 70_003), (0, 4, 2048, 2, 2188, 4376)),
        ("nvfp4", (5, 70), (0, 1, 4680, 1, 5, 25)),
        ("mxfp4", (2, 17, 40), (0, 1, 3276, 1, 2, 68)),
    ],
)
def test_chunks_of_row_blocks(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert statistics(KernelJob(shape, "F32", scheme_of(name))).arguments[3:9] == wanted


def test_rule_best_needs_the_whole_tensor() -> None:
    assert len(list(KernelJob((4096, 4096), "F32", scheme_of("fp8_e4m3")).pieces(1 << 20))) == 64
    assert len(list(KernelJob((4096, 4096), "F32", scheme_of("fp8_e4m3", "best")).pieces(1 << 20))) == 1


# --- Arguments ---------------------------------------------------------------------------------------------


KEY = 5 | 3 << 32
"""Key of seed 5 and stream 3."""


def recorded(name: str, **options: Any) -> list[Launch]:
    """Return the launches for three rows of 70,003 binary32 elements, one row per piece."""
    device = Recorder()
    scheme = scheme_of(name, rounding="stochastic", seed=5)
    Cuda(device, piece_bytes=1).quantize(normal(3, 70_003), "F32", scheme, stream=3, **options)
    return device.launches


def test_arguments_for_codes_in_rows() -> None:
    """Buffers 1 and 2 hold the tensor's amax for each queue; then elements, codes and scales. Random numbers count from
    the tensor's first element."""
    assert [launch.arguments for launch in recorded("mxfp8", stats=False)] == [
        (at(3), 1, 70_003, KEY, 0, at(1), 0, at(4), at(5)),
        (at(6), 1, 70_003, KEY, 70_003, at(2), 0, at(7), at(8)),
        (at(9), 1, 70_003, KEY, 140_006, at(1), 0, at(10), at(11)),
    ]


def test_arguments_for_codes_in_blocks() -> None:
    """Addresses are relative to the tensor's start: 280,012 bytes per row, 70,003 codes, 4 bytes per scale."""
    shape = (3, 70_003, 1, 70_003)
    assert [launch.arguments for launch in recorded("fp8_e4m3_channel", stats=False)] == [
        (at(3), *shape, 0, 1, KEY, at(1), at(4), at(5)),
        (at(6, -280_012), *shape, 1, 2, KEY, at(2), at(7, -70_003), at(8, -4)),
        (at(9, -560_024), *shape, 2, 3, KEY, at(1), at(10, -140_006), at(11, -8)),
    ]


def test_arguments_for_statistics() -> None:
    """Buffers 3 and 4 hold the totals of each queue; then elements, codes, scales, sums, noise, noisiest and their
    indices."""
    launches = recorded("mxfp8")
    chunking = (2048, 2, 2188, 6564)
    assert [launch.arguments for launch in launches if launch.kernel.name == "mx_measure_rows"] == [
        (at(5), 3, 70_003, 0, 2, *chunking, KEY, at(1), at(6), at(7), at(9), 0, 2188, at(3), at(8)),
        (
            *(at(12, -280_012), 3, 70_003, 2, 4, *chunking, KEY, at(2), at(13, -70_003), at(14, -2188)),
            *(at(16, -17_504), 0, 2188, at(4), at(15, -64)),
        ),
        (
            *(at(19, -560_024), 3, 70_003, 4, 6, *chunking, KEY, at(1), at(20, -140_006), at(21, -4376)),
            *(at(23, -35_008), 0, 2188, at(3), at(22, -128)),
        ),
    ]
    assert [launch.arguments for launch in launches if launch.kernel.name == "mx_worst"] == [
        (at(9), 2188, at(10), at(11)),
        (at(16), 2188, at(17), at(18)),
        (at(23), 2188, at(24), at(25)),
    ]


def test_arguments_for_amax() -> None:
    """Element count of a piece and the index of its first; pieces still in memory are not uploaded again."""
    launches = recorded("nvfp4", stats=False)
    assert [launch.arguments for launch in launches[:3]] == [
        (at(3), 70_003, 0, at(1)),
        (at(4), 70_003, 70_003, at(2)),
        (at(5), 70_003, 140_006, at(1)),
    ]
    assert [launch.arguments[0] for launch in launches[3:]] == [at(3), at(4), at(5)]


def test_a_scheme_is_compiled_once() -> None:
    """Shape and tensor scale do not change the kernel; format, type and rule do."""
    for name in ("mxfp8", "nvfp4", "fp8_e4m3", "fp8_e4m3_1x128"):
        jobs = [KernelJob(shape, "F32", scheme_of(name)) for shape in ((5, 70), (300, 551), (4096, 4096))]
        for kernels in ({codes_and_scales(job).kernel for job in jobs}, {statistics(job).kernel for job in jobs}):
            assert len(kernels) == 1
    kernels = {
        codes_and_scales(KernelJob((5, 70), dtype, scheme_of(name, rule))).kernel
        for name in ("mxfp8", "mxfp4")
        for dtype in ("F32", "BF16")
        for rule in ("floor", "rceil")
    }
    assert len(kernels) == 8
    # Tensor scales are computed from memory.
    one, other = (
        {launch.kernel for launch in recorded("nvfp4", stats=False, tensor_amax=amax)} for amax in (1.0, 448.0)
    )
    assert one == other
    assert {hash(kernel) for kernel in one} == {hash(kernel) for kernel in other}


# --- Tensors of more than 2^31 elements --------------------------------------------------------------------

HUGE = [(1 << 17, 1 << 16), (3, 1 << 31), (2, (1 << 31) + 3), ((1 << 31) + 5, 3), (3, 1 << 15, 1 << 16)]


@pytest.mark.parametrize("shape", HUGE, ids=str)
@pytest.mark.parametrize("name", [*FORMATS, "e4m3:fp32:2x2", "e4m3:fp32:1x1"])
def test_grids_of_huge_tensors(name: str, shape: tuple[int, ...]) -> None:
    """Grids of a piece, and of the whole tensor where kernels loop over the rest."""
    for rule in (None, "best"):
        if rule and rule not in scale_rules(scheme_of(name).format):
            continue
        job = KernelJob(shape, "BF16", scheme_of(name, rule))
        pieces = list(job.pieces(PIECE_BYTES)) if job.cut.units < 10_000 * job.cut.per_chunk else []
        for piece in (pieces[:1] + pieces[-1:]) or [next(job.pieces(PIECE_BYTES))]:
            assert 1 <= codes_and_scales(job, piece).grid <= MOST_BLOCKS
            assert 1 <= statistics(job, piece).grid <= 4 * PROCESSORS
    whole = everything(job)
    assert 1 <= statistics(job, whole).grid <= 4 * PROCESSORS
    assert 1 <= job.worst(at(1), job.blocks, at(2), at(3)).grid <= MOST_BLOCKS
    assert 1 <= amax_of("BF16", at(1), 1 << 34, 0, at(2), PROCESSORS).grid <= 8 * PROCESSORS


def test_offsets_of_huge_tensors() -> None:
    """The last piece of 2^33 bfloat16 elements starts at row 130,560 of 2^17 bytes: byte 17,112,760,320."""
    job = KernelJob((1 << 17, 1 << 16), "BF16", scheme_of("mxfp4"))
    *_, piece = job.pieces(64 << 20)
    assert (piece.rows, piece.blocks) == ((130_560, 131_072), (267_386_880, 268_435_456))
    places = Addresses(at(9) - 130_560 * 131_072, at(2), at(3) - 130_560 * 32_768, at(4) - 267_386_880)
    assert job.quantize(piece, places, 1).arguments == (at(9), 1, 512 << 16, 0, 130_560 << 16, at(2), 0, at(3), at(4))
    x, *_, first_chunk, last_chunk = job.measure(piece, places, 1, conversions=1, codes=False).arguments[:5]
    assert (x, first_chunk, last_chunk) == (38_654_705_664 - 17_112_760_320, 130_560, 131_072)
    below = Addresses(at(1) - 130_560 * 131_072)  # the tensor would start below 0: modulo 2^64
    x, *_ = job.measure(piece, below, 1, conversions=1, codes=False).arguments
    assert x == np.uint64(2**64 + 4_294_967_296 - 17_112_760_320)


def test_more_blocks_than_a_launch() -> None:
    """A row of tiny blocks: thread blocks loop."""
    job = KernelJob((2, 2**33), "BF16", scheme_of("e4m3:fp32:2x1"))
    piece = next(job.pieces(PIECE_BYTES))
    launch = job.quantize(piece, Addresses(*[1 << 40] * 9), conversions=0)
    assert (piece.blocks, launch.grid) == ((0, 2**33), 2**31 - 1)
