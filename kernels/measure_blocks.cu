// Statistics of a tensor with blocks of any shape, optionally with codes and scales; one block per thread block.
// Macros, next to those of device.h and measure.h:
//   MX_WHOLE  1: the tensor is one block of known amax, which thread blocks measure in parts
#include "measure.h"

// A part's contribution to a per-tensor block.
struct MxShare {
  MxSums sums;
  mx_u64 saturated, underflowed;
  mx_u32 largest, least, top_code, unused;
};

MX_FN void mx_add_share(MxBlock& b, const MxShare& share) {
#pragma unroll
  for (int k = 0; k < 4; ++k) b.sums.of[k] += share.sums.of[k];
  b.saturated += share.saturated;
  b.underflowed += share.underflowed;
  b.largest = mx_max_u32(b.largest, share.largest);
  b.least = mx_max_u32(b.least, share.least);
  b.top_code = mx_max_u32(b.top_code, share.top_code);
}

// Measure (and encode) a span of at most 512 columns of a row with four lanes; all lanes of the warp must call it.
// Return the span's sums; add everything else to `b`.
MX_FN MxSums mx_measure_span(const MxSource* x, mx_u64 key, mx_u8* to, mx_i64 at, mx_i64 width, MxScheme r, MxEncoder e,
                             MxBlock& b, MxTally& tally, MxCounts& counts, mx_u64* totals) {
  mx_u32 amax = b.amax;
  if (b.amax >= MX_INFINITY_BITS) {  // the same for all threads
    amax = 0;
    for (mx_i64 step = 4 * (threadIdx.x % 4); step < width; step += 16) {
      float values[4];
      mx_load(x, at + step, width - step, values);
      amax = mx_max_u32(amax, mx_finite_amax_bits<4>(values));
    }
    tally.amax = mx_max_u32(tally.amax, amax);  // includes NaN blocks
    amax = b.scale.is_nan ? 0u : mx_lanes_max<4>(amax);
  }
  MxSpan span = {};
  MxTerms own[4];
  mx_measure_steps(x, key, MX_CODES ? to : nullptr, at, width, threadIdx.x % 4, amax, r, e, b, own, span, tally, counts,
                   totals);
  mx_finish_span(span.max_error, span.underflowed, tally, counts);
  b.underflowed += span.underflowed;
  b.largest = mx_max_u32(b.largest, amax);
  b.least = mx_max_u32(b.least, span.least);
  return mx_rescale_sums(mx_lanes_terms(own), 1.0 / (double)mx_unit(amax));
}

#define MX_BATCH 256  // spans per batch of sums

// Add `count` sums in order: thread k < 4 adds sum k. All threads must call it.
MX_FN void mx_add_in_order(const MxSums* sums, mx_i64 count, double& sum) {
  __syncthreads();
  if (threadIdx.x < 4)
    for (mx_i64 i = 0; i < count; ++i) sum += sums[i].of[threadIdx.x];
  __syncthreads();
}

// Reduce a part's share over the thread block, to all threads; thread k < 4 holds sum k.
MX_FN MxShare mx_reduce_share(const MxBlock& b, double sum) {
  __shared__ MxSums scratch_sums;
  __shared__ mx_u64 scratch_counts[MX_WARP];
  __shared__ mx_u32 scratch_bits[MX_WARP];
  MxShare share;
  share.saturated = mx_block_sum(b.saturated, scratch_counts);
  share.underflowed = mx_block_sum(b.underflowed, scratch_counts);
  share.largest = mx_block_max(b.largest, scratch_bits);
  share.least = mx_block_max(b.least, scratch_bits);
  share.top_code = mx_block_max(b.top_code, scratch_bits);
  share.unused = 0;
  if (threadIdx.x < 4) scratch_sums.of[threadIdx.x] = sum;
  __syncthreads();
  share.sums = scratch_sums;
  __syncthreads();
  return share;
}

