// Statistics in GPU kernels: per element, span and block, finally added to the tensor's totals. Counts, extremes,
// histograms and per-block sums, which are added in the CPU kernel's order, equal the CPU kernel's. Thread blocks have
// MX_SUMS threads.
//   MX_CODES      1: also write codes and scales
//   MX_HISTOGRAM  1: count codes
#ifndef MXCLI_MEASURE_H
#define MXCLI_MEASURE_H

#include "blocks.h"

#define MX_SPAN 512  // most neighbors summed in binary32
#define MX_COPIES 4  // copies of small histograms, to reduce contention between neighboring lanes

// Indices of a tensor's 64-bit totals; the histograms of scales, codes, largest codes per block, signal / noise and
// range follow them. From MX_FIRST on they are extremes: three minima, then maxima. Doubles and floats are stored as
// their bits, which have the same order.
enum MxTotal {
  MX_ZERO_BLOCKS,
  MX_NAN_BLOCKS,
  MX_SATURATED,
  MX_SATURATED_BLOCKS,
  MX_UNDERFLOWED,
  MX_LOST,
  MX_NAN,
  MX_INFINITE,
  MX_EXCLUDED,
  MX_FIRST,
  MX_MIN_SQNR,
  MX_MIN_RANGE,
  MX_AMAX,
  MX_MAX_ABS,
  MX_MAX_REL,
  MX_TOTALS
};

// Counts of a thread block, in shared memory.
struct MxCounts {
  mx_u32 scale[MX_SCALE_BINS * MX_COPIES], block_code[MX_CODE_BINS * MX_COPIES], sqnr[MX_SQNR_BINS];
  mx_u32 range[MX_RANGE_BINS];
  mx_u32 code[MX_CODE_BINS * MX_COPIES];  // 4-bit codes are counted in pairs
  mx_u32 odd_code[MX_CODE_BINS];          // codes outside whole pieces, modulo 2^32
  mx_u32 zero_blocks, nan_blocks, lost, nan, infinite, excluded;
  mx_u32 max_rel;  // bits of the largest relative error so far
};

// Sums of x^2, (y - x)^2, x (y - x) and y - x.
struct MxSums {
  double of[4];
};

// Totals of one thread.
struct MxTally {
  MxSums sums;                 // of the current chunk
  double min_sqnr, min_range;  // negative: none
  mx_u64 saturated, underflowed;
  mx_u32 saturated_blocks, amax;
  float max_abs, max_rel;
};

// Per-block arrays in the order of the scale grid; either may be null.
struct MxPerBlock {
  double* noise;
  float* others;  // four arrays with stride `each`: amax, decode and, as integers, saturated, underflowed
  mx_i64 each;
};

struct MxBlock {
  mx_u32 amax;
  MxScale<float, mx_u32> scale;
  mx_u32 top_code;  // code of the block's amax, without its sign
  bool saturates;   // the amax exceeds the element format's maximum
  MxSums sums;
  mx_u64 saturated, underflowed;
  mx_u32 largest, least;  // bits of the largest finite magnitude; 0 - bits of the smallest nonzero one, or 0
};

// Binary32 partial sums of the terms of MxSums over elements of a span, in units of a power of two.
struct MxTerms {
  float of[4];
};

// Extremes and counts of a lane's part of a span.
struct MxSpan {
  float max_error;  // largest absolute error
  mx_u32 least, underflowed;
  bool is_relative;  // some relative error may exceed the largest so far
};

// Signal and noise of a block of one span, without their common power of two.
struct MxRatio {
  float signal, noise;  // 0, 0: not available in binary32
};

// --------------------------------------------------------------------------------------------------------------- begin

MX_FN MxTally mx_begin_tally(MxCounts& counts) {
  mx_u32* const words = reinterpret_cast<mx_u32*>(&counts);
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < sizeof(MxCounts) / 4; i += blockDim.x) words[i] = 0u;
  __syncthreads();
  MxTally t = {};
  t.min_sqnr = t.min_range = -1.0;
  return t;
}

