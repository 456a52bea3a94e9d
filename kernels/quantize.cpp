// The CPU loops: a tensor is cut into chunks for threads, a chunk into stripes of a row, a stripe into blocks.
// Compiled once per instruction set (MXCLI_ISA names the build's namespace). All arithmetic on values is numerics.h's.
#ifndef MXCLI_ISA
#define MXCLI_ISA baseline
#endif

#include "quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tensors.h"
#include "totals.h"

namespace MXCLI_ISA {
namespace {

constexpr int64_t kChunk = int64_t(1) << 16;  // elements a thread takes at once

// Calls work(state, chunk) for every chunk, on `threads` threads; returns the threads' states.
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

// ------------------------------------------------------------------------------------------------------------ encode

// What encoding needs to know of a recipe, in registers.
struct Encoder {
  int mantissa_bits, emin, bits, twos_complement, clear_zero_code;
  bool divides, quotient_bf16, plain;  // plain: nearest-even, no rule for the sign of zero
  uint32_t magnitude_mask;             // a code is zero when these bits are
  float max;
  MxRounding rounding;

  explicit Encoder(const MxRecipe& r)
      : mantissa_bits(r.element.mantissa_bits), emin(r.element.emin), bits(r.element.bits),
        twos_complement(r.element.twos_complement), clear_zero_code(r.clear_zero_code),
        magnitude_mask(r.element.twos_complement ? ~0u : (1u << (r.element.bits - 1)) - 1u), max(r.element.max),
        rounding(r.rounding) {
    const bool mantissa = r.scale_kind != MX_POWER_OF_TWO;
    quotient_bf16 = mantissa && r.element_step == MX_ELEMENT_OVER_PRODUCT_BF16;
    divides = mantissa && (quotient_bf16 || r.element_step == MX_ELEMENT_OVER_PRODUCT ||
                           r.element_step == MX_ELEMENT_OVER_QUOTIENT);
    const bool nearest_even = rounding.above == 0.5f && rounding.half_if == 1 && rounding.half_always == 0;
    plain = nearest_even && !quotient_bf16 && !clear_zero_code;
  }

  template <bool Divides, bool Plain, class F>
  inline __attribute__((always_inline)) F argument(F x, F factor) const {
    F scaled = Divides ? x / factor : x * factor;
    return !Plain && quotient_bf16 ? mx_round_to_bf16(scaled) : scaled;
  }

  // Code of x with its sign, and the dequantized value.
  template <bool Divides, bool Plain, class F, class U>
  inline __attribute__((always_inline)) void encode(F x, F factor, F decode, U& code, F& value) const {
    U argument_bits = mx_bits(argument<Divides, Plain>(x, factor));
    F magnitude = mx_float(argument_bits & 0x7FFFFFFFu);
    U sign_bit = argument_bits & 0x80000000u, negative = argument_bits >> 31;
    auto rounded = [&] {
      if constexpr (Plain) return mx_encode_nearest_even(magnitude, mantissa_bits, emin, max);
      else return mx_encode(magnitude, mantissa_bits, emin, max, rounding);
    }();
    U none = argument_bits & 0u;
    U sign = !Plain && clear_zero_code ? (rounded.code == 0u ? none : negative) : negative;
    code = mx_signed_code(rounded.code, sign, bits, twos_complement);
    value = mx_float(mx_bits(rounded.value) | sign_bit) * decode;
  }
};

template <bool Divides, bool Plain, bool Stats>
inline __attribute__((always_inline)) void encode_block(const float* x, int n, float factor, float decode,
                                                        const Encoder& encoder, float* values, uint32_t* codes) {
  const MxLanes factors = mx_fill(MxLanes{}, factor), decodes = mx_fill(MxLanes{}, decode);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    MxLanes lanes, value;
    MxLaneBits code;
    std::memcpy(&lanes, x + i, sizeof lanes);
    encoder.encode<Divides, Plain>(lanes, factors, decodes, code, value);
    std::memcpy(codes + i, &code, sizeof code);
    if (Stats) std::memcpy(values + i, &value, sizeof value);
  }
  for (; i < n; ++i) {
    float value;
    encoder.encode<Divides, Plain>(x[i], factor, decode, codes[i], value);
    if (Stats) values[i] = value;
  }
}

// ------------------------------------------------------------------------------------------------------------ driver

struct Job {
  const MxRecipe& r;
  const MxTensor& x;
  MxResult& result;
  const MxTensorScale tensor_scale;
  const Encoder encoder;
  int64_t block_rows, block_columns;  // resolved: 0 became the whole length
  int64_t grid_rows, grid_columns;    // per batch entry
  int64_t row_bytes;
  bool whole;                         // one block: the tensor, its amax known beforehand

