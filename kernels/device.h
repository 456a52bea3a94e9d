// GPU loads and stores and warp and block reductions: elements in, packed codes and scales out. All arithmetic on
// values is in numerics.h. Macros that kernels are compiled with:
//   MX_SCHEME    an MxScheme of constants
//   MX_SOURCE    element type: 0 binary32, 1 bfloat16, 2 binary16, 3 binary64
//   MX_TARGET    element type of values, where they are written; for kernels that quantize: instead of codes and scales
//   MX_BITS      packed width of a code: 4, 6 or 8
//   MX_SWIZZLED  1: scales in the 128x4 layout of block-scaled matrix products, 0: row-major
//   MX_HARDWARE  conversion instructions: 0 none, 1 to FP8 (from sm_89), 2 also to FP6 and FP4 (sm_100a, sm_120a)
//   MX_ROTATED   group size of a random Hadamard transform, a divisor of the columns; 0 or undefined: none
//   MX_SIGNS     its sign words; MX_ROTATED_BF16 1: its values are rounded to bfloat16
#ifndef MXCLI_DEVICE_H
#define MXCLI_DEVICE_H

#include "numerics.h"

#if MX_SOURCE == 0
typedef float MxSource;
MX_FN float mx_widen(MxSource x) { return x; }
#elif MX_SOURCE == 1
typedef mx_u16 MxSource;
MX_FN float mx_widen(MxSource x) { return mx_float((mx_u32)x << 16); }
#elif MX_SOURCE == 2
typedef mx_u16 MxSource;
MX_FN float mx_widen(MxSource x) { return mx_from_f16(x); }
#else
typedef double MxSource;
MX_FN float mx_widen(MxSource x) { return (float)x; }
#endif

#ifdef MX_TARGET
#define MX_PASSES 1
#else
#define MX_PASSES 0
#define MX_TARGET MX_SOURCE
#endif
#if MX_TARGET == 0
typedef float MxTarget;
MX_FN MxTarget mx_narrow(float y) { return y; }
#elif MX_TARGET == 1
typedef mx_u16 MxTarget;
MX_FN MxTarget mx_narrow(float y) { return (mx_u16)(mx_bits(mx_round_to_bf16(y)) >> 16); }
#elif MX_TARGET == 2
typedef mx_u16 MxTarget;
MX_FN MxTarget mx_narrow(float y) { return mx_round_to_f16(y); }
#else
typedef double MxTarget;
MX_FN MxTarget mx_narrow(float y) { return y; }
#endif

#ifndef MX_ROTATED
#define MX_ROTATED 0
#endif
#if MX_ROTATED
#define MX_ROTATION (MxRotation{MX_ROTATED, {MX_SIGNS}, MX_ROTATED_BF16})
#endif

#define MX_WARP 32
#define MX_MEMBER __device__ __forceinline__
#define MX_ALL_LANES 0xFFFFFFFFu

MX_FN mx_i64 mx_ceil_div(mx_i64 a, mx_i64 b) { return (a + b - 1) / b; }
MX_FN mx_i64 mx_min_i64(mx_i64 a, mx_i64 b) { return a < b ? a : b; }

// a / b; 32-bit division suffices for most tensors and is several times as fast.
MX_FN mx_i64 mx_quotient(mx_i64 a, mx_i64 b) {
  return ((mx_u64)a | (mx_u64)b) >> 32 ? a / b : (mx_i64)((mx_u32)a / (mx_u32)b);
}

// -------------------------------------------------------------------------------------------------------------- memory

// Load `words` 32-bit words from an address aligned to 8 bytes for 2 words, else to 16.
template <int words>
MX_FN void mx_load_words(const void* from, mx_u32 (&w)[words]) {
  if constexpr (words % 4 == 0) {
#pragma unroll
    for (int i = 0; i < words / 4; ++i) {
      const uint4 q = static_cast<const uint4*>(from)[i];
      w[4 * i] = q.x, w[4 * i + 1] = q.y, w[4 * i + 2] = q.z, w[4 * i + 3] = q.w;
    }
  } else {
    static_assert(words == 2, "loads are of 8 or of 16 bytes");
    const uint2 q = *static_cast<const uint2*>(from);
    w[0] = q.x, w[1] = q.y;
  }
}

// N elements, not yet widened.
template <int N>
struct MxRaw {
  mx_u32 words[N * sizeof(MxSource) / 4];
};

