"""The CUDA emulation on the CPU: correct kernels run, wrong kernels are reported."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cuda_on_cpu
import numpy as np
import pytest
from cuda_on_cpu import Program, build, sanitized_environment

KERNELS = Path(__file__).parents[2] / "kernels"
ORDERS = ["ascending", "descending", "shuffle:1", "shuffle:2"]
LANES = 32

pytestmark = pytest.mark.skipif(shutil.which(cuda_on_cpu.CXX) is None, reason="needs g++")

Build = Callable[..., Program]


@pytest.fixture
def compiled(tmp_path: Path) -> Build:
    def compiled(text: str, sanitize: bool = False, **definitions: str) -> Program:
        source = tmp_path / "kernels.cu"
        source.write_text(text, encoding="utf-8")
        return build(source, definitions, KERNELS, sanitize)

    return compiled


def address(array: np.ndarray) -> np.uint64:
    return np.uint64(array.ctypes.data)


def run(program: Program, kernel: str, threads: int, *, grid: int = 1, order: str = "ascending") -> np.ndarray:
    """Return the words that kernel(unsigned* out) writes, one per thread."""
    out = np.full(grid * threads, 0xDEAD, np.uint32)
    program.launch(kernel, grid, threads, [address(out)], order)
    return out


# ----------------------------------------------------------------------------------------------- correct kernels

REDUCTION = """
#include "numerics.h"
template <int N> __device__ __forceinline__ float* scratch() { __shared__ alignas(16) float part[N]; return part; }
extern "C" __global__ void __launch_bounds__(1024) total(const float* __restrict__ x, unsigned* y, long long count) {
  float* part = scratch<MOST>();
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  part[threadIdx.x] = i < count ? x[i] : 0.0f;
  __syncthreads();
  for (unsigned width = MOST / 2; width; width /= 2) {
    if (threadIdx.x < width && threadIdx.x + width < blockDim.x) part[threadIdx.x] += part[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(y, (unsigned)mx_whole(part[0]));
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_reduce_with_barriers(compiled: Build, order: str) -> None:
    program = compiled(REDUCTION, MOST="1024")
    x = np.arange(3000, dtype=np.float32) % 11
    for threads in (1, 2, 33, 96, 256, 1000, 1024):
        total = np.zeros(1, np.uint32)
        grid = -(-x.size // threads)
        program.launch("total", grid, threads, [address(x), address(total), np.int64(x.size)], order)
        assert total[0] == x.sum()


EXCHANGES = """
template <class T> __device__ T warp_sum(T value) {
#pragma unroll
  for (int other = WIDTH / 2; other; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other, WIDTH);
  return value;
}
extern "C" __global__ void sums(unsigned* out) {
  unsigned i = threadIdx.x;
  unsigned whole = warp_sum(i);
  bool same = warp_sum((float)i) == (float)whole && warp_sum((double)i) == (double)whole;
  same = same && warp_sum((int)i) == (int)whole && warp_sum((long long)i) == whole;
  out[i] = same && warp_sum((unsigned long long)i << 32) == (unsigned long long)whole << 32 ? whole : 0u;
}
extern "C" __global__ void up(unsigned* out) { out[threadIdx.x] = __shfl_up_sync(~0u, threadIdx.x, 3, WIDTH); }
extern "C" __global__ void down(unsigned* out) { out[threadIdx.x] = __shfl_down_sync(~0u, threadIdx.x, 3, WIDTH); }
extern "C" __global__ void from(unsigned* out) { out[threadIdx.x] = __shfl_sync(~0u, threadIdx.x, 5, WIDTH); }
"""


@pytest.mark.parametrize("width", [4, 8, 32])
def test_shuffles_within_segments(compiled: Build, width: int) -> None:
    program = compiled(EXCHANGES, WIDTH=str(width))
    i = np.arange(96)
    first = i // width * width
    sums = i.reshape(-1, width).sum(axis=1).repeat(width)
    for order in ORDERS:
        assert (run(program, "sums", 96, order=order) == sums).all()
        assert (run(program, "up", 96, order=order) == np.where(i - 3 >= first, i - 3, i)).all()
        assert (run(program, "down", 96, order=order) == np.where(i + 3 < first + width, i + 3, i)).all()
        assert (run(program, "from", 96, order=order) == first + 5 % width).all()


VOTES = """
extern "C" __global__ void ballot(unsigned* out) { out[threadIdx.x] = __ballot_sync(~0u, threadIdx.x % 3 == 0); }
extern "C" __global__ void any(unsigned* out) { out[threadIdx.x] = __any_sync(~0u, threadIdx.x == 40); }
extern "C" __global__ void all(unsigned* out) { out[threadIdx.x] = __all_sync(~0u, threadIdx.x != 40); }
extern "C" __global__ void active(unsigned* out) { out[threadIdx.x] = __activemask(); }
extern "C" __global__ void match(unsigned* out) { out[threadIdx.x] = __match_any_sync(~0u, 0.5f * (threadIdx.x % 5)); }
extern "C" __global__ void add(unsigned* out) { out[threadIdx.x] = __reduce_add_sync(~0u, threadIdx.x); }
extern "C" __global__ void least(unsigned* out) { out[threadIdx.x] = __reduce_min_sync(~0u, -(int)threadIdx.x); }
extern "C" __global__ void most(unsigned* out) { out[threadIdx.x] = __reduce_max_sync(~0u, threadIdx.x); }
extern "C" __global__ void bits(unsigned* out) { out[threadIdx.x] = __reduce_or_sync(~0u, 1u << threadIdx.x % 8); }
extern "C" __global__ void count(unsigned* out) { out[threadIdx.x] = __syncthreads_count(threadIdx.x % 2); }
extern "C" __global__ void some(unsigned* out) {
  out[threadIdx.x] = __syncthreads_or(threadIdx.x == 7) * 2 + __syncthreads_and(threadIdx.x != 7);
}
extern "C" __global__ void groups(unsigned* out) {  // three groups of a warp with different numbers of operations
  unsigned group = threadIdx.x % 3, mask = 0, sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane) mask |= (lane + threadIdx.x / 32 * 32) % 3 == group ? 1u << lane : 0u;
  for (unsigned i = 0; i <= group; ++i) sum += __reduce_add_sync(mask, 1u);
  if (group == 1) __syncwarp(mask);
  __syncwarp();
  out[threadIdx.x] = sum;
}
"""


def lanes_of(threads: int, predicate: Callable[[int], bool]) -> list[int]:
    """Return for each thread the mask of existing lanes of its warp for which `predicate(thread)` holds."""
    warps = [range(first, min(first + LANES, threads)) for first in range(0, threads, LANES)]
    return [sum(1 << other % LANES for other in warp if predicate(other)) for warp in warps for _ in warp]


@pytest.mark.parametrize("threads", [33, 64, 96])  # 33: the last warp is a single lane
def test_warp_votes_and_reductions(compiled: Build, threads: int) -> None:
    program = compiled(VOTES)
    everyone = lanes_of(threads, lambda _: True)
    first = [i // LANES * LANES for i in range(threads)]
    last = [min(start + LANES, threads) - 1 for start in first]
    expected = {
        "ballot": lanes_of(threads, lambda i: i % 3 == 0),
        "any": [int(i // LANES == 40 // LANES and threads > 40) for i in range(threads)],
        "all": [int(not (i // LANES == 40 // LANES and threads > 40)) for i in range(threads)],
        "active": everyone,
        "match": [lanes_of(threads, lambda j, i=i: j % 5 == i % 5)[i] for i in range(threads)],  # type: ignore[misc]
        "add": [sum(range(a, b + 1)) for a, b in zip(first, last, strict=True)],
        "least": [-b % 2**32 for b in last],
        "most": last,
        "bits": [0xFF if b - a >= 7 else 1 for a, b in zip(first, last, strict=True)],
        "count": [threads // 2] * threads,
        "some": [2] * threads,
        "groups": [
            (i % 3 + 1) * sum(j % 3 == i % 3 for j in range(a, b + 1))
            for i, (a, b) in enumerate(zip(first, last, strict=True))
        ],
    }
    for order in ORDERS:
        for kernel, values in expected.items():
            assert run(program, kernel, threads, order=order).tolist() == values, kernel


ATOMICS = """
template <class T> __device__ void add(T* at) { atomicAdd(at, (T)threadIdx.x); }
template <class T> __device__ void others(T* at) {  // the old value is stored in the last place
  T i = (T)threadIdx.x;
  atomicMin(at, (T)(5 - i));
  atomicMax(at + 1, i);
  atomicOr(at + 2, (T)1 << threadIdx.x % 8);
  atomicCAS(at + 3, i, (T)(i + 1));
  if (threadIdx.x == 3) at[5] = atomicExch(at + 4, (T)99);
}
extern "C" __global__ void adds(int* i, unsigned* u, unsigned long long* w, float* f, double* d) {
  add(i); add(u); add(w); add(f); add(d);
}
extern "C" __global__ void rest(int* i, unsigned* u, long long* l, unsigned long long* w) {
  others(i); others(u); others(l); others(w);
}
"""


def test_atomics_of_every_type(compiled: Build) -> None:
    program = compiled(ATOMICS)
    sums = [np.ones(1, kind) for kind in (np.int32, np.uint32, np.uint64, np.float32, np.float64)]
    program.launch("adds", 2, 64, [address(array) for array in sums])
    assert [array[0] for array in sums] == [1 + 2 * sum(range(64))] * 5

    cells = [np.array([0, 0, 0, 0, 1, 0], kind) for kind in (np.int32, np.uint32, np.int64, np.uint64)]
    program.launch("rest", 1, 64, [address(array) for array in cells])
    for array in cells:
        least = 5 - 63 if array.dtype.kind == "i" else 0
        assert array.tolist() == [least, 63, 0xFF, 64, 99, 1]


def test_threads_may_return_before_a_barrier(compiled: Build) -> None:
    text = """
extern "C" __global__ void early(unsigned* out) {
  __shared__ unsigned cell;
  if (threadIdx.x == 40) cell = 7;
  out[threadIdx.x] = 0;
  if (threadIdx.x % 4 == 1) return;
  __syncthreads();
  out[threadIdx.x] = cell;
  if (threadIdx.x % 4 == 2) return;
  out[threadIdx.x] += __syncthreads_count(1);
}
"""
    program = compiled(text)
    for order in ORDERS:
        assert run(program, "early", 64, order=order).tolist() == [39, 0, 7, 39] * 16


def test_grids(compiled: Build) -> None:
    text = """
extern "C" __global__ void where(unsigned* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x + 100 * blockIdx.x + 10000 * gridDim.x +
      1000000 * (blockIdx.y + blockIdx.z + threadIdx.y + threadIdx.z + blockDim.y + blockDim.z + gridDim.y + gridDim.z);
}
"""
    program = compiled(text)
    for grid in (1, 2, 7, 12):
        for order in ORDERS:
            out = run(program, "where", 33, grid=grid, order=order).reshape(grid, 33)
            assert (out == np.arange(33) + 100 * np.arange(grid)[:, None] + 10000 * grid + 4_000_000).all()


def test_argument_types(compiled: Build) -> None:
    text = """
struct Both { float scale; int shift; double offset; };
extern "C" __global__ __launch_bounds__(32) void arguments(double* const out, const long long a, unsigned b, int c,
                                                           float d, Both e, unsigned char f) {
  const double all[8] = {(double)a, (double)b, (double)c, d, e.scale, (double)e.shift, e.offset, (double)f};
  for (int i = 0; i < 8; ++i) out[i] = all[i];
}
extern "C" __global__ void nothing() {}
"""
    program = compiled(text)
    assert program.kernels == ("arguments", "nothing")
    assert program.parameter_bytes("arguments") == (8, 8, 4, 4, 4, 16, 1)
    both = np.array([(0.25, -9, 1e300)], np.dtype([("scale", "f4"), ("shift", "i4"), ("offset", "f8")]))[0]
    out = np.zeros(8)
    values = [np.int64(-(2**40)), np.uint32(2**32 - 1), np.int32(-5), np.float32(1.5), both, np.uint8(200)]
    program.launch("arguments", 1, 1, [address(out), *values])
    assert out.tolist() == [-(2**40), 2**32 - 1, -5, 1.5, 0.25, -9, 1e300, 200]
    program.launch("nothing", 3, 5, [])


def test_intrinsics(compiled: Build) -> None:
    text = """
extern "C" __global__ void words(unsigned* out) {
  const uint4 four = make_uint4(1, 2, 3, 4);
  *reinterpret_cast<uint4*>(out) = __ldg(&four);
  unsigned* next = out + 4;
  *next++ = __byte_perm(0x03020100u, 0x07060504u, 0x7340u);
  *next++ = __popc(0xF0F0u) + 100 * __popcll(~0ull) + 10000 * __ffs(0x10) + 1000000 * __clz(1);
  *next++ = __umulhi(0xFFFFFFFFu, 0xFFFFFFFFu);
  *next++ = __float_as_uint(fmaxf(-0.0f, 0.0f)) + __float_as_uint(fmaxf(0.0f, -0.0f));
  *next++ = __float_as_uint(fminf(__uint_as_float(0x7FC00000u), 2.0f));
  *next++ = __float_as_uint(__fmaf_rn(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, -1.0f));
  *next++ = __float_as_uint(__fadd_rn(__fmul_rn(1.0f + 0x1p-12f, 1.0f + 0x1p-12f), -1.0f));
  *next++ = min(3, 5) + 10 * max(3u, 5) + 100 * (unsigned)min(7ll, 9ll) + 1000 * (unsigned)max(1.0f, 2.0f);
  *next++ = (unsigned)__double_as_longlong(__longlong_as_double(42ll)) + (unsigned)__clzll(1);
  *next++ = __funnelshift_l(0x80000000u, 1u, 1) + warpSize;
}
"""
    out = np.zeros(14, np.uint32)
    compiled(text).launch("words", 1, 1, [address(out)])
    fused, rounded = (np.float32(2**-11 + rest).view(np.uint32) for rest in (2**-24, 0))
    assert out.tolist() == [
        *(1, 2, 3, 4, 0x07030400, 8 + 6400 + 50000 + 31000000, 0xFFFFFFFE, 0, np.float32(2).view(np.uint32)),
        *(fused, rounded, 3 + 50 + 700 + 2000, 42 + 63, 3 + 32),
    ]


def test_the_other_context_switch(compiled: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu, "FLAGS", (*cuda_on_cpu.FLAGS, "-DCUDA_ON_CPU_UCONTEXT"))
    program = compiled(EXCHANGES, WIDTH="8")
    assert (run(program, "from", 96) == np.arange(96) // 8 * 8 + 5).all()


# ----------------------------------------------------------------------------------------------- wrong kernels


def test_shared_memory_starts_as_garbage(compiled: Build) -> None:
    text = """
__shared__ unsigned outside;
template <int N> struct Cells { static __device__ unsigned* get() { __shared__ unsigned cells[N]; return cells; } };
template <int N> inline __device__ unsigned* cells() { __shared__ unsigned cells[N]; return cells; }
inline __device__ unsigned* plain() { __shared__ uint4 four; return &four.w; }
extern "C" __global__ void garbage(unsigned* out) {
  __shared__ unsigned large[10000];
  __shared__ bool never_written;
  unsigned all = outside & Cells<3>::get()[1] & cells<100>()[99] & cells<7>()[0] & *plain() & large[threadIdx.x];
  out[blockIdx.x] = all + never_written;
  outside = Cells<3>::get()[1] = cells<100>()[99] = cells<7>()[0] = *plain() = large[threadIdx.x] = 0;
}
"""
    program = compiled(text)
    out = np.zeros(4, np.uint32)
    for _ in range(2):
        program.launch("garbage", 4, 1, [address(out)])
        assert (out - 0xA5A5A5A5 <= 0xA5).all()


def test_shuffles_from_missing_lanes_are_garbage(compiled: Build) -> None:
    text = """
extern "C" __global__ void missing(unsigned* out) { out[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 16); }
"""
    out = run(compiled(text), "missing", 40)
    assert out.tolist() == [*[i ^ 16 for i in range(32)], *[0xA5A5A5A5] * 8]


# Each lacks one barrier: before the neighbor's cell is read, or before the cell is overwritten.
RACES = """
extern "C" __global__ void unwritten(unsigned* out) {
  __shared__ unsigned cells[64];
  cells[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = cells[(threadIdx.x + NEIGHBOUR) % 64];
}
extern "C" __global__ void overwritten(unsigned* out) {
  __shared__ unsigned cells[64];
  cells[threadIdx.x] = threadIdx.x;
  __syncthreads();
  unsigned read = cells[(threadIdx.x + NEIGHBOUR) % 64];
  cells[threadIdx.x] = 1000;
  out[threadIdx.x] = read;
}
extern "C" __global__ void warp(unsigned* out) {
  __shared__ unsigned cells[64];
  cells[threadIdx.x] = threadIdx.x;
  BARRIER
  out[threadIdx.x] = cells[threadIdx.x ^ 1];
}
"""


@pytest.mark.parametrize("neighbour", [1, 63])
def test_races_show_in_some_order(compiled: Build, neighbour: int) -> None:
    program = compiled(RACES, NEIGHBOUR=str(neighbour), BARRIER="")
    right = (np.arange(64) + neighbour) % 64
    for kernel in ("unwritten", "overwritten"):
        assert any((run(program, kernel, 64, order=order) != right).any() for order in ORDERS)
    assert any((run(program, "warp", 64, order=order) != np.arange(64) ^ 1).any() for order in ORDERS)
    program = compiled(RACES, NEIGHBOUR=str(neighbour), BARRIER="__syncwarp();")
    assert all((run(program, "warp", 64, order=order) == np.arange(64) ^ 1).all() for order in ORDERS)


WRONG = """
extern "C" __global__ void right(unsigned* out) { __syncthreads(); out[threadIdx.x] = __any_sync(~0u, 1); }
extern "C" __global__ void half(unsigned* out) {
  if (threadIdx.x < 16) __shfl_xor_sync(0xffffffffu, 1, 1); else __syncthreads();
}
extern "C" __global__ void different(unsigned* out) {
  if (threadIdx.x < 16) __any_sync(0xffffffffu, 1); else __all_sync(0xffffffffu, 1);
  __syncthreads();
}
extern "C" __global__ void widths(unsigned* out) {
  if (threadIdx.x < 16) __shfl_sync(0xffffffffu, 1, 1); else __shfl_sync(0xffffffffu, 1ll, 1);
}
extern "C" __global__ void masks(unsigned* out) {
  if (threadIdx.x < 32) __syncwarp(threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u);
}
extern "C" __global__ void left(unsigned* out) {
  if (threadIdx.x == 35) return;
  __syncwarp();
}
extern "C" __global__ void barriers(unsigned* out) {
  if (threadIdx.x < 8) __syncthreads(); else __syncthreads_or(1);
}
extern "C" __global__ void outside(unsigned* out) { __ballot_sync(0x0000ffffu, 1); }
extern "C" __global__ void width(unsigned* out) { __shfl_sync(~0u, 1, 0, 12); }
extern "C" __global__ void trap(unsigned* out) { if (blockIdx.x == 1 && threadIdx.x == 3) __trap(); }
extern "C" __global__ void selector(unsigned* out) { *out = __byte_perm(1, 2, 0x0008); }
"""


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "half",
            "kernel half, block 0: deadlock: "
            "threads 0-15 wait in __shfl_xor_sync (mask 0xffffffff, 4 bytes) for threads 16-31; "
            "threads 16-63 wait in __syncthreads for threads 0-15",
        ),
        (
            "different",
            "threads 0-15 wait in __any_sync (mask 0xffffffff, 4 bytes) for threads 16-31; "
            "threads 16-31 wait in __all_sync (mask 0xffffffff, 4 bytes) for threads 0-15; "
            "threads 32-63 wait in __syncthreads for threads 0-31",
        ),
        ("widths", "threads 16-31 wait in __shfl_sync (mask 0xffffffff, 8 bytes) for threads 0-15"),
        ("masks", "threads 0-15 wait in __syncwarp (mask 0xffffffff) for threads 16-31; returned from the kernel"),
        (
            "left",
            "threads 32-34, 36-63 wait in __syncwarp (mask 0xffffffff) for threads 35; "
            "returned from the kernel: threads 0-31, 35",
        ),
        ("barriers", "threads 0-7 wait in __syncthreads for threads 8-63; threads 8-63 wait in __syncthreads_or for"),
        ("outside", "kernel outside, block 0, thread 16: __ballot_sync: mask 0x0000ffff does not contain the calling"),
        ("width", "thread 0: __shfl_sync: width 12 is not a power of two up to 32"),
        ("trap", "kernel trap, block 1, thread 3: __trap"),
        ("selector", "__byte_perm: selector 0x0008"),
    ],
)
def test_stuck_kernels_are_reported(compiled: Build, kernel: str, message: str) -> None:
    program = compiled(WRONG)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            run(program, kernel, 64, grid=2)
        assert message in str(error.value)
        assert (run(program, "right", 64) == 1).all()  # the process and the library still work
    for order in ORDERS[1:]:
        with pytest.raises(RuntimeError, match=f"kernel {kernel}, block"):
            run(program, kernel, 64, grid=2, order=order)


def test_invalid_launches(compiled: Build) -> None:
    program = compiled(WRONG)
    out = np.zeros(1, np.uint32)
    with pytest.raises(RuntimeError, match=r"right: the parameters have \(8,\) bytes, the arguments \(4,\)"):
        program.launch("right", 1, 1, [np.uint32(1)])
    with pytest.raises(RuntimeError, match=r"the arguments \(8, 8\)"):
        program.launch("right", 1, 1, [address(out), address(out)])
    with pytest.raises(RuntimeError, match="no kernel wrong in the source; it has right, half"):
        program.launch("wrong", 1, 1, [address(out)])
    for grid, threads in ((0, 1), (1, 0), (1, 1025)):
        with pytest.raises(RuntimeError, match="at most 1024 threads"):
            program.launch("right", grid, threads, [address(out)])
    with pytest.raises(RuntimeError, match="'sideways' is not ascending, descending or shuffle:SEED"):
        program.launch("right", 1, 1, [address(out)], order="sideways")


# ------------------------------------------------------------------------------------------------------------- building


def test_compile_errors_are_shown(compiled: Build) -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        compiled('extern "C" __global__ void broken() { nonsense(); }')


def test_without_a_compiler(compiled: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu, "CXX", "no-such-compiler")
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        compiled(WRONG)


def test_kernels_depend_on_definitions(compiled: Build) -> None:
    text = """
// extern "C" __global__ void commented() {}
#if T == 2
#define NAME(what) what##_two
extern "C" __global__ void NAME(kernel)(unsigned* out) { *out = T; }
#else
extern "C" __global__ void other(unsigned* out) { *out = T; }
#endif
"""
    two, other = compiled(text, T="2"), compiled(text, T="3")
    assert (two.kernels, other.kernels) == (("kernel_two",), ("other",))
    assert [run(two, "kernel_two", 1)[0], run(other, "other", 1)[0]] == [2, 3]
    assert compiled(text, T="2").library == two.library


SANITIZED = """
from pathlib import Path
import numpy as np, sys
from cuda_on_cpu import build
program = build(Path(sys.argv[1]), {}, Path(sys.argv[2]), sanitize=True)
for order in ("ascending", "shuffle:1"):
    out = np.zeros(64, np.uint32)
    program.launch("right", 1, 64, [np.uint64(out.ctypes.data)], order)
    assert (out == 3).all()
try:
    program.launch("stuck", 1, 64, [np.uint64(out.ctypes.data)])
except RuntimeError as error:
    print(error)
program.launch("right", 1, 64, [np.uint64(out.ctypes.data)])
print("so far, so good", flush=True)
program.launch(sys.argv[3], 1, 64, [np.uint64(out.ctypes.data)])
print("not seen")
"""
OVERRUNS = """
extern "C" __global__ void right(unsigned* out) {
  __shared__ unsigned cells[64];
  unsigned mine[4] = {threadIdx.x, 1, 2, 3};
  cells[63 - threadIdx.x] = mine[out[threadIdx.x] & 3u];
  __syncthreads();
  out[threadIdx.x] = __reduce_or_sync(~0u, 3u & cells[threadIdx.x]) ? 3u : 3u;
}
extern "C" __global__ void stuck(unsigned* out) {
  unsigned mine[9] = {};
  if (threadIdx.x) __syncwarp(mine[out[0]] + 1u ? ~0u : 0u);
}
extern "C" __global__ void global(unsigned* out) { out[threadIdx.x + 1] = 1; }
extern "C" __global__ void shared(unsigned* out) {
  __shared__ unsigned cells[64];
  unsigned* at = cells + threadIdx.x;
  at[out[0] & 1u] = 1;
}
extern "C" __global__ void shift(unsigned* out) { out[0] = 1 << (out[0] + 30); }
"""


@pytest.mark.slow
def test_sanitizers_find_errors(tmp_path: Path) -> None:
    script, source = tmp_path / "script.py", tmp_path / "overruns.cu"
    script.write_text(SANITIZED, encoding="utf-8")
    source.write_text(OVERRUNS, encoding="utf-8")
    environment = {**sanitized_environment(), "PYTHONPATH": str(Path(__file__).parent)}
    if not all(Path(library).is_file() for library in environment["LD_PRELOAD"].split()):
        pytest.skip("needs g++'s address sanitizer")
    for kernel, words in (("global", "heap-buffer-overflow"), ("shared", "insufficient space"), ("shift", "shift")):
        command = [sys.executable, str(script), str(source), str(KERNELS), kernel]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode != 0
        assert "kernel stuck, block 0: deadlock: threads 1-31 wait in __syncwarp" in done.stdout
        assert done.stdout.endswith("so far, so good\n"), done.stderr
        assert words in done.stderr
