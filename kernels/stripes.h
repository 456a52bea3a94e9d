// Processing of a stripe of a row: scales, codes and statistics of its blocks.
#ifndef MXCLI_STRIPES_H
#define MXCLI_STRIPES_H

#include <algorithm>
#include <cstring>

#include "encode.h"
#include "tensors.h"
#include "totals.h"

namespace MXCLI_ISA {
namespace {

struct Job {
  const MxScheme& r;
  const MxTensor& x;
  MxResult& result;
  const MxTensorScale tensor_scale;
  const MxEncoder encoder;
  const MxKey key;
  const float given_amax;             // negative: not given
  int64_t block_rows, block_columns;  // resolved: 0 is replaced by the whole length
  int64_t grid_rows, grid_columns;    // per batch entry
  int64_t row_bytes;
  bool whole;  // the tensor is one block, of known amax

  Job(const MxScheme& scheme, const MxTensor& tensor, float amax, MxKey key_, MxResult& out)
      : r(scheme), x(tensor), result(out), tensor_scale(mx_tensor_scale(amax, scheme)), encoder(mx_encoder(scheme)),
        key(key_), given_amax(amax), block_rows(r.block_rows ? r.block_rows : std::max<int64_t>(1, x.rows)),
        block_columns(r.block_columns ? r.block_columns : std::max<int64_t>(1, x.columns)),
        grid_rows((x.rows + block_rows - 1) / block_rows),
        grid_columns((x.columns + block_columns - 1) / block_columns),
        row_bytes(packed_bytes(x.columns, r.stored_bits)), whole(r.block_rows == 0 && r.block_columns == 0) {}

  // Return whether a given amax may determine the scale of a per-tensor block.
  bool is_given_scale() const { return r.tensor_step == MX_TENSOR_NONE && r.candidate_count == 0; }

  int64_t block(int64_t block_row, int64_t column) const {
    return whole ? 0 : block_row * grid_columns + column / block_columns;
  }
};

// One thread's buffers and totals.
struct Worker {
  alignas(64) float x[kWidestStripe];
  alignas(64) float values[kWidestStripe];  // dequantized, for statistics
  alignas(64) float drawn[kWidestStripe];   // random numbers, for random rounding
  alignas(64) uint32_t wide_codes[kWidestStripe];
  alignas(64) uint8_t codes[kWidestStripe];
  alignas(64) uint8_t packed[kWidestStripe];
  Blocks blocks;
  Counts counts;
  ChunkSums sums;
};

// Part of a row.
struct Span {
  int64_t row, column;  // the row counts over all batch entries
  int width;
};

template <int N, bool Divides, bool Plain, bool Stats>
struct Loops {
  const Job& job;
  Worker& w;

  // Each loop copies the encoder: through a reference, the compiler must reload it after every store of a code.
  MxEncoder own_encoder() const { return known<Divides, Plain>(job.encoder); }

  void load_span(const Span& span) {
    load(job.x, span.row * job.x.columns + span.column, span.width, w.x);
    if (job.r.clear_zero_input | job.r.set_zero_input) canonicalize_zeros(w.x, span.width, job.r);
  }

