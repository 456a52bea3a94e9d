// CPU loops. A tensor is split into chunks for threads, a chunk into stripes of a row, a stripe into blocks. Compiled
// once per instruction set; MXCLI_ISA is the build's namespace. All arithmetic on values is in numerics.h.
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

#include "stripes.h"

namespace MXCLI_ISA {
namespace {

constexpr int64_t kChunk = int64_t(1) << 16;  // elements per work item

// Call work(state, chunk) for every chunk on `threads` threads; return the threads' states.
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

// Split of a tensor into chunks: groups of block rows, or parts of a block row larger than a chunk. It depends on the
// shape, not on the thread count.
struct Cut {
  int64_t unit_rows, units, part, parts, per_chunk, chunks;
  int64_t stripe;  // columns processed at once, whole blocks; 0: blocks are wider than a stripe

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

// Bits of the largest magnitude; with `finite_only`, of the largest finite one, counting non-finite elements.
MX_NOINLINE uint32_t largest_magnitude(const MxTensor& t, int threads, bool finite_only, int64_t* nonfinite,
                                       int64_t* first) {
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

// A chunk's contribution to a per-tensor block.
struct WholeShare {
  Sums sums;
  uint32_t largest = 0, least = kAllZero, top_code = 0;
  int64_t saturated = 0, underflowed = 0;
};

template <int N, bool Divides, bool Plain, Output Wanted>
void quantize_blocks(const Job& job, int threads) {
  using L = Loops<N, Divides, Plain, Wanted>;
  constexpr bool Stats = L::Stats;
  const MxTensor& x = job.x;
  const Cut cut(job);
  const int64_t rows = x.batch * x.rows;
  std::vector<Sums> chunk_sums(size_t(std::max<int64_t>(cut.chunks, 1)));
  std::vector<WholeShare> shares(job.whole ? chunk_sums.size() : 0);
  std::unique_ptr<Worker> whole(job.whole ? new Worker : nullptr);
  if (job.whole) {
    int64_t nonfinite, first;
    L loops(job, *whole);
    const uint32_t amax = largest_magnitude(x, threads, false, &nonfinite, &first);
    // A tensor with non-finite elements ignores the given amax.
    const uint32_t scale_amax =
        job.given_amax >= 0.0f && amax < MX_INFINITY_BITS && job.is_given_scale() ? mx_bits(job.given_amax) : amax;
    loops.begin_wide(amax, scale_amax, 0, rows, 0, x.columns);
    loops.store_scales(1, 0);
  }

  auto workers = run_chunks<Worker>(cut.chunks, threads, [&](Worker& w, int64_t chunk) {
    L loops(job, w);
    const int64_t first = cut.parts > 1 ? chunk / cut.parts : chunk * cut.per_chunk;
    const int64_t last = std::min(cut.units, first + cut.per_chunk);
    const int64_t column = cut.parts > 1 ? chunk % cut.parts * cut.part : 0,
                  end = std::min(x.columns, column + cut.part);
    if (job.whole) {
      w.blocks = whole->blocks;
      loops.encode_wide(first * 16, std::min<int64_t>(last * 16, rows) - first * 16, column, end);
      const Blocks& b = w.blocks;
      shares[size_t(chunk)] = {{b.signal[0], b.noise[0], b.cross[0], b.error[0]},
                               b.largest[0],
                               b.least[0],
                               b.top_code[0],
                               b.saturated[0],
                               b.underflowed[0]};
      return;
    }
    if (Stats) w.sums.begin(job.block(first, column));
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t in_batch = unit % job.grid_rows * job.block_rows, row = unit / job.grid_rows * x.rows + in_batch;
      const int64_t count = std::min(job.block_rows, x.rows - in_batch),
                    step = cut.stripe ? cut.stripe : job.block_columns;
      for (int64_t at = column; at < end; at += step) {
        if (cut.stripe) loops.narrow(unit, row, count, at, std::min(end, at + step));
        else loops.wide(job.block(unit, at), row, count, at, std::min(end, at + step));
      }
    }
    if (Stats) chunk_sums[size_t(chunk)] = w.sums.total();
  });
  if (!Stats) return;

  if (job.whole && rows > 0 && x.columns > 0) {
    Blocks& b = whole->blocks;
    for (const WholeShare& share : shares) {
      b.signal[0] += share.sums.signal;
      b.noise[0] += share.sums.noise;
      b.cross[0] += share.sums.cross;
      b.error[0] += share.sums.error;
      b.largest[0] = std::max(b.largest[0], share.largest);
      b.least[0] = std::max(b.least[0], share.least);
      b.top_code[0] = std::max(b.top_code[0], share.top_code);
      b.saturated[0] += int32_t(share.saturated);
      b.underflowed[0] += int32_t(share.underflowed);
    }
    L(job, *whole).finish_blocks(1, 0);
    chunk_sums[0] = whole->sums.total();
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
  Sums all;
  for (const Sums& sums : chunk_sums) all += sums;
  s.signal = all.signal;
  s.noise = all.noise;
  s.cross = all.cross;
  s.error = all.error;
}

// Instantiate the common block widths 16 and 32; other widths and rare schemes share loops for any width.
template <Output Wanted>
void quantize_mode(const Job& job, int threads) {
  const MxEncoder& e = job.encoder;
  if (!e.plain) quantize_blocks<0, false, false, Wanted>(job, threads);
  else if (e.divides) quantize_blocks<0, true, true, Wanted>(job, threads);
  else if (job.block_columns == 16) quantize_blocks<16, false, true, Wanted>(job, threads);
  else if (job.block_columns == 32) quantize_blocks<32, false, true, Wanted>(job, threads);
  else quantize_blocks<0, false, true, Wanted>(job, threads);
}

// -------------------------------------------------------------------------------------------------------- entry points

// `amax`: the largest finite magnitude to scale the tensor for, not necessarily its own; negative: not given. Ignored
// without a per-tensor scale.
void quantize(const MxScheme* scheme, const MxTensor* x, float amax, MxKey key, int threads, MxResult* result) {
  const Job job(*scheme, *x, amax, key, *result);
  result->encode = job.tensor_scale.encode;
  result->decode = job.tensor_scale.decode;
  if (result->stats) quantize_mode<Output::statistics>(job, threads);
  else quantize_mode<Output::codes>(job, threads);
}

void cut(const MxScheme* scheme, const MxTensor* x, MxCut* out) {
  MxResult none{};
  const Cut c(Job(*scheme, *x, 0.0f, MxKey{}, none));
  *out = {c.unit_rows, c.units, c.part, c.parts, c.per_chunk, c.chunks};
}

float amax(const MxTensor* t, int threads, int64_t* nonfinite, int64_t* first_nonfinite) {
  return mx_float(largest_magnitude(*t, threads, true, nonfinite, first_nonfinite));
}

// Buffer for a row that is rotated back.
struct Row {
  std::vector<float> values;

  void store(const MxTensor& out, int64_t row) {
    rotate_groups_back(values.data(), out.columns, out.rotation);
    for (int64_t i = 0; i < out.columns; ++i) store_value(out, row * out.columns + i, values[size_t(i)]);
  }
};

void dequantize(const MxScheme* scheme, const uint8_t* codes, const void* scales, float encode, float decode,
                const MxTensor* out, int threads) {
  MxResult none{};
  const Job job(*scheme, *out, 0.0f, MxKey{}, none);
  const MxScheme& r = *scheme;
  const MxTensorScale tensor_scale{encode, decode};
  const int64_t rows = out->batch * out->rows;
  float values[kCodeBins];
  for (uint32_t c = 0; c < kCodeBins; ++c) values[c] = mx_decode(c & ((1u << r.element.bits) - 1u), r.element);
  const int64_t per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, out->columns));
  run_chunks<Row>((rows + per_chunk - 1) / per_chunk, threads, [&](Row& whole, int64_t chunk) {
    uint8_t unpacked[kStripe];
    const bool rotated = out->rotation.size != 0;
    if (rotated) whole.values.resize(size_t(out->columns));
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
          for (int64_t i = 0; i < n; ++i) {
            const float value = values[unpacked[i]] * back;
            if (rotated) whole.values[size_t(at + i)] = value;
            else store_value(*out, row * out->columns + at + i, value);
          }
        }
      }
      if (rotated) whole.store(*out, row);
    }
  });
}

