// Statistics of a tensor whose blocks lie in rows, with codes and scales or without: counts and sums of what quantizing
// does to it, in one read. See device.h and measure.h for the definitions it is compiled with; further
//   MX_WIDTH  columns of a block of one row: up to 32, or a multiple of 16 up to 128
#include "measure.h"

// Element i of a lane, counted from its block's first column: one lane has all, or four take turns of four.
template <int lanes>
MX_FN int mx_offset(int i, int lane) {
  return lanes == 1 ? i : i / 4 * 16 + lane * 4 + i % 4;
}

// Whether a block's values in units of its scale give sums of the same bits as in units of its amax's power of two: where
// none of them is so small or so large that a product or a difference leaves the range of normal numbers. Elements reach
// 2^emax in that unit, and their squares are added.
MX_FN bool mx_is_ordinary(const MxBlock& b, mx_u32 least, mx_i32 emax) {
  if (emax < 0 || emax > 40) return false;
  const mx_u32 scale = mx_bits(b.scale.decode) >> 23, smallest = 0u - least;
  return least != 0u && (b.amax >> 23) - (smallest >> 23) <= 35u && scale >= 27u && scale <= 227u;
}

// Whether blocks commonly have elements that are rounded to zero, so that counting them at once is cheaper than looking
// first whether there is any: where the smallest value is less than 2^8 below the largest.
MX_FN bool mx_loses_many(MxEncoder e) { return e.element.emax - e.element.emin + e.element.mantissa_bits < 8; }

// Adds elements 0 to N, by add(i, sum), in the order that mx_added tells, so that few partial sums are held at a time.
template <int N, class Add>
MX_FN MxTerms mx_add_in_halves(Add add) {
  MxTerms four[4];
#pragma unroll
  for (int column = 0; column < 4; column += 2) {  // two neighbours at a time: their codes may be counted as a pair
    MxTerms half[2][2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        MxTerms sum[2] = {};
#pragma unroll
        for (int i = column + 4 * (side + 2 * part); i < N; i += 16) {
          add(i, sum[0]);
          if (i + 1 < N) add(i + 1, sum[1]);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) half[side][k] = part ? mx_added(half[side][k], sum[k]) : sum[k];
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) four[column + k] = mx_added(half[0][k], half[1][k]);
  }
  return mx_last(four);
}