  Job(const MxRecipe& recipe, const MxTensor& tensor, float amax, MxResult& out)
      : r(recipe), x(tensor), result(out), tensor_scale(mx_tensor_scale(amax, recipe)), encoder(recipe),
        block_rows(r.block_rows ? r.block_rows : std::max<int64_t>(1, x.rows)),
        block_columns(r.block_columns ? r.block_columns : std::max<int64_t>(1, x.columns)),
        grid_rows((x.rows + block_rows - 1) / block_rows),
        grid_columns((x.columns + block_columns - 1) / block_columns),
        row_bytes(packed_bytes(x.columns, r.stored_bits)), whole(r.block_rows == 0 && r.block_columns == 0) {}

  int64_t block(int64_t block_row, int64_t column) const {
    return whole ? 0 : block_row * grid_columns + column / block_columns;
  }
};

// One thread's buffers and totals.
struct Worker {
  alignas(64) float x[kWidestStripe];
  alignas(64) float values[kWidestStripe];        // dequantized, where statistics are wanted
  alignas(64) uint32_t wide_codes[kWidestStripe];
  alignas(64) uint8_t codes[kWidestStripe];
  alignas(64) uint8_t packed[kWidestStripe];
  Blocks blocks;
  Counts counts;
};

// A piece of a row.
struct Span {
  int64_t row, column;  // the row counts over all batch entries
  int width;
};

template <int N, bool Divides, bool Plain, bool Stats>
struct Loops {
  const Job& job;
  Worker& w;
  Sums& sums;

  void load_span(const Span& span) {
    load(job.x, span.row * job.x.columns + span.column, span.width, w.x);
    if (job.r.clear_zero_input | job.r.set_zero_input) one_zero(w.x, span.width, job.r);
  }

  // Elements of flushed blocks are zeros, with their signs.
  void flush_subnormal_blocks(const Span& span, int64_t block_width) {
    if (!job.r.flush_subnormal_blocks) return;
    for (int i = 0; i < span.width; ++i)
      if (w.blocks.amax[i / block_width] == 0) w.x[i] = w.x[i] * 0.0f;
  }

  // Scales of blocks 0..n from their amax.
  void choose_scales(int n) {
    Blocks& b = w.blocks;
    const MxRecipe r = job.r;
    for (int i = 0; i < n; ++i)
      if (r.flush_subnormal_blocks && b.amax[i] < 0x00800000u) b.amax[i] = 0;
    std::fill(b.amax + n, b.amax + (n + kLanes - 1) / kLanes * kLanes, 0u);
    for (int i = 0; i < n; i += kLanes) {
      MxLaneBits amax;
      std::memcpy(&amax, b.amax + i, sizeof amax);
      auto s = mx_choose_scale(amax, job.tensor_scale, r);
      std::memcpy(b.stored + i, &s.stored, sizeof s.stored);
      std::memcpy(b.factor + i, &s.factor, sizeof s.factor);
      std::memcpy(b.decode + i, &s.decode, sizeof s.decode);
      std::memcpy(b.is_nan + i, &s.is_nan, sizeof s.is_nan);
      std::memcpy(b.is_lost + i, &s.is_lost, sizeof s.is_lost);
    }
  }

