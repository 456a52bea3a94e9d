// Statistics: counts and sums per span, per block and per thread.
#ifndef MXCLI_TOTALS_H
#define MXCLI_TOTALS_H

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensors.h"

namespace MXCLI_ISA {
namespace {

constexpr int kStripe = 512;         // elements of a row processed at once; they stay in L1 cache
constexpr int kWidestStripe = 2048;  // enough for lcm(block columns, 4)
constexpr int kPartial = 16;         // partial sums per sum for any SIMD width: same results on every machine
constexpr int kGroups = kPartial / kLanes;
constexpr uint32_t kAllZero = 0;  // `least` of a block without nonzero elements

// -------------------------------------------------------------------------------------------------------- partial sums

typedef float FourFloats __attribute__((vector_size(16)));
typedef uint32_t FourBits __attribute__((vector_size(16)));

// Reduce by halves: the same order for every SIMD width.
template <class Four, class T, class V, class Combine>
inline __attribute__((always_inline)) T reduce(const V* groups, const Combine& combine) {
  constexpr int fours = kPartial / 4;
  Four part[fours];
  std::memcpy(part, groups, sizeof part);
  Four last = combine(combine(part[0], part[2]), combine(part[1], part[3]));
  return combine(combine(T(last[0]), T(last[2])), combine(T(last[1]), T(last[3])));
}

inline float sum(const MxLanes* groups) {
  return reduce<FourFloats, float>(groups, [](auto a, auto b) { return a + b; });
}

inline float largest(const MxLanes* groups) {
  return reduce<FourFloats, float>(groups, [](auto a, auto b) { return a > b ? a : b; });
}

inline uint32_t largest(const MxLaneBits* groups) {
  return reduce<FourBits, uint32_t>(groups, [](auto a, auto b) { return a > b ? a : b; });
}

inline uint32_t total(const MxLaneBits* groups) {
  return reduce<FourBits, uint32_t>(groups, [](auto a, auto b) { return a + b; });
}

// -------------------------------------------------------------------------------------------------------------- blocks

// The blocks of a stripe as a structure of arrays, so that per-block work is vectorized over blocks.
struct Blocks {
  alignas(64) uint32_t amax[kStripe], stored[kStripe], is_nan[kStripe], is_lost[kStripe];
  alignas(64) float factor[kStripe], decode[kStripe];
  alignas(64) uint32_t top_code[kStripe], saturates[kStripe];  // of the block's amax
  alignas(64) uint32_t largest[kStripe];                       // bits of the largest finite magnitude
  alignas(64) uint32_t least[kStripe];  // complement of (bits of the smallest nonzero magnitude - 1); 0: all zero
  alignas(64) double signal[kStripe], noise[kStripe], cross[kStripe], error[kStripe];
  alignas(64) int32_t saturated[kStripe], underflowed[kStripe];

  void clear_totals(int blocks) {
    std::fill_n(largest, blocks, 0u);
    std::fill_n(least, blocks, kAllZero);
    std::fill_n(signal, blocks, 0.0);
    std::fill_n(noise, blocks, 0.0);
    std::fill_n(cross, blocks, 0.0);
    std::fill_n(error, blocks, 0.0);
    std::fill_n(saturated, blocks, 0);
    std::fill_n(underflowed, blocks, 0);
  }
};

// Extremes and counts over the blocks of a span.
struct SpanSums {
  MxLanes max_error[kGroups];
  MxLaneBits underflowed[kGroups], relative[kGroups];
  SpanSums() { std::memset(this, 0, sizeof *this); }
};

// A span's elements, dequantized values and signed codes.
struct SpanView {
  const float* x;
  const float* values;
  const uint32_t* codes;
};

// Add an encoded piece of a block, all of it finite, to the block's and the span's totals. Sums are of values divided
// by 2^floor(log2(amax)), so neither tiny nor huge blocks leave binary32's range.
inline __attribute__((always_inline)) void measure(const SpanView& v, int n, uint32_t block_amax,
                                                   uint32_t magnitude_mask, float relative_bound, SpanSums& s,
                                                   Blocks& b, int block) {
  const float unit = mx_unit(block_amax);
  MxLanes signals[kGroups], noises[kGroups], crosses[kGroups], errors[kGroups];
  MxLaneBits leasts[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    MxLanes signal = {}, noise = {}, cross = {}, error = {}, max_error = s.max_error[g];
    MxLaneBits least = {}, underflowed = s.underflowed[g], relative = s.relative[g];
    auto add = [&](const MxLanes& x, const MxLanes& y, const MxLaneBits& code) __attribute__((always_inline)) {
      MxLanes difference = y - x;
      MxLanes xs = x * unit, ds = difference * unit;
      signal += xs * xs;
      noise += ds * ds;
      cross += xs * ds;
      error += ds;
      MxLanes distance = mx_float(mx_bits(difference) & 0x7FFFFFFFu);
      MxLaneBits bits = mx_bits(x) & 0x7FFFFFFFu, rest = 0u - bits;
      max_error = distance > max_error ? distance : max_error;
      least = rest > least ? rest : least;
      MxLaneBits zero_code = (MxLaneBits)((code & magnitude_mask) == 0u);
      underflowed -= zero_code & (MxLaneBits)(bits != 0u);
      relative |= (MxLaneBits)(distance > mx_float(bits) * relative_bound) & ~zero_code;
    };
    int i = g * kLanes;
    for (; i + kLanes <= n; i += kPartial) {
      MxLanes x, y;
      MxLaneBits code;
      std::memcpy(&x, v.x + i, sizeof x);
      std::memcpy(&y, v.values + i, sizeof y);
      std::memcpy(&code, v.codes + i, sizeof code);
      add(x, y, code);
    }
    if (i < n) {
      MxLanes x = {}, y = {};
      MxLaneBits code = {};
      for (int k = 0; k < n - i; ++k) {
        x[k] = v.x[i + k];
        y[k] = v.values[i + k];
        code[k] = v.codes[i + k];
      }
      add(x, y, code);
    }
    signals[g] = signal;
    noises[g] = noise;
    crosses[g] = cross;
    errors[g] = error;
    leasts[g] = least;
    s.max_error[g] = max_error;
    s.underflowed[g] = underflowed;
    s.relative[g] = relative;
  }
  const double back = 1.0 / double(unit);
  b.signal[block] += double(sum(signals)) * back * back;
  b.noise[block] += double(sum(noises)) * back * back;
  b.cross[block] += double(sum(crosses)) * back * back;
  b.error[block] += double(sum(errors)) * back;
  b.least[block] = std::max(b.least[block], largest(leasts));
}

// ------------------------------------------------------------------------------------------------------- thread totals

struct Sums {
  double signal = 0, noise = 0, cross = 0, error = 0;