// Load the first n of N elements at p; the rest are zeros.
template <int N>
MX_FN MxRaw<N> mx_load_raw(const MxSource* p, mx_i64 n) {
  constexpr int bytes = N * (int)sizeof(MxSource), alignment = bytes % 16 == 0 ? 16 : 8;
  MxRaw<N> raw = {};
  if (n >= N && ((mx_u64)p & (alignment - 1)) == 0) {
    mx_load_words(p, raw.words);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= n) continue;
      if constexpr (sizeof(MxSource) == 2) {
        raw.words[i / 2] |= (mx_u32)p[i] << 16 * (i & 1);
      } else if constexpr (sizeof(MxSource) == 4) {
        raw.words[i] = mx_bits(p[i]);
      } else {
        const mx_u64 bits = (mx_u64)__double_as_longlong(p[i]);
        raw.words[2 * i] = (mx_u32)bits;
        raw.words[2 * i + 1] = (mx_u32)(bits >> 32);
      }
    }
  }
  return raw;
}

// Element i of `raw`.
template <int N>
MX_FN MxSource mx_raw_element(const MxRaw<N>& raw, int i) {
  if constexpr (sizeof(MxSource) == 2) return (MxSource)(raw.words[i / 2] >> 16 * (i & 1));
  else if constexpr (sizeof(MxSource) == 4) return mx_float(raw.words[i]);
  else return __longlong_as_double((mx_i64)((mx_u64)raw.words[2 * i + 1] << 32 | raw.words[2 * i]));
}

template <int N>
MX_FN void mx_widen_all(const MxRaw<N>& raw, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = mx_widen(mx_raw_element(raw, i));
}

// Load and widen the first n of N elements at p; the rest are zeros. Widths that are not 8 bytes or a multiple of 16
// are loaded element by element.
template <int N>
MX_FN void mx_load_plain(const MxSource* p, mx_i64 n, float (&x)[N]) {
  if constexpr (N * sizeof(MxSource) % 8 == 0 && (N * sizeof(MxSource) % 16 == 0 || N * sizeof(MxSource) == 8)) {
    mx_widen_all(mx_load_raw<N>(p, n), x);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = i < n ? mx_widen(p[i]) : 0.0f;
  }
}

#if MX_ROTATED
// The same for a rotated tensor. Every thread that needs part of a group rotates the whole group.
template <int N>
MX_FN void mx_load_rotated(const MxSource* x, mx_i64 at, mx_i64 n, float (&values)[N]) {
  constexpr int size = MX_ROTATED, parts = size / (N < size ? N : size);
  const bool is_whole = N % size == 0 && at % size == 0, is_part = size % N == 0 && at % N == 0;
  float group[size];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = 0.0f;
  if (is_whole) {
#pragma unroll
    for (int first = 0; first < N; first += size) {
      if (first >= n) continue;
      mx_load_plain(x + at + first, size, group);
      mx_rotate(group, MX_ROTATION);
#pragma unroll
      for (int i = 0; i < size; ++i)
        if (first + i < N) values[first + i] = group[i];
    }
  } else if (is_part) {
    if (n <= 0) return;
    const int offset = (int)(at % size);
    mx_load_plain(x + (at - offset), size, group);
    mx_rotate(group, MX_ROTATION);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      if (offset != part * N) continue;
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (part * N + i < size) values[i] = i < n ? group[part * N + i] : 0.0f;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < N && i < n; ++i) {
      const int offset = (int)((at + i) % size);
      mx_load_plain(x + (at + i - offset), size, group);
      mx_rotate(group, MX_ROTATION);
      values[i] = group[offset];
    }
  }
}
#endif

// Load the first n of N elements from element `at` of a tensor, rotated if the scheme rotates; the rest are zeros.
template <int N>
MX_FN void mx_load(const MxSource* x, mx_i64 at, mx_i64 n, float (&values)[N]) {
#if MX_ROTATED
  mx_load_rotated(x, at, n, values);
#else
  mx_load_plain(x + at, n, values);
#endif
}

// Replace the signs of zeros as the scheme says.
template <int N>
MX_FN void mx_canonicalize_zeros(float (&x)[N], MxScheme r) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = mx_zero_input(x[i], r.clear_zero_input, r.set_zero_input);
}