  // Scaling and encoding never reverse an order: a block's largest magnitude has its largest code, and tells whether
  // anything in the block saturates.
  void find_tops(int n) {
    Blocks& b = w.blocks;
    for (int i = 0; i < n; i += kLanes) {
      MxLanes amax, factor, decode, value;
      MxLaneBits code, infinity = MxLaneBits{} + MX_INFINITY_BITS, largest = infinity - 1u, one = MxLaneBits{} + 1u;
      std::memcpy(&code, b.amax + i, sizeof code);
      amax = mx_float(code < infinity ? code : largest);
      std::memcpy(&factor, b.factor + i, sizeof factor);
      std::memcpy(&decode, b.decode + i, sizeof decode);
      MxLaneBits saturates = job.encoder.argument<Divides, Plain>(amax, factor) > job.encoder.max ? one : MxLaneBits{};
      job.encoder.encode<Divides, Plain>(amax, factor, decode, code, value);
      code &= job.encoder.magnitude_mask;
      std::memcpy(b.top_code + i, &code, sizeof code);
      std::memcpy(b.saturates + i, &saturates, sizeof saturates);
    }
  }

  // Squared error of a block under an exponent, in binary64, element after element; the block is rows x [column, end).
  double squared_error(mx_i32 exponent, int64_t row, int64_t rows, int64_t column, int64_t end) {
    auto scale = mx_power_of_two_scale(mx_u32(exponent), job.r);
    double error = 0;
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span{i, at, int(std::min<int64_t>(kStripe, end - at))};
        load_span(span);
        encode_block<Divides, Plain, true>(w.x, span.width, scale.factor, scale.decode, job.encoder, w.values, w.wide_codes);
        for (int k = 0; k < span.width; ++k) {
          double difference = double(w.values[k]) - double(w.x[k]);
          error += difference * difference;
        }
      }
    return error;
  }

  // Lets a rule with candidates choose block i's exponent: the lowest error, and of equals the largest.
  void choose_candidate(int i, int64_t row, int64_t rows, int64_t column, int64_t end) {
    Blocks& b = w.blocks;
    if (b.is_nan[i] || b.amax[i] >= MX_INFINITY_BITS) return;
    const int exponent = mx_i32(mx_scale_exponent(b.amax[i], job.r));
    double best = -1;
    int chosen = exponent;
    for (int c = 0; c < job.r.candidate_count; ++c) {
      const int candidate = std::clamp(exponent + job.r.candidates[c], job.r.min_exponent, 127);
      const double error = squared_error(candidate, row, rows, column, end);
      if (best < 0 || error < best || (error == best && candidate > chosen)) {
        best = error;
        chosen = candidate;
      }
    }
    auto scale = mx_power_of_two_scale(mx_u32(chosen), job.r);
    b.stored[i] = scale.stored;
    b.factor[i] = scale.factor;
    b.decode[i] = scale.decode;
  }

  void store_scales(int n, int64_t first) {
    if (!job.result.scales) return;
    if (job.r.scale_stored_bits == 32) {
      std::memcpy(static_cast<uint32_t*>(job.result.scales) + first, w.blocks.stored, size_t(n) * 4);
    } else {
      narrow_codes(w.blocks.stored, n, static_cast<uint8_t*>(job.result.scales) + first);
    }
  }

  // Counts non-finite elements of a piece and makes them zeros, so that nothing else is measured of them. Returns how
  // many there were.
  int set_aside_nonfinite(const Span& span, int at, int n) {
    int found = 0;
    for (int i = at; i < at + n; ++i) {
      const uint32_t bits = mx_bits(w.x[i]) & 0x7FFFFFFFu;
      if (bits < MX_INFINITY_BITS) {
        w.counts.amax = std::max(w.counts.amax, bits);
        continue;
      }
      ++found;
      w.counts.see_nonfinite(bits, span.row * job.x.columns + span.column + i);
      w.x[i] = w.values[i] = 0.0f;
    }
    return found;
  }

  int count_saturated(int at, int n, float factor) {
    int count = 0;
    for (int i = at; i < at + n; ++i) {
      const float magnitude = mx_float(mx_bits(job.encoder.argument<Divides, Plain>(w.x[i], factor)) & 0x7FFFFFFFu);
      count += magnitude > job.encoder.max;
    }
    return count;
  }