// Set the block's largest code and whether any element saturates. Scaling and encoding are monotonic, so the amax
// decides both; under random rounding, mx_update_top_code finds the code.
MX_FN void mx_find_top_code(MxBlock& b, MxScheme r, MxEncoder e) {
  const float amax = mx_float(b.amax);
  b.saturates = mx_saturates(amax, b.scale.factor, e);
  b.top_code = mx_encode_element(amax, b.scale.factor, e).code & mx_magnitude_mask(r.element);
  if (r.rounding.is_random && b.amax < MX_INFINITY_BITS) b.top_code = 0u;
}

// Raise the block's largest code to an element's, under random rounding.
MX_FN void mx_update_top_code(mx_u32 code, MxEncoder e, MxBlock& b) {
  if (e.rounding.is_random) b.top_code = mx_max_u32(b.top_code, mx_magnitude_code(code, e.element));
}

MX_FN MxBlock mx_begin_block(mx_u32 amax, mx_u32 scale_amax, MxTensorScale t, MxScheme r, MxEncoder e) {
  MxBlock b;
  b.amax = amax;
  b.scale = mx_choose_scale(scale_amax, t, r);
  b.sums = MxSums();
  b.saturated = b.underflowed = 0;
  b.largest = b.least = 0;
  mx_find_top_code(b, r, e);
  return b;
}

// ------------------------------------------------------------------------------------------------------------ elements

// Add an element's terms, in any unit. Signs matter only for the sum of errors.
MX_FN void mx_add_element(float x, float magnitude, float difference, MxTerms& p) {
  p.of[0] += magnitude * magnitude;
  p.of[1] += difference * difference;
  p.of[2] += magnitude * difference;
  p.of[3] += mx_float(mx_bits(difference) ^ (mx_bits(x) & 0x80000000u));
}

// Count a non-finite element and replace it by zero; replace all elements of NaN blocks by zero.
MX_FN void mx_exclude_nonfinite(float& x, mx_i64 at, const MxScale<float, mx_u32>& s, MxEncoder e, MxCounts& counts,
                                mx_u64* totals) {
  const mx_u32 bits = mx_bits(x) & 0x7FFFFFFFu;
  if (bits >= MX_INFINITY_BITS) {
    atomicAdd(bits == MX_INFINITY_BITS ? &counts.infinite : &counts.nan, 1u);
    atomicMin(totals + MX_FIRST, (mx_u64)at);
    if (!s.is_nan) {
      atomicAdd(&counts.excluded, 1u);
      if (MX_HISTOGRAM) {  // count the code of the infinity; the zero will be counted later, so subtract it here
        atomicAdd(&counts.odd_code[mx_encode_element(x, s.factor, e).code], 1u);
        atomicAdd(&counts.odd_code[0], ~0u);
      }
    }
    x = 0.0f;
  }
  if (s.is_nan) x = 0.0f;
}

// Add a finite element; return its code.
MX_FN mx_u32 mx_measure_element(float x, const MxScale<float, mx_u32>& s, MxEncoder e, float drawn, float unit,
                                float bound, MxTerms& p, MxSpan& span) {
  const auto element = mx_encode_one(x, s.factor, e, drawn);
  const float magnitude = mx_abs(x), difference = element.value * s.decode - magnitude;
  mx_add_element(x, magnitude * unit, difference * unit, p);
  const float distance = mx_abs(difference);
  span.max_error = mx_max(distance, span.max_error);
  span.is_relative = span.is_relative || distance > magnitude * bound;
  span.underflowed += element.value == 0.0f && magnitude != 0.0f;
  return element.code;
}

// The same in units of a power-of-two scale, for blocks where that changes no bit (mx_stays_normal). `counts_zeros`:
// count every element that becomes zero as underflowed, zeros included.
MX_FN mx_u32 mx_measure_scaled(float x, float factor, MxEncoder e, float drawn, bool counts_zeros, float bound,
                               MxTerms& p, MxSpan& span) {
  const auto element = mx_encode_one(x, factor, e, drawn);
  const float magnitude = mx_abs(x * factor), difference = element.value - magnitude;
  mx_add_element(x, magnitude, difference, p);
  const float distance = mx_abs(difference);
  span.max_error = mx_max(distance, span.max_error);
  span.is_relative = span.is_relative || distance > magnitude * bound;
  if (counts_zeros) span.underflowed += element.value == 0.0f;
  return element.code;
}