// Measure (and encode) a block or a part of one: 64 spans at a time, whose sums are added in order.
MX_FN MxShare mx_measure_region(const MxSource* x, mx_u64 key, mx_i64 columns, const MxBlockBounds& p, mx_u8* codes,
                                MxScheme r, MxEncoder e, MxBlock& b, MxTally& tally, MxCounts& counts, mx_u64* totals) {
  __shared__ MxSums batch[MX_BATCH];
  const mx_i64 per_row = mx_ceil_div(p.width, MX_SPAN), spans = p.height * per_row;
  double sum = 0.0;
  for (mx_i64 first = 0; first < spans; first += MX_BATCH) {
    const mx_i64 count = mx_min_i64(MX_BATCH, spans - first);
    for (mx_i64 i = threadIdx.x / 4; i - threadIdx.x / 4 < count; i += MX_SUMS / 4) {
      const mx_i64 inside = mx_quotient(first + i, per_row);
      const mx_i64 row = p.row + inside, column = p.column + (first + i - inside * per_row) * MX_SPAN;
      const mx_i64 width = i < count ? mx_min_i64(MX_SPAN, p.column + p.width - column) : 0;
      const MxSums sums = mx_measure_span(x, key, codes + row * mx_packed_bytes(columns) + mx_packed_bytes(column),
                                          row * columns + column, width, r, e, b, tally, counts, totals);
      if (threadIdx.x % 4 == 0 && i < count) batch[i] = sums;
    }
    mx_add_in_order(batch, count, sum);
  }
  return mx_reduce_share(b, sum);
}

// Replace a block's totals by those of `share`; keep its amax and scale.
MX_FN MxBlock mx_with_share(MxBlock b, const MxShare& share) {
  b.sums = MxSums();
  b.saturated = b.underflowed = 0;
  b.largest = b.least = 0;
  mx_add_share(b, share);
  return b;
}

#if !MX_WHOLE

// Measure blocks of block_rows x block_columns of a tensor [rows, columns], repeated any number of times; a chunk's
// blocks in order. `sums` has four numbers per chunk.
extern "C" __global__ void __launch_bounds__(MX_SUMS)
    mx_measure_blocks(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_i64 block_rows, mx_i64 block_columns,
                      mx_i64 first_chunk, mx_i64 last_chunk, mx_i64 chunk_blocks, mx_i64 chunk_parts,
                      mx_i64 unit_blocks, mx_i64 all_blocks, mx_u64 key, const mx_u32* tensor_amax, mx_u8* codes,
                      void* scales, double* noise, float* per_block, mx_i64 per_block_each, mx_u64* totals,
                      double* sums) {
  __shared__ MxCounts counts;
  __shared__ mx_u32 scratch_bits[MX_WARP];
  __shared__ double scratch_sums[MX_WARP];
  const MxScheme r = MX_SCHEME;
  const MxEncoder e = mx_encoder(r);
  const MxTensorScale t = mx_read_tensor_scale(tensor_amax, r);
  const mx_i64 across = mx_ceil_div(columns, block_columns);
  MxTally tally = mx_begin_tally(counts);

  const MxChunking chunking = {chunk_blocks, chunk_parts, unit_blocks, all_blocks};
  for (mx_i64 chunk = first_chunk + blockIdx.x; chunk < last_chunk; chunk += gridDim.x) {
    const MxChunk in = mx_chunk(chunking, chunk);
    for (mx_i64 block = in.begin; block < in.end; ++block) {
      const MxBlockBounds p = mx_block_bounds(block, rows, columns, block_rows, block_columns);
      const MxVectors v = mx_vectors(x, columns, p);
      const mx_u32 amax = mx_block_amax(v, r, scratch_bits);
      MxBlock b = mx_begin_block(amax, amax, t, r, e);
      if (r.candidate_count) {
        mx_choose_candidate_shared(v, b.amax, t, r, e, scratch_sums, b.scale);
        mx_find_top_code(b, r, e);
      }
      if (MX_CODES && threadIdx.x == 0) mx_store_scale(scales, p.grid_row, p.grid_column, across, b.scale.stored, r);
      const MxShare share = mx_measure_region(x, key, columns, p, codes, r, e, b, tally, counts, totals);
      if (threadIdx.x == (block - in.begin) % MX_SUMS)
        mx_finish_block(mx_with_share(b, share), MxRatio{0.0f, 0.0f}, r, block,
                        MxPerBlock{noise, per_block, per_block_each}, tally, counts);
    }
    mx_finish_chunk(tally, threadIdx.x, sums + 4 * chunk);
  }
  mx_add_tally(tally, counts, totals);
}

