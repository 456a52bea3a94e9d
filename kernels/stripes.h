// Processing of a stripe of a row: scales, codes and statistics of its blocks, or their values.
#ifndef MXCLI_STRIPES_H
#define MXCLI_STRIPES_H

#include <algorithm>

#include "tries.h"

namespace MXCLI_ISA {
namespace {

template <int N, bool Divides, bool Plain, Output Wanted>
struct Loops : Tries<Divides, Plain> {
  using Base = Tries<Divides, Plain>;
  using Base::choose_scales;
  using Base::choose_tried;
  using Base::count_codes;
  using Base::count_saturated;
  using Base::exclude_nonfinite;
  using Base::find_top_codes;
  using Base::finish_blocks;
  using Base::job;
  using Base::load_span;
  using Base::own_encoder;
  using Base::store_scales;
  using Base::update_top_codes;
  using Base::w;
  static constexpr bool Stats = Wanted == Output::statistics;

  Loops(const Job& job, Worker& w) : Base{{job, w}} {}

  // Draw a span's random numbers; null if the rounding is not random.
  const float* draw_span(const Span& span) {
    if (Plain || !job.r.rounding.is_random) return nullptr;
    draw(job.key, span.row * job.x.columns + span.column, span.width, w.drawn);
    return w.drawn;
  }

  // Replace a loaded span by its dequantized values, with blocks of `width` columns.
  void pass_span(const Span& span, int width, int blocks) {
    const Blocks& b = w.blocks;
    const MxEncoder encoder = own_encoder();
    const float* const drawn = draw_span(span);
    for (int i = 0; i < blocks; ++i) {
      const int at = i * width, n = std::min(width, span.width - at);
      const float* const own = drawn ? drawn + at : nullptr;
      if (b.is_nan[i]) {
        const float nan = mx_decode(uint32_t(job.r.element.nan_code), job.r.element);
        std::fill_n(w.values + at, n, nan * mx_decode_factor(b.stored[i], job.tensor_scale, job.r));
      } else if (N && n == N) {
        pass_block(w.x + at, N, b.factor[i], b.decode[i], encoder, own, w.values + at);
      } else {
        pass_block(w.x + at, n, b.factor[i], b.decode[i], encoder, own, w.values + at);
      }
    }
    const MxTensor& out = *job.values;
    if (out.rotation.size) rotate_groups_back(w.values, span.width, out.rotation);
    store_values(out, span.row * out.columns + span.column, span.width, w.values);
  }

  // Encode and measure a loaded span with blocks of `block_width` columns.
  void encode_span(const Span& span, int block_width) {
    if (Wanted == Output::values) {
      const int width = N ? N : block_width;
      return pass_span(span, width, (span.width + width - 1) / width);
    }
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

  // Process the blocks of rows x [column, end), which fit into one stripe.
  void narrow(int64_t block_row, int64_t row, int64_t rows, int64_t column, int64_t end) {
    Blocks& b = w.blocks;
    const int width = N ? N : int(job.block_columns), blocks = int((end - column + width - 1) / width);
    Span span{row, column, int(end - column)};
    std::fill_n(b.amax, blocks, 0u);
    for (span.row = row; span.row < row + rows; ++span.row) {
      load_span(span);
      int i = 0;
#ifdef MXCLI_HAS_SIXTEEN
      if (N == 16 || N == 32)
        for (; (i + 16) * N <= span.width; i += 16) raise_amaxes<N>(w.x + i * N, b.amax + i);
#endif
      for (; i < blocks; ++i) {
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