// Count a code. 4-bit codes of whole pieces are counted in pairs; `pair` holds the first of a pair.
MX_FN void mx_count_code(mx_u32 code, int i, bool is_whole, bool exists, mx_u32& pair, MxCounts& counts) {
  mx_u32* const own = counts.code + threadIdx.x % MX_COPIES;
  if (MX_BITS == 4 && is_whole) {
    if (i % 2 == 0) pair = code;
    else atomicAdd(own + (pair | code << 4) * MX_COPIES, 1u);
  } else if (MX_BITS == 4) {
    if (exists) atomicAdd(&counts.odd_code[code], 1u);
  } else if (exists) {
    atomicAdd(own + code * MX_COPIES, 1u);
  }
}

// ----------------------------------------------------------------------------------------------------- relative errors

// mx_relative_bound of the largest relative error so far, of this thread or its thread block.
MX_FN float mx_known_bound(const MxTally& tally, const MxCounts& counts, const MxScale<float, mx_u32>& s, MxEncoder e) {
  const float known = mx_max(mx_float(*(const volatile mx_u32*)&counts.max_rel), tally.max_rel);
  return mx_relative_bound(known, s.decode, e.element);
}

MX_FN void mx_update_max_rel(float error, MxTally& tally, MxCounts& counts) {
  if (!(error > tally.max_rel)) return;
  tally.max_rel = error;
  atomicMax(&counts.max_rel, mx_bits(error));
}

MX_FN void mx_measure_relative_error(const MxSource* x, mx_i64 at, mx_u64 key, MxScheme r,
                                     const MxScale<float, mx_u32>& s, MxEncoder e, MxTally& tally, MxCounts& counts) {
  float value[1], drawn[1];
  mx_load_input(x, at, 1, r, value);
  mx_draw(key, at, e, drawn);
  const float magnitude = mx_abs(value[0]);
  if (magnitude == 0.0f || mx_bits(magnitude) >= MX_INFINITY_BITS) return;
  const float difference = mx_encode_one(value[0], s.factor, e, drawn[0]).value * s.decode - magnitude;
  mx_update_max_rel(mx_abs(difference) / magnitude, tally, counts);
}

// --------------------------------------------------------------------------------------------------------------- spans

// The CPU adds element i of a span to partial sum i % 16 and combines these by halves: s0 = (0 + 8) + (4 + 12),
// s1 = (1 + 9) + (5 + 13), and so on; then (s0 + s2) + (s1 + s3).
MX_FN MxTerms mx_add_terms(const MxTerms& a, const MxTerms& b) {
  MxTerms sum;
#pragma unroll
  for (int k = 0; k < 4; ++k) sum.of[k] = a.of[k] + b.of[k];
  return sum;
}

MX_FN MxTerms mx_sum_four(const MxTerms (&four)[4]) {
  return mx_add_terms(mx_add_terms(four[0], four[2]), mx_add_terms(four[1], four[3]));
}

// Combine four lanes with four partial sums each; all four lanes get the result.
MX_FN MxTerms mx_lanes_terms(MxTerms (&own)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      own[i].of[k] += __shfl_xor_sync(MX_ALL_LANES, own[i].of[k], 2);
      own[i].of[k] += __shfl_xor_sync(MX_ALL_LANES, own[i].of[k], 1);
    }
  }
  return mx_sum_four(own);
}

// Undo the normalization of a span's sums.
MX_FN MxSums mx_rescale_sums(const MxTerms& terms, double back) {
  MxSums sums;
#pragma unroll
  for (int k = 0; k < 3; ++k) sums.of[k] = (double)terms.of[k] * back * back;
  sums.of[3] = (double)terms.of[3] * back;
  return sums;
}

