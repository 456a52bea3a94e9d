// CPU loops over blocks: loads, stores, threads and totals. All arithmetic on values is numerics.h's.
// Compiled once per instruction set (MXCLI_ISA names the build's namespace); inner loops are written for the
// compiler's vectorizer: fixed trip counts, no branches, selections instead.
#include "quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#ifndef MXCLI_ISA
#define MXCLI_ISA baseline
#endif

namespace MXCLI_ISA {
namespace {

constexpr int kStripe = 512;             // elements of a row handled at once; they stay in the first-level cache
constexpr int kWidestStripe = 2048;      // enough for lcm(block columns, 4)
constexpr int64_t kChunk = int64_t(1) << 16;  // elements a thread takes at once
constexpr int kLanes = 16;               // partial sums per total, whatever the vector width: same sums on every machine

// ------------------------------------------------------------------------------------------------------------- loads

inline float from_f16(uint16_t half) {
  // Exponent and fraction move into place; 2^112 corrects the bias and normalizes subnormals exactly.
  float magnitude = mx_float(uint32_t(half & 0x7FFF) << 13) * 0x1p112f;
  uint32_t bits = mx_bits(magnitude);
  bits = (half & 0x7C00) == 0x7C00 ? (bits | MX_INFINITY_BITS) : bits;
  return mx_float(bits | uint32_t(half & 0x8000) << 16);
}

template <class Source>
inline void load_as(const Source* source, int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] = float(source[i]);
}

inline void load_bf16(const uint16_t* source, int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] = mx_float(uint32_t(source[i]) << 16);
}

inline void load_f16(const uint16_t* source, int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] = from_f16(source[i]);
}

inline void load(const MxTensor& t, int64_t at, int n, float* x) {
  switch (t.type) {
    case MX_F32: std::memcpy(x, static_cast<const float*>(t.data) + at, size_t(n) * 4); break;
    case MX_BF16: load_bf16(static_cast<const uint16_t*>(t.data) + at, n, x); break;
    case MX_F16: load_f16(static_cast<const uint16_t*>(t.data) + at, n, x); break;
    case MX_F64: load_as(static_cast<const double*>(t.data) + at, n, x); break;
  }
}

inline void clear_negative_zeros(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = x[i] + 0.0f;
}