template <int N>
MX_FN void mx_load_input(const MxSource* x, mx_i64 at, mx_i64 n, MxScheme r, float (&values)[N]) {
  mx_load(x, at, n, values);
  mx_canonicalize_zeros(values, r);
}

MX_FN mx_i64 mx_packed_bytes(mx_i64 codes) {
  return MX_BITS == 4 ? (codes + 1) / 2 : MX_BITS == 6 ? (codes + 3) / 4 * 3 : codes;
}

// Pack the first n of N codes and store them at `to`; N is a multiple of 4.
template <int N>
MX_FN void mx_store_codes(mx_u8* to, mx_i64 n, const mx_u32 (&codes)[N]) {
  constexpr int bytes = N * MX_BITS / 8, words = (bytes + 3) / 4;
  constexpr int unit = bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
  mx_u32 w[words] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int at = i * MX_BITS, shift = at % 32;
    const mx_u32 code = i < n ? codes[i] : 0u;
    w[at / 32] |= code << shift;
    if (shift + MX_BITS > 32) w[(at / 32 + 1) % words] |= code >> (32 - shift);
  }
  if (n >= N && ((mx_u64)to & (unit - 1)) == 0) {
    if constexpr (unit == 16) {
#pragma unroll
      for (int i = 0; i < words / 4; ++i)
        reinterpret_cast<uint4*>(to)[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
    } else if constexpr (unit == 8) {
#pragma unroll
      for (int i = 0; i < words / 2; ++i) reinterpret_cast<uint2*>(to)[i] = make_uint2(w[2 * i], w[2 * i + 1]);
    } else if constexpr (unit == 4) {
#pragma unroll
      for (int i = 0; i < words; ++i) reinterpret_cast<mx_u32*>(to)[i] = w[i];
    } else if constexpr (unit == 2) {
#pragma unroll
      for (int i = 0; i < bytes / 2; ++i) reinterpret_cast<mx_u16*>(to)[i] = (mx_u16)(w[i / 2] >> 16 * (i & 1));
    } else {
#pragma unroll
      for (int i = 0; i < bytes; ++i) to[i] = (mx_u8)(w[i / 4] >> 8 * (i & 3));
    }
  } else {
    const mx_i64 end = mx_packed_bytes(n);
#pragma unroll
    for (int i = 0; i < bytes; ++i)
      if (i < end) to[i] = (mx_u8)(w[i / 4] >> 8 * (i & 3));
  }
}

// Store the first n of N values at `to`; N is a multiple of 8.
template <int N>
MX_FN void mx_store_values(MxTarget* to, mx_i64 n, const float (&y)[N]) {
  constexpr int each = 16 / (int)sizeof(MxTarget);
  if (n >= N && ((mx_u64)to & 15u) == 0) {
#pragma unroll
    for (int first = 0; first < N; first += each) {
      mx_u32 w[4] = {};
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const MxTarget one = mx_narrow(y[first + i]);
        if constexpr (sizeof(MxTarget) == 2) {
          w[i / 2] |= (mx_u32)one << 16 * (i & 1);
        } else if constexpr (sizeof(MxTarget) == 4) {
          w[i] = mx_bits(one);
        } else {
          const mx_u64 bits = (mx_u64)__double_as_longlong(one);
          w[2 * i] = (mx_u32)bits;
          w[2 * i + 1] = (mx_u32)(bits >> 32);
        }
      }
      *reinterpret_cast<uint4*>(to + first) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < n) to[i] = mx_narrow(y[i]);
  }
}

// Pack the first n (which may be <= 0) of N codes and store them at column `at` of a row; N is a multiple of 4, or the
// whole row's codes.
template <int N>
MX_FN void mx_store_part(mx_u8* row, mx_i64 at, mx_i64 n, const mx_u32* codes) {
  if (n <= 0) return;
  constexpr int padded = (N + 3) / 4 * 4;
  mx_u32 own[padded] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) own[i] = codes[i];
  mx_store_codes(row + mx_packed_bytes(at), n < N || padded > N ? mx_min_i64(n, N) : padded, own);
}