  // Encodes a loaded span whose blocks are `block_width` wide, and measures it.
  void encode_span(const Span& span, int block_width) {
    Blocks& b = w.blocks;
    const int width = N ? N : block_width, blocks = (span.width + width - 1) / width;
    const Encoder encoder = job.encoder;
    for (int i = 0; i < blocks; ++i) {
      const int at = i * width, n = std::min(width, span.width - at);
      if (b.is_nan[i]) {
        std::fill_n(w.wide_codes + at, n, uint32_t(job.r.element.nan_code));
        std::fill_n(w.values + at, n, 0.0f);
      } else if (N && n == N) {
        encode_block<Divides, Plain, Stats>(w.x + at, N, b.factor[i], b.decode[i], encoder, w.values + at, w.wide_codes + at);
      } else {
        encode_block<Divides, Plain, Stats>(w.x + at, n, b.factor[i], b.decode[i], encoder, w.values + at, w.wide_codes + at);
      }
    }
    narrow_codes(w.wide_codes, span.width, w.codes);
    if (job.result.codes)
      store_codes(w.codes, span.width, job.r.stored_bits,
                  job.result.codes + span.row * job.row_bytes + packed_bytes(span.column, job.r.stored_bits));
    if (Stats) {
      measure_span(span, width, blocks);
      count_codes(span, width, blocks);
    }
  }

  void measure_span(const Span& span, int width, int blocks) {
    Blocks& b = w.blocks;
    uint32_t amax = 0;
    for (int i = 0; i < blocks; ++i) amax = std::max(amax, b.is_nan[i] ? 0u : b.amax[i]);
    const float unit = unit_of(std::min(amax, MX_INFINITY_BITS - 1u)), bound = w.counts.max_rel * 0.999999f;
    SpanSums span_sums;
    for (int i = 0; i < blocks; ++i) {
      const int at = i * width, n = std::min(width, span.width - at);
      const SpanView view{w.x + at, w.values + at, w.wide_codes + at};
      int set_aside = 0;
      if (b.amax[i] >= MX_INFINITY_BITS) set_aside = set_aside_nonfinite(span, at, n);
      if (b.is_nan[i]) continue;
      w.counts.stats.measured += n - set_aside;
      const uint32_t block_amax = std::min(b.amax[i], MX_INFINITY_BITS - 1u), mask = job.encoder.magnitude_mask;
      if (N && n == N) measure(view, N, block_amax, unit, mask, bound, span_sums, &b.signal[i], &b.noise[i], &b.least[i]);
      else measure(view, n, block_amax, unit, mask, bound, span_sums, &b.signal[i], &b.noise[i], &b.least[i]);
      if (b.saturates[i]) b.saturated[i] += count_saturated(at, n, b.factor[i]);
      if (job.result.per_block.underflowed)
        for (int k = at; k < at + n; ++k) b.underflowed[i] += w.x[k] != 0.0f && !(w.wide_codes[k] & mask);
    }
    w.counts.add_span({w.x, w.values, w.wide_codes}, span.width, span_sums, unit, sums);
  }

  // Adds a span's codes to the histogram, those of NaN blocks left out.
  void count_codes(const Span& span, int width, int blocks) {
    const bool all = std::none_of(w.blocks.is_nan, w.blocks.is_nan + blocks, [](uint32_t nan) { return nan; });
    const bool pairs = job.r.stored_bits == 4;
    if (all && pairs && span.width % 2 == 0) {
      pack4(w.codes, span.width, w.packed);
      w.counts.count_bytes(w.packed, span.width / 2, true);
    } else if (all && !pairs) {
      w.counts.count_bytes(w.codes, span.width, false);
    } else {
      for (int i = 0; i < span.width; ++i)
        if (!w.blocks.is_nan[i / width]) ++w.counts.stats.code_bins[w.codes[i]];
    }
  }

  void end_blocks(int n, int64_t first) {
    const MxPerBlock& per = job.result.per_block;
    const Blocks& b = w.blocks;
    for (int i = 0; i < n; ++i) {
      if (per.amax) per.amax[first + i] = mx_float(b.amax[i]);
      if (per.decode) per.decode[first + i] = b.decode[i];
      if (per.saturated) per.saturated[first + i] = b.saturated[i];
      if (per.underflowed) per.underflowed[first + i] = b.underflowed[i];
      if (per.noise) per.noise[first + i] = b.noise[i];
    }
    w.counts.add_blocks(b, n, first, job.r.scale_kind == MX_MINIFLOAT, job.r.scale, sums);
  }