  Sums& operator+=(const Sums& other) {
    signal += other.signal;
    noise += other.noise;
    cross += other.cross;
    error += other.error;
    return *this;
  }
};

// Sums over a chunk's blocks in the order of 256 GPU threads: block i is added to sum i % 256, groups of 32 neighbors
// are reduced by halves, and their sums are added in order.
struct ChunkSums {
  static constexpr int kSums = 256, kNeighbours = 32;
  Sums sums[kSums];
  int64_t first = 0;  // the chunk's first block

  void begin(int64_t block) {
    std::fill_n(sums, kSums, Sums());
    first = block;
  }

  Sums& of(int64_t block) { return sums[(block - first) % kSums]; }

  Sums total() {
    Sums all;
    for (int at = 0; at < kSums; at += kNeighbours) {
      for (int apart = kNeighbours / 2; apart > 0; apart /= 2)
        for (int i = at; i < at + apart; ++i) sums[i] += sums[i + apart];
      if (at == 0) all = sums[0];
      else all += sums[at];
    }
    return all;
  }
};

inline int ratio_bin(double ratio, int fraction_bits, int lowest, int bins) {
  int64_t bits;
  std::memcpy(&bits, &ratio, 8);
  return int(mx_ratio_bin(bits, 52, 1023, fraction_bits, lowest, bins));
}

// A thread's counts; they can be merged in any order.
struct Counts {
  MxStats stats{};
  uint32_t byte_counts[4][kCodeBins] = {};  // four, so that equal neighboring codes do not stall on the previous store
  int64_t pending = 0;
  float max_abs = 0, max_rel = 0;
  uint32_t amax = 0;

  Counts() {
    stats.first_nonfinite = -1;
    stats.min_block_sqnr = stats.min_block_range = -1;
  }

  // Count bytes with one code each, or two 4-bit codes each (`pairs`, the same in all calls).
  void count_bytes(const uint8_t* bytes, int n, bool pairs) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
      ++byte_counts[0][bytes[i]];
      ++byte_counts[1][bytes[i + 1]];
      ++byte_counts[2][bytes[i + 2]];
      ++byte_counts[3][bytes[i + 3]];
    }
    for (; i < n; ++i) ++byte_counts[0][bytes[i]];
    if ((pending += n) > int64_t(1) << 30) flush_bytes(pairs);
  }

  void flush_bytes(bool pairs) {
    for (int c = 0; c < kCodeBins; ++c)
      for (auto& table : byte_counts) {
        stats.code_bins[pairs ? c & 0xF : c] += table[c];
        if (pairs) stats.code_bins[c >> 4] += table[c];
        table[c] = 0;
      }
    pending = 0;
  }

  // Merge a finished span's extremes and counts.
  void add_span(const SpanView& v, int n, const SpanSums& s) {
    max_abs = std::max(max_abs, largest(s.max_error));
    const uint32_t underflowed = total(s.underflowed);
    stats.underflowed += underflowed;
    // An underflowed element has relative error 1; other relative errors are divided only if one may exceed the largest
    // so far.
    if (underflowed) max_rel = std::max(max_rel, 1.0f);
    if (largest(s.relative))
      for (int k = 0; k < n; ++k)
        if (float magnitude = std::fabs(v.x[k]); magnitude > 0)
          max_rel = std::max(max_rel, std::fabs(v.values[k] - v.x[k]) / magnitude);
  }

