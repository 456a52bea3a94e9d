// Choice of a block's scale among those that a rule tries, and what else depends on how elements are encoded only.
#ifndef MXCLI_TRIES_H
#define MXCLI_TRIES_H

#include <algorithm>

#include "spans.h"

namespace MXCLI_ISA {
namespace {

template <bool Divides, bool Plain>
struct Tries : Spans {
  // Each loop copies the encoder: through a reference, the compiler must reload it after every store of a code.
  MxEncoder own_encoder() const { return known<Divides, Plain>(job.encoder); }

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

  MX_NOINLINE int count_saturated(int at, int n, float factor) {
    const MxEncoder encoder = own_encoder();
    int count = 0;
    for (int i = at; i < at + n; ++i) count += mx_saturates(w.x[i], factor, encoder);
    return count;
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
};

}  // namespace
}  // namespace MXCLI_ISA

#endif