  // Blocks that fit a stripe: all blocks of rows x [column, end), `end - column` at most one stripe.
  void narrow(int64_t block_row, int64_t row, int64_t rows, int64_t column, int64_t end) {
    Blocks& b = w.blocks;
    const int width = N ? N : int(job.block_columns), blocks = int((end - column + width - 1) / width);
    Span span{row, column, int(end - column)};
    std::fill_n(b.amax, blocks, 0u);
    for (span.row = row; span.row < row + rows; ++span.row) {
      load_span(span);
      for (int i = 0; i < blocks; ++i) {
        const int n = std::min(width, span.width - i * width);
        const float* x = w.x + i * width;
        b.amax[i] = std::max(b.amax[i], N && n == N ? amax_bits<N>(x, N) : amax_bits<0>(x, n));
      }
    }
    choose_scales(blocks);
    for (int i = 0; job.r.candidate_count && i < blocks; ++i)
      choose_candidate(i, row, rows, column + int64_t(i) * width, std::min(end, column + int64_t(i + 1) * width));
    store_scales(blocks, job.block(block_row, column));
    if (Stats) {
      b.clear_totals(blocks);
      find_tops(blocks);
    }
    for (span.row = row; span.row < row + rows; ++span.row) {
      if (rows > 1 || job.r.candidate_count) load_span(span);
      flush_subnormal_blocks(span, width);
      encode_span(span, width);
    }
    if (Stats) end_blocks(blocks, job.block(block_row, column));
  }

  // Prepares block 0 of `w.blocks` for a block wider than a stripe, rows x [column, end), of known amax.
  void begin_wide(uint32_t amax, int64_t row, int64_t rows, int64_t column, int64_t end) {
    w.blocks.amax[0] = amax;
    choose_scales(1);
    if (job.r.candidate_count) choose_candidate(0, row, rows, column, end);
    w.blocks.clear_totals(1);
    find_tops(1);
  }

  void encode_wide(int64_t row, int64_t rows, int64_t column, int64_t end) {
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span{i, at, int(std::min<int64_t>(kStripe, end - at))};
        load_span(span);
        flush_subnormal_blocks(span, kStripe);
        encode_span(span, span.width);
      }
  }

  void wide(int64_t block, int64_t row, int64_t rows, int64_t column, int64_t end) {
    uint32_t amax = 0;
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span{i, at, int(std::min<int64_t>(kStripe, end - at))};
        load_span(span);
        amax = std::max(amax, amax_bits<0>(w.x, span.width));
      }
    begin_wide(amax, row, rows, column, end);
    store_scales(1, block);
    encode_wide(row, rows, column, end);
    if (Stats) end_blocks(1, block);
  }
};

// How a tensor is cut into chunks: groups of block rows, or parts of one where that is more than a chunk. Depends on
// the shape only, never on the threads.
struct Cut {
  int64_t unit_rows, units, part, parts, per_chunk, chunks;
  int64_t stripe;  // columns handled at once, whole blocks; 0: blocks are wider than a stripe

  explicit Cut(const Job& job) {
    const int64_t columns = job.x.columns, rows = job.x.batch * job.x.rows;
    unit_rows = job.whole ? 16 : job.block_rows;
    units = job.whole ? (rows + 15) / 16 : job.x.batch * job.grid_rows;
    stripe = 0;
    part = columns;
    if (job.whole) {
      part = kChunk / 16;
    } else if (job.block_columns > kStripe) {
      part = (kChunk / unit_rows / job.block_columns + 1) * job.block_columns;
    } else {
      stripe = job.block_columns;
      while (stripe % 4) stripe *= 2;
      stripe *= std::max<int64_t>(1, kStripe / stripe);
      if (unit_rows * columns > kChunk) part = std::max<int64_t>(1, kChunk / unit_rows / stripe) * stripe;
    }
    parts = std::max<int64_t>(1, part ? (columns + part - 1) / part : 1);
    per_chunk = parts > 1 ? 1 : std::max<int64_t>(1, kChunk / std::max<int64_t>(1, unit_rows * columns));
    chunks = parts > 1 ? units * parts : (units + per_chunk - 1) / per_chunk;
  }
};

struct AmaxState {
  alignas(64) float x[kStripe];
  uint32_t amax = 0;
  int64_t nonfinite = 0, first = -1;
};