// Add a lane's part of a span to its tally; `max_error` is not normalized.
MX_FN void mx_finish_span(float max_error, mx_u32 underflowed, MxTally& tally, MxCounts& counts) {
  tally.max_abs = mx_max(max_error, tally.max_abs);
  if (underflowed) mx_update_max_rel(1.0f, tally, counts);  // the element is lost: relative error 1
}

// Measure columns 4 * lane to 4 * lane + 3 of every 16 of a span from element `at` on; the elements may be non-finite.
// `own` receives the four partial sums; `amax` is that of the span's finite elements. Codes are stored at `to` unless
// it is null.
MX_FN void mx_measure_steps(const MxSource* x, mx_u64 key, mx_u8* to, mx_i64 at, mx_i64 width, int lane, mx_u32 amax,
                            MxScheme r, MxEncoder e, MxBlock& b, MxTerms (&own)[4], MxSpan& span, MxTally& tally,
                            MxCounts& counts, mx_u64* totals) {
  const float unit = mx_unit(amax), bound = mx_known_bound(tally, counts, b.scale, e);
#pragma unroll
  for (int i = 0; i < 4; ++i) own[i] = MxTerms();
#pragma unroll 1
  for (mx_i64 step = 4 * lane; step < width; step += 16) {
    float values[4], drawn[4];
    mx_load_input(x, at + step, width - step, r, values);
    mx_draw(key, at + step, e, drawn);
    if (to != nullptr) {
      mx_u32 packed[4];
      mx_encode_block<4>(values, b.scale, e, drawn, packed);
      mx_store_part<4>(to, step, width - step, packed);
    }
    if (b.amax >= MX_INFINITY_BITS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) mx_exclude_nonfinite(values[i], at + step + i, b.scale, e, counts, totals);
    }
    if (b.scale.is_nan) continue;
    mx_u32 pair = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const mx_u32 code = mx_measure_element(values[i], b.scale, e, drawn[i], unit, bound, own[i], span);
      mx_update_top_code(code, e, b);
      span.least = mx_max_u32(span.least, 0u - (mx_bits(values[i]) & 0x7FFFFFFFu));
      if (MX_HISTOGRAM) mx_count_code(code, i, step + 4 <= width, step + i < width, pair, counts);
      if (b.saturates) b.saturated += mx_saturates(values[i], b.scale.factor, e);
    }
    if (span.is_relative) {
#pragma unroll 1
      for (int i = 0; i < 4 && step + i < width; ++i)
        mx_measure_relative_error(x, at + step + i, key, r, b.scale, e, tally, counts);
      span.is_relative = false;
    }
  }
  if (b.scale.is_nan && lane == 0) atomicAdd(&counts.excluded, (mx_u32)width);
}

// -------------------------------------------------------------------------------------------------------------- blocks

// Return the bin of a / b and update `least`, the smallest ratio so far. The binary32 quotient decides both unless it
// is on a bin's edge or close to `least`; only then is the exact ratio divided in binary64.
MX_FN mx_i64 mx_bin_ratio(float a, float b, double exact_a, double exact_b, int fraction_bits, int lowest_exponent,
                          int bins, double& least) {
  const float quotient = a / b;
  const mx_u32 bits = mx_bits(quotient);
  const bool is_certain =
      b > 0.0f && bits > 0x00800000u && bits < MX_INFINITY_BITS && (bits & ((1u << (23 - fraction_bits)) - 1u)) != 0u;
  if (is_certain && least >= 0.0 && (double)quotient * (1.0 - 0x1p-22) > least) {
    return mx_ratio_bin(bits, 23, 127, fraction_bits, lowest_exponent, bins);
  }
  const double ratio = exact_a / exact_b;
  if (least < 0.0 || ratio < least) least = ratio;
  return mx_ratio_bin(__double_as_longlong(ratio), 52, 1023, fraction_bits, lowest_exponent, bins);
}