// Store the scale of block (row, column) of a grid of `across` columns.
MX_FN void mx_store_scale(void* scales, mx_i64 row, mx_i64 column, mx_i64 across, mx_u32 stored, MxScheme r) {
  const mx_i64 at = MX_SWIZZLED ? ((row >> 7) * ((across + 3) >> 2) + (column >> 2)) * 512 + (row & 31) * 16 +
                                      (row & 127) / 32 * 4 + (column & 3)
                                : row * across + column;
  if (r.scale_stored_bits == 32) static_cast<mx_u32*>(scales)[at] = stored;
  else static_cast<mx_u8*>(scales)[at] = (mx_u8)stored;
}

// ------------------------------------------------------------------------------------------------------------ encoding

// Formats with conversion instructions for binary32 pairs: nearest even, saturating.
enum MxConversion { MX_SOFTWARE, MX_TO_E4M3, MX_TO_E5M2, MX_TO_E2M1, MX_TO_E2M3, MX_TO_E3M2 };

MX_FN MxConversion mx_conversion(MxEncoder e) {
  const MxFloat f = e.element;
  if (!e.plain || f.twos_complement) return MX_SOFTWARE;
  if (MX_HARDWARE >= 1 && f.bits == 8 && f.mantissa_bits == 3 && f.emin == -6 && f.max == 448.0f) return MX_TO_E4M3;
  if (MX_HARDWARE >= 1 && f.bits == 8 && f.mantissa_bits == 2 && f.emin == -14 && f.max == 57344.0f) return MX_TO_E5M2;
  if (MX_HARDWARE >= 2 && f.bits == 4 && f.mantissa_bits == 1 && f.emin == 0 && f.max == 6.0f) return MX_TO_E2M1;
  if (MX_HARDWARE >= 2 && f.bits == 6 && f.mantissa_bits == 3 && f.emin == 0 && f.max == 7.5f) return MX_TO_E2M3;
  if (MX_HARDWARE >= 2 && f.bits == 6 && f.mantissa_bits == 2 && f.emin == -2 && f.max == 28.0f) return MX_TO_E3M2;
  return MX_SOFTWARE;
}

// Convert two scaled elements with one instruction: `low` to the low byte, `high` to the high byte (E2M1: nibbles).
MX_FN mx_u32 mx_convert_pair(float low, float high, MxConversion to) {
  mx_u16 pair = 0;
#if MX_HARDWARE >= 1
  if (to == MX_TO_E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(low), "f"(high));
  if (to == MX_TO_E5M2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(low), "f"(high));
#endif
#if MX_HARDWARE >= 2
  if (to == MX_TO_E2M3) asm("cvt.rn.satfinite.e2m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(low), "f"(high));
  if (to == MX_TO_E3M2) asm("cvt.rn.satfinite.e3m2x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(low), "f"(high));
  if (to == MX_TO_E2M1)
    asm("{ .reg .b8 byte, zero; mov.b16 {zero, byte}, 0; cvt.rn.satfinite.e2m1x2.f32 byte, %2, %1; "
        "mov.b16 %0, {byte, zero}; }"
        : "=h"(pair)
        : "f"(low), "f"(high));
#endif
  (void)low, (void)high, (void)to;
  return pair;
}

// Draw the random numbers of N neighbors, from element `at` of the tensor on, if the rounding is random.
template <int N>
MX_FN void mx_draw(mx_u64 key, mx_i64 at, MxEncoder e, float (&drawn)[N]) {
  if (!e.rounding.is_random) return;
  const MxKey k = {(mx_u32)key, (mx_u32)(key >> 32)};
  if (N % 4 == 0 && at % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const MxWords words = mx_random_words((mx_u64)(at + i) / 4, k);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < N) drawn[i + j] = mx_uniform(words.of[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const MxWords words = mx_random_words((mx_u64)(at + i) / 4, k);
      const int j = (int)((at + i) % 4);
      drawn[i] = mx_uniform(j < 2 ? (j == 0 ? words.of[0] : words.of[1]) : (j == 2 ? words.of[2] : words.of[3]));
    }
  }
}

// Encode an element; `drawn` is read if the rounding is random.
MX_FN auto mx_encode_one(float x, float factor, MxEncoder e, float drawn) {
  return e.rounding.is_random ? mx_encode_element(x, factor, e, drawn) : mx_encode_element(x, factor, e);
}

// Encode N elements that share a scale.
template <int N>
MX_FN void mx_encode_all(const float* x, float factor, MxEncoder e, const float* drawn, mx_u32* codes) {
  const MxConversion to = mx_conversion(e);
  if (to != MX_SOFTWARE && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) {
      const mx_u32 pair = mx_convert_pair(mx_argument(x[i], factor, e), mx_argument(x[i + 1], factor, e), to);
      codes[i] = to == MX_TO_E2M1 ? pair & 0xFu : pair & 0xFFu;
      codes[i + 1] = to == MX_TO_E2M1 ? pair >> 4 : pair >> 8;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) codes[i] = mx_encode_one(x[i], factor, e, drawn[i]).code;
  }
}

// The same for a block that may be NaN.
template <int N>
MX_FN void mx_encode_block(const float* x, const MxScale<float, mx_u32>& s, MxEncoder e, const float* drawn,
                           mx_u32* codes) {
  if (s.is_nan) {
#pragma unroll
    for (int i = 0; i < N; ++i) codes[i] = (mx_u32)e.element.nan_code;
  } else {
    mx_encode_all<N>(x, s.factor, e, drawn, codes);
  }
}

// Replace N elements that share a scale by their dequantized values.
template <int N>
MX_FN void mx_pass_block(float* x, const MxScale<float, mx_u32>& s, MxEncoder e, const float* drawn) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float value = mx_signed_value(mx_encode_one(x[i], s.factor, e, drawn[i]), x[i], e) * s.decode;
    x[i] = s.is_nan ? s.decode : value;
  }
}

