// Reductions independent of the format: a tensor's amax, and the blocks with the most noise.
#define MX_BITS 8
#define MX_SWIZZLED 0
#define MX_HARDWARE 0
#include "device.h"

// Result of mx_amax; the caller zeroes it and sets `first` to all ones.
struct MxFound {
  mx_u32 finite, all;       // bits of the largest finite magnitude, and of the largest of any kind
  mx_u64 nonfinite, first;  // count of NaN and infinities, and the index of the first
};

// Find the largest magnitudes of n elements, of which the first is element `base` of the tensor.
extern "C" __global__ void __launch_bounds__(256) mx_amax(const MxSource* x, mx_i64 n, mx_i64 base, MxFound* found) {
  constexpr int elements = 16 / sizeof(MxSource) < 4 ? 4 : 16 / sizeof(MxSource), together = 4;
  __shared__ mx_u32 scratch[MX_WARP];
  mx_u32 finite = 0, all = 0;
  const mx_i64 stride = (mx_i64)gridDim.x * blockDim.x * elements;
  mx_i64 at = ((mx_i64)blockIdx.x * blockDim.x + threadIdx.x) * elements;
  while (at < n) {
    float values[together][elements];
#pragma unroll
    for (int k = 0; k < together; ++k) mx_load(x, at + k * stride, n - at - k * stride, values[k]);
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const mx_u32 bits = mx_amax_bits<elements>(values[k]);
      all = mx_max_u32(all, bits);
      if (bits < MX_INFINITY_BITS) {
        finite = mx_max_u32(finite, bits);
        continue;
      }
#pragma unroll
      for (int i = 0; i < elements; ++i) {
        const mx_u32 one = mx_bits(values[k][i]) & 0x7FFFFFFFu;
        if (one < MX_INFINITY_BITS) {
          finite = mx_max_u32(finite, one);
        } else {
          atomicAdd(&found->nonfinite, (mx_u64)1);
          atomicMin(&found->first, (mx_u64)(base + at + k * stride + i));
        }
      }
    }
    at += together * stride;
  }
  finite = mx_block_max(finite, scratch);
  all = mx_block_max(all, scratch);
  if (threadIdx.x == 0) {
    atomicMax(&found->finite, finite);
    atomicMax(&found->all, all);
  }
}

#define MX_WORST 8
#define MX_WORST_EACH 16

// Find the 8 largest positive numbers of every 4096, in descending order, ties in input order; padded with 0.
extern "C" __global__ void __launch_bounds__(256)
    mx_worst(const double* noise, mx_i64 n, double* worst, mx_i64* where) {
  __shared__ double scratch_noise[MX_WARP];
  __shared__ mx_i64 scratch_where[MX_WARP];
  const mx_i64 first = (mx_i64)blockIdx.x * blockDim.x * MX_WORST_EACH;
  double own[MX_WORST_EACH];
#pragma unroll
  for (int i = 0; i < MX_WORST_EACH; ++i) {
    const mx_i64 at = first + threadIdx.x + i * blockDim.x;
    own[i] = at < n ? noise[at] : 0.0;
  }
  for (int round = 0; round < MX_WORST; ++round) {
    double most = 0.0;
    mx_i64 at = 0;
#pragma unroll
    for (int i = 0; i < MX_WORST_EACH; ++i)
      if (own[i] > most) {
        most = own[i];
        at = first + threadIdx.x + i * blockDim.x;
      }
    auto take = [&](double other, mx_i64 place) {
      if (other > most || (other == most && place < at)) {
        most = other;
        at = place;
      }
    };
#pragma unroll
    for (int apart = MX_WARP / 2; apart > 0; apart /= 2)
      take(__shfl_xor_sync(MX_ALL_LANES, most, apart), __shfl_xor_sync(MX_ALL_LANES, at, apart));
    __syncthreads();
    if (threadIdx.x % MX_WARP == 0) {
      scratch_noise[threadIdx.x / MX_WARP] = most;
      scratch_where[threadIdx.x / MX_WARP] = at;
    }
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x / MX_WARP; ++i) take(scratch_noise[i], scratch_where[i]);
    if (threadIdx.x == 0) {
      worst[(mx_i64)blockIdx.x * MX_WORST + round] = most;
      where[(mx_i64)blockIdx.x * MX_WORST + round] = at;
    }
#pragma unroll
    for (int i = 0; i < MX_WORST_EACH; ++i)
      if (first + threadIdx.x + i * blockDim.x == at) own[i] = 0.0;
  }
}