// Bits of the largest magnitude; with `finite_only`, of the largest finite one, non-finite elements being counted.
uint32_t largest_magnitude(const MxTensor& t, int threads, bool finite_only, int64_t* nonfinite, int64_t* first) {
  const int64_t n = t.batch * t.rows * t.columns;
  auto states = run_chunks<AmaxState>((n + kChunk - 1) / kChunk, threads, [&](AmaxState& s, int64_t chunk) {
    for (int64_t at = chunk * kChunk, end = std::min(n, at + kChunk); at < end; at += kStripe) {
      const int count = int(std::min<int64_t>(kStripe, end - at));
      load(t, at, count, s.x);
      uint32_t bits = amax_bits<0>(s.x, count);
      if (finite_only && bits >= MX_INFINITY_BITS) {
        bits = 0;
        for (int i = 0; i < count; ++i) {
          const uint32_t one = mx_bits(s.x[i]) & 0x7FFFFFFFu;
          if (one < MX_INFINITY_BITS) bits = std::max(bits, one);
          else if (s.nonfinite++ == 0 || at + i < s.first) s.first = at + i;
        }
      }
      s.amax = std::max(s.amax, bits);
    }
  });
  uint32_t largest = 0;
  *nonfinite = 0;
  *first = -1;
  for (auto& s : states) {
    largest = std::max(largest, s->amax);
    *nonfinite += s->nonfinite;
    if (s->first >= 0 && (*first < 0 || s->first < *first)) *first = s->first;
  }
  return largest;
}

// A chunk's share of the block that is the whole tensor.
struct WholeShare {
  double signal = 0, noise = 0;
  uint32_t least = kNoneLeast;
  int64_t saturated = 0, underflowed = 0;
};

template <int N, bool Divides, bool Plain, bool Stats>
void quantize_blocks(const Job& job, int threads) {
  using L = Loops<N, Divides, Plain, Stats>;
  const MxTensor& x = job.x;
  const Cut cut(job);
  const int64_t rows = x.batch * x.rows;
  std::vector<Sums> chunk_sums(size_t(std::max<int64_t>(cut.chunks, 1)));
  std::vector<WholeShare> shares(job.whole ? chunk_sums.size() : 0);
  std::unique_ptr<Worker> whole(job.whole ? new Worker : nullptr);
  if (job.whole) {
    int64_t nonfinite, first;
    L loops{job, *whole, chunk_sums[0]};
    loops.begin_wide(largest_magnitude(x, threads, false, &nonfinite, &first), 0, rows, 0, x.columns);
    loops.store_scales(1, 0);
  }

  auto workers = run_chunks<Worker>(cut.chunks, threads, [&](Worker& w, int64_t chunk) {
    L loops{job, w, chunk_sums[size_t(chunk)]};
    const int64_t first = cut.parts > 1 ? chunk / cut.parts : chunk * cut.per_chunk;
    const int64_t last = std::min(cut.units, first + cut.per_chunk);
    const int64_t column = cut.parts > 1 ? chunk % cut.parts * cut.part : 0, end = std::min(x.columns, column + cut.part);
    if (job.whole) {
      w.blocks = whole->blocks;
      loops.encode_wide(first * 16, std::min<int64_t>(last * 16, rows) - first * 16, column, end);
      const Blocks& b = w.blocks;
      shares[size_t(chunk)] = {b.signal[0], b.noise[0], b.least[0], b.saturated[0], b.underflowed[0]};
      return;
    }
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t in_batch = unit % job.grid_rows * job.block_rows, row = unit / job.grid_rows * x.rows + in_batch;
      const int64_t count = std::min(job.block_rows, x.rows - in_batch), step = cut.stripe ? cut.stripe : job.block_columns;
      for (int64_t at = column; at < end; at += step) {
        if (cut.stripe) loops.narrow(unit, row, count, at, std::min(end, at + step));
        else loops.wide(job.block(unit, at), row, count, at, std::min(end, at + step));
      }
    }
  });
  if (!Stats) return;

  if (job.whole && rows > 0 && x.columns > 0) {
    Blocks& b = whole->blocks;
    for (const WholeShare& share : shares) {
      b.signal[0] += share.signal;
      b.noise[0] += share.noise;
      b.least[0] = std::max(b.least[0], share.least);
      b.saturated[0] += int32_t(share.saturated);
      b.underflowed[0] += int32_t(share.underflowed);
    }
    L{job, *whole, chunk_sums[0]}.end_blocks(1, 0);
    workers.push_back(std::move(whole));
  }
  MxStats& s = *job.result.stats;
  s = MxStats{};
  s.first_nonfinite = -1;
  s.min_block_sqnr = s.min_block_range = -1;
  s.elements = rows * x.columns;
  Counts worst;
  for (auto& worker : workers) {
    worker->counts.flush_bytes(job.r.stored_bits == 4);
    worker->counts.merge_into(s);
    const MxStats& own = worker->counts.stats;
    for (int64_t i = 0; i < own.worst_count; ++i) worst.add_worst(own.worst[i].noise, own.worst[i].block);
  }
  s.worst_count = worst.stats.worst_count;
  std::copy(worst.stats.worst, worst.stats.worst + kWorst, s.worst);
  for (const Sums& sums : chunk_sums) {
    s.signal += sums.signal;
    s.noise += sums.noise;
    s.cross += sums.cross;
    s.error += sums.error;
  }
}