  // Choose the scales of blocks 0..n from their amax.
  MX_NOINLINE void choose_scales(int n) {
    Blocks& b = w.blocks;
    const MxScheme r = job.r;
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

  // Draw a span's random numbers; null if the rounding is not random.
  const float* draw_span(const Span& span) {
    if (Plain || !job.r.rounding.is_random) return nullptr;
    draw(job.key, span.row * job.x.columns + span.column, span.width, w.drawn);
    return w.drawn;
  }

  // Set each block's largest code and whether any element saturates. Scaling and encoding are monotonic, so the amax
  // decides both; under random rounding, update_top_codes finds the code.
  MX_NOINLINE void find_top_codes(int n) {
    Blocks& b = w.blocks;
    const MxEncoder encoder = own_encoder();
    const uint32_t magnitude_mask = mx_magnitude_mask(encoder.element);
    for (int i = 0; i < n; i += kLanes) {
      MxLanes amax, factor;
      MxLaneBits one = MxLaneBits{} + 1u;
      std::memcpy(&amax, b.amax + i, sizeof amax);
      std::memcpy(&factor, b.factor + i, sizeof factor);
      MxLaneBits saturates = mx_saturates(amax, factor, encoder) ? one : MxLaneBits{};
      MxLaneBits code = mx_encode_element(amax, factor, encoder).code & magnitude_mask;
      if (job.r.rounding.is_random) code = MxLaneBits{};
      std::memcpy(b.top_code + i, &code, sizeof code);
      std::memcpy(b.saturates + i, &saturates, sizeof saturates);
    }
  }

  // Squared error of block rows x [column, end) under an exponent, summed in binary64 in element order.
  MX_NOINLINE double squared_error(mx_i32 exponent, int64_t row, int64_t rows, int64_t column, int64_t end) {
    const MxEncoder encoder = own_encoder();
    auto scale = mx_power_of_two_scale(mx_u32(exponent), job.r);
    double error = 0;
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span{i, at, int(std::min<int64_t>(kStripe, end - at))};
        load_span(span);
        encode_block<true>(w.x, span.width, scale.factor, scale.decode, encoder, nullptr, w.values, w.wide_codes);
        for (int k = 0; k < span.width; ++k) {
          double difference = double(w.values[k]) - double(w.x[k]);
          error += difference * difference;
        }
      }
    return error;
  }

  // Add a span's errors under scale `s` to the parts of its block's error.
  template <int Norm>
  void add_errors(const float* x, int n, const MxScale<float, uint32_t>& s, double* parts) {
    encode_block<true>(x, n, s.factor, s.decode, own_encoder(), nullptr, w.values, w.wide_codes);
    for (int at = 0; at < n; at += MX_ERROR_PARTS)
      for (int k = 0; k < std::min(MX_ERROR_PARTS, n - at); ++k)
        parts[k] = mx_add_error(parts[k], w.values[at + k], x[at + k], Norm);
  }

  // Error of block rows x [column, end) under a scale with a mantissa; `held`: its elements, if it is part of a row.
  template <int Norm>
  double block_error(const MxScale<float, uint32_t>& s, const float* held, int64_t row, int64_t rows, int64_t column,
                     int64_t end) {
    double parts[MX_ERROR_PARTS] = {};
    if (held) add_errors<Norm>(held, int(end - column), s, parts);
    for (int64_t i = row; !held && i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span{i, at, int(std::min<int64_t>(kStripe, end - at))};
        load_span(span);
        add_errors<Norm>(w.x, span.width, s, parts);
      }
    return mx_total_error(parts, Norm);
  }

  // Choose block i's scale from those with a mantissa that the rule tries.
  template <int Norm>
  MX_NOINLINE void search_scale(int i, const float* held, int64_t row, int64_t rows, int64_t column, int64_t end) {
    Blocks& b = w.blocks;
    const MxSearch q = mx_begin_search(b.amax[i], job.tensor_scale, job.r);
    auto chosen = mx_tried_scale(q, 0, job.tensor_scale, job.r);
    double best = block_error<Norm>(chosen, held, row, rows, column, end);
    for (int k = 1; k < q.count; ++k) {
      const auto s = mx_tried_scale(q, k, job.tensor_scale, job.r);
      if (mx_ends_search(q, s, best, job.r)) break;
      const double error = block_error<Norm>(s, held, row, rows, column, end);
      if (!mx_is_better(error, best, job.r)) continue;
      best = error;
      chosen = s;
    }
    b.stored[i] = chosen.stored;
    b.factor[i] = chosen.factor;
    b.decode[i] = chosen.decode;
    b.is_lost[i] = chosen.is_lost;
  }