// Count a block with complete sums.
MX_FN void mx_finish_block(const MxBlock& b, MxRatio ratio, MxScheme r, mx_i64 index, const MxPerBlock& per_block,
                           MxTally& tally, MxCounts& counts) {
  if (per_block.noise) per_block.noise[index] = b.scale.is_nan ? 0.0 : b.sums.of[1];
  if (per_block.others) {
    float* const amax = per_block.others + index;
    amax[0] = mx_float(b.amax);
    amax[per_block.each] = b.scale.decode;
    amax[2 * per_block.each] = mx_float((mx_u32)b.saturated);
    amax[3 * per_block.each] = mx_float((mx_u32)b.underflowed);
  }
  const unsigned copy = threadIdx.x % MX_COPIES;
  const float scale = r.scale_kind == MX_MINIFLOAT ? mx_decode(b.scale.stored, r.scale) : b.scale.decode;
  const mx_u32 bin = b.scale.is_nan ? MX_SCALE_BINS - 1 : mx_bits(scale) >> 23 & 0xFFu;
  atomicAdd(&counts.scale[bin * MX_COPIES + copy], 1u);
  if (b.scale.is_nan) {
    atomicAdd(&counts.nan_blocks, 1u);
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) tally.sums.of[k] += b.sums.of[k];
  tally.saturated += b.saturated;
  tally.underflowed += b.underflowed;
  tally.saturated_blocks += b.saturated > 0;
  tally.amax = mx_max_u32(tally.amax, b.largest);
  if (b.scale.is_lost) atomicAdd(&counts.lost, 1u);
  atomicAdd(&counts.block_code[b.top_code * MX_COPIES + copy], 1u);
  if (b.least == 0u) {
    if (b.amax == 0u) atomicAdd(&counts.zero_blocks, 1u);
    return;
  }
  const float largest = mx_float(b.largest), least = mx_float(0u - b.least);
  atomicAdd(&counts.range[mx_bin_ratio(largest, least, largest, least, MX_RANGE_BITS, MX_RANGE_LOWEST, MX_RANGE_BINS,
                                       tally.min_range)],
            1u);
  const mx_i64 sqnr_bin = b.sums.of[1] > 0.0
                              ? mx_bin_ratio(ratio.signal, ratio.noise, b.sums.of[0], b.sums.of[1], MX_SQNR_BITS,
                                             MX_SQNR_LOWEST, MX_SQNR_BINS - 1, tally.min_sqnr)
                              : MX_SQNR_BINS - 1;
  atomicAdd(&counts.sqnr[sqnr_bin], 1u);
}

// -------------------------------------------------------------------------------------------------------------- chunks

// Blocks per chunk: `blocks` neighbors or, if parts > 1, that many of a unit of `unit_blocks`.
struct MxChunking {
  mx_i64 blocks, parts, unit_blocks, all_blocks;
};

struct MxChunk {
  mx_i64 begin, end;
};

MX_FN MxChunk mx_chunk(const MxChunking& c, mx_i64 chunk) {
  const mx_i64 unit = c.parts > 1 ? mx_quotient(chunk, c.parts) : 0;
  MxChunk at;
  at.begin = unit * c.unit_blocks + (chunk - unit * c.parts) * c.blocks;
  at.end = mx_min_i64(at.begin + c.blocks, c.parts > 1 ? (unit + 1) * c.unit_blocks : c.all_blocks);
  return at;
}

#define MX_SUMS 256  // partial sums of a chunk, one per thread: block i is added to sum i % 256

// Write a chunk's sums, of which this thread holds partial sum `own`, and clear them.
MX_FN void mx_finish_chunk(MxTally& tally, unsigned own, double* sums) {
  __shared__ double partial[MX_SUMS];
  __shared__ double scratch[MX_WARP];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    __syncthreads();
    partial[own] = tally.sums.of[k];
    __syncthreads();
    const double sum = mx_block_sum(partial[threadIdx.x], scratch);
    if (threadIdx.x == 0) sums[k] = sum;
  }
  tally.sums = MxSums();
}

// -------------------------------------------------------------------------------------------------------------- totals