template <int N>
inline uint32_t amax_bits(const float* x, int n) {
  uint32_t largest = 0;
  const int count = N ? N : n;
  for (int i = 0; i < count; ++i) {
    uint32_t bits = mx_bits(x[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// ------------------------------------------------------------------------------------------------------------ stores

inline void pack4(const uint8_t* codes, int n, uint8_t* out) {
  const int pairs = n / 2;
  for (int i = 0; i < pairs; ++i) out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
  if (n & 1) out[pairs] = codes[n - 1];
}

inline void pack6(const uint8_t* codes, int n, uint8_t* out) {
  for (int i = 0; i < n; i += 4) {
    uint32_t word = 0;
    for (int k = 0; k < 4 && i + k < n; ++k) word |= uint32_t(codes[i + k]) << (6 * k);
    *out++ = uint8_t(word);
    *out++ = uint8_t(word >> 8);
    *out++ = uint8_t(word >> 16);
  }
}

int64_t packed_bytes(int64_t columns, int bits) {
  return bits == 4 ? (columns + 1) / 2 : bits == 6 ? (columns + 3) / 4 * 3 : columns;
}

inline void store_codes(const uint8_t* codes, int n, int bits, uint8_t* out) {
  if (bits == 4) pack4(codes, n, out);
  else if (bits == 6) pack6(codes, n, out);
  else std::memcpy(out, codes, size_t(n));
}

// ------------------------------------------------------------------------------------------------------------ encode

// Everything known about one row piece after encoding; `values` and `arguments` are filled when statistics are wanted.
struct Piece {
  alignas(64) float x[kWidestStripe];
  alignas(64) float arguments[kWidestStripe];  // scaled magnitudes
  alignas(64) float values[kWidestStripe];     // dequantized
  alignas(64) uint8_t magnitudes[kWidestStripe];
  alignas(64) uint8_t codes[kWidestStripe];
};

struct Mode {
  bool divides, quotient_bf16, plain;  // plain: nearest-even, no rule for the sign of zero
};

Mode mode_of(const MxRecipe& r) {
  Mode m;
  bool mantissa = r.scale_kind != MX_POWER_OF_TWO;
  m.quotient_bf16 = mantissa && r.element_step == MX_ELEMENT_OVER_PRODUCT_BF16;
  m.divides = mantissa && (m.quotient_bf16 || r.element_step == MX_ELEMENT_OVER_PRODUCT ||
                           r.element_step == MX_ELEMENT_OVER_QUOTIENT);
  bool nearest_even = r.rounding.above == 0.5f && r.rounding.half_if == 1 && r.rounding.half_always == 0;
  m.plain = nearest_even && !m.quotient_bf16 && !r.clear_zero_code && !r.set_zero_code;
  return m;
}

template <int N, bool Divides, bool Plain, bool Stats>
inline void encode_block(const float* x, int n, const MxScale& scale, const MxRecipe& r, bool quotient_bf16,
                         float* arguments, float* values, uint8_t* magnitudes, uint8_t* codes) {
  const int count = N ? N : n;
  const int m = r.element.mantissa_bits, emin = r.element.emin, bits = r.element.bits, twos = r.element.twos_complement;
  const float max = r.element.max, factor = scale.factor, decode = scale.decode;
  for (int i = 0; i < count; ++i) {
    float argument = Divides ? x[i] / factor : x[i] * factor;
    if (!Plain && quotient_bf16) argument = mx_round_to_bf16(argument);
    float magnitude = mx_float(mx_bits(argument) & 0x7FFFFFFFu);
    uint32_t negative = mx_bits(argument) >> 31;
    MxRounded rounded = Plain ? mx_encode_nearest_even(magnitude, m, emin, max)
                              : mx_encode(magnitude, m, emin, max, r.rounding);
    uint32_t sign = Plain ? negative : mx_sign_of_zero(rounded.code, negative, r.clear_zero_code, r.set_zero_code);
    codes[i] = uint8_t(mx_signed_code(rounded.code, sign, bits, twos));
    if (Stats) {
      arguments[i] = magnitude;
      magnitudes[i] = uint8_t(rounded.code);
      values[i] = mx_float(mx_bits(rounded.value) | negative << 31) * decode;
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ totals

struct BlockTotals {
  double signal = 0, noise = 0, cross = 0, error = 0;
  int64_t measured = 0;
  uint32_t least = 0xFFFFFFFFu;  // bits of the smallest nonzero magnitude, minus one
  uint32_t max_code = 0;
  int32_t saturated = 0, underflowed = 0;
};

struct Sums {
  double signal = 0, noise = 0, cross = 0, error = 0;
  void add(const BlockTotals& b) {
    signal += b.signal;
    noise += b.noise;
    cross += b.cross;
    error += b.error;
  }
};

// A thread's own counts; merging them in any order gives the same.
struct Counts {
  MxStats stats{};
  uint32_t code_counts[4][kCodeBins] = {};  // four, so that equal neighbours do not wait for each other's store
  int64_t pending = 0;
  float max_abs = 0, max_rel = 0;
  uint32_t amax = 0;

  Counts() {
    stats.first_nonfinite = -1;
    stats.min_block_sqnr = -1;
    stats.min_block_range = -1;
  }

  void count_codes(const uint8_t* codes, int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
      ++code_counts[0][codes[i]];
      ++code_counts[1][codes[i + 1]];
      ++code_counts[2][codes[i + 2]];
      ++code_counts[3][codes[i + 3]];
    }
    for (; i < n; ++i) ++code_counts[0][codes[i]];
    if ((pending += n) > int64_t(1) << 30) flush_codes();
  }

  void flush_codes() {
    for (int c = 0; c < kCodeBins; ++c)
      for (auto& table : code_counts) {
        stats.code_bins[c] += table[c];
        table[c] = 0;
      }
    pending = 0;
  }

  void add_worst(double noise, int64_t block) {
    auto worse = [](const MxWorst& a, const MxWorst& b) { return a.noise != b.noise ? a.noise > b.noise : a.block < b.block; };
    MxWorst candidate{noise, block};
    int64_t& count = stats.worst_count;
    if (count == kWorst && !worse(candidate, stats.worst[kWorst - 1])) return;
    int64_t at = count < kWorst ? count++ : kWorst - 1;
    for (; at > 0 && worse(candidate, stats.worst[at - 1]); --at) stats.worst[at] = stats.worst[at - 1];
    stats.worst[at] = candidate;
  }

  void see_nonfinite(int64_t at) {
    if (stats.first_nonfinite < 0 || at < stats.first_nonfinite) stats.first_nonfinite = at;
  }
};

// Bin of a positive ratio: its binade and the top bits of its fraction, from the bits alone.
inline int ratio_bin(double ratio, int fraction_bits, int lowest_exponent, int bins) {
  uint64_t bits;
  std::memcpy(&bits, &ratio, 8);
  int64_t bin = int64_t(bits >> (52 - fraction_bits)) - (int64_t(1023 + lowest_exponent) << fraction_bits);
  return int(std::clamp<int64_t>(bin, 0, bins - 1));
}

inline float fold(float* lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// Adds one encoded row piece (all of it finite) to its block's totals. Sums are taken of values divided by the power of
// two under the block's amax, so that neither tiny nor huge blocks leave binary32's range.
template <int N>
inline void measure(const float* x, const float* arguments, const float* values, const uint8_t* magnitudes, int n,
                    uint32_t block_amax, float element_max, BlockTotals& b, Counts& counts) {
  const int whole = (N ? N : n) / kLanes * kLanes, count = N ? N : n;
  int exponent = std::clamp(int(block_amax >> 23) - 127, -126, 126);
  const float unit = mx_power_of_two(-exponent);
  alignas(64) float signal[kLanes] = {}, noise[kLanes] = {}, cross[kLanes] = {}, error[kLanes] = {};
  alignas(64) float worst[kLanes] = {}, relative[kLanes] = {};
  alignas(64) uint32_t saturated[kLanes] = {}, underflowed[kLanes] = {}, least[kLanes], largest[kLanes] = {};
  for (auto& lane : least) lane = 0xFFFFFFFFu;
  auto step = [&](int i, int l) {
    float difference = values[i] - x[i];
    float xs = x[i] * unit, ds = difference * unit;
    signal[l] += xs * xs;
    noise[l] += ds * ds;
    cross[l] += xs * ds;
    error[l] += ds;
    float off = mx_float(mx_bits(difference) & 0x7FFFFFFFu);
    uint32_t bits = mx_bits(x[i]) & 0x7FFFFFFFu;
    float ratio = off / mx_float(bits);  // 0 / 0 of a zero element compares false
    worst[l] = off > worst[l] ? off : worst[l];
    relative[l] = ratio > relative[l] ? ratio : relative[l];
    saturated[l] += arguments[i] > element_max ? 1u : 0u;
    uint32_t code = magnitudes[i];
    underflowed[l] += ((code == 0) & (bits != 0)) ? 1u : 0u;
    least[l] = bits - 1u < least[l] ? bits - 1u : least[l];
    largest[l] = code > largest[l] ? code : largest[l];
  };
  for (int i = 0; i < whole; i += kLanes)
    for (int l = 0; l < kLanes; ++l) step(i + l, l);
  for (int i = whole; i < count; ++i) step(i, i - whole);

  const double back = double(mx_power_of_two(exponent));
  b.signal += double(fold(signal)) * back * back;
  b.noise += double(fold(noise)) * back * back;
  b.cross += double(fold(cross)) * back * back;
  b.error += double(fold(error)) * back;
  b.measured += count;
  uint32_t saturated_sum = 0, underflowed_sum = 0;
  for (int l = 0; l < kLanes; ++l) {
    saturated_sum += saturated[l];
    underflowed_sum += underflowed[l];
    b.least = least[l] < b.least ? least[l] : b.least;
    b.max_code = largest[l] > b.max_code ? largest[l] : b.max_code;
    counts.max_abs = worst[l] > counts.max_abs ? worst[l] : counts.max_abs;
    counts.max_rel = relative[l] > counts.max_rel ? relative[l] : counts.max_rel;
  }
  b.saturated += int32_t(saturated_sum);
  b.underflowed += int32_t(underflowed_sum);
}

// ------------------------------------------------------------------------------------------------------------ driver

struct Job {
  const MxRecipe& r;
  const MxTensor& x;
  MxResult& result;
  MxTensorScale tensor_scale;
  Mode mode;
  int64_t block_rows, block_columns;    // resolved: 0 became the whole length
  int64_t grid_rows, grid_columns;      // per batch entry
  int64_t row_bytes;
  bool whole;                           // one block: the tensor, its amax known beforehand
  uint32_t whole_amax;
  std::unique_ptr<Sums[]> chunk_sums;

  const MxScale scale_of(uint32_t bits) const { return mx_choose_scale(bits, tensor_scale, r); }
};

// One thread's buffers.
struct Worker {
  Piece piece;
  Counts counts;
};

// A row piece inside blocks `first_block...` of `block_columns` each (or inside one block when it is wider).
struct Span {
  int64_t row;      // over all batch entries
  int64_t column;
  int width;
  int64_t at(const Job& job) const { return row * job.x.columns + column; }
};

template <int N, bool Divides, bool Plain, bool Stats>
void encode_span(const Job& job, Worker& w, const Span& span, const uint32_t* amaxes, const MxScale* scales,
                 BlockTotals* totals, int64_t block_width) {
  Piece& p = w.piece;
  int done = 0;
  for (int b = 0; done < span.width; ++b) {
    const int n = int(std::min<int64_t>(block_width, span.width - done));
    const MxScale& scale = scales[b];
    if (scale.is_nan) {
      std::memset(p.codes + done, job.r.element.nan_code, size_t(n));
      if (Stats)
        for (int i = 0; i < n; ++i) {
          uint32_t bits = mx_bits(p.x[done + i]) & 0x7FFFFFFFu;
          if (bits < MX_INFINITY_BITS) continue;
          ++(bits == MX_INFINITY_BITS ? w.counts.stats.infinite : w.counts.stats.nan);
          w.counts.see_nonfinite(span.at(job) + done + i);
        }
    } else {
      float* x = p.x + done;
      float *arguments = p.arguments + done, *values = p.values + done;
      uint8_t *magnitudes = p.magnitudes + done, *codes = p.codes + done;
      auto encode = [&](auto size) {
        encode_block<decltype(size)::value, Divides, Plain, Stats>(x, n, scale, job.r, job.mode.quotient_bf16, arguments,
                                                                   values, magnitudes, codes);
      };
      auto count = [&](auto size) {
        measure<decltype(size)::value>(x, arguments, values, magnitudes, n, amaxes[b], job.r.element.max, totals[b],
                                       w.counts);
      };
      if (N && n == N) encode(std::integral_constant<int, N>());
      else encode(std::integral_constant<int, 0>());
      if (Stats) {
        w.counts.count_codes(codes, n);
        uint32_t amax = amaxes[b];
        if (amax >= MX_INFINITY_BITS) {  // infinities saturate; they are counted, not measured
          amax = 0;
          for (int i = 0; i < n; ++i) {
            uint32_t bits = mx_bits(x[i]) & 0x7FFFFFFFu;
            if (bits < MX_INFINITY_BITS) {
              amax = std::max(amax, bits);
              continue;
            }
            ++w.counts.stats.infinite;
            --totals[b].measured;
            w.counts.see_nonfinite(span.at(job) + done + i);
            x[i] = values[i] = arguments[i] = 0.0f;
          }
          measure<0>(x, arguments, values, magnitudes, n, amax, job.r.element.max, totals[b], w.counts);
        } else if (N && n == N) {
          count(std::integral_constant<int, N>());
        } else {
          count(std::integral_constant<int, 0>());
        }
        w.counts.amax = std::max(w.counts.amax, amax);
      }
    }
    done += n;
  }
  if (job.result.codes)
    store_codes(p.codes, span.width, job.r.stored_bits,
                job.result.codes + span.row * job.row_bytes + packed_bytes(span.column, job.r.stored_bits));
}

// Squared error of a block piece under an exponent, in binary64, element after element.
double squared_error(const float* x, int n, int exponent, const MxRecipe& r) {
  MxScale scale = mx_power_of_two_scale(exponent, r);
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    float magnitude = mx_float(mx_bits(x[i]) & 0x7FFFFFFFu);
    if (magnitude > MX_FLT_MAX) continue;
    float value = mx_encode(magnitude * scale.factor, r.element.mantissa_bits, r.element.emin, r.element.max, r.rounding).value;
    double difference = double(value * scale.decode) - double(magnitude);
    sum += difference * difference;
  }
  return sum;
}

int64_t block_index(const Job& job, int64_t block_row, int64_t block_column) {
  return job.whole ? 0 : block_row * job.grid_columns + block_column;
}

void store_scale(const Job& job, int64_t block, const MxScale& scale) {
  if (!job.result.scales) return;
  if (job.r.scale_stored_bits == 32) static_cast<uint32_t*>(job.result.scales)[block] = scale.stored;
  else static_cast<uint8_t*>(job.result.scales)[block] = uint8_t(scale.stored);
}

// A finished block's share of the totals.
void finish_block(const Job& job, Worker& w, int64_t block, uint32_t amax, const MxScale& scale, const BlockTotals& b,
                  Sums& sums) {
  const MxPerBlock& per = job.result.per_block;
  if (per.amax) per.amax[block] = mx_float(amax);
  if (per.decode) per.decode[block] = scale.decode;
  if (per.saturated) per.saturated[block] = b.saturated;
  if (per.underflowed) per.underflowed[block] = b.underflowed;
  if (per.noise) per.noise[block] = b.noise;
  if (!job.result.stats) return;

  MxStats& s = w.counts.stats;
  ++s.blocks;
  uint32_t decode = job.r.scale_kind == MX_MINIFLOAT ? mx_bits(mx_decode(scale.stored, job.r.scale)) : mx_bits(scale.decode);
  ++s.scale_bins[scale.is_nan ? kScaleBins - 1 : int(decode >> 23 & 0xFF)];
  if (scale.is_nan) {
    ++s.nan_blocks;
    return;
  }
  sums.add(b);
  s.measured += b.measured;
  s.saturated += b.saturated;
  s.underflowed += b.underflowed;
  s.saturated_blocks += b.saturated > 0;
  s.scale_underflowed_blocks += scale.is_lost;
  ++s.block_code_bins[b.max_code];
  if (amax == 0) {
    ++s.zero_blocks;
    return;
  }
  if (b.least != 0xFFFFFFFFu) {
    double range = double(mx_float(std::min(amax, MX_INFINITY_BITS - 1u))) / double(mx_float(b.least + 1u));
    ++s.range_bins[ratio_bin(range, 2, 0, kRangeBins)];
    if (s.min_block_range < 0 || range < s.min_block_range) s.min_block_range = range;
  }
  if (b.noise > 0) {
    double ratio = b.signal / b.noise;
    ++s.sqnr_bins[ratio_bin(ratio, 4, -16, kSqnrBins - 1)];
    if (s.min_block_sqnr < 0 || ratio < s.min_block_sqnr) s.min_block_sqnr = ratio;
    w.counts.add_worst(b.noise, block);
  } else {
    ++s.sqnr_bins[kSqnrBins - 1];
  }
}

template <int N, bool Divides, bool Plain, bool Stats>
struct Loops {
  // Loads a span, with what the recipe does to inputs before anything else.
  static void load_span(const Job& job, Worker& w, const Span& span) {
    load(job.x, span.at(job), span.width, w.piece.x);
    if (job.r.clear_zero_input) clear_negative_zeros(w.piece.x, span.width);
  }

  static Span span_at(int64_t row, int64_t column, int64_t end) {
    return {row, column, int(std::min<int64_t>(kStripe, end - column))};
  }

  // Lets rules with candidates choose; the block is rows x [column, end).
  static MxScale choose(const Job& job, Worker& w, uint32_t amax, int64_t row, int64_t rows, int64_t column, int64_t end) {
    MxScale scale = job.scale_of(amax);
    if (job.r.candidate_count == 0 || scale.is_nan || amax >= MX_INFINITY_BITS) return scale;
    const int exponent = mx_scale_exponent(amax, job.r);
    double best = -1;
    int chosen = exponent;
    for (int c = 0; c < job.r.candidate_count; ++c) {
      int candidate = std::clamp(exponent + job.r.candidates[c], job.r.min_exponent, 127);
      double error = 0;
      for (int64_t i = row; i < row + rows; ++i)
        for (int64_t at = column; at < end; at += kStripe) {
          Span span = span_at(i, at, end);
          load_span(job, w, span);
          error += squared_error(w.piece.x, span.width, candidate, job.r);
        }
      if (best < 0 || error < best || (error == best && candidate > chosen)) {
        best = error;
        chosen = candidate;
      }
    }
    return mx_power_of_two_scale(chosen, job.r);
  }

  static uint32_t flushed(const Job& job, uint32_t amax) {
    return job.r.flush_subnormal_blocks && amax < 0x00800000u ? 0u : amax;
  }

  // Blocks that fit a stripe: all blocks of rows x [column, end), `end - column` at most one stripe.
  static void narrow(const Job& job, Worker& w, int64_t block_row, int64_t row, int64_t rows, int64_t column, int64_t end,
                     Sums& sums) {
    const int64_t width = job.block_columns;
    const int blocks = int((end - column + width - 1) / width);
    uint32_t amaxes[kWidestStripe] = {};
    MxScale scales[kWidestStripe];
    BlockTotals totals[Stats ? kWidestStripe : 1];
    Span span{row, column, int(end - column)};
    for (span.row = row; span.row < row + rows; ++span.row) {
      load_span(job, w, span);
      for (int b = 0; b < blocks; ++b) {
        const int n = int(std::min(width, end - column - b * width));
        const float* x = w.piece.x + b * width;
        uint32_t bits = N && n == N ? amax_bits<N>(x, n) : amax_bits<0>(x, n);
        amaxes[b] = std::max(amaxes[b], bits);
      }
    }
    for (int b = 0; b < blocks; ++b) {
      amaxes[b] = flushed(job, amaxes[b]);
      scales[b] = job.r.candidate_count == 0
                      ? job.scale_of(amaxes[b])
                      : choose(job, w, amaxes[b], row, rows, column + b * width, std::min(end, column + (b + 1) * width));
      store_scale(job, block_index(job, block_row, column / width + b), scales[b]);
    }
    for (span.row = row; span.row < row + rows; ++span.row) {
      if (rows > 1 || job.r.candidate_count || job.r.flush_subnormal_blocks) load_flushed(job, w, span, amaxes, width);
      encode_span<N, Divides, Plain, Stats>(job, w, span, amaxes, scales, totals, width);
    }
    if (Stats)
      for (int b = 0; b < blocks; ++b)
        finish_block(job, w, block_index(job, block_row, column / width + b), amaxes[b], scales[b], totals[b], sums);
  }

  // Loads a span again; where subnormal blocks are flushed, their elements are zeros from here on.
  static void load_flushed(const Job& job, Worker& w, const Span& span, const uint32_t* amaxes, int64_t width) {
    load_span(job, w, span);
    if (!job.r.flush_subnormal_blocks) return;
    for (int i = 0; i < span.width; ++i)
      if (amaxes[i / width] == 0) w.piece.x[i] = w.piece.x[i] * 0.0f;
  }

  // One block wider than a stripe: rows x [column, end).
  static void wide(const Job& job, Worker& w, int64_t block, int64_t row, int64_t rows, int64_t column, int64_t end,
                   Sums& sums) {
    uint32_t amax = 0;
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span = span_at(i, at, end);
        load_span(job, w, span);
        amax = std::max(amax, amax_bits<0>(w.piece.x, span.width));
      }
    amax = flushed(job, amax);
    MxScale scale = choose(job, w, amax, row, rows, column, end);
    store_scale(job, block, scale);
    BlockTotals totals;
    encode_wide(job, w, amax, scale, row, rows, column, end, totals);
    if (Stats) finish_block(job, w, block, amax, scale, totals, sums);
  }

  static void encode_wide(const Job& job, Worker& w, uint32_t amax, const MxScale& scale, int64_t row, int64_t rows,
                          int64_t column, int64_t end, BlockTotals& totals) {
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span = span_at(i, at, end);
        load_flushed(job, w, span, &amax, kStripe);
        encode_span<0, Divides, Plain, Stats>(job, w, span, &amax, &scale, &totals, span.width);
      }
  }
};

// Calls work(worker, chunk) for every chunk, on `threads` threads; returns their workers.
template <class State, class Work>
std::vector<std::unique_ptr<State>> run_chunks(int64_t chunks, int threads, const Work& work) {
  threads = int(std::clamp<int64_t>(threads, 1, std::max<int64_t>(chunks, 1)));
  std::vector<std::unique_ptr<State>> states;
  for (int t = 0; t < threads; ++t) states.emplace_back(new State);
  std::atomic<int64_t> next{0};
  auto loop = [&](State& state) {
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) work(state, chunk);
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back([&, t] { loop(*states[size_t(t)]); });
  loop(*states[0]);
  for (auto& thread : pool) thread.join();
  return states;
}

void merge(const Counts& c, MxStats& s) {
  const MxStats& p = c.stats;
  auto add = [](int64_t& a, int64_t b) { a += b; };
  add(s.blocks, p.blocks);
  add(s.zero_blocks, p.zero_blocks);
  add(s.nan_blocks, p.nan_blocks);
  add(s.saturated, p.saturated);
  add(s.saturated_blocks, p.saturated_blocks);
  add(s.underflowed, p.underflowed);
  add(s.scale_underflowed_blocks, p.scale_underflowed_blocks);
  add(s.nan, p.nan);
  add(s.infinite, p.infinite);
  add(s.measured, p.measured);
  for (int i = 0; i < kScaleBins; ++i) add(s.scale_bins[i], p.scale_bins[i]);
  for (int i = 0; i < kCodeBins; ++i) add(s.code_bins[i], p.code_bins[i]);
  for (int i = 0; i < kCodeBins; ++i) add(s.block_code_bins[i], p.block_code_bins[i]);
  for (int i = 0; i < kSqnrBins; ++i) add(s.sqnr_bins[i], p.sqnr_bins[i]);
  for (int i = 0; i < kRangeBins; ++i) add(s.range_bins[i], p.range_bins[i]);
  s.amax = std::max(s.amax, double(mx_float(c.amax)));
  s.max_abs_error = std::max(s.max_abs_error, double(c.max_abs));
  s.max_rel_error = std::max(s.max_rel_error, double(c.max_rel));
  auto least = [](double& a, double b) { if (b >= 0 && (a < 0 || b < a)) a = b; };
  least(s.min_block_sqnr, p.min_block_sqnr);
  least(s.min_block_range, p.min_block_range);
  if (p.first_nonfinite >= 0 && (s.first_nonfinite < 0 || p.first_nonfinite < s.first_nonfinite))
    s.first_nonfinite = p.first_nonfinite;
}

template <int N, bool Divides, bool Plain, bool Stats>
void quantize_blocks(Job& job, int threads) {
  using L = Loops<N, Divides, Plain, Stats>;
  const MxTensor& x = job.x;
  const int64_t rows = x.batch * x.rows;
  const int64_t block_rows_total = job.whole ? (rows + 15) / 16 : x.batch * job.grid_rows;  // whole: rows in slices of 16
  const bool is_wide = !job.whole && job.block_columns > kStripe;
  // Columns are cut into parts of whole stripes only where one row of blocks is more than a chunk.
  int64_t stripe = job.block_columns;
  while (!is_wide && !job.whole && stripe % 4) stripe *= 2;
  if (!is_wide && !job.whole) stripe *= std::max<int64_t>(1, kStripe / stripe);
  const int64_t unit_rows = job.whole ? std::min<int64_t>(16, rows) : job.block_rows;
  int64_t part = x.columns;
  if (job.whole) part = std::max<int64_t>(kStripe, std::min(x.columns, kChunk / std::max<int64_t>(1, unit_rows) / kStripe * kStripe));
  else if (!is_wide && unit_rows * x.columns > kChunk) part = std::max<int64_t>(1, kChunk / unit_rows / stripe) * stripe;
  else if (is_wide) part = (kChunk / unit_rows / job.block_columns + 1) * job.block_columns;
  const int64_t parts = std::max<int64_t>(1, (x.columns + part - 1) / part);
  const int64_t per_chunk = parts > 1 ? 1 : std::max<int64_t>(1, kChunk / std::max<int64_t>(1, unit_rows * x.columns));
  const int64_t chunks = parts > 1 ? block_rows_total * parts : (block_rows_total + per_chunk - 1) / per_chunk;
  job.chunk_sums.reset(new Sums[size_t(std::max<int64_t>(chunks, 1))]);
  std::unique_ptr<BlockTotals[]> whole_totals(job.whole ? new BlockTotals[size_t(std::max<int64_t>(chunks, 1))] : nullptr);
  MxScale whole_scale{};
  if (job.whole) {
    std::unique_ptr<Worker> w(new Worker);
    whole_scale = L::choose(job, *w, job.whole_amax, 0, rows, 0, x.columns);
  }

  auto states = run_chunks<Worker>(chunks, threads, [&](Worker& w, int64_t chunk) {
    Sums& sums = job.chunk_sums[size_t(chunk)];
    const int64_t first = parts > 1 ? chunk / parts : chunk * per_chunk;
    const int64_t last = std::min(block_rows_total, first + per_chunk);
    const int64_t column = parts > 1 ? chunk % parts * part : 0, end = std::min(x.columns, column + part);
    for (int64_t block_row = first; block_row < last; ++block_row) {
      if (job.whole) {
        const int64_t row = block_row * 16, count = std::min<int64_t>(16, rows - row);
        L::encode_wide(job, w, job.whole_amax, whole_scale, row, count, column, end, whole_totals[size_t(chunk)]);
        continue;
      }
      const int64_t in_batch = block_row % job.grid_rows * job.block_rows;
      const int64_t row = block_row / job.grid_rows * x.rows + in_batch;
      const int64_t count = std::min(job.block_rows, x.rows - in_batch);
      if (is_wide) {
        for (int64_t at = column; at < end; at += job.block_columns)
          L::wide(job, w, block_index(job, block_row, at / job.block_columns), row, count, at,
                  std::min(end, at + job.block_columns), sums);
      } else {
        for (int64_t at = column; at < end; at += stripe)
          L::narrow(job, w, block_row, row, count, at, std::min(end, at + stripe), sums);
      }
    }
  });

  if (job.whole) {
    store_scale(job, 0, whole_scale);
    BlockTotals total;
    for (int64_t c = 0; c < chunks; ++c) {
      const BlockTotals& b = whole_totals[size_t(c)];
      total.signal += b.signal;
      total.noise += b.noise;
      total.cross += b.cross;
      total.error += b.error;
      total.measured += b.measured;
      total.least = std::min(total.least, b.least);
      total.max_code = std::max(total.max_code, b.max_code);
      total.saturated += b.saturated;
      total.underflowed += b.underflowed;
    }
    if (Stats && rows > 0 && x.columns > 0)
      finish_block(job, *states[0], 0, job.whole_amax, whole_scale, total, job.chunk_sums[0]);
  }
  if (!Stats) return;

  MxStats& s = *job.result.stats;
  s = MxStats{};
  s.first_nonfinite = -1;
  s.min_block_sqnr = s.min_block_range = -1;
  s.elements = rows * x.columns;
  Counts best;
  for (auto& state : states) {
    state->counts.flush_codes();
    merge(state->counts, s);
    for (int64_t i = 0; i < state->counts.stats.worst_count; ++i)
      best.add_worst(state->counts.stats.worst[i].noise, state->counts.stats.worst[i].block);
  }
  s.worst_count = best.stats.worst_count;
  std::copy(best.stats.worst, best.stats.worst + kWorst, s.worst);
  for (int64_t c = 0; c < chunks; ++c) {
    s.signal += job.chunk_sums[size_t(c)].signal;
    s.noise += job.chunk_sums[size_t(c)].noise;
    s.cross += job.chunk_sums[size_t(c)].cross;
    s.error += job.chunk_sums[size_t(c)].error;
  }
}

template <int N, bool Stats>
void quantize_mode(Job& job, int threads) {
  if (!job.mode.plain) {
    if (job.mode.divides) quantize_blocks<0, true, false, Stats>(job, threads);
    else quantize_blocks<0, false, false, Stats>(job, threads);
  } else if (job.mode.divides) {
    quantize_blocks<N, true, true, Stats>(job, threads);
  } else {
    quantize_blocks<N, false, true, Stats>(job, threads);
  }
}

template <bool Stats>
void quantize_width(Job& job, int threads) {
  if (job.block_columns == 16) quantize_mode<16, Stats>(job, threads);
  else if (job.block_columns == 32) quantize_mode<32, Stats>(job, threads);
  else if (job.block_columns == 128) quantize_mode<128, Stats>(job, threads);
  else quantize_mode<0, Stats>(job, threads);
}

// ------------------------------------------------------------------------------------------------- the four functions

struct AmaxState {
  alignas(64) float x[kStripe];
  uint32_t amax = 0;
  int64_t nonfinite = 0, first = -1;
};

float amax(const MxTensor* t, int threads, int64_t* nonfinite, int64_t* first_nonfinite) {
  const int64_t n = t->batch * t->rows * t->columns;
  auto states = run_chunks<AmaxState>((n + kChunk - 1) / kChunk, threads, [&](AmaxState& s, int64_t chunk) {
    for (int64_t at = chunk * kChunk, end = std::min(n, at + kChunk); at < end; at += kStripe) {
      const int count = int(std::min<int64_t>(kStripe, end - at));
      load(*t, at, count, s.x);
      uint32_t bits = amax_bits<0>(s.x, count);
      if (bits >= MX_INFINITY_BITS) {
        bits = 0;
        for (int i = 0; i < count; ++i) {
          uint32_t one = mx_bits(s.x[i]) & 0x7FFFFFFFu;
          if (one < MX_INFINITY_BITS) {
            bits = std::max(bits, one);
            continue;
          }
          ++s.nonfinite;
          if (s.first < 0 || at + i < s.first) s.first = at + i;
        }
      }
      s.amax = std::max(s.amax, bits);
    }
  });
  uint32_t largest = 0;
  *nonfinite = 0;
  *first_nonfinite = -1;
  for (auto& s : states) {
    largest = std::max(largest, s->amax);
    *nonfinite += s->nonfinite;
    if (s->first >= 0 && (*first_nonfinite < 0 || s->first < *first_nonfinite)) *first_nonfinite = s->first;
  }
  return mx_float(largest);
}

// amax of everything with NaN and infinities included, for a block that is the whole tensor.
uint32_t total_amax_bits(const MxTensor& t, int threads) {
  const int64_t n = t.batch * t.rows * t.columns;
  auto states = run_chunks<AmaxState>((n + kChunk - 1) / kChunk, threads, [&](AmaxState& s, int64_t chunk) {
    for (int64_t at = chunk * kChunk, end = std::min(n, at + kChunk); at < end; at += kStripe) {
      const int count = int(std::min<int64_t>(kStripe, end - at));
      load(t, at, count, s.x);
      s.amax = std::max(s.amax, amax_bits<0>(s.x, count));
    }
  });
  uint32_t largest = 0;
  for (auto& s : states) largest = std::max(largest, s->amax);
  return largest;
}

// `amax`: the largest finite magnitude of the tensor, or of the set it shares its scale with; unused without one.
void quantize(const MxRecipe* recipe, const MxTensor* x, float amax, int threads, MxResult* result) {
  const MxRecipe& r = *recipe;
  Job job{r, *x, *result, mx_tensor_scale(amax, r), mode_of(r), 0, 0, 0, 0, 0, false, 0, nullptr};
  result->encode = job.tensor_scale.encode;
  result->decode = job.tensor_scale.decode;
  job.whole = r.block_rows == 0 && r.block_columns == 0;
  job.block_rows = r.block_rows ? r.block_rows : x->rows;
  job.block_columns = r.block_columns ? r.block_columns : std::max<int64_t>(1, x->columns);
  job.grid_rows = job.block_rows ? (x->rows + job.block_rows - 1) / job.block_rows : 0;
  job.grid_columns = (x->columns + job.block_columns - 1) / job.block_columns;
  job.row_bytes = packed_bytes(x->columns, r.stored_bits);
  if (job.whole) job.whole_amax = total_amax_bits(*x, threads);
  if (result->stats) quantize_width<true>(job, threads);
  else quantize_width<false>(job, threads);
}

struct Nothing {};

void unpack_row(const uint8_t* packed, int64_t first, int64_t n, int bits, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = first + i;
    if (bits == 4) codes[i] = uint8_t(packed[at / 2] >> (4 * (at & 1)) & 0xF);
    else if (bits == 6) {
      const uint8_t* word = packed + at / 4 * 3;
      codes[i] = uint8_t((uint32_t(word[0]) | uint32_t(word[1]) << 8 | uint32_t(word[2]) << 16) >> (6 * (at & 3)) & 0x3F);
    } else codes[i] = packed[at];
  }
}

void store_value(const MxTensor& t, int64_t at, float y) {
  switch (t.type) {
    case MX_F32: static_cast<float*>(const_cast<void*>(t.data))[at] = y; break;
    case MX_BF16: static_cast<uint16_t*>(const_cast<void*>(t.data))[at] = uint16_t(mx_bits(mx_round_to_bf16(y)) >> 16); break;
    case MX_F64: static_cast<double*>(const_cast<void*>(t.data))[at] = y; break;
  }
}

void dequantize(const MxRecipe* recipe, const uint8_t* codes, const void* scales, float encode, float decode,
                const MxTensor* out, int threads) {
  const MxRecipe& r = *recipe;
  const int64_t block_rows = r.block_rows ? r.block_rows : std::max<int64_t>(1, out->rows);
  const int64_t block_columns = r.block_columns ? r.block_columns : std::max<int64_t>(1, out->columns);
  const int64_t grid_rows = (out->rows + block_rows - 1) / block_rows;
  const int64_t grid_columns = (out->columns + block_columns - 1) / block_columns;
  const int64_t row_bytes = packed_bytes(out->columns, r.stored_bits), rows = out->batch * out->rows;
  const bool whole = r.block_rows == 0 && r.block_columns == 0;
  const MxTensorScale tensor_scale{encode, decode};
  float values[256];
  for (uint32_t c = 0; c < 256; ++c) values[c] = mx_decode(c & ((1u << r.element.bits) - 1u), r.element);
  const int64_t per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, out->columns));
  run_chunks<Nothing>((rows + per_chunk - 1) / per_chunk, threads, [&](Nothing&, int64_t chunk) {
    uint8_t unpacked[kStripe];
    for (int64_t row = chunk * per_chunk, last = std::min(rows, row + per_chunk); row < last; ++row) {
      const int64_t grid_row = row / out->rows * grid_rows + row % out->rows / block_rows;
      for (int64_t b = 0; b < grid_columns; ++b) {
        const int64_t block = whole ? 0 : grid_row * grid_columns + b;
        const uint32_t stored = r.scale_stored_bits == 32 ? static_cast<const uint32_t*>(scales)[block]
                                                          : static_cast<const uint8_t*>(scales)[block];
        const float back = mx_decode_factor(stored, tensor_scale, r);
        for (int64_t at = b * block_columns, end = std::min(out->columns, at + block_columns); at < end; at += kStripe) {
          const int64_t n = std::min<int64_t>(kStripe, end - at);
          unpack_row(codes + row * row_bytes, at, n, r.stored_bits, unpacked);
          for (int64_t i = 0; i < n; ++i) store_value(*out, row * out->columns + at + i, values[unpacked[i]] * back);
        }
      }
    }
  });
}

void unpack(const uint8_t* packed, int64_t rows, int64_t columns, int bits, uint8_t* codes) {
  for (int64_t row = 0; row < rows; ++row)
    unpack_row(packed + row * packed_bytes(columns, bits), 0, columns, bits, codes + row * columns);
}

}  // namespace

extern const MxKernel kernel;
const MxKernel kernel = {quantize, amax, dequantize, unpack};

}  // namespace MXCLI_ISA
