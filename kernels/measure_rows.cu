// Statistics of a tensor whose blocks lie in rows, with codes and scales or without: counts and sums of what quantizing
// does to it, in one read. See device.h and measure.h for the definitions it is compiled with; further
//   MX_WIDTH  columns of a block of one row: up to 32, or a multiple of 16 up to 128
#include "measure.h"

// Element i of a lane, counted from its block's first column: one lane has all, or four take turns of four.
template <int lanes>
MX_FN int mx_offset(int i, int lane) {
  return lanes == 1 ? i : i / 4 * 16 + lane * 4 + i % 4;
}

// Blocks of 1 x MX_WIDTH of a tensor [rows, columns], each measured by one thread or by four: those of chunks first_chunk
// to last_chunk. `sums` has four numbers for every chunk.
extern "C" __global__ void __launch_bounds__(MX_SUMS)
    mx_measure_rows(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_i64 first_chunk, mx_i64 last_chunk,
                    mx_i64 chunk_blocks, mx_i64 chunk_parts, mx_i64 unit_blocks, mx_i64 all_blocks,
                    const mx_u32* tensor_amax, mx_u8* codes, void* scales, double* noise, float* per_block,
                    mx_i64 per_block_each, mx_u64* totals, double* sums) {
  constexpr int width = MX_WIDTH, lanes = width > 32 ? 4 : 1, each = width / lanes, partial = 16 / lanes;
  constexpr int piece = lanes == 1 ? each : 4;  // neighbours that a lane loads at once
  constexpr int at_once = MX_SUMS / lanes;
  __shared__ MxCounts counts;
  const MxRecipe r = MX_RECIPE;
  const MxEncoder e = mx_encoder(r);
  const MxTensorScale t = mx_read_tensor_scale(tensor_amax, r);
  const mx_i64 across = mx_ceil_div(columns, width);
  const int lane = threadIdx.x % lanes;
  MxTally tally = mx_begin(counts);

  const MxChunking chunking = {chunk_blocks, chunk_parts, unit_blocks, all_blocks};
  for (mx_i64 chunk = first_chunk + blockIdx.x; chunk < last_chunk; chunk += gridDim.x) {
    const MxChunk in = mx_chunk(chunking, chunk);
    mx_i32 turn = 0;  // of the lanes: whose sum the block adds to
    for (mx_i64 first = in.begin; first < in.end; first += at_once, turn = (turn + 1) % lanes) {
      const mx_i64 block = first + threadIdx.x / lanes;
      const bool is_active = block < in.end;
      const mx_i64 row = rows == 1 ? 0 : mx_quotient(block, across), column = (block - row * across) * width;
      const mx_i64 n = is_active ? mx_least(width, columns - column) : 0;
      const MxSource* const from = x + row * columns + column;

      float values[each];
#pragma unroll
      for (int i = 0; i < each; i += piece) {
        float loaded[piece];
        mx_load_input(from + mx_offset<lanes>(i, lane), n - mx_offset<lanes>(i, lane), r, loaded);
#pragma unroll
        for (int k = 0; k < piece; ++k) values[i + k] = loaded[k];
      }
      MxBlock b = mx_begin_block(mx_lanes_max<lanes>(mx_amax_bits<each>(values)), t, r, e);
      if (r.candidate_count && lanes == 1) {
        mx_choose_candidate<each>(values, b.amax, r, e, b.scale);
        mx_find_top(b, r, e);
      }
      if (MX_CODES && is_active) {
        if (lane == 0) mx_store_scale(scales, row, column / width, across, b.scale.stored, r);
        mx_u32 packed[each];
        mx_encode_block<each>(values, b.scale, e, packed);
        mx_u8* const to = codes + row * mx_packed_bytes(columns) + mx_packed_bytes(column);
#pragma unroll
        for (int i = 0; i < each; i += piece) {
          const int offset = mx_offset<lanes>(i, lane);
          mx_store_part<piece>(to, offset, n - offset, packed + i);
        }
      }

      mx_u32 amax = b.amax;  // of what is measured
      if (__any_sync(MX_ALL_LANES, b.amax >= MX_INFINITY_BITS)) {
        tally.amax = mx_larger(tally.amax, mx_finite_amax_bits<each>(values));
#pragma unroll
        for (int i = 0; i < each; ++i)
          mx_set_aside(values[i], row * columns + column + mx_offset<lanes>(i, lane), b.scale, e, counts, totals);
        amax = mx_lanes_max<lanes>(mx_amax_bits<each>(values));
        if (b.scale.is_nan && lane == 0) atomicAdd(&counts.excluded, (mx_u32)n);
      }

      MxSpan<partial> span;
      if (is_active && !b.scale.is_nan) {
        const float unit = mx_unit(amax), bound = mx_relative_bound(tally, counts);
        mx_u32 pair = 0;
#pragma unroll
        for (int i = 0; i < each; ++i) {
          const mx_u32 code = mx_measure_element(values[i], b.scale, e, unit, bound, i % partial, span);
          if (MX_HISTOGRAM)
            mx_count_code(code, i, mx_offset<lanes>(i, lane) - i % piece + piece <= n, mx_offset<lanes>(i, lane) < n,
                          pair, counts);
        }
        if (b.saturates) {
#pragma unroll
          for (int i = 0; i < each; ++i) b.saturated += mx_saturates(values[i], b.scale.factor, e);
        }
        if (span.is_relative) {
          for (int i = 0; i < each; ++i)
            if (mx_offset<lanes>(i, lane) < n)
              mx_see_relative(
                  mx_zero_input(mx_widen(from[mx_offset<lanes>(i, lane)]), r.clear_zero_input, r.set_zero_input),
                  b.scale, e, tally, counts);
        }
        mx_end_span(span, tally, counts);
        b.underflowed = span.underflowed;
      }
      MxRatio ratio;
      b.sums = mx_span_sums<lanes>(span, mx_unit(amax), ratio);
      b.largest = amax;
      b.least = mx_lanes_max<lanes>(span.least);
      b.saturated = mx_lanes_sum<lanes>(b.saturated);
      b.underflowed = mx_lanes_sum<lanes>(b.underflowed);
      if (is_active && lane == turn)
        mx_end_block(b, ratio, r, block, MxPerBlock{noise, per_block, per_block_each}, tally, counts);
    }
    mx_end_chunk(tally, threadIdx.x / lanes + lane * at_once, sums + 4 * chunk);
  }
  mx_end(tally, counts, totals);
}