// Add `bins` bins with `copies` copies each to a tensor's histogram.
MX_FN void mx_add_bins(mx_u64* totals, const mx_u32* counts, int bins, int copies) {
#pragma unroll 1
  for (int i = threadIdx.x; i < bins; i += blockDim.x) {
    mx_u32 sum = 0;
    for (int k = 0; k < copies; ++k) sum += counts[i * copies + k];
    if (sum) atomicAdd(totals + i, (mx_u64)sum);
  }
}

// Bits of a double: nonnegative doubles keep their order, negative ones are above all of them.
MX_FN mx_u64 mx_ordered_bits(double x) { return (mx_u64)__double_as_longlong(x); }

// Add a thread block's counts and tallies to the tensor's totals.
MX_FN void mx_add_tally(const MxTally& tally, MxCounts& counts, mx_u64* totals) {
  __shared__ mx_u64 scratch[MX_WARP];
  const mx_u64 saturated = mx_block_sum(tally.saturated, scratch),
               underflowed = mx_block_sum(tally.underflowed, scratch);
  const mx_u64 saturated_blocks = mx_block_sum((mx_u64)tally.saturated_blocks, scratch);
  const mx_u64 min_sqnr = mx_combine_block(mx_ordered_bits(tally.min_sqnr), scratch, MxMin());
  const mx_u64 min_range = mx_combine_block(mx_ordered_bits(tally.min_range), scratch, MxMin());
  const mx_u64 amax = mx_combine_block((mx_u64)tally.amax, scratch, MxMax());
  const mx_u64 max_abs = mx_combine_block((mx_u64)mx_bits(tally.max_abs), scratch, MxMax());
  const mx_u64 max_rel = mx_combine_block((mx_u64)mx_bits(tally.max_rel), scratch, MxMax());
  if (threadIdx.x == 0) {
    atomicAdd(totals + MX_SATURATED, saturated);
    atomicAdd(totals + MX_SATURATED_BLOCKS, saturated_blocks);
    atomicAdd(totals + MX_UNDERFLOWED, underflowed);
    atomicMin(totals + MX_MIN_SQNR, min_sqnr);
    atomicMin(totals + MX_MIN_RANGE, min_range);
    atomicMax(totals + MX_AMAX, amax);
    atomicMax(totals + MX_MAX_ABS, max_abs);
    atomicMax(totals + MX_MAX_REL, max_rel);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(totals + MX_ZERO_BLOCKS, (mx_u64)counts.zero_blocks);
    atomicAdd(totals + MX_NAN_BLOCKS, (mx_u64)counts.nan_blocks);
    atomicAdd(totals + MX_LOST, (mx_u64)counts.lost);
    atomicAdd(totals + MX_NAN, (mx_u64)counts.nan);
    atomicAdd(totals + MX_INFINITE, (mx_u64)counts.infinite);
    atomicAdd(totals + MX_EXCLUDED, (mx_u64)counts.excluded);
  }
  mx_u64* bins = totals + MX_TOTALS;
  mx_add_bins(bins, counts.scale, MX_SCALE_BINS, MX_COPIES);
  bins += MX_SCALE_BINS;
#pragma unroll 1
  for (int i = threadIdx.x; i < MX_CODE_BINS; i += blockDim.x) {
    mx_u32 sum = 0;
    for (int k = 0; k < MX_COPIES; ++k) sum += counts.code[i * MX_COPIES + k];
    if (MX_BITS == 4 && sum) {
      atomicAdd(&counts.odd_code[i & 0xF], sum);
      atomicAdd(&counts.odd_code[i >> 4], sum);
    } else if (sum) {
      atomicAdd(&counts.odd_code[i], sum);
    }
  }
  __syncthreads();
  mx_add_bins(bins, counts.odd_code, MX_CODE_BINS, 1);
  bins += MX_CODE_BINS;
  mx_add_bins(bins, counts.block_code, MX_CODE_BINS, MX_COPIES);
  bins += MX_CODE_BINS;
  mx_add_bins(bins, counts.sqnr, MX_SQNR_BINS, 1);
  bins += MX_SQNR_BINS;
  mx_add_bins(bins, counts.range, MX_RANGE_BINS, 1);
}

#endif