  void add_worst(double noise, int64_t block) {
    auto worse = [](const MxWorst& a, const MxWorst& b) {
      return a.noise != b.noise ? a.noise > b.noise : a.block < b.block;
    };
    const MxWorst candidate{noise, block};
    int64_t& count = stats.worst_count;
    if (count == kWorst && !worse(candidate, stats.worst[kWorst - 1])) return;
    int64_t at = count < kWorst ? count++ : kWorst - 1;
    for (; at > 0 && worse(candidate, stats.worst[at - 1]); --at) stats.worst[at] = stats.worst[at - 1];
    stats.worst[at] = candidate;
  }

  void count_nonfinite(uint32_t bits, int64_t at) {
    ++(bits == MX_INFINITY_BITS ? stats.infinite : stats.nan);
    if (stats.first_nonfinite < 0 || at < stats.first_nonfinite) stats.first_nonfinite = at;
  }

  // Count the finished blocks 0..n of `b`, blocks first..first+n of the grid.
  void add_blocks(const Blocks& b, int n, int64_t first, bool narrow_scales, const MxFloat& scale, ChunkSums& sums) {
    alignas(64) double ratio[kStripe], range[kStripe];
    for (int i = 0; i < n; ++i) {
      ratio[i] = b.signal[i] / b.noise[i];
      range[i] = double(mx_float(b.largest[i])) / double(mx_float(0u - b.least[i]));
    }
    stats.blocks += n;
    for (int i = 0; i < n; ++i) {
      const uint32_t decode = narrow_scales ? mx_bits(mx_decode(b.stored[i], scale)) : mx_bits(b.decode[i]);
      ++stats.scale_bins[b.is_nan[i] ? kScaleBins - 1 : int(decode >> 23 & 0xFF)];
      if (b.is_nan[i]) {
        ++stats.nan_blocks;
        continue;
      }
      sums.of(first + i) += {b.signal[i], b.noise[i], b.cross[i], b.error[i]};
      stats.saturated += b.saturated[i];
      stats.saturated_blocks += b.saturated[i] > 0;
      stats.scale_underflowed_blocks += b.is_lost[i];
      ++stats.block_code_bins[b.top_code[i]];
      amax = std::max(amax, b.largest[i]);
      if (b.least[i] == kAllZero) {
        stats.zero_blocks += b.amax[i] == 0;
        continue;
      }
      ++stats.range_bins[ratio_bin(range[i], MX_RANGE_BITS, MX_RANGE_LOWEST, kRangeBins)];
      if (stats.min_block_range < 0 || range[i] < stats.min_block_range) stats.min_block_range = range[i];
      if (b.noise[i] > 0) {
        ++stats.sqnr_bins[ratio_bin(ratio[i], MX_SQNR_BITS, MX_SQNR_LOWEST, kSqnrBins - 1)];
        if (stats.min_block_sqnr < 0 || ratio[i] < stats.min_block_sqnr) stats.min_block_sqnr = ratio[i];
        if (stats.worst_count < kWorst || b.noise[i] >= stats.worst[kWorst - 1].noise) add_worst(b.noise[i], first + i);
      } else {
        ++stats.sqnr_bins[kSqnrBins - 1];
      }
    }
  }

  // Add this thread's counts to `s`; sums are added by the caller, in the order of chunks.
  void merge_into(MxStats& s) const {
    static constexpr int64_t MxStats::* counters[] = {&MxStats::blocks,
                                                      &MxStats::zero_blocks,
                                                      &MxStats::nan_blocks,
                                                      &MxStats::saturated,
                                                      &MxStats::saturated_blocks,
                                                      &MxStats::underflowed,
                                                      &MxStats::scale_underflowed_blocks,
                                                      &MxStats::nan,
                                                      &MxStats::infinite,
                                                      &MxStats::measured};
    for (auto counter : counters) s.*counter += stats.*counter;
    auto add_bins = [](int64_t* a, const int64_t* b, int n) {
      for (int i = 0; i < n; ++i) a[i] += b[i];
    };
    add_bins(s.scale_bins, stats.scale_bins, kScaleBins);
    add_bins(s.code_bins, stats.code_bins, kCodeBins);
    add_bins(s.block_code_bins, stats.block_code_bins, kCodeBins);
    add_bins(s.sqnr_bins, stats.sqnr_bins, kSqnrBins);
    add_bins(s.range_bins, stats.range_bins, kRangeBins);
    s.amax = std::max(s.amax, double(mx_float(amax)));
    s.max_abs_error = std::max(s.max_abs_error, double(max_abs));
    s.max_rel_error = std::max(s.max_rel_error, double(max_rel));
    auto least = [](double& a, double b) {
      if (b >= 0 && (a < 0 || b < a)) a = b;
    };
    least(s.min_block_sqnr, stats.min_block_sqnr);
    least(s.min_block_range, stats.min_block_range);
    if (stats.first_nonfinite >= 0 && (s.first_nonfinite < 0 || stats.first_nonfinite < s.first_nonfinite))
      s.first_nonfinite = stats.first_nonfinite;
  }
};

}  // namespace
}  // namespace MXCLI_ISA

#endif
