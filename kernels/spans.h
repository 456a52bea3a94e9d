// A pass over a tensor: its job, a thread's buffers, and the steps that are the same for all schemes and outputs.
#ifndef MXCLI_SPANS_H
#define MXCLI_SPANS_H

#include <algorithm>
#include <cstring>

#include "encode.h"
#include "tensors.h"
#include "totals.h"

namespace MXCLI_ISA {
namespace {

// The outputs of a pass: codes and scales; these and statistics; dequantized values instead.
enum class Output { codes, statistics, values };

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
  bool whole;                        // the tensor is one block, of known amax
  const MxTensor* values = nullptr;  // of Output::values; rotated back before they are stored if they have a rotation

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

struct Spans {
  const Job& job;
  Worker& w;

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

  // Raise the blocks' largest codes to those of a span's elements.
  MX_NOINLINE void update_top_codes(const Span& span, int width, int blocks) {
    for (int i = 0; i < blocks; ++i)
      for (int k = i * width, end = std::min(span.width, k + width); k < end; ++k)
        w.blocks.top_code[i] = std::max(w.blocks.top_code[i], mx_magnitude_code(w.wide_codes[k], job.r.element));
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
};

}  // namespace
}  // namespace MXCLI_ISA

#endif