  // Choose block i's scale from those that the rule tries.
  void choose_tried(int i, const float* held, int64_t row, int64_t rows, int64_t column, int64_t end) {
    const Blocks& b = w.blocks;
    if (b.is_nan[i] || b.amax[i] == 0 || b.amax[i] >= MX_INFINITY_BITS) return;
    if (job.r.scale_kind == MX_POWER_OF_TWO) return choose_candidate(i, row, rows, column, end);
    switch (job.r.error_norm) {
      case MX_SQUARES: return search_scale<MX_SQUARES>(i, held, row, rows, column, end);
      case MX_MAGNITUDES: return search_scale<MX_MAGNITUDES>(i, held, row, rows, column, end);
      case MX_LARGEST: return search_scale<MX_LARGEST>(i, held, row, rows, column, end);
    }
  }

  // Choose block i's candidate exponent: the lowest error; ties go to the largest exponent.
  MX_NOINLINE void choose_candidate(int i, int64_t row, int64_t rows, int64_t column, int64_t end) {
    Blocks& b = w.blocks;
    const int exponent = mx_floor_exponent(b.amax[i], job.r);
    double best = -1;
    int chosen = job.r.min_exponent;
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

  // Count a piece's non-finite elements and replace them by zeros, which exclude them from all sums. Return their
  // count.
  MX_NOINLINE int exclude_nonfinite(const Span& span, int at, int n) {
    int found = 0;
    for (int i = at; i < at + n; ++i) {
      const uint32_t bits = mx_bits(w.x[i]) & 0x7FFFFFFFu;
      if (bits < MX_INFINITY_BITS) continue;
      ++found;
      w.counts.count_nonfinite(bits, span.row * job.x.columns + span.column + i);
      w.x[i] = w.values[i] = 0.0f;
    }
    return found;
  }

  MX_NOINLINE int count_saturated(int at, int n, float factor) {
    const MxEncoder encoder = own_encoder();
    int count = 0;
    for (int i = at; i < at + n; ++i) count += mx_saturates(w.x[i], factor, encoder);
    return count;
  }

  // Raise the blocks' largest codes to those of a span's elements.
  MX_NOINLINE void update_top_codes(const Span& span, int width, int blocks) {
    for (int i = 0; i < blocks; ++i)
      for (int k = i * width, end = std::min(span.width, k + width); k < end; ++k)
        w.blocks.top_code[i] = std::max(w.blocks.top_code[i], mx_magnitude_code(w.wide_codes[k], job.r.element));
  }

  // Encode and measure a loaded span with blocks of `block_width` columns.
  void encode_span(const Span& span, int block_width) {
    Blocks& b = w.blocks;
    const int width = N ? N : block_width, blocks = (span.width + width - 1) / width;
    const MxEncoder encoder = own_encoder();
    const float* const drawn = draw_span(span);
    for (int i = 0; i < blocks; ++i) {
      const int at = i * width, n = std::min(width, span.width - at);
      const float* const own = drawn ? drawn + at : nullptr;
      if (b.is_nan[i]) {
        std::fill_n(w.wide_codes + at, n, uint32_t(job.r.element.nan_code));
        std::fill_n(w.values + at, n, 0.0f);
      } else if (N && n == N) {
        encode_block<Stats>(w.x + at, N, b.factor[i], b.decode[i], encoder, own, w.values + at, w.wide_codes + at);
      } else {
        encode_block<Stats>(w.x + at, n, b.factor[i], b.decode[i], encoder, own, w.values + at, w.wide_codes + at);
      }
    }
    narrow_codes(w.wide_codes, span.width, w.codes);
    if (job.result.codes)
      store_codes(w.codes, span.width, job.r.stored_bits,
                  job.result.codes + span.row * job.row_bytes + packed_bytes(span.column, job.r.stored_bits));
    if (Stats) {
      if (drawn) update_top_codes(span, width, blocks);
      measure_span(span, width, blocks);
      count_codes(span, width, blocks);
    }
  }

  void measure_span(const Span& span, int width, int blocks) {
    Blocks& b = w.blocks;
    const uint32_t mask = mx_magnitude_mask(job.r.element);
    uint32_t amax[kStripe];  // of finite elements
    for (int i = 0; i < blocks; ++i) {
      const int at = i * width, n = std::min(width, span.width - at);
      int64_t excluded = 0;
      amax[i] = b.amax[i];
      if (b.amax[i] >= MX_INFINITY_BITS) {
        excluded = exclude_nonfinite(span, at, n);
        amax[i] = amax_bits<0>(w.x + at, n);
        w.counts.amax = std::max(w.counts.amax, amax[i]);
      }
      if (b.is_nan[i]) {
        std::fill_n(w.x + at, n, 0.0f);  // values are zeros too, so it adds nothing
        continue;
      }
      w.counts.stats.measured += n - excluded;
      b.largest[i] = std::max(b.largest[i], amax[i]);
    }
    SpanSums s;
    for (int i = 0; i < blocks; ++i) {
      if (b.is_nan[i]) continue;
      const int at = i * width, n = std::min(width, span.width - at);
      const SpanView v{w.x + at, w.values + at, w.wide_codes + at};
      const float bound = mx_relative_bound(w.counts.max_rel, b.decode[i], job.r.element);
      if (N && n == N) measure(v, N, amax[i], mask, bound, s, b, i);
      else measure(v, n, amax[i], mask, bound, s, b, i);
      if (b.saturates[i]) b.saturated[i] += count_saturated(at, n, b.factor[i]);
      if (job.result.per_block.underflowed)
        for (int k = at; k < at + n; ++k) b.underflowed[i] += w.x[k] != 0.0f && !(w.wide_codes[k] & mask);
    }
    w.counts.add_span({w.x, w.values, w.wide_codes}, span.width, s);
  }

  // Add a span's codes to the histogram, except those of NaN blocks.
  MX_NOINLINE void count_codes(const Span& span, int width, int blocks) {
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

  MX_NOINLINE void finish_blocks(int n, int64_t first) {
    const MxPerBlock& per = job.result.per_block;
    const Blocks& b = w.blocks;
    for (int i = 0; i < n; ++i) {
      if (per.amax) per.amax[first + i] = mx_float(b.amax[i]);
      if (per.decode) per.decode[first + i] = b.decode[i];
      if (per.saturated) per.saturated[first + i] = b.saturated[i];
      if (per.underflowed) per.underflowed[first + i] = b.underflowed[i];
      if (per.noise) per.noise[first + i] = b.noise[i];
    }
    w.counts.add_blocks(b, n, first, job.r.scale_kind == MX_MINIFLOAT, job.r.scale, w.sums);
  }

  // Process the blocks of rows x [column, end), which fit into one stripe.
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
      choose_tried(i, rows == 1 ? w.x + i * width : nullptr, row, rows, column + int64_t(i) * width,
                   std::min(end, column + int64_t(i + 1) * width));
    store_scales(blocks, job.block(block_row, column));
    if (Stats) {
      b.clear_totals(blocks);
      find_top_codes(blocks);
    }
    for (span.row = row; span.row < row + rows; ++span.row) {
      if (rows > 1 || job.r.candidate_count) load_span(span);
      encode_span(span, width);
    }
    if (Stats) finish_blocks(blocks, job.block(block_row, column));
  }

  // Prepare block 0 of `w.blocks` for block rows x [column, end), wider than a stripe, of known amax; `scale_amax` is
  // the amax that determines its scale.
  MX_NOINLINE void begin_wide(uint32_t amax, uint32_t scale_amax, int64_t row, int64_t rows, int64_t column,
                              int64_t end) {
    w.blocks.amax[0] = scale_amax;
    choose_scales(1);
    if (job.r.candidate_count) choose_tried(0, nullptr, row, rows, column, end);
    w.blocks.amax[0] = amax;
    w.blocks.clear_totals(1);
    find_top_codes(1);
  }

  void encode_wide(int64_t row, int64_t rows, int64_t column, int64_t end) {
    for (int64_t i = row; i < row + rows; ++i)
      for (int64_t at = column; at < end; at += kStripe) {
        Span span{i, at, int(std::min<int64_t>(kStripe, end - at))};
        load_span(span);
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
    begin_wide(amax, amax, row, rows, column, end);
    store_scales(1, block);
    encode_wide(row, rows, column, end);
    if (Stats) finish_blocks(1, block);
  }
};

}  // namespace
}  // namespace MXCLI_ISA

#endif