// Set `out`, of the shape of x and possibly x itself, to what dequantizing the quantized tensor would give; `amax` as in
// quantize.
void quantize_dequantize(const MxScheme* scheme, const MxTensor* x, float amax, MxKey key, const MxTensor* out,
                         int threads) {
  MxResult none{};
  Job job(*scheme, *x, amax, key, none);
  const Cut cut(job);
  const int64_t rows = x->batch * x->rows, step = cut.stripe ? cut.stripe : job.block_columns;
  MxTensor to = *out;
  to.rotation = x->rotation;
  job.values = &to;
  if (to.rotation.size == 0 || job.whole || step % to.rotation.size == 0)
    return quantize_mode<Output::values>(job, threads);
  // Groups are cut by the spans that are processed at once: hold all values, and rotate them back afterwards.
  std::vector<float> held(size_t(rows * x->columns));
  MxTensor plain = to;
  plain.data = held.data();
  plain.type = MX_F32;
  plain.rotation = MxRotation{};
  job.values = &plain;
  quantize_mode<Output::values>(job, threads);
  run_chunks<int>(rows, threads, [&](int&, int64_t row) {
    float* const values = held.data() + row * x->columns;
    rotate_groups_back(values, x->columns, to.rotation);
    for (int64_t at = 0; at < x->columns; at += kStripe)
      store_values(to, row * x->columns + at, int(std::min<int64_t>(kStripe, x->columns - at)), values + at);
  });
}

void unpack(const uint8_t* packed, int64_t rows, int64_t columns, int bits, uint8_t* codes) {
  for (int64_t row = 0; row < rows; ++row)
    unpack_row(packed + row * packed_bytes(columns, bits), 0, columns, bits, codes + row * columns);
}

}  // namespace

extern const MxKernel kernel;
const MxKernel kernel = {quantize, amax, dequantize, quantize_dequantize, unpack, cut};

}  // namespace MXCLI_ISA