MX_FN mx_u32 mx_max_u32(mx_u32 a, mx_u32 b) { return a > b ? a : b; }

// Bits of the largest magnitude; NaN > infinity > finite.
template <int N>
MX_FN mx_u32 mx_amax_bits(const float* x) {
  mx_u32 largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = mx_max_u32(largest, mx_bits(x[i]) & 0x7FFFFFFFu);
  return largest;
}

// Bits of the smallest magnitude.
template <int N>
MX_FN mx_u32 mx_amin_bits(const float* x) {
  mx_u32 smallest = ~0u;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const mx_u32 bits = mx_bits(x[i]) & 0x7FFFFFFFu;
    smallest = bits < smallest ? bits : smallest;
  }
  return smallest;
}

// Bits of the largest finite magnitude.
template <int N>
MX_FN mx_u32 mx_finite_amax_bits(const float* x) {
  mx_u32 largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const mx_u32 bits = mx_bits(x[i]) & 0x7FFFFFFFu;
    if (bits < MX_INFINITY_BITS) largest = mx_max_u32(largest, bits);
  }
  return largest;
}

// ---------------------------------------------------------------------------------------------------------- reductions

// Reduce `value` over groups of `lanes` neighboring lanes by butterfly exchange; every lane gets the result.
template <int lanes, class T, class Combine>
MX_FN T mx_combine_lanes(T value, Combine combine) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2)
    value = combine(value, __shfl_xor_sync(MX_ALL_LANES, value, apart));
  return value;
}

// Reduce over all threads of a thread block (whole warps, at most 32): within warps, then over warps in order, so sums
// are deterministic. `scratch` is shared memory with one entry per warp.
template <class T, class Combine>
MX_FN T mx_combine_block(T value, T* scratch, Combine combine) {
  value = mx_combine_lanes<MX_WARP>(value, combine);
  __syncthreads();
  if (threadIdx.x % MX_WARP == 0) scratch[threadIdx.x / MX_WARP] = value;
  __syncthreads();
  T all = scratch[0];
#pragma unroll 1
  for (unsigned i = 1; i < blockDim.x / MX_WARP; ++i) all = combine(all, scratch[i]);
  return all;
}

struct MxMax {
  template <class T>
  MX_MEMBER T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct MxMin {
  template <class T>
  MX_MEMBER T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

struct MxAdd {
  template <class T>
  MX_MEMBER T operator()(T a, T b) const {
    return a + b;
  }
};

template <int lanes>
MX_FN mx_u32 mx_lanes_max(mx_u32 value) {
  return mx_combine_lanes<lanes>(value, MxMax());
}

template <int lanes>
MX_FN mx_u64 mx_lanes_sum(mx_u64 value) {
  return mx_combine_lanes<lanes>(value, MxAdd());
}

MX_FN mx_u32 mx_block_max(mx_u32 value, mx_u32* scratch) { return mx_combine_block(value, scratch, MxMax()); }

template <class T>
MX_FN T mx_block_sum(T value, T* scratch) {
  return mx_combine_block(value, scratch, MxAdd());
}

#endif