// Blocks of 1 x MX_WIDTH of a tensor [rows, columns], each measured by one thread or by four: those of chunks first_chunk
// to last_chunk. `sums` has four numbers for every chunk.
extern "C" __global__ void __launch_bounds__(MX_SUMS, 2)
    mx_measure_rows(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_i64 first_chunk, mx_i64 last_chunk,
                    mx_i64 chunk_blocks, mx_i64 chunk_parts, mx_i64 unit_blocks, mx_i64 all_blocks, mx_u64 key,
                    const mx_u32* tensor_amax, mx_u8* codes, void* scales, double* noise, float* per_block,
                    mx_i64 per_block_each, mx_u64* totals, double* sums) {
  constexpr int width = MX_WIDTH, lanes = width > 32 ? 4 : 1, each = width / lanes;
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
      const mx_i64 at = row * columns + column;

      float values[each], drawn[each];
#pragma unroll
      for (int i = 0; i < each; i += piece) {
        float loaded[piece], own_drawn[piece];
        mx_load_input(x, at + mx_offset<lanes>(i, lane), n - mx_offset<lanes>(i, lane), r, loaded);
        mx_draw(key, at + mx_offset<lanes>(i, lane), e, own_drawn);
#pragma unroll
        for (int k = 0; k < piece; ++k) {
          values[i + k] = loaded[k];
          drawn[i + k] = e.rounding.is_random ? own_drawn[k] : 0.0f;
        }
      }
      const mx_u32 block_amax = mx_lanes_max<lanes>(mx_amax_bits<each>(values));
      MxBlock b = mx_begin_block(block_amax, block_amax, t, r, e);
      if (r.candidate_count && lanes == 1) {
        mx_choose_candidate<each>(values, b.amax, r, e, b.scale);
        mx_find_top(b, r, e);
      }
      if (MX_CODES && is_active) {
        if (lane == 0) mx_store_scale(scales, row, column / width, across, b.scale.stored, r);
        mx_u32 packed[each];
        mx_encode_block<each>(values, b.scale, e, drawn, packed);
        mx_u8* const to = codes + row * mx_packed_bytes(columns) + mx_packed_bytes(column);
#pragma unroll
        for (int i = 0; i < each; i += piece) {
          const int offset = mx_offset<lanes>(i, lane);
          mx_store_part<piece>(to, offset, n - offset, packed + i);
        }
      }

      mx_u32 amax = b.amax;  // of what is measured
      if (__any_sync(MX_ALL_LANES, b.amax >= MX_INFINITY_BITS)) {
        const mx_u32 finite = mx_finite_amax_bits<each>(values);
        tally.amax = mx_larger(tally.amax, finite);  // a NaN block's count too
        const mx_u32 largest = mx_lanes_max<lanes>(finite);
        amax = b.scale.is_nan ? 0u : largest;
      }
      MxSpan span = {};
      MxTerms terms = {}, own[4] = {};
      mx_u32 zeros = 0;
      span.least = 0u - mx_amin_bits<each>(values);
      if (span.least == 0u) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
          span.least = mx_larger(span.least, 0u - (mx_bits(values[i]) & 0x7FFFFFFFu));
          zeros += mx_bits(values[i]) << 1 == 0u;
        }
      }
      const mx_u32 least = mx_lanes_max<lanes>(span.least);
      const bool is_scaled = r.scale_kind == MX_POWER_OF_TWO;
      double back = 1.0 / (double)mx_unit(amax);
      if (is_active && b.amax < MX_INFINITY_BITS && (!is_scaled || mx_is_ordinary(b, least, e.element.emax))) {
        const float unit = mx_unit(amax), bound = mx_known_bound(tally, counts, b.scale, e);
        const bool counts_zeros = mx_loses_many(e) || e.rounding.is_random;
        mx_u32 pair = 0;
        auto add = [&](int i, MxTerms& p) {
          mx_u32 code;
          if (is_scaled) code = mx_measure_scaled(values[i], b.scale.factor, e, drawn[i], counts_zeros, bound, p, span);
          else code = mx_measure_element(values[i], b.scale, e, drawn[i], unit, bound, p, span);
          mx_see_top(code, e, b);
          if (MX_HISTOGRAM) mx_count_code(code, i, n == width, mx_offset<lanes>(i, lane) < n, pair, counts);
        };
        if constexpr (lanes == 1) terms = mx_add_in_halves<each>(add);
        else {
#pragma unroll
          for (int i = 0; i < each; ++i) add(i, own[i % 4]);
        }
        if (b.saturates) {
#pragma unroll
          for (int i = 0; i < each; ++i) b.saturated += mx_saturates(values[i], b.scale.factor, e);
        }
        if (span.is_relative) {
#pragma unroll 1
          for (int i = 0; i < each; ++i)
            if (mx_offset<lanes>(i, lane) < n)
              mx_see_relative(x, at + mx_offset<lanes>(i, lane), key, r, b.scale, e, tally, counts);
        }
        if (is_scaled) {
          back = (double)b.scale.decode;
          span.off *= b.scale.decode;
          if (!counts_zeros && mx_encode_element(mx_float(0u - span.least), b.scale.factor, e).value == 0.0f) {
#pragma unroll
            for (int i = 0; i < each; ++i)
              span.underflowed += mx_encode_element(values[i], b.scale.factor, e).value == 0.0f;
          }
          if (span.underflowed) span.underflowed -= zeros;
        }
      } else if (is_active) {
        span.least = 0u;
        MxTerms first[4] = {};
#pragma unroll 1
        for (int turn_of = 0; turn_of < (lanes == 1 ? 4 : 1); ++turn_of) {
          const int part = lanes == 1 ? turn_of % 2 * 2 + turn_of / 2 : lane;  // 0, 2, 1, 3
          MxTerms found[4];
          mx_measure_steps(x, key, nullptr, at, n, part, amax, r, e, b, found, span, tally, counts, totals);
#pragma unroll
          for (int i = 0; i < 4; ++i) own[i] = turn_of % 2 ? mx_added(own[i], found[i]) : found[i];
          if (turn_of == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) first[i] = own[i];
          }
        }
        if (lanes == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) own[i] = mx_added(first[i], own[i]);
          terms = mx_last(own);
        }
      }
      mx_end_span(span.off, span.underflowed, tally, counts);
      if (lanes > 1) terms = mx_lanes_terms(own);
      b.sums = mx_scaled_back(terms, back);
      b.largest = amax;
      b.least = mx_lanes_max<lanes>(span.least);
      if (r.rounding.is_random) b.top_code = mx_lanes_max<lanes>(b.top_code);
      b.saturated = mx_lanes_sum<lanes>(b.saturated);
      b.underflowed = mx_lanes_sum<lanes>((mx_u64)span.underflowed);
      if (is_active && lane == turn)
        mx_end_block(b, MxRatio{terms.of[0], terms.of[1]}, r, block, MxPerBlock{noise, per_block, per_block_each},
                     tally, counts);
    }
    mx_end_chunk(tally, threadIdx.x / lanes + lane * at_once, sums + 4 * chunk);
  }
  mx_end(tally, counts, totals);
}