// Fixed widths where most blocks are: other widths, and rules that are seldom asked for, share the loops of any width.
template <bool Stats>
void quantize_mode(const Job& job, int threads) {
  const Encoder& e = job.encoder;
  if (!e.plain && e.divides) quantize_blocks<0, true, false, Stats>(job, threads);
  else if (!e.plain) quantize_blocks<0, false, false, Stats>(job, threads);
  else if (e.divides) quantize_blocks<0, true, true, Stats>(job, threads);
  else if (job.block_columns == 16) quantize_blocks<16, false, true, Stats>(job, threads);
  else if (job.block_columns == 32) quantize_blocks<32, false, true, Stats>(job, threads);
  else quantize_blocks<0, false, true, Stats>(job, threads);
}

// ------------------------------------------------------------------------------------------------- the four functions

// `amax`: the largest finite magnitude of the tensor, or of the set it shares its scale with; unused without one.
void quantize(const MxRecipe* recipe, const MxTensor* x, float amax, int threads, MxResult* result) {
  const Job job(*recipe, *x, amax, *result);
  result->encode = job.tensor_scale.encode;
  result->decode = job.tensor_scale.decode;
  if (result->stats) quantize_mode<true>(job, threads);
  else quantize_mode<false>(job, threads);
}

float amax(const MxTensor* t, int threads, int64_t* nonfinite, int64_t* first_nonfinite) {
  return mx_float(largest_magnitude(*t, threads, true, nonfinite, first_nonfinite));
}

struct Nothing {};

void dequantize(const MxRecipe* recipe, const uint8_t* codes, const void* scales, float encode, float decode,
                const MxTensor* out, int threads) {
  MxResult none{};
  const Job job(*recipe, *out, 0.0f, none);
  const MxRecipe& r = *recipe;
  const MxTensorScale tensor_scale{encode, decode};
  const int64_t rows = out->batch * out->rows;
  float values[kCodeBins];
  for (uint32_t c = 0; c < kCodeBins; ++c) values[c] = mx_decode(c & ((1u << r.element.bits) - 1u), r.element);
  const int64_t per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, out->columns));
  run_chunks<Nothing>((rows + per_chunk - 1) / per_chunk, threads, [&](Nothing&, int64_t chunk) {
    uint8_t unpacked[kStripe];
    for (int64_t row = chunk * per_chunk, last = std::min(rows, row + per_chunk); row < last; ++row) {
      const int64_t block_row = row / out->rows * job.grid_rows + row % out->rows / job.block_rows;
      for (int64_t column = 0; column < out->columns; column += job.block_columns) {
        const int64_t block = job.block(block_row, column);
        const uint32_t stored = r.scale_stored_bits == 32 ? static_cast<const uint32_t*>(scales)[block]
                                                          : static_cast<const uint8_t*>(scales)[block];
        const float back = mx_decode_factor(stored, tensor_scale, r);
        for (int64_t at = column, end = std::min(out->columns, column + job.block_columns); at < end; at += kStripe) {
          const int64_t n = std::min<int64_t>(kStripe, end - at);
          unpack_row(codes + row * job.row_bytes, at, n, r.stored_bits, unpacked);
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