#else

// Measure the tensor [rows, columns] as one block of known amax, in parts of part_rows x part_columns. Parts first_part
// to last_part - 1 write their shares to `shares`.
extern "C" __global__ void __launch_bounds__(MX_SUMS)
    mx_measure_parts(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_i64 part_rows, mx_i64 part_columns,
                     mx_i64 first_part, mx_i64 last_part, mx_u64 key, const mx_u32* tensor_amax,
                     const mx_u32* whole_amax, mx_u8* codes, void* scales, mx_u64* totals, MxShare* shares) {
  __shared__ MxCounts counts;
  const MxScheme r = MX_SCHEME;
  const MxEncoder e = mx_encoder(r);
  const MxBlock known = mx_begin_block(*whole_amax, mx_scale_amax(*tensor_amax, *whole_amax, r),
                                       mx_read_tensor_scale(tensor_amax, r), r, e);
  MxTally tally = mx_begin_tally(counts);
  if (MX_CODES && blockIdx.x == 0 && threadIdx.x == 0) mx_store_scale(scales, 0, 0, 1, known.scale.stored, r);
  for (mx_i64 part = first_part + blockIdx.x; part < last_part; part += gridDim.x) {
    MxBlock b = known;
    const MxBlockBounds p = mx_block_bounds(part, rows, columns, part_rows, part_columns);
    const MxShare share = mx_measure_region(x, key, columns, p, codes, r, e, b, tally, counts, totals);
    if (threadIdx.x == 0) shares[part] = share;
  }
  mx_add_tally(tally, counts, totals);
}

// Finish a per-tensor block from its shares in order; launched as one thread block.
extern "C" __global__ void __launch_bounds__(MX_SUMS)
    mx_measure_whole(const mx_u32* tensor_amax, const mx_u32* whole_amax, const MxShare* shares, mx_i64 count,
                     double* noise, float* per_block, mx_u64* totals, double* sums) {
  __shared__ MxCounts counts;
  __shared__ MxSums batch[MX_BATCH];
  const MxScheme r = MX_SCHEME;
  const MxEncoder e = mx_encoder(r);
  MxTally tally = mx_begin_tally(counts);
  const MxBlock known = mx_begin_block(*whole_amax, mx_scale_amax(*tensor_amax, *whole_amax, r),
                                       mx_read_tensor_scale(tensor_amax, r), r, e);
  MxBlock b = known;
  double sum = 0.0;
  for (mx_i64 first = 0; first < count; first += MX_BATCH) {
    if (first + threadIdx.x < count) {
      batch[threadIdx.x] = shares[first + threadIdx.x].sums;
      mx_add_share(b, shares[first + threadIdx.x]);
    }
    mx_add_in_order(batch, mx_min_i64(MX_BATCH, count - first), sum);
  }
  const MxShare share = mx_reduce_share(b, sum);
  if (threadIdx.x == 0)
    mx_finish_block(mx_with_share(known, share), MxRatio{0.0f, 0.0f}, r, 0, MxPerBlock{noise, per_block, 1}, tally,
                    counts);
  mx_finish_chunk(tally, threadIdx.x, sums);
  mx_add_tally(tally, counts, totals);
}

#endif
